"""Look for checkpoints below a directory that is none itself."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from ckpttool.errors import NotACheckpoint
from ckpttool.formats.findings import listing
from ckpttool.inspection.access import closed
from ckpttool.inspection.kinds import is_checkpoint, is_run

DEPTH = 4
CROWD = 2000
"""Directories that are looked into, at most: the search must end on a whole file server, too."""


def only_candidate(path: Path) -> Path:
    """Return the one checkpoint below a directory.

    Raises :class:`NotACheckpoint` that lists what is there: several with the commands to type, or just names.
    """
    candidates, all_seen = _search(path)
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


def _search(path: Path) -> tuple[list[Path], bool]:
    """Go down level by level, and say whether all was seen; what is found is not searched further."""
    found: list[Path] = []
    level, visited = [path], 0
    for _ in range(DEPTH):
        below: list[Path] = []
        for child in (c for folder in level for c in _folders(folder)):
            visited += 1
            if visited > CROWD:
                return found, False
            if is_checkpoint(child) or is_run(child):
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
