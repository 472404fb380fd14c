"""What is looked at before a watch begins: whether it is a run, and what may not be meant."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection
from itertools import islice
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import NotACheckpoint, Problem, UsageError
from ckpttool.formats.findings import counted
from ckpttool.inspection import kinds, runs
from ckpttool.inspection.access import closed, is_directory
from ckpttool.watching.scanning import roles_of, steps_of

MOST_BELOW = 200
"""Directories below that are looked at for runs, where there is no step."""


def check_run(run: Path) -> None:
    """Raise :class:`NotACheckpoint` or :class:`UsageError` for what is no run: nothing, a file, a step, a role."""
    run = Path(os.path.abspath(run))  # noqa: PTH100
    if not run.is_dir():
        hint = f"If training is yet to make it: mkdir -p {run}"
        raise NotACheckpoint(f"{run}: no such directory", hint="" if run.exists() else hint)
    above = next((p for p in (run, run.parent) if layout.step_of(p.name) is not None), None)
    if above is not None or (kinds.is_checkpoint(run) and not kinds.is_run(run)):
        hint = f"Its run: ckpttool watch {above.parent}" if above is not None else "Give the directory above it."
        raise UsageError(f"{run}: a checkpoint; what is watched is a run, the directory of its steps", hint=hint)
    if found := _runs_below(run):
        lines = "\n".join(f"  ckpttool watch {shlex.quote(str(path))}" for path in found[:6])
        raise NotACheckpoint(f"{run}: no run, but {counted(len(found), 'run')} below it", hint=f"Try:\n{lines}")


def _runs_below(path: Path) -> list[Path]:
    """Return the runs in a directory that has no step itself; what may not be read is none."""
    try:
        if runs.steps(path) or runs.tracker(path) is not None:
            return []
        below = [child for child in islice(path.iterdir(), MOST_BELOW) if is_directory(child) and not closed(child)]
        return sorted(child for child in below if kinds.is_run(child))
    except OSError:
        return []


def doubts(run: Path, roles: Collection[str]) -> tuple[Problem, ...]:
    """Return notes on what may not be meant: a run without steps, a role that no step has."""
    steps = steps_of(run)
    if not steps:
        return (Problem(code="no-steps", message=f"{run}: no step is here yet", severity="note"),)
    there = roles_of(run, [step for _, step in steps]) if roles else set()
    unknown = [role for role in roles if role not in there]
    if not unknown or not there:
        return ()
    message = f"no step has a role {unknown[0]} yet; there is {', '.join(sorted(there))}"
    return (Problem(code="no-role", message=message, severity="note"),)
