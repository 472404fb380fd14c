"""The trees of a role: which ones the archive of layout v1 asks for, and how far those that exist are."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from ckpttool import layout
from ckpttool.formats import dcp
from ckpttool.formats.dcpkeys import part_of
from ckpttool.migration.names import Mode
from ckpttool.migration.sameness import is_copy, same_bytes

Condition = Literal["absent", "empty", "whole", "partial", "foreign", "absolute link", "dangling link"]
"""How a tree of v2 compares with its source: ``foreign`` holds a file that is not the source's."""


class File(NamedTuple):
    """What a directory entry leads to; equal for all names of one file."""

    device: int
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Listing:
    """The files below a directory: sub-directory ("" for itself) to names and files, and bytes in all.

    ``odd`` are entries that a tree cannot take over: links to directories, links that lead nowhere, special files.
    """

    folders: Mapping[str, Mapping[str, File]]
    bytes: int
    odd: tuple[str, ...] = ()

    @property
    def count(self) -> int:
        """Number of files."""
        return sum(map(len, self.folders.values()))


def listing_of(path: Path) -> Listing:
    """List a directory with its sub-directories, in order; links to files count as the files."""
    folders: dict[str, Mapping[str, File]] = {}
    odd: list[str] = []
    for folder, below, files in os.walk(path):
        below.sort()
        where = os.path.relpath(folder, path).removeprefix(".")
        found = {name: _file(os.path.join(folder, name)) for name in sorted(files)}  # noqa: PTH118 - many files
        folders[where] = {name: file for name, file in found.items() if file is not None}
        links = [name for name in below if os.path.islink(os.path.join(folder, name))]  # noqa: PTH114, PTH118
        odd += [os.path.join(where, name) for name in (*found.keys() - folders[where].keys(), *links)]  # noqa: PTH118
    return Listing(folders, sum(file.size for names in folders.values() for file in names.values()), tuple(odd))


def _file(path: str) -> File | None:
    """Return a regular file, links followed, or ``None`` for anything else."""
    try:
        info = os.stat(path)  # noqa: PTH116 - many files
    except OSError:
        return None
    return File(info.st_dev, info.st_ino, info.st_size) if stat.S_ISREG(info.st_mode) else None


def filled(path: Path) -> bool:
    """Tell whether a directory is there and holds something."""
    return path.is_dir() and bool(os.listdir(path))


def flat(tree: str) -> str:
    """Return a tree's name while it lies aside."""
    return tree.replace("/", "-")


def kinship(role: Path, tree: str, source: str) -> Mode:
    """Say how a tree got its files, by its index or its first file."""
    path = role / tree
    if path.is_symlink():
        return "symlink"
    names = [name for name in sorted(os.listdir(path)) if (path / name).is_file() and (role / source / name).is_file()]
    return "hardlink" if names and (path / names[0]).samefile(role / source / names[0]) else "copy"


def parts_of(source: dcp.DcpSource) -> set[str]:
    """Return what an archive holds, in the words of :func:`ckpttool.formats.dcpkeys.part_of`."""
    parts = {part_of(name) for name in (*source.tensors, *source.objects)}
    if {"lr_scheduler", "opt_param_scheduler"} & set(source.unsharded or {}):
        parts.add("scheduler")
    return parts


def wanted(parts: set[str], *, archive: bool, huggingface: bool) -> dict[str, str]:
    """Return the trees to have, each with its source in layout v1."""
    trees = {tree: layout.V1_ARCHIVE for part, tree in layout.TREE_OF_PART.items() if archive and part in parts}
    if huggingface:
        trees[layout.HUGGINGFACE] = layout.V1_HUGGINGFACE
    return {tree: trees[tree] for tree in (*layout.ARCHIVES, layout.HUGGINGFACE) if tree in trees}


def condition(role: Path, tree: str, source: str, *, by_bytes: bool = False) -> Condition:
    """Compare a tree with its source. Files that are links are the source's own.

    Copies are read, unless they have the size and the time of the original; with ``by_bytes`` always.
    """
    path = role / tree
    if path.is_symlink():
        return _link_condition(role, path, role / source)
    if not path.is_dir():
        return "absent"
    if not os.listdir(path):
        return "empty"
    have, want = listing_of(path), listing_of(role / source)
    if any(_strangers(path, have, role / source, want, by_bytes=by_bytes)):
        return "foreign"
    whole = all(files.keys() <= have.folders.get(folder, {}).keys() for folder, files in want.folders.items())
    return "whole" if whole and have.bytes == want.bytes else "partial"


def strangers(role: Path, tree: str, source: str) -> list[str]:
    """Return the files of a tree that are not its source's, byte by byte."""
    path, original = role / tree, role / source
    if path.is_symlink():
        return []
    return list(_strangers(path, listing_of(path), original, listing_of(original), by_bytes=True))


def _strangers(path: Path, have: Listing, source: Path, want: Listing, *, by_bytes: bool) -> Iterator[str]:
    yield from have.odd
    for folder, files in have.folders.items():
        originals = want.folders.get(folder, {})
        for name, file in files.items():
            where = f"{folder}/{name}".lstrip("/")
            if name not in originals or (
                file != originals[name] and not _copied(path / where, source / where, by_bytes)
            ):
                yield where


def is_part_of(path: Path, whole: Path) -> bool:
    """Tell whether another directory has every file of this one, byte by byte, and more."""
    have, want = listing_of(path), listing_of(whole)
    names = [os.path.join(folder, name) for folder, files in have.folders.items() for name in files]  # noqa: PTH118
    return (
        not have.odd
        and have.count < want.count
        and all((whole / name).is_file() and same_bytes(path / name, whole / name) for name in names)
    )


def leans_on(path: Path, goes: Path) -> bool:
    """Tell whether a directory is, or holds, symbolic links to something at or below another one."""
    below = os.path.realpath(goes)
    names = [path, *(Path(folder, name) for folder, dirs, files in os.walk(path) for name in (*dirs, *files))]
    targets = (os.path.realpath(name) for name in names if name.is_symlink())
    return any(target == below or target.startswith(f"{below}{os.sep}") for target in targets)


def _link_condition(role: Path, path: Path, source: Path) -> Condition:
    if not path.exists():
        return "dangling link"
    if not path.samefile(source):
        return "foreign"
    return "absolute link" if path.readlink().is_absolute() else "whole"


def _copied(copy: Path, original: Path, by_bytes: bool) -> bool:
    """Tell whether a file of its own is a copy; without ``by_bytes``, size and time that agree are enough."""
    a, b = copy.stat(), original.stat()
    return (not by_bytes and (a.st_size, a.st_mtime_ns) == (b.st_size, b.st_mtime_ns)) or is_copy(copy, original)
