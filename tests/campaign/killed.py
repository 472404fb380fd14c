"""SIGKILL, full disks and devices that fail, at every step and at any moment of every command that writes.

Sources stay as they are, an output is complete or absent, the next run succeeds and cleans up.
"""

from __future__ import annotations

import errno
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.acting import following
from tests.campaign.children import USUAL, Child, Die, End, Fail, Habits, Hook, Kind, Log, Slow, start
from tests.campaign.outcomes import Outcome, Outcomes
from tests.campaign.subjects import UNWRITTEN, Export, Migration, Subject, exports, migrations

CODES = (errno.ENOSPC, errno.EIO, errno.EACCES, errno.EDQUOT, errno.EROFS, errno.EPERM)

STEPS: Mapping[str, str] = {
    "staging made": r"mkdir out\.partial-\*",
    "staging opened to others": r"chmod out\.partial-\*",
    "file made": r"open .*\.safetensors",
    "header written": r"pwrite .*-00001-of-.*",
    "file synced": r"fsync .*\.safetensors",
    "file closed": r"close .*\.safetensors",
    "side files copied": r"write .*/generation_config\.json",
    "contents written": r"write .*/config\.json",
    "checked": r"fsync out\.partial-\*",
    "renamed aside": r"rename out -> out\.replaced-\*",
    "renamed in": r"rename out\.partial-\* -> out",
    "parent synced": r"fsync ",
    "old one given up": r"rename out\.replaced-\* -> out\.partial-\*",
    "old one removed": r"(unlink|rmdir) out\.partial-\*.*",
}
"""The named steps of a command that makes a directory, by the calls that they end with."""

WITH_FORCE = frozenset({"renamed aside", "old one given up", "old one removed"})
"""The steps that there are only where something is replaced."""

STOPPED: Mapping[int, Collection[int]] = {
    signal.SIGKILL: {0},
    signal.SIGTERM: {0, 143},
    signal.SIGINT: {0, 130},
    signal.SIGHUP: {0, 129},
}
"""Signals, and how a command that is sent one may end, unless it is killed: it may have been done before."""

TIDYING = ("unlink", "rmdir", "fsync run")
"""Calls without which nothing is removed: a step that is deleted has to have its new name on disk before."""

UNREADABLE = frozenset({0, 3, 4, 6})
"""Exit codes of a command whose source cannot be read; a migration copies inside the kernel, and cannot tell."""

SLOW = 0.001
"""Seconds that each call takes while moments are drawn, so that one is as likely as another."""

STARTED = 0.005
"""Seconds after which a command is sure to look out for signals itself."""

Act = Callable[[Child], object]
Step = tuple[str, int]
"""The label of a call, and the how-manieth with that label it is."""


@dataclass
class Ground:
    """Where attempts take place, one after the other; ``repeat`` says how to have the one to come again."""

    folder: Path
    repeat: str = ""
    outcomes: Outcomes = field(default_factory=Outcomes)
    tidies: bool = True
    """Whether a command that fails has to take away what it made: what keeps it from that is not what fails."""
    watched: Path | None = None
    """The directory below which calls count; where it is not given, each attempt's own."""

    def play(
        self,
        subject: Subject,
        why: str,
        hooks: Sequence[Hook] = (),
        codes: Collection[int] = UNWRITTEN,
        habits: Habits = USUAL,
        act: Act = lambda _child: None,
    ) -> End:
        """Run a subject until it ends, of itself or by what is done to it; look; run it again, and look again."""
        here = self.folder / f"{self.outcomes.trials}"
        words = subject.arrange(here)
        child = start(words, self.watched or here, self.folder / "text", hooks, habits)
        act(child)
        end = child.end()
        found = [*subject.wrong(here, end, codes), *self._left(subject, here, end), *subject.wrong_after(here)]
        self._add(subject, f"exit {end.code}", why, found)
        shutil.rmtree(here)
        return end

    def _left(self, subject: Subject, here: Path, end: End) -> Iterator[str]:
        """What is left although the command came to an end of its own, and nothing kept it from cleaning up."""
        if 0 <= end.code < 128 and self.tidies and (left := subject.left(here)):
            yield f"it left {left}: {end.text}"

    def expect(self, end: End, subject: Subject, why: str) -> None:
        """Have it for a fault that a child was not killed where it was to be."""
        if end.code != -signal.SIGKILL:
            self._add(subject, "not killed", why, ["it never came to that"])

    def _add(self, subject: Subject, came_to: str, why: str, found: Sequence[str]) -> None:
        wrong = tuple(f"{why}: {what}" for what in found)
        self.outcomes.add(Outcome((subject.name,), came_to, wrong, self.repeat))

    def happens(self, subject: Subject, kind: Kind = "write") -> list[str]:
        """Return the label of everything of a kind that happens in an undisturbed run."""
        log = self.folder / "log"
        log.unlink(missing_ok=True)
        self.play(subject, "undisturbed", [Log(str(log), kind)], {0})
        return log.read_text().splitlines()


