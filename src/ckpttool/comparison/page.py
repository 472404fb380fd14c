"""The file that a page is written to: complete or absent, beside the checkpoints and never in one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ckpttool.comparison.result import PAGE_BEGINS
from ckpttool.staging import check_outside
from ckpttool.wholefile import check_file, write_whole


def check_page(path: Path, *, force: bool, sources: Iterable[Path] = ()) -> None:
    """Raise :class:`CannotWrite` where a page cannot be written: worth knowing before a long comparison.

    ``sources`` are the checkpoints that are compared. With ``force``, an earlier page is replaced, and no other file.
    """
    check_outside(path, sources)
    check_file(path, PAGE_BEGINS.encode(), force=force)


def write_page(path: Path, text: str, *, force: bool, sources: Iterable[Path] = ()) -> None:
    """Write a page, or leave what is there as it is and raise :class:`CannotWrite`."""
    check_page(path, force=force, sources=sources)
    write_whole(path, text.encode(), force=force)
