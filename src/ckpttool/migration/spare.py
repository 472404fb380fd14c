"""What may be deleted: files whose bytes another name, outside the staging directory, has as well."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.findings import listing
from ckpttool.migration.names import GONE, NEW, OLD, STAGING, TREES, V1, V1_NAMES
from ckpttool.migration.sameness import is_copy


class OnlyCopy(BrokenCheckpoint):
    """Files that were about to be deleted have bytes that are nowhere else."""


def require_spare(role: Path) -> None:
    """Raise :class:`OnlyCopy` when the staging directory holds bytes that the rest of the role has not."""
    only = list(only_copies(role))
    if only:
        raise OnlyCopy(
            f"{role}: bytes that are nowhere else in the role, so nothing is deleted: {listing(only)}",
            hint=f"Something changed between two runs. Move what you want to keep out of {STAGING}/, then run again.",
            code="only-copy",
        )


def only_copies(role: Path) -> Iterator[str]:
    """Yield the files in the staging directory that have no equal outside of it; links are no bytes.

    What was being built is made of second names and copies: there, a first name that is gone is what matters.
    """
    for aside in (OLD, V1, GONE, NEW):
        top = role / aside
        for folder, _, files in os.walk(top):
            inside = Path(folder).relative_to(top).parts
            for name in files:
                path = Path(folder, name)
                if path.is_symlink():
                    continue
                staying = [role / tree / Path(*inside[1:], name) for tree in (*TREES, *V1_NAMES)]
                spare = any(map(Path.is_file, staying)) if aside == NEW else _elsewhere(path, staying)
                if not spare:
                    yield str(path.relative_to(role))


def _elsewhere(path: Path, staying: Iterable[Path]) -> bool:
    """Tell whether a name that stays leads to the same file, to the same bytes, or to more that begins with them."""
    info = path.stat()
    for other in staying:
        try:
            found = other.stat()
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and (os.path.samestat(info, found) or is_copy(path, other)):
            return True
    return False
