"""``inspect``: what is this, is it whole, what is in it, what do I type next. Headers and indexes only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ckpttool.errors import NotACheckpoint
from ckpttool.inspection.result import Inspection
from ckpttool.unpickle import collector_paused

if TYPE_CHECKING:
    from ckpttool.inspection.draft import Draft

__all__ = ["Inspection", "inspect", "open_directory"]


def inspect(path: Path | str, *, tensors: str | None = None) -> Inspection:
    """Say what lies at a path. ``tensors`` is a glob of the tensors to list.

    Raises :class:`~ckpttool.errors.NotACheckpoint` for a path that is absent, unreadable or no checkpoint,
    and :class:`~ckpttool.errors.Refused` for a file that would run code if it were loaded the usual way.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links that we report
    with _readable(path), collector_paused():
        if path.is_file():
            from ckpttool.inspection.files import inspect_file

            return inspect_file(path, tensors)
        return _open(path).finish(tensors)


def open_directory(path: Path) -> Draft:
    """Return what ``inspect`` finds in a directory, not yet counted up: with the archives that it has opened.

    Raises as :func:`inspect` does.
    """
    with _readable(path), collector_paused():
        return _open(path)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Let what the system refuses say that there is nothing to be read."""
    try:
        yield
    except PermissionError as error:
        raise NotACheckpoint(
            f"{error.filename}: permission denied",
            hint="Run as the user who trained, or ask for read access to the directory.",
            code="unreadable",
        ) from error
    except OSError as error:  # a step that the trainer's retention removes while we look
        raise NotACheckpoint(
            f"{error.filename or path}: {error.strerror}",
            hint="Is a training run at work here? Try again.",
            code="unreadable",
        ) from error


def _open(path: Path) -> Draft:
    from ckpttool.inspection.kinds import recognise
    from ckpttool.inspection.search import only_candidate, require_directory

    require_directory(path)
    draft = recognise(path)
    if draft is None:
        candidate = only_candidate(path)
        draft = recognise(candidate)
        if draft is None:
            raise NotACheckpoint(f"{candidate}: nothing that ckpttool recognises")
        draft.note("found-below", f"{path} itself is no checkpoint; the only one below it is shown")
    return draft
