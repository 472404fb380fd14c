"""``inspect``: what is this, is it whole, what is in it, what do I type next. Headers and indexes only."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import NotACheckpoint
from ckpttool.formats import dcp, foreign, fsdp, hf
from ckpttool.formats.findings import listing
from ckpttool.inspection import leaves, megatron, runs
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.files import inspect_file
from ckpttool.inspection.result import Inspection

__all__ = ["Inspection", "inspect"]

SEARCH_DEPTH = 4
"""How far below an unrecognised directory checkpoints are looked for."""

_CROWD = 2000
"""Directories looked into by that search, at most."""


def inspect(path: Path, *, tensors: str | None = None) -> Inspection:
    """Say what lies at a path. ``tensors`` is a glob of the tensors to list.

    Raises :class:`~ckpttool.errors.NotACheckpoint` for a path that is absent, unreadable or no checkpoint,
    and :class:`~ckpttool.errors.Refused` for a file that would run code if it were loaded the usual way.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow the links that we report
    try:
        if path.is_file():
            return inspect_file(path, tensors)
        _require_directory(path)
        draft = _recognise(path)
        if draft is None:
            only = _only_candidate(path)
            draft = _recognise(only)
            assert draft is not None
            draft.note("found-below", f"{path} itself is no checkpoint; the only one below it is shown")
        return draft.finish(tensors)
    except PermissionError as error:
        raise NotACheckpoint(
            f"{error.filename}: permission denied",
            hint="Run as the user who trained, or ask for read access to the directory.",
            code="unreadable",
        ) from error


def _require_directory(path: Path) -> None:
    if path.is_dir():
        return
    if path.exists():
        raise NotACheckpoint(f"{path}: neither a directory nor a regular file")
    if path.is_symlink():
        raise NotACheckpoint(f"{path}: a link that leads nowhere", hint=f"It points at {path.readlink()}.")
    parent = path.parent
    while not parent.is_dir():
        path, parent = parent, parent.parent
    close = get_close_matches(path.name, os.listdir(parent), 3)
    hint = f"In {parent} there is {listing(close)}." if close else f"{parent} exists; look what it holds."
    raise NotACheckpoint(f"{path}: no such file or directory", hint=hint)


def _recognise(path: Path) -> Draft | None:
    """Describe a directory by the first kind that has evidence in it, or return ``None``."""
    if not os.listdir(path):
        return Draft(path=path, kind="absent", title="empty directory: absent", state="absent")
    for kind in (_fsdp, _megatron_role, _archive, _run, _foreign, _step, _hf):
        draft = kind(path)
        if draft is not None:
            return draft
    return None


def _fsdp(path: Path) -> Draft | None:
    evidence = fsdp.detect(path)
    if evidence:
        return leaves.inspect_fsdp(path, evidence)
    return leaves.inspect_fsdp_remains(path) if (path / fsdp.CONFIG_FILE).is_file() else None


def _megatron_role(path: Path) -> Draft | None:
    evidence = megatron.detect(path)
    return megatron.inspect_role(path, evidence) if evidence else None


def _archive(path: Path) -> Draft | None:
    other = foreign.detect(path) if (path / dcp.BACKEND_FILE).is_file() else None
    if other is not None:
        return _foreign(path)
    evidence = dcp.detect(path)
    return leaves.inspect_archive(path, evidence) if evidence else None


def _foreign(path: Path) -> Draft | None:
    other = foreign.detect(path) or (foreign.detect(path / "model") if (path / "model").is_dir() else None)
    if other is None:
        return None
    draft = Draft(path=path, kind=other.kind, title=other.title, evidence=other.evidence, state="not opened")
    draft.note("not-opened", "recognised by name, not opened", hint=other.hint)
    return draft


def _hf(path: Path) -> Draft | None:
    evidence = hf.detect(path)
    return leaves.inspect_hf(path, evidence) if evidence else None


def _run(path: Path) -> Draft | None:
    names = runs.steps(path)
    if runs.tracker(path) is None and not any(_holds_something(step) for step in names):
        return None
    if not names and (hf.detect(path) or foreign.detect(path)):
        return None
    return runs.inspect_run(path, _look, _roles)


def _step(path: Path) -> Draft | None:
    roles = _roles(path)
    if not roles or (len(roles) == 1 and layout.step_of(path.name) is None):
        return None
    return runs.inspect_step(path, _look, roles)


def _look(path: Path) -> Inspection:
    draft = _recognise(path)
    if draft is None:
        return Draft(path=path, kind="unknown", title="not recognised", state="unknown").finish()
    return draft.finish()


def _is_checkpoint(path: Path) -> bool:
    """Tell by names alone whether a checkpoint lies directly in a directory."""
    detectors: tuple[Callable[[Path], object], ...] = (
        fsdp.detect,
        megatron.detect,
        dcp.detect,
        foreign.detect,
        hf.detect,
    )
    return any(detect(path) for detect in detectors) or (path / fsdp.CONFIG_FILE).is_file()


def _roles(path: Path) -> list[Path]:
    """Return the role directories of a step; none when the step is a checkpoint itself."""
    if _is_checkpoint(path):
        return []
    return [p for p in sorted(path.iterdir()) if p.is_dir() and (_is_checkpoint(p) or _empty(p))]


def _empty(path: Path) -> bool:
    return not os.listdir(path)


def _holds_something(step: Path) -> bool:
    return _is_checkpoint(step) or any(p.is_dir() and _is_checkpoint(p) for p in step.iterdir())


def _only_candidate(path: Path) -> Path:
    """Return the one checkpoint below a directory that is none itself.

    Raises :class:`NotACheckpoint` that lists what is there: the candidates with the commands to type, or the names.
    """
    candidates = _search(path)
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        lines = "\n".join(f"  ckpttool inspect {shlex.quote(str(c))}" for c in candidates[:20])
        raise NotACheckpoint(f"{path}: no checkpoint itself, but {len(candidates)} lie below it", hint=f"Try:\n{lines}")
    names = listing(sorted(os.listdir(path)), 6)
    raise NotACheckpoint(
        f"{path}: nothing that ckpttool recognises",
        hint=f"It holds {names}. Give a run, a step (global_step_N), a role (actor) or a bare checkpoint.",
    )


def _search(path: Path) -> list[Path]:
    """Look below a directory, level by level; what is found is not searched further."""
    found: list[Path] = []
    level, visited = [path], 0
    for _ in range(SEARCH_DEPTH):
        below: list[Path] = []
        for folder in level:
            for child in sorted(p for p in folder.iterdir() if p.is_dir() and not p.is_symlink()):
                visited += 1
                if visited > _CROWD:
                    return found
                if runs.tracker(child) is not None or runs.steps(child) or _is_checkpoint(child):
                    found.append(child)
                else:
                    below.append(child)
        level = below
    return found
