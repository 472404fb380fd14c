"""The trees of a role: which ones the archive of layout v1 asks for, and how far those that exist are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from filecmp import cmp
from pathlib import Path
from typing import Literal

from ckpttool import layout
from ckpttool.formats import dcp

Condition = Literal["absent", "empty", "whole", "partial", "foreign", "absolute link", "dangling link"]
"""How a tree of v2 compares with its source: ``foreign`` holds a file that is not the source's."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files below a directory: sub-directory ("" for itself) to names, and bytes in all."""

    folders: Mapping[str, tuple[str, ...]]
    bytes: int

    @property
    def count(self) -> int:
        """Number of files."""
        return sum(map(len, self.folders.values()))


def listing_of(path: Path) -> Listing:
    """List a directory with its sub-directories, in order; links to files count as the files."""
    folders: dict[str, tuple[str, ...]] = {}
    total = 0
    for where, names in _walk(path):
        folders[where] = names
        total += sum((path / where / name).stat().st_size for name in names)
    return Listing(folders, total)


def _walk(path: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for folder, below, files in os.walk(path):
        below.sort()
        where = os.path.relpath(folder, path)
        yield "" if where == "." else where, tuple(sorted(files))


def filled(path: Path) -> bool:
    """Tell whether a directory is there and holds something."""
    return path.is_dir() and bool(os.listdir(path))


def parts_of(source: dcp.DcpSource) -> set[str]:
    """Return what an archive holds, in the words of :func:`ckpttool.formats.dcp.part_of`."""
    parts = {dcp.part_of(name) for name in (*source.tensors, *source.objects)}
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
    """Compare a tree with its source. Files that are links are the source's own; copies are compared by size.

    ``by_bytes`` reads the copies and compares every byte.
    """
    path = role / tree
    if path.is_symlink():
        return _link_condition(role, path, role / source)
    if not path.is_dir():
        return "absent"
    if not os.listdir(path):
        return "empty"
    have, want = listing_of(path), listing_of(role / source)
    states = [
        _same(path / folder / name, role / source / folder / name, by_bytes=by_bytes)
        for folder, names in have.folders.items()
        for name in names
    ]
    if not all(states):
        return "foreign"
    whole = all(set(names) <= set(have.folders.get(folder, ())) for folder, names in want.folders.items())
    return "whole" if whole and have.bytes == want.bytes else "partial"


def _link_condition(role: Path, path: Path, source: Path) -> Condition:
    if not path.exists():
        return "dangling link"
    if not path.samefile(source):
        return "foreign"
    return "absolute link" if path.readlink().is_absolute() else "whole"


def _same(copy: Path, original: Path, *, by_bytes: bool) -> bool:
    """Tell whether a file is the original, or a copy of it that may be cut short (an interrupted copy)."""
    if not original.is_file() or not copy.is_file():
        return False
    if copy.samefile(original):
        return True
    size, whole = copy.stat().st_size, original.stat().st_size
    if size == whole and by_bytes:
        return cmp(copy, original, shallow=False)
    return size == whole or (size < whole and _begins_alike(copy, original, size))


def _begins_alike(copy: Path, original: Path, size: int) -> bool:
    with copy.open("rb") as a, original.open("rb") as b:
        while size > 0:
            block = a.read(min(size, 8 << 20))
            if not block or block != b.read(len(block)):
                return False
            size -= len(block)
    return True
