"""A second tree of names for the files of a directory: hard links, without a byte copied or a pipe opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Identity = tuple[int, int]
"""Device and number of a directory."""


class Vanished(Exception):
    """Something that was there is not any more."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class Linking:
    """Links a directory, with those that its links lead to; each of them once, whatever leads there.

    A link to a directory that lies in the new tree already becomes a relative link to it. One that leads elsewhere is
    followed, but links to directories that are found there lead where they led, and so do links to what ``avoid``
    names: the directories around. Links to files become files, links that lead nowhere stay as they are. Every method
    raises :class:`Vanished`, and ``OSError`` with the names of what it was about.
    """

    def __init__(self, avoid: tuple[Path, ...] = ()) -> None:
        self._avoid = {_identity(info) for info in map(_looked_up, avoid) if info is not None}
        self._places: dict[Identity, str] = {}
        self._trees: list[tuple[str, str]] = []

    def link_files(self, source: Path, target: Path) -> None:
        """Make a directory with the files of another, and nothing from below."""
        self._folder(str(source), str(target))

    def link_tree(self, source: Path, target: Path) -> None:
        """Make a directory with the files of another and of all below it."""
        for link, place in self._walk(str(source), str(target)):
            info = _looked_up(link)
            known = None if info is None else self._places.get(_identity(info))
            if known is not None:
                os.symlink(os.path.relpath(known, os.path.dirname(place)), place)  # noqa: PTH120, PTH211
            elif info is None or _identity(info) in self._avoid:
                os.symlink(os.path.realpath(link), place)  # noqa: PTH211
            else:
                for deeper, there in self._walk(link, place):
                    os.symlink(os.path.realpath(deeper), there)  # noqa: PTH211

    def _walk(self, source: str, target: str) -> list[tuple[str, str]]:
        """Link a tree, and return the links to directories in it, with the places that they are to have."""
        pending, links = [(source, target)], []
        while pending:
            here, there = pending.pop()
            below, found = self._folder(here, there)
            self._trees.append((here, there))
            pending += [(f"{here}/{name}", f"{there}/{name}") for name in below]
            links += [(f"{here}/{name}", f"{there}/{name}") for name in found]
        return links

    def _folder(self, source: str, target: str) -> tuple[list[str], list[str]]:
        """Make one directory with its files; return the names of the directories in it, and of links to such."""
        below: list[str] = []
        links: list[str] = []
        with _opened(source) as from_:
            info = os.fstat(from_)
            self._places[_identity(info)] = target
            os.mkdir(target, stat.S_IMODE(info.st_mode) & 0o777 | stat.S_IRWXU)  # noqa: PTH102
            with _opened(target) as to, os.scandir(from_) as entries:
                os.fchmod(to, stat.S_IMODE(info.st_mode) & 0o777 | stat.S_IRWXU)
                for entry in entries:
                    kind = _kind(entry, source)
                    if kind == "file":
                        _link(entry.name, source, target, from_, to)
                    elif kind == "nowhere":
                        os.symlink(os.readlink(entry.name, dir_fd=from_), entry.name, dir_fd=to)
                    elif kind:
                        (below if kind == "folder" else links).append(entry.name)
        return below, links

    def changed(self) -> str | None:
        """Return a file that a tree has by its name no longer, for it was written anew, or ``None``."""
        for source, target in self._trees:
            with _opened(source) as from_, _opened(target) as to, os.scandir(to) as entries:
                for entry in entries:
                    if entry.is_file(follow_symlinks=False) and not _same(entry, from_, source):
                        return f"{source}/{entry.name}"
        return None


def _kind(entry: os.DirEntry[str], source: str) -> str:
    """Say what an entry is: a file, a folder, a link to one, one that leads nowhere, or nothing that is linked."""
    if entry.is_file(follow_symlinks=False):
        return "file"
    if entry.is_dir(follow_symlinks=False):
        return "folder"
    try:
        is_link = stat.S_ISLNK(entry.stat(follow_symlinks=False).st_mode)
    except FileNotFoundError as error:
        raise Vanished(f"{source}/{entry.name}") from error
    if not is_link:
        return ""
    try:
        mode = entry.stat().st_mode
    except OSError:
        return "nowhere"
    return "file" if stat.S_ISREG(mode) else "link" if stat.S_ISDIR(mode) else ""


def _link(name: str, source: str, target: str, from_: int, to: int) -> None:
    try:
        os.link(name, name, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=True)
    except FileNotFoundError as error:
        if os.path.exists(target):  # noqa: PTH110 - else the new tree is what was taken away
            raise Vanished(f"{source}/{name}") from error
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, f"{source}/{name}", None, f"{target}/{name}") from error


def _same(entry: os.DirEntry[str], from_: int, source: str) -> bool:
    try:
        return os.stat(entry.name, dir_fd=from_).st_ino == entry.inode()
    except FileNotFoundError as error:
        raise Vanished(f"{source}/{entry.name}") from error


def _looked_up(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)  # noqa: PTH116 - many
    except OSError:
        return None


def _identity(info: os.stat_result) -> Identity:
    return info.st_dev, info.st_ino


@contextmanager
def _opened(path: str) -> Iterator[int]:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Vanished(path) from error
    try:
        yield handle
    finally:
        os.close(handle)
