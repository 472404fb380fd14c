"""What a run holds now: every checkpoint of every step, how far it is written, and whether its sign is given."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpttool import layout
from ckpttool.formats import dcp
from ckpttool.inspection import kinds, runs
from ckpttool.inspection.access import closed
from ckpttool.watching.signs import TRAINER_STATE, Sign, Tracker, read_tracker, sign_of, unreadable

_ACCELERATE = "pytorch_model_fsdp_"

_DATA = re.compile(r".*\.(?:pt|pth|bin|distcp|safetensors|metadata)|\.metadata")


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a checkpoint is there: files, bytes, when any and when data were written last (ns since 1970)."""

    files: int = 0
    bytes: int = 0
    changed: int = 0
    written: int = 0

    @property
    def newest(self) -> float:
        """When data were written last, in seconds."""
        return self.written / 1e9


@dataclass(frozen=True, slots=True)
class Anchor:
    """A file that every save of a checkpoint writes, below it, and when it was written (ns since 1970).

    A checkpoint whose anchor was written since is another one; names that are added to it change nothing.
    """

    file: str
    written: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A checkpoint in a run, finished or not. ``name`` is its path below the run, ``step`` that of its step."""

    name: str
    path: Path
    step: Path
    number: int
    role: str
    sign: Sign | None
    extent: Extent
    anchor: Anchor | None

    @property
    def is_signed(self) -> bool:
        """Whether its producer has called it finished."""
        return self.sign is not None and self.sign.given


def steps_of(run: Path) -> list[tuple[int, Path]]:
    """Return the numbered step directories of a run, in order."""
    numbered = ((layout.step_of(path.name), path) for path in runs.steps(run))
    return [(number, path) for number, path in numbered if number is not None]


def checkpoints_of(run: Path, step: Path, roles: Collection[str] = ()) -> list[tuple[str, Path]]:
    """Return the role and path of every checkpoint of a step: its roles, or itself. ``roles`` are all if empty.

    A step that is closed may be one. Model and optimizer that accelerate saves beside each other
    (``pytorch_model_fsdp_0``, ``optimizer_0``) are one.
    """
    paths = kinds.roles(step)
    if any(path.name.startswith(_ACCELERATE) for path in paths):
        paths = [step]
    paths = paths or ([step] if closed(step) or kinds.is_checkpoint(step) else [])
    found = ((runs.role_below(path, run), path) for path in paths)
    return [(role, path) for role, path in found if not roles or role in roles]


def roles_of(run: Path, steps: Iterable[Path]) -> set[str]:
    """Return the roles that steps have, of those that are still there."""
    found: set[str] = set()
    for step in steps:
        with suppress(OSError):
            found.update(role for role, _ in checkpoints_of(run, step) if role)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """One look at a run: its steps, and the checkpoints that were not left out."""

    steps: tuple[tuple[int, Path], ...] = ()
    candidates: tuple[Candidate, ...] = ()


def scan(
    run: Path,
    *,
    roles: Collection[str] = (),
    since: int = 0,
    only: int | None = None,
    known: Collection[str] = (),
) -> Scan:
    """Look at the steps of a run from ``since`` on, or at one, but for checkpoints whose names are ``known``.

    What vanishes meanwhile is not there; what cannot be read waits for that. Raises ``OSError`` for the run itself.
    """
    tracker, steps = read_tracker(run), steps_of(run)
    of_trainer = [step / TRAINER_STATE for _, step in steps if step.name.startswith("checkpoint-")]
    by_trainer = any(map(os.path.isfile, of_trainer))  # Path.is_file() raises below a closed directory
    found = []
    for number, step in steps:
        if number >= since and only in (None, number):
            found += list(_candidates(run, step, number, roles, known, tracker, by_trainer=by_trainer))
    return Scan(steps=tuple(steps), candidates=tuple(found))


def _candidates(
    run: Path,
    step: Path,
    number: int,
    roles: Collection[str],
    known: Collection[str],
    tracker: Tracker | None,
    *,
    by_trainer: bool,
) -> Iterator[Candidate]:
    try:
        found = checkpoints_of(run, step, roles)
    except OSError:
        return
    for role, path in found:
        name = path.relative_to(run).as_posix()
        if name not in known:
            try:
                sign = sign_of(path, step, number, tracker, by_trainer=by_trainer)
                extent, anchor = measure(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                sign, extent, anchor = unreadable(error), Extent(), None
            yield Candidate(
                name=name, path=path, step=step, number=number, role=role, sign=sign, extent=extent, anchor=anchor
            )


def measure(path: Path) -> tuple[Extent, Anchor | None]:
    """Return how much of a checkpoint is there, and its anchor. Links to directories are not followed."""
    files = size = changed = written = 0
    best: tuple[int, str, int] | None = None
    for where, status in _files(path):
        files, size, changed = files + 1, size + status.st_size, max(changed, status.st_mtime_ns)
        if _DATA.fullmatch(os.path.basename(where)):  # noqa: PTH119 - there may be a hundred thousand
            written = max(written, status.st_mtime_ns)
            rank = (_rank(where), where, status.st_mtime_ns)
            best = rank if best is None else min(best, rank)
    return Extent(files, size, changed, written), None if best is None else Anchor(best[1], best[2])


def _rank(where: str) -> int:
    """Order files by how sure it is that a save writes them, and nothing else does."""
    name = os.path.basename(where)  # noqa: PTH119
    return 0 if name == dcp.METADATA_FILE else 1 if name.startswith(("model", "pytorch_model")) else 2


def _files(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    pending = [""]
    while pending:
        below = pending.pop()
        with os.scandir(path / below) as entries:
            for entry in entries:
                where = f"{below}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{where}/")
                elif _is_file(entry):
                    yield where, entry.stat()


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:  # a link that leads in a circle, or where one may not look
        return False


def is_rewritten(path: Path, anchor: Anchor) -> bool:
    """Tell whether a checkpoint was saved anew since its anchor was taken; one that is gone was not."""
    try:
        return (path / anchor.file).stat().st_mtime_ns != anchor.written
    except OSError:
        pass
    try:
        now = measure(path)[1]
    except OSError:
        return False
    return now is not None and now.written != anchor.written


def is_changed(candidate: Candidate) -> bool:
    """Tell whether something of a checkpoint was written or removed since it was looked at; not where it is gone."""
    try:
        return measure(candidate.path) != (candidate.extent, candidate.anchor)
    except OSError:
        return not is_gone(candidate.path)


def is_gone(path: Path) -> bool:
    """Tell whether there is nothing any more; what one may not look at is not gone."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False