def named_steps(labels: Sequence[str]) -> dict[str, Step]:
    """Return the calls of the named steps that occur; bands have one each, but the first, which is the header's."""
    found = {}
    for name, pattern in STEPS.items():
        if label := next((label for label in labels if re.fullmatch(pattern, label)), None):
            found[name] = (label, 1)
    bands = [label for label in labels if label.startswith("pwrite ")]
    for at, label in enumerate(bands[1:], 2):
        found[f"band {at} written"] = (label, bands[:at].count(label))
    return found


def steps_of(ground: Ground, subject: Subject) -> dict[str, Step]:
    """Return the named steps of a subject; a migration names its own, of others every call is one."""
    if isinstance(subject, Export):
        return named_steps(ground.happens(subject))
    labels = ground.happens(subject, "step" if isinstance(subject, Migration) else "write")
    return {f"{at} {label}": (label, labels[:at].count(label)) for at, label in enumerate(labels, 1)}


def at_step(ground: Ground, subject: Subject, name: str, step: Step, *, is_before: bool) -> None:
    """Kill a command right before or right after one of its steps."""
    why = f"killed {'before' if is_before else 'after'} {name}"
    ground.expect(ground.play(subject, why, [Die(*step, is_before)]), subject, why)


def duration(ground: Ground, subject: Subject) -> float:
    """Return the seconds that a slowed command takes."""
    took: list[float] = []

    def measure(child: Child) -> None:
        begun = time.monotonic()
        child.process.join()
        took.append(time.monotonic() - begun)

    ground.play(subject, "slowly", [Slow(SLOW)], {0}, act=measure)
    return took[0]


def at_moment(ground: Ground, subject: Subject, moment: float, number: signal.Signals = signal.SIGKILL) -> End:
    """Send a signal after some seconds."""

    def stop(child: Child) -> None:
        child.process.join(moment)
        if child.process.exitcode is None:
            child.kill(number)

    return ground.play(subject, f"{number.name} after {moment:.4f} s", [Slow(SLOW)], STOPPED[number], act=stop)


def failing(ground: Ground, subject: Subject, at: int, label: str, code: int, *, lasting: bool = False) -> End:
    """Let the call of a number fail, or all from there on."""
    why = f"{errno.errorcode[code]} at call {at}{' and after' if lasting else ''}: {label}"
    ground.tidies = not lasting and not label.startswith(TIDYING)
    end = ground.play(subject, why, [Fail(at, code, lasting)])
    ground.tidies = True
    return end


def unreadable(ground: Ground, subject: Subject, at: int, label: str) -> End:
    """Let the read of a number fail, of sources too."""
    ground.tidies, ground.watched = re.search(r"partial-|\.ckpttool-", label) is None, ground.folder.parent
    end = ground.play(subject, f"EIO at read {at}: {label}", [Fail(at, errno.EIO, kind="read")], UNREADABLE)
    ground.tidies, ground.watched = True, None
    return end


def reads_of(ground: Ground, subject: Subject) -> list[str]:
    """Return the label of everything that is read in an undisturbed run."""
    ground.watched = ground.folder.parent
    labels = ground.happens(subject, "read")
    ground.watched = None
    return labels


def grounds(folder: Path) -> tuple[Ground, list[Export], list[Subject]]:
    """Return a place for attempts, commands that make a directory, and others: migrations, a watch."""
    (folder / "trials").mkdir(parents=True)
    others: list[Subject] = [*migrations(folder / "migrations"), following(folder / "following")]
    return Ground(folder / "trials"), exports(folder / "exports"), others


@dataclass
class _Known:
    """What was found out about a subject, once."""

    subject: Subject
    steps: Mapping[str, Step]
    writes: Sequence[str]
    reads: Sequence[str]
    seconds: float


def _look(ground: Ground, subject: Subject) -> _Known:
    steps, writes = steps_of(ground, subject), ground.happens(subject)
    return _Known(subject, steps, writes, reads_of(ground, subject), duration(ground, subject))


def campaign(seed: int, times: int, folder: Path) -> Outcomes:
    """Attempt it so many times: a subject, what befalls it, and when."""
    ground, making, migrating = grounds(folder)
    known: dict[str, _Known] = {}
    for at in range(times):
        rng, ground.repeat = random.Random(f"{seed} {at}"), f"--seed {seed}, attempt {at}"
        subject = rng.choice([*making, *migrating])
        if subject.name not in known:
            known[subject.name] = _look(ground, subject)
        _attempt(ground, known[subject.name], rng)
    return ground.outcomes


def _attempt(ground: Ground, known: _Known, rng: random.Random) -> None:
    subject, what = known.subject, rng.choice(("moment", "moment", "stopped", "step", "write", "lasting", "read"))
    if what == "moment":
        at_moment(ground, subject, rng.uniform(0, known.seconds))
    elif what == "stopped":
        number = rng.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        at_moment(ground, subject, rng.uniform(STARTED, known.seconds), number)
    elif what == "step":
        name = rng.choice(sorted(known.steps))
        at_step(ground, subject, name, known.steps[name], is_before=rng.random() < 0.5)
    elif what == "read":
        at = rng.randrange(len(known.reads))
        unreadable(ground, subject, at + 1, known.reads[at])
    else:
        at = rng.randrange(len(known.writes))
        failing(ground, subject, at + 1, known.writes[at], rng.choice(CODES), lasting=what == "lasting")
