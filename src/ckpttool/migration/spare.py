"""What may be deleted: files whose bytes another name, outside the staging directory, has as well."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.findings import listing
from ckpttool.migration.sameness import is_copy

STAYING = (*layout.ARCHIVES, layout.HUGGINGFACE, layout.V1_ARCHIVE, layout.V1_HUGGINGFACE)
ASIDE = ("old", "v1", "gone")
"""Where trees and v1 names lie in the staging directory before they are deleted."""

MADE = "new"
"""Where trees are built: their files are second names or copies, unless the first name has gone meanwhile."""


class OnlyCopy(BrokenCheckpoint):
    """Files that were about to be deleted have bytes that are nowhere else."""


def require_spare(role: Path, staging: str) -> None:
    """Raise :class:`OnlyCopy` when the staging directory holds bytes that the rest of the role has not."""
    only = list(only_copies(role, staging))
    if only:
        raise OnlyCopy(
            f"{role}: bytes that are nowhere else in the role, so nothing is deleted: {listing(only)}",
            hint=f"Something changed between two runs. Move what you want to keep out of {staging}/, then run again.",
            code="only-copy",
        )


def only_copies(role: Path, staging: str) -> Iterator[str]:
    """Yield the files in the staging directory that have no equal outside of it; links are no bytes."""
    for aside in (*ASIDE, MADE):
        top = role / staging / aside
        for folder, _, files in os.walk(top):
            inside = Path(folder).relative_to(top).parts
            for name in files:
                path = Path(folder, name)
                if path.is_symlink():
                    continue
                names = _names(inside, name)
                if not (_is_there(role, names) if aside == MADE else _elsewhere(role, path, names)):
                    yield str(path.relative_to(role))


def _names(inside: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Return what a file may be called in its tree: the tree may lie in the directory, or be it."""
    return tuple({"/".join((*inside[1:], name)): None, "/".join((*inside, name)): None})


def _is_there(role: Path, names: tuple[str, ...]) -> bool:
    """Tell whether a file of these names stays, perhaps saved anew since."""
    return any((role / tree / name).is_file() for name in names for tree in STAYING)


def _elsewhere(role: Path, path: Path, names: tuple[str, ...]) -> bool:
    """Tell whether a name that stays leads to the same file, to the same bytes, or to more that begins with them."""
    info = path.stat()
    for other in (role / tree / name for name in names for tree in STAYING):
        try:
            found = other.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and (os.path.samestat(info, found) or is_copy(path, other)):
            return True
    return False
