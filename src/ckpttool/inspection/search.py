"""Look for checkpoints below a directory that is none itself."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from ckpttool.errors import CkpttoolError, NotACheckpoint
from ckpttool.formats.findings import listing
from ckpttool.inspection.access import closed
from ckpttool.inspection.kinds import is_checkpoint, is_run

DEPTH = 4
CROWD = 2000
"""Directories that are looked into, at most: the search must end on a whole file server, too."""


def require_directory(path: Path) -> None:
    """Raise :class:`NotACheckpoint` for what is no directory, with what may have been meant."""
    if path.is_dir():
        return
    if path.exists():
        hint = "Give a run, a step (global_step_N), a role (actor), a bare checkpoint or a file of one."
        what = "a file, not a directory" if path.is_file() else "neither a directory nor a regular file"
        raise NotACheckpoint(f"{path}: {what}", hint=hint)
    if path.is_symlink():
        raise NotACheckpoint(f"{path}: a link that leads nowhere", hint=f"It points at {path.readlink()}.")
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    close = get_close_matches(path.name, os.listdir(parent), 3)
    hint = f"In {parent} there is {', '.join(close)}." if close else f"{parent} exists; look what it holds."
    raise NotACheckpoint(f"{path}: no such file or directory", hint=hint)


def model_directory(option: str, given: str) -> Path:
    """Return the directory of a model that an option names, also by a file in it.

    Raises :class:`NotACheckpoint` for what is not there, with what to do where it is a name on the hub.
    """
    path = Path(given)
    if path.is_file():
        return path.parent
    if not path.exists() and re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not path.parent.exists():
        local = f"hf download {given} --exclude '*.safetensors' '*.bin' --local-dir {path.name}"
        raise NotACheckpoint(
            f"{option} {given}: no such directory, and nothing is downloaded",
            hint=f"If it is a model of the hub, its small files suffice: {local}",
        )
    try:
        require_directory(path)
    except NotACheckpoint as error:
        raise NotACheckpoint(f"{option} {error.message}", hint=error.hint) from error
    return path


def what_it_is(path: Path) -> str:
    """Say what a directory is that is not what a command wants, where it has a name: ``; it is a ...``."""
    from ckpttool.inspection import inspect

    try:
        title = inspect(path).title
    except CkpttoolError:
        return ""
    return f"; it is {'an' if title.startswith('FSDP') else 'a'} {title}"


def only_candidate(path: Path) -> Path:
    """Return the one checkpoint below a directory.

    Raises :class:`NotACheckpoint` that lists what is there: several with the commands to type, or just names.
    """
    candidates, all_seen = below(path, lambda child: is_checkpoint(child) or is_run(child))
    if len(candidates) == 1 and all_seen:
        return candidates[0]
    if candidates:
        lines = "\n".join(f"  ckpttool inspect {shlex.quote(str(c))}" for c in candidates[:20])
        lines += "" if all_seen else f"\nThe search ended after {CROWD:,} directories; there may be more."
        raise NotACheckpoint(f"{path}: no checkpoint itself, but {len(candidates)} lie below it", hint=f"Try:\n{lines}")
    names = listing(sorted(os.listdir(path)), 6)
    raise NotACheckpoint(
        f"{path}: nothing that ckpttool recognises",
        hint=f"It holds {names}. Give a run, a step (global_step_N), a role (actor) or a bare checkpoint.",
    )


def below(path: Path, wanted: Callable[[Path], bool]) -> tuple[list[Path], bool]:
    """Return the directories below that are wanted, and whether all were seen; no further down than what is found."""
    found: list[Path] = []
    level, visited = [path], 0  # one level of directories after the other
    for _ in range(DEPTH):
        below: list[Path] = []
        for child in (c for folder in level for c in _folders(folder)):
            visited += 1
            if visited > CROWD:
                return found, False
            if wanted(child):
                found.append(child)
            else:
                below.append(child)
        level = below
    return found, True


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(p for p in path.iterdir() if p.is_dir() and not p.is_symlink() and not closed(p))
    except PermissionError:
        return []
