"""Hostile pickles in every place where a command meets one: ``python -m tests.campaign.hostile FOLDER SEED TIMES``.

A child process puts payloads (`payloads`) into places (`places`) and runs the commands there, watched (`watching`).
The verdict is the exit code, a message that names the file, no marker, no event that acts, little memory and time.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import typer.main

from ckpttool import cli
from tests.campaign import followed
from tests.campaign.outcomes import Outcome, Outcomes
from tests.campaign.payloads import Payload, goes_off, payloads, script
from tests.campaign.places import DEMO, PLACES, WATCH, Command, Place
from tests.campaign.watching import Watch, forget, held, peak

SECONDS = 30
"""What one command may take."""

MEMORY = 300 << 20
"""Bytes by which the process may grow over one command."""

SOUND = DEMO / "fsdp"

UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""What moves a cursor, hides or turns text around."""


class Case(NamedTuple):
    """One payload in one place, for one command."""

    payload: str
    place: str
    command: Command

    def __str__(self) -> str:
        return f"{self.payload} in {self.place}: {' '.join(self.command)}"


class Tried(NamedTuple):
    """What a command did; ``acted`` lists what it may not do."""

    code: int
    said: str
    acted: list[str]
    grown: int


class Hanging(BaseException):
    """No ``Exception``: it would be taken for one of the tool's."""


def cases(seed: int, times: int) -> list[Case]:
    """Each payload in each place, with all commands in turn; ``times`` of these, or all for 0, drawn by the seed.

    A draw has each payload and each command of a place as often as all others, or once less.
    """
    every = [
        Case(payload, name, command)
        for name, place in PLACES.items()
        for payload, command in itertools.product(payloads(Path("x")), (*place.opening, *place.passing))
    ]
    random.Random(seed).shuffle(every)
    return every[: times or None]


def prepare(folder: Path) -> None:
    """The checkpoints, each once."""
    for name, place in PLACES.items():
        place.base(folder / "bases" / name)


def attempt(case: Case, table: dict[str, Payload], folder: Path, watch: Watch, marker: Path) -> tuple[int, str]:
    """Run one case: the exit code, and what is wrong with it, if anything is."""
    place, payload = PLACES[case.place], table[case.payload]
    room = folder / "room"
    shutil.copytree(folder / "bases" / case.place, room / "in")
    place.put(room / "in", place.stream(payload))
    before = fingerprint(room)
    wrong: list[str] = []
    with followed_by_sound(room, case.command):
        done = run(line_of(case.command, room), room, watch)
        if case.command == WATCH:
            wrong += _of_watch(place, payload, done.said, room)
    if done.code not in place.allowed(payload, case.command):
        wrong.append(f"exit code {done.code}")
    if done.code not in (0, place.sound) and not any(name in done.said for name in place.names):
        wrong.append("does not name the file")
    if done.code and fingerprint(room) != before:
        wrong.append("has left something")
    if marker.exists() or done.acted:
        wrong.append(f"has acted {done.acted}")
    if UNSEEN.search(done.said) or "Traceback" in done.said:
        wrong.append("says what may not be said")
    if done.grown > MEMORY:
        wrong.append(f"{done.grown:,} bytes")
    shutil.rmtree(room)
    marker.unlink(missing_ok=True)
    return done.code, f"{case}: {', '.join(wrong)}: {done.said[:500]}" if wrong else ""


def line_of(command: Command, room: Path) -> list[str]:
    """The words of a command line."""
    return [word.format(room / "in", run=room / "run") for word in command]


def followed_by_sound(room: Path, command: Command) -> contextlib.AbstractContextManager[None]:
    """Have the checkpoint as a step of a run with a sound one after it, where a command takes a run."""
    if command != WATCH:
        return contextlib.nullcontext()
    return followed.placed(room, f"global_step_{followed.STEP}/actor", SOUND, f"global_step_{followed.SOUND}/actor")


