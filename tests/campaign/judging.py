"""What may come of a damaged checkpoint, and what may not."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.campaign import followed
from tests.campaign.damages import Damage
from tests.campaign.inputs import Command
from tests.campaign.layouts import WEIRD
from tests.damaging import Tensors, differences, tensors_in

CODES = {
    "inspect": {0, 1, 2, 3, 7},
    "migrate": {0, 2, 3, 4, 6, 7},
    "diff": {0, 1, 2, 3, 4, 5, 7},
    "verify": {0, 1, 2, 3, 7},
    "merge-fsdp": {0, 2, 3, 4, 5, 6, 7},
    "to-hf": {0, 2, 3, 4, 5, 6, 7},
    "watch": {0},
}

RESULTS = ("migrate", "verify")
"""Commands that tell of what they refuse in their result, not as an error."""

UNSEEN = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""What moves a cursor, hides or turns text around, or is no text."""

Fingerprint = dict[str, tuple[object, ...]]


class Tried(NamedTuple):
    """What a command line did."""

    code: int
    out: str
    err: str


def fingerprint(folder: Path) -> Fingerprint:
    """Every entry below: its type and mode, its time, its bytes or where it leads."""
    return {os.path.relpath(path, folder): _print(path) for path in sorted(_walked(folder))}


def _walked(folder: Path) -> Iterator[str]:
    for here, folders, files in os.walk(folder):
        yield from (f"{here}/{name}" for name in (*folders, *files))


def _print(path: str) -> tuple[object, ...]:
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        return ("link", str(Path(path).readlink()))
    if not stat.S_ISREG(info.st_mode):
        return (info.st_mode & 0o7777770, 0)
    with open(path, "rb") as file:
        return (info.st_mode, info.st_mtime_ns, file.read())


def faults(
    command: Command,
    damage: Damage,
    done: Tried,
    room: Path,
    prints: tuple[Fingerprint, Fingerprint],
    wanted: Tensors | None,
) -> Iterator[str]:
    """Everything that is wrong with what a command made of a damaged input."""
    unlinked = damage.closed and "--pin" in command  # nobody may not link what is root's
    if done.code not in CODES[command[0]] | ({6} if unlinked else set()):
        yield "exit code"
    if "Traceback" in done.out + done.err or "MemoryError" in done.out + done.err:
        yield "traceback"
    yield from of_text(command, damage, done, room)
    yield from of_files(command, done, *prints)
    if command[0] == "watch":
        yield from followed.step_faults(room, command, damage, done.out)
    if wanted is not None and done.code == 0 and not damage.free:
        count = differences(wanted, tensors_in(room / "out"))
        if count > damage.changed:
            yield f"other tensors without a word: {count} elements"
    if command[0] == "diff" and done.code == 0 and damage.changed and "--trust-crc" not in command:
        yield f"the same, it says, and {damage.changed} bytes of tensors differ"


def of_text(command: Command, damage: Damage, done: Tried, room: Path) -> Iterator[str]:
    """An error is on stderr and names a file at fault; nothing hides in what is said; JSON is one object."""
    for stream in (done.out, done.err):
        if hidden := UNSEEN.search(stream):
            yield f"raw {hidden[0]!r} in what it says"
    if any(weird in done.out + done.err for weird in WEIRD if "\n" in weird):
        yield "a name with a raw line break in what it says"
    if len(done.out) + len(done.err) > 4_000_000:
        yield f"{len(done.out) + len(done.err)} characters in what it says"
    if done.code in (3, 4, 7) and not done.err.startswith("error: ") and command[0] not in RESULTS:
        yield "no error on stderr"
    names = (*damage.files, str(room / "in"))
    if done.code in (3, 4, 7) and not any(name in done.out + done.err for name in names):
        yield "names no file"
    if "--json" in command and done.code != 2:
        yield from _of_json(done, lines=command[0] == "watch")


def _of_json(done: Tried, *, lines: bool) -> Iterator[str]:
    try:
        values = [json.loads(line) for line in (done.out.splitlines() if lines else [done.out])]
    except ValueError as error:
        yield f"no JSON: {error}"
        return
    value = values[-1]
    if done.code and value["ok"] and done.code != 1:
        yield "ok, it says"
    if done.code in (3, 4, 7) and not value["problems"]:
        yield "no problem in the JSON"


def of_files(command: Command, done: Tried, before: Fingerprint, after: Fingerprint) -> Iterator[str]:
    """The input is as it was; the output is there or not, and nothing else."""
    before, after = (
        {name: one for name, one in all_.items() if not followed.is_kept(name)} for all_ in (before, after)
    )
    output = {name for name in after if Path(name).parts[0] == "out"}
    others = {name: print_ for name, print_ in after.items() if name not in output}
    if bool(output) != (done.code == 0 and "{out}" in command):
        yield f"output: {sorted(output)[:5]}"
    if command[0] == "migrate" and done.code == 0:
        held = {bytes(print_[2]) for print_ in others.values() if len(print_) > 2}  # type: ignore[call-overload]
        there = {name: bytes(print_[2]) for name, print_ in before.items() if len(print_) > 2}  # type: ignore[call-overload]
        lost = [name for name, content in there.items() if content not in held]
        lost = [name for name in lost if not any(whole.startswith(there[name]) for whole in held)]  # cut short
        if lost := [name for name in lost if "ckpt_contents" not in name]:
            yield f"bytes are gone: {lost}"
    elif others != before:
        changed = {name for name in others.keys() | before.keys() if others.get(name) != before.get(name)}
        yield f"files changed: {sorted(changed)[:5]}"
