"""Two commands on one destination, of which one comes first and the other says so; and trainers at random."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.campaign import rivals
from tests.campaign.acting import Following
from tests.campaign.children import Child, End, Slow, held, run, start
from tests.campaign.killed import grounds
from tests.campaign.outcomes import Outcome, Outcomes
from tests.campaign.subjects import Content, Export, Migration, content, said
from tests.campaign.trainers import CHANGES, MUTATIONS, Reading, copied_meanwhile, readings
from tests.migrating import photograph

# Two commands on one destination


@dataclass(frozen=True)
class Runner:
    """A command that writes to a directory: words without the output, what comes of it."""

    export: Export
    force: bool

    def words(self, here: Path) -> list[str]:
        """The command line."""
        force = ["--force"] if self.force else []
        return [self.export.command, str(self.export.source), "-o", str(here / "out"), *self.export.more, *force]


Ends = tuple[tuple[Runner, End], tuple[Runner, End]]


def _judge(here: Path, ends: Ends, old: Content) -> Iterator[str]:
    """Say what is wrong after two commands have ended."""
    found = content(here / "out") if (here / "out").exists() else {}
    done = [runner for runner, end in ends if not end.code]
    for runner, end in ends:
        yield from said(end, {0, 6}, here)
        if end.code and not (runner.force or old or "exists already" in end.text):
            yield f"it came too late, and does not say so: {end.text}"
    if found not in [runner.export.new for runner in done] and (done or found != old):
        yield f"the output is of neither command that ended with 0, but {sorted(found)}"
    if not done and not (old and not any(runner.force for runner, _ in ends)):
        yield f"both failed: {[end.text for _, end in ends]}"
    if len(done) == 2 and not any(runner.force for runner in done):
        yield "both wrote one directory"
    if left := [path.name for path in here.iterdir() if path.name != "out"]:
        yield f"left beside the output: {left}"


def one_in_the_other(folder: Path, runners: tuple[Runner, Runner], at: int, old: Path | None) -> tuple[Ends, list[str]]:
    """Run the second command while the first one stands before a write."""
    here = folder / "here"
    here.mkdir()
    if old is not None:
        shutil.copytree(old, here / "out")
    begun = held(runners[0].words(here), here, folder / "text", at, "write")
    begun.reached()
    second = run(runners[1].words(here), here, folder / "text 2")
    ends = (runners[0], begun.end()), (runners[1], second)
    found = list(_judge(here, ends, content(old) if old is not None else {}))
    shutil.rmtree(here)
    return ends, found


def at_once(
    folder: Path, runners: tuple[Runner, Runner], rng: random.Random, old: Path | None
) -> tuple[Ends, list[str]]:
    """Start two commands at nearly the same time."""
    here = folder / "here"
    here.mkdir()
    if old is not None:
        shutil.copytree(old, here / "out")
    children: list[Child] = []
    for runner in runners:
        children.append(start(runner.words(here), here, folder / f"text {len(children)}", [Slow(0.0005)]))
        time.sleep(rng.uniform(0, 0.03))
    ends = (runners[0], children[0].end()), (runners[1], children[1].end())
    found = list(_judge(here, ends, content(old) if old is not None else {}))
    shutil.rmtree(here)
    return ends, found


def two_migrations(folder: Path, first: Migration, second: Migration, at: int) -> tuple[End, End, list[str]]:
    """Run a second migration of one role while the first one stands before a write; then both once more."""
    here = folder / "here"
    words = first.arrange(here)
    role = Path(words[1])
    begun = held(words, here, folder / "text", at, "write")
    begun.reached()
    other = run(["migrate", role, *second.more], here, folder / "text 2")
    end = begun.end()
    found = [*said(end, {0, 4, 6}, here), *said(other, {0, 4, 6}, here)]
    if end.code and other.code:
        found.append(f"both failed: {end.text}, {other.text}")
    undone = run(["migrate", role, "--undo"], here, folder / "text")
    if undone.code or photograph(role) != first.before:
        found.append(f"layout v1 does not come back: {undone.text}")
    shutil.rmtree(here)
    return end, other, found


# Everything at random


@dataclass(frozen=True)
class Field:
    """All that races: readers with the moments of their reads, migrations, commands on one destination, watches."""

    folder: Path
    readings: Mapping[Reading, range]
    migrations: Mapping[Migration, int]
    exports: Mapping[Export, int]
    watches: Mapping[Following, int]

    @property
    def old(self) -> Path:
        """What lies at a destination that is replaced."""
        (old,) = {export.old for export in self.exports if export.old is not None}
        return old


def field(folder: Path) -> Field:
    """Return all of them below a folder, with how many moments there are."""
    ground, making, others = grounds(folder)
    return Field(
        ground.folder,
        {reading: reading.moments(ground.folder) for reading in readings(folder / "readings")},
        {migration: len(ground.happens(migration)) for migration in others if isinstance(migration, Migration)},
        {export: len(ground.happens(export)) for export in making},
        {watch: len(ground.happens(watch)) for watch in others if isinstance(watch, Following)},
    )


def campaign(seed: int, times: int, folder: Path) -> Outcomes:
    """Attempt it so many times: who races with whom, and when."""
    ground, outcomes = field(folder), Outcomes()
    for at in range(times):
        what, came_to, why, wrong = _attempt(ground, random.Random(f"{seed} {at}"))
        repeat = f"--seed {seed}, attempt {at}"
        outcomes.add(Outcome((what,), came_to, tuple(f"{why}: {line}" for line in wrong), repeat))
    return outcomes


Attempt = tuple[str, str, str, list[str]]
"""What raced, what it came to, what happened when, what was wrong."""


def _attempt(ground: Field, rng: random.Random) -> Attempt:
    attempts = (_reading, _reading, _copied, _migrations, _exports, _exports, _watches, _watches)
    return rng.choice(attempts)(ground, rng)


def _reading(ground: Field, rng: random.Random) -> Attempt:
    reading, moments = rng.choice(list(ground.readings.items()))
    name, at = rng.choice(list(MUTATIONS)), rng.choice(moments)
    end, wrong = reading.play(ground.folder, at, MUTATIONS[name], rng)
    return reading.command, f"exit {end.code}", f"{name} before read {at}", wrong


def _copied(ground: Field, rng: random.Random) -> Attempt:
    migration = rng.choice([found for found in ground.migrations if "mode" in found.options])
    name, at = rng.choice(list(CHANGES)), rng.randrange(ground.migrations[migration]) + 1
    end, wrong = copied_meanwhile(migration, ground.folder, at, CHANGES[name])
    return migration.name, f"exit {end.code}", f"{name} before write {at}", wrong


def _migrations(ground: Field, rng: random.Random) -> Attempt:
    first, second = (rng.choice(list(ground.migrations)) for _ in range(2))
    at = rng.randrange(ground.migrations[first]) + 1
    end, other, wrong = two_migrations(ground.folder, first, second, at)
    return f"{first.name} and {second.name}", f"exit {end.code} and {other.code}", f"at write {at}", wrong


def _exports(ground: Field, rng: random.Random) -> Attempt:
    one, two = (rng.choice(list(ground.exports)) for _ in range(2))
    runners = Runner(one, one.old is not None), Runner(two, two.old is not None)
    old = ground.old if one.old is not None and rng.random() < 0.7 else None
    if at := rng.randrange(ground.exports[one] + 1):
        ends, wrong = one_in_the_other(ground.folder, runners, at, old)
    else:
        ends, wrong = at_once(ground.folder, runners, rng, old)
    came_to = f"exit {ends[0][1].code} and {ends[1][1].code}"
    return f"{one.name} and {two.name}", came_to, f"at write {at}" if at else "at once", wrong


def _watches(ground: Field, rng: random.Random) -> Attempt:
    watch = rng.choice(list(ground.watches))
    at = rng.randrange(2, ground.watches[watch]) + 1
    what = rng.choice(("one state", "two states", "merge", "migrate"))
    if what == "one state":
        return "watch and watch", "exit 0 and 6", f"at write {at}", rivals.one_state(ground.folder, watch, at)
    if what == "two states":
        told, wrong = rivals.two_states(ground.folder, watch, at)
        return "watch and watch", ", ".join(sorted(told)), f"at write {at}", wrong
    first = rng.choice(("watch", what))
    if what == "merge":
        end, other, wrong = rivals.beside_merge(ground.folder, watch, at, first=first)
    else:
        (v1,) = {migration.v1 for migration in ground.migrations}
        end, other, wrong = rivals.beside_migrate(ground.folder, v1, at, first=first)
    return f"watch and {what}", f"exit {end.code} and {other.code}", f"{first} at {at}", wrong
