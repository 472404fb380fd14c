"""Directories that the user may not look into: told, and treated as if they held nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckpttool.inspection.draft import Draft

HINT = "Run as the user who trained, or ask for read access."


def is_directory(path: Path) -> bool:
    """Like ``Path.is_dir``, which to Python 3.13 raises below a closed directory."""
    return os.path.isdir(path)  # noqa: PTH112


def closed(path: Path) -> bool:
    """Tell whether this user may not look into a directory, or not even into the one above."""
    return any(is_directory(p) and not os.access(p, os.R_OK | os.X_OK) for p in (path, path.parent))


def add_closed(draft: Draft, names: Iterable[str]) -> None:
    """Report those of these directories that are closed."""
    for name in names:
        if not closed(draft.path / Path(name).parent) and closed(draft.path / name):
            draft.fault("unreadable", f"{name}/: permission denied", path=name, hint=HINT)
