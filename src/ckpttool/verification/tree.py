"""What lies below a directory, every file once, whatever names links give it."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.inspection.summary import keeps_checkpoints

Identity = tuple[int, int]
"""Device and inode: what makes a file one, whatever its names are."""

Stamp = tuple[int, int, int]
"""Inode, size and time of the last change: what a file was like when it was listed."""

_HINT = "Run as the user who trained, or ask for read access."


@dataclass(frozen=True, slots=True)
class Entry:
    """A regular file: where it is, how it is called from the base on, and what it was like."""

    path: Path
    shown: str
    size: int
    identity: Identity
    stamp: Stamp


@dataclass(slots=True)
class Tree:
    """The files of ``base`` by identity, directories by how they are called from there, what may not be looked at."""

    base: Path
    files: dict[Identity, Entry] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def shown(self, path: Path) -> str:
        """Return a path below the base as it is called from there."""
        return str(path.relative_to(self.base))

    def entry(self, path: Path) -> Entry | None:
        """Return the file at a path, listed or not; ``None`` where no regular file is, or another than the only one."""
        try:
            info = path.stat()
        except OSError:
            return None
        if not stat.S_ISREG(info.st_mode):
            return None
        known = self.files.get((info.st_dev, info.st_ino))
        if known is not None or self.is_file:
            return known
        return entry_of(path, self.shown(path), info)

    @property
    def is_file(self) -> bool:
        """Whether the base is a file itself, and the only one that is looked at."""
        return not self.folders


def entry_of(path: Path, shown: str, info: os.stat_result) -> Entry:
    """Return a file as it is now."""
    return Entry(path, shown, info.st_size, (info.st_dev, info.st_ino), stamp_of(info))


def stamp_of(info: os.stat_result) -> Stamp:
    """Return what tells whether a file has been written to or replaced."""
    return info.st_ino, info.st_size, info.st_mtime_ns


def walk(base: Path) -> Tree:
    """List what lies at or below a path; raises :class:`NotACheckpoint` where that cannot be listed.

    Real directories come first, then links to directories: to those inside that were not seen (there are none), and
    to those outside only where a checkpoint is kept, so that no link leads through the whole disk.
    """
    tree = Tree(base)
    if base.is_file():
        entry = entry_of(base, base.name, base.stat())
        tree.files[entry.identity] = entry
        return tree
    seen: set[Identity] = set()
    todo, linked = [""], list[str]()
    while todo or linked:
        where = todo.pop() if todo else linked.pop(0)
        for folder, is_link in _list(tree, where, seen):
            (linked if is_link else todo).append(folder)
    return tree


def _list(tree: Tree, where: str, seen: set[Identity]) -> list[tuple[str, bool]]:
    """Take the files of one directory, and return those below it, last one first, with whether a link leads there."""
    path = tree.base / where if where else tree.base
    try:
        info = path.stat()
        if (info.st_dev, info.st_ino) in seen:
            return []
        seen.add((info.st_dev, info.st_ino))
        entries = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError as error:
        if not where:
            raise NotACheckpoint(f"{path}: {error.strerror}", hint=_HINT, code="unreadable") from error
        message = f"{where}/: {(error.strerror or '').lower()}"
        tree.problems.append(Problem(code="unreadable", message=message, path=where, hint=_HINT))
        return []
    tree.folders[where] = path
    below = []
    for entry in entries:
        name = f"{where}/{entry.name}" if where else entry.name
        try:
            info = entry.stat()
        except OSError:  # a link that leads nowhere: the structure tells of it
            continue
        if stat.S_ISDIR(info.st_mode):
            if not entry.is_symlink() or keeps_checkpoints(entry.name):
                below.append((name, entry.is_symlink()))
        elif stat.S_ISREG(info.st_mode):
            tree.files.setdefault((info.st_dev, info.st_ino), entry_of(Path(path, entry.name), name, info))
    return below[::-1]
