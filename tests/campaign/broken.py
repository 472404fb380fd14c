"""Damaged checkpoints by the thousand: ``python -m tests.campaign.broken FOLDER SEED FIRST TIMES``, in a child process.

One trial damages a copy of one input (`inputs`, `damages`) and gives it to commands that take it. `judging` says what
may come of it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import typer.main

from ckpttool.cli import main as ckpttool
from tests.campaign import followed
from tests.campaign.damages import Damage, applied
from tests.campaign.inputs import INPUTS, Command, Input, prepare
from tests.campaign.judging import Tried, faults, fingerprint
from tests.campaign.outcomes import Outcome, Outcomes
from tests.damaging import Hanging, Tensors, peak, tensors_in

SECONDS = 30
"""What one command may take."""

MEMORY = 1 << 30
"""Bytes of address space that commands may take beyond what the process has when it begins."""

NOBODY = 65534
WARMING = ("fsdp role", "lora", "hub", "plain dcp", "role v1", "single file")


def _hangs(_number: int, _frame: object) -> None:
    raise Hanging


def line_of(command: Command, one: Input, room: Path, name: str) -> list[str]:
    """The words of a command line."""
    bases = room.parent / "bases"
    places = {"out": room / "out", "sound": bases / name / one.target, "bases": bases}
    places |= {"run": room / "run", "fired": room / followed.FIRED}
    return [word.format(room / "in" / one.target, **places) for word in command]


def tried(line: list[str]) -> Tried:
    """One command line in this process; one that hangs has no exit code of the table."""
    out, err = io.StringIO(), io.StringIO()
    signal.alarm(SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = ckpttool(line)
    except Hanging:
        code = -1
    except BaseException as error:  # noqa: BLE001 - whatever leaves the border is what is looked for
        code = -2
        err.write(f"Traceback: {type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    return Tried(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def nobody() -> Iterator[None]:
    """Without the rights of root, for a while."""
    if os.geteuid():
        yield
        return
    os.setresgid(NOBODY, NOBODY, 0)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
        os.setresgid(0, 0, 0)


@lru_cache(maxsize=512)
def expected(command: Command, name: str, folder: Path) -> Tensors | None:
    """The tensors that the undamaged input becomes; none, where the command writes none."""
    if "{out}" not in command:
        return None
    room = folder / "expected"
    shutil.copytree(folder / "bases" / name, room / "in")
    done = tried(line_of(command, INPUTS[name], room, name))
    assert done.code in (0, 5), f"{command} on {name}: {done}"
    found = tensors_in(room / "out") if done.code == 0 else {}
    shutil.rmtree(room)
    return found


def trials(seed: int, number: int) -> tuple[str, tuple[Command, ...], random.Random]:
    """The input, the commands and the chance of one trial."""
    chance = random.Random(f"{seed}/{number}")
    name = chance.choice(sorted(INPUTS))
    commands = INPUTS[name].commands()
    writing = [command for command in commands if command in INPUTS[name].writing] or commands
    reading = [command for command in commands if command not in INPUTS[name].writing]
    return name, (chance.choice(reading), chance.choice(writing)), chance


def attempt(folder: Path, seed: int, number: int) -> Iterator[Outcome]:
    """One damaged input and what commands make of it."""
    name, commands, chance = trials(seed, number)
    wanted = [expected(command, name, folder) for command in commands]
    room = folder / "room"
    shutil.copytree(folder / "bases" / name, room / "in", symlinks=True)
    try:
        damage = applied(room / "in", folder / "bases" / name, chance)
        for command, tensors in zip(commands, wanted, strict=True):
            yield one(command, name, damage, room, tensors)._replace(repeat=f"--seed {seed}, trial {number}")
    finally:
        _remove(room)


def one(command: Command, name: str, damage: Damage, room: Path, wanted: Tensors | None) -> Outcome:
    """One command on a damaged input."""
    line = line_of(command, INPUTS[name], room, name)
    with followed.as_run(room, room.parent / "bases" / name) if "{run}" in command else contextlib.nullcontext():
        if damage.closed:
            _open_to_all(room)
        before = fingerprint(room)
        with nobody() if damage.closed else contextlib.nullcontext():
            done = tried(line)
        after = fingerprint(room)
        wrong = tuple(faults(command, damage, done, room, (before, after), wanted))
    shutil.rmtree(room / "out", ignore_errors=True)
    shown = (*wrong, str(damage), f"{name}: {' '.join(line)}", done.out[-1500:] + done.err[-1500:]) if wrong else ()
    return Outcome((damage.way, command[0]), str(done.code), shown)


def _open_to_all(room: Path) -> None:
    """Others may write wherever nothing was closed."""
    room.chmod(0o777)
    for path in room.rglob("*"):
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode) and mode & 0o777 == 0o755:
            path.chmod(0o777)


def _remove(room: Path) -> None:
    if os.geteuid():
        for path in [room, *room.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
    shutil.rmtree(room)


def _run_all(folder: Path) -> None:
    room = folder / "warm"
    for name in WARMING:
        for command in INPUTS[name].commands():
            shutil.copytree(folder / "bases" / name, room / "in")
            with followed.as_run(room, folder / "bases" / name) if "{run}" in command else contextlib.nullcontext():
                tried(line_of(command, INPUTS[name], room, name))
            tried(line_of(command, INPUTS[name], room / "nothing", name))
            shutil.rmtree(room)


def confine(warm: Path | None = None) -> None:
    """Import what commands import, by running them below ``warm/bases``, then bound the memory.

    The command line is built once: that would take half of the time otherwise.
    """
    signal.signal(signal.SIGALRM, _hangs)
    typer.main.get_command = lru_cache(typer.main.get_command)
    if warm is not None:
        _run_all(warm)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))


def main(folder: Path, seed: int, first: int, times: int) -> None:
    """Print a line of JSON before each trial, and one for each outcome."""
    confine(folder)
    for number in range(first, first + times):
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        for outcome in attempt(folder, seed, number):
            sys.stdout.write(json.dumps(outcome) + "\n")
    sys.stdout.write(json.dumps(Outcome(("peak",), f"{peak() >> 26 << 6} MiB")) + "\n")


def campaign(seed: int, times: int, folder: Path, first: int = 0) -> Outcomes:
    """So many trials, each with its commands, in a child; in another one after a trial that has ended the child."""
    found = Outcomes()
    folder.chmod(0o755)
    prepare(folder / "bases")
    while times > 0:
        line = [sys.executable, "-m", "tests.campaign.broken", str(folder), str(seed), str(first), str(times)]
        child = subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
        last = first
        for said in child.stdout.splitlines():
            if said.startswith("["):
                what, *rest = json.loads(said)
                found.add(Outcome(tuple(what), rest[0], tuple(rest[1]), rest[2]))
            else:
                last = int(said)
        if not child.returncode:
            break
        found.add(
            Outcome(("the child",), str(child.returncode), (child.stderr[-3000:],), f"--seed {seed}, trial {last}")
        )
        times, first = times - (last + 1 - first), last + 1
        if (folder / "room").exists():
            _remove(folder / "room")
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(word) for word in sys.argv[2:5]))
