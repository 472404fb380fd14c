"""What stands against deleting a step: the files of a run that name it, pins, marks, links and mount points."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from ckpttool.errors import CkpttoolError
from ckpttool.formats.jsonfile import INDEX_MOST, read_object
from ckpttool.formats.torchzip import read_range
from ckpttool.inspection.runs import TRACKERS
from ckpttool.layout import step_of
from ckpttool.watching.pins import is_pinned
from ckpttool.watching.signs import TRAINER_STATE

KEEP = ".ckpttool-keep"
"""A file of this name in a step keeps it."""

LATEST = "latest"
"""Where DeepSpeed names the directory that it saved last."""

MOUNTS = Path("/proc/self/mountinfo")
_TRACKER_MOST = 64

Named = dict[int | None, str]
"""Steps that are named, and by what; ``None`` stands for all, and says what cannot be understood."""


class Protection:
    """The reasons of a run, as it is at the moment."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._names = listed(run)
        self._mounted = _mounted(run)
        self._best = _best(run, self._names)
        self._named = self._now_named()

    def reason(self, name: str, *, again: bool = False) -> str:
        """Say why a step directory is to be kept, or nothing; ``again`` looks at all but the best model once more.

        A step is kept, too, where it cannot be told which one a trainer needs.
        """
        if again:
            self._names, self._mounted = listed(self._run), _mounted(self._run)
            self._named = self._now_named()
        step = self._run / name
        if not _is_folder(step):
            return "a symbolic link" if step.is_symlink() else "no directory"
        if name in self._mounted:
            return "a file system is mounted there"
        unclear = self._named.get(None, "")
        if reason := self._named.get(step_of(name), "") or unclear:
            return reason
        if is_pinned(self._run, name):
            return "pinned"
        return f"{KEEP} lies in it" if os.path.lexists(step / KEEP) else ""

    def _now_named(self) -> Named:
        return _tracked(self._run, self._names) | self._best | _linked(self._run, self._names)


def _tracked(run: Path, names: list[str]) -> Named:
    """Return what the trackers say, and the file of DeepSpeed."""
    found: Named = {}
    for name in (*TRACKERS, LATEST):
        if name not in names or (name == LATEST and not _is_file(run / name)):
            continue
        said = _said(run / name)
        step = _step_said(said, deepspeed=name == LATEST)
        if step is not None:
            found[step] = f"{name} names it"
        elif said != "release" and name != LATEST:
            found[None] = f"{name} {'cannot be read' if said is None else f'holds {said!r}, not a step'}"
    return found


def _said(path: Path) -> str | None:
    try:
        raw = read_range(path, 0, _TRACKER_MOST)
    except CkpttoolError:
        return None
    return raw.decode(errors="replace").strip()


def _step_said(said: str | None, *, deepspeed: bool) -> int | None:
    if said is None:
        return None
    if deepspeed:
        return step_of(said)
    return int(said) if said.isascii() and said.isdigit() and len(said) < _TRACKER_MOST else None


def _best(run: Path, names: list[str]) -> Named:
    """Return what transformers' Trainer has as its best model, by its newest records in steps and that of the run.

    Newest are that of the last step and the one that was written last: training may have gone back.
    """
    steps = sorted((number, name) for name in names if name.startswith("checkpoint-") and (number := step_of(name)))
    records = [
        (info.st_mtime_ns, at, path)
        for at, path in enumerate(run / n / TRAINER_STATE for _, n in steps)
        if (info := _info(path))
    ]
    newest = dict.fromkeys(path for _, _, path in (*records[-1:], *sorted(records)[-1:]))
    found: Named = {}
    for path in (*newest, run / TRAINER_STATE):
        if not os.path.lexists(path):
            continue
        where = os.path.relpath(path, run)
        try:
            best = read_object(path, INDEX_MOST).get("best_model_checkpoint")
        except CkpttoolError:
            found[None] = f"{where} cannot be read"
            continue
        if isinstance(best, str) and (number := _last(best)) is not None:
            found[number] = f"the best model, says {where}"
        elif best is not None:
            found[None] = f"{where} has a best model that is no step"
    return found


def _last(path: str) -> int | None:
    """Return the step that a path of a trainer, on this system or another one, ends with."""
    return step_of(re.split(r"[/\\]+", path.rstrip("/\\"))[-1])


def _linked(run: Path, names: list[str]) -> Named:
    """Return steps to which links in the run lead, such as ``latest`` or ``best``."""
    found: Named = {}
    real = Path(os.path.realpath(run))
    for name in names:
        if (run / name).is_symlink():
            target = Path(os.path.realpath(run / name))
            if real in target.parents and (number := step_of(target.relative_to(real).parts[0])) is not None:
                found[number] = f"{name} leads to it"
    return found


def _mounted(run: Path) -> set[str]:
    """Return the names in a run on or below which file systems are mounted, as far as the system tells."""
    real, found = f"{os.path.realpath(run)}/", set[str]()
    with suppress(OSError):
        for line in MOUNTS.read_bytes().splitlines():
            place = os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), line.split(b" ")[4]))
            if place.startswith(real):
                found.add(place[len(real) :].split("/")[0])
    return found


def listed(path: Path) -> list[str]:
    """List a directory; one that is not there, or closed, has nothing that can be deleted."""
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    info = _info(path)
    return info is not None and stat.S_ISDIR(info.st_mode)


def _is_file(path: Path) -> bool:
    info = _info(path)
    return info is not None and stat.S_ISREG(info.st_mode)


def _info(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None