def _of_watch(place: Place, payload: Payload, said: str, room: Path) -> Iterator[str]:
    """Say where a watch has not acted on the steps that are whole, or on others."""
    fired = {int(path.name) for path in (room / followed.FIRED).iterdir()}
    wanted = {followed.SOUND, *([followed.STEP] if place.fires(payload) else [])}
    if left := {path.name for path in (room / "run").iterdir() if path.name[0] == "."} - set(followed.KEPT):
        yield f"has left {left}"
    if fired != wanted:
        yield f"acted on {fired}, not on {wanted}"
    if followed.STEP not in wanted and not any(name in said for name in place.names):
        yield "does not name the file"


def run(line: list[str], room: Path, watch: Watch) -> Tried:
    """One command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    forget()
    start = peak()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), watch.over(room) as acted:
            code = cli.main(line)
    except Hanging:
        return Tried(-1, "hangs", [], 0)
    finally:
        signal.alarm(0)
    return Tried(code, out.getvalue() + err.getvalue(), acted, peak() - start)


def fingerprint(folder: Path) -> dict[str, object]:
    """Every entry of a directory with its time and its bytes."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


def _hangs(_number: int, _frame: object) -> None:
    raise Hanging


def confine(folder: Path, marker: Path) -> Watch:
    """Import all that commands import when they succeed, refuse or find damage; then watch and bound the process."""
    signal.signal(signal.SIGALRM, _hangs)
    vars(cli)["app"] = typer.main.get_command(cli.app)  # or annotations are evaluated for every command line
    table, watch = payloads(marker), Watch()
    assert "\0".encode("unicode_escape")  # a codec is imported when it is first used
    warm = [table[name] for name in ("os.system", "nothing", "a tensor of storages", "letters of full width")]
    for name, place in PLACES.items():
        for command, payload in itertools.product((*place.opening, *place.passing), (None, *warm)):
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                shutil.copytree(folder / "bases" / name, folder / "warm" / "in")
                if payload is not None:
                    place.put(folder / "warm" / "in", place.stream(payload))
                with followed_by_sound(folder / "warm", command):
                    cli.main(line_of(command, folder / "warm"))
            shutil.rmtree(folder / "warm")
    most = held() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return watch


def main(folder: Path, seed: int, times: int) -> int:
    """Count the outcomes on stdout, tell of what is wrong on stderr."""
    marker = folder / "m"
    Path(f"{marker}.py").write_text(script(marker))
    watch, table = confine(folder, marker), payloads(marker)
    outcomes: Counter[tuple[str, str, int]] = Counter()
    faults = 0
    for case in cases(seed, times):
        code, wrong = attempt(case, table, folder, watch, marker)
        outcomes[case.place, case.command[0], code] += 1
        if wrong:
            faults += 1
            sys.stderr.write(f"{wrong}\n")
    for (place, command, code), count in sorted(outcomes.items()):
        sys.stdout.write(f"{place}, {command}, {code}: {count}\n")
    return min(faults, 1)


def campaign(seed: int, times: int, folder: Path) -> Outcomes:
    """Run so many cases (0: all of them) in a child, and return what it has seen."""
    done, found = started(seed, times, folder), Outcomes()
    for line in done.stdout.splitlines():
        words = tuple(line.partition(":")[0].split(", "))
        found.counts[words] += int(line.rpartition(":")[2])
    wrong = done.stderr.splitlines() or ["the child ended with no word"] * bool(done.returncode)
    found.faults += [Outcome(("hostile",), str(done.returncode), (line,), f"--seed {seed}") for line in wrong]
    return found


def started(seed: int, times: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run so many cases (0: all of them) in a child; its stdout counts outcomes, its stderr lists faults."""
    prepare(folder)
    line = [sys.executable, "-m", "tests.campaign.hostile", str(folder), str(seed), str(times)]
    return subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})


def harmless(folder: Path, *, libraries: bool = True) -> list[str]:
    """The payloads that are said to act and do not, when plain pickle loads them."""
    marker = folder / "m"
    Path(f"{marker}.py").write_text(script(marker))
    table = payloads(marker)
    acting = [name for name, payload in table.items() if payload.acts and (libraries or not payload.needs)]
    return [name for name in acting if not goes_off(table[name], marker)]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
