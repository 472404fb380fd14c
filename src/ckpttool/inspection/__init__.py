"""``inspect``: what is this, is it whole, what is in it, what do I type next. Headers and indexes only."""

from __future__ import annotations

import os
from pathlib import Path

from ckpttool.errors import NotACheckpoint
from ckpttool.inspection.result import Inspection
from ckpttool.unpickle import collector_paused

__all__ = ["Inspection", "inspect"]


def inspect(path: Path | str, *, tensors: str | None = None) -> Inspection:
    """Say what lies at a path. ``tensors`` is a glob of the tensors to list.

    Raises :class:`~ckpttool.errors.NotACheckpoint` for a path that is absent, unreadable or no checkpoint,
    and :class:`~ckpttool.errors.Refused` for a file that would run code if it were loaded the usual way.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links that we report
    try:
        with collector_paused():
            return _inspect(path, tensors)
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


def _inspect(path: Path, tensors: str | None) -> Inspection:
    if path.is_file():
        from ckpttool.inspection.files import inspect_file

        return inspect_file(path, tensors)
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
    return draft.finish(tensors)
