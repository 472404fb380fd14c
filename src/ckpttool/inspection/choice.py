"""Choose a step and a role below a run, by ``--step`` and ``--role``."""

from __future__ import annotations

from pathlib import Path

from ckpttool import layout
from ckpttool.errors import NotACheckpoint, UsageError
from ckpttool.formats.findings import listing
from ckpttool.inspection import inspect, runs

LATEST = "latest"


def choose(path: Path, step: str | None, role: str | None) -> Path:
    """Return the directory that the options mean; without options the path itself.

    Raises :class:`UsageError` for a word that is no step, :class:`NotACheckpoint` for one that is not there.
    """
    if step is not None:
        path = _step(path, step)
    return path if role is None else _role(path, role)


def _step(path: Path, step: str) -> Path:
    if step != LATEST and not step.isdigit():
        raise UsageError(f"--step {step}: neither a number nor {LATEST!r}")
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: no such directory")
    names = runs.steps(path)
    if not names:
        raise NotACheckpoint(f"{path}: no step directories", hint="--step chooses a step of a run directory.")
    wanted = int(step) if step != LATEST else _latest(path)
    for name in names:
        if layout.step_of(name.name) == wanted:
            return name
    raise NotACheckpoint(f"{path}: no step {wanted}", hint=f"There are {listing(name.name for name in names)}.")


def _latest(path: Path) -> int:
    run = inspect(path).run
    if run is None or run.latest_complete is None:
        raise NotACheckpoint(f"{path}: no step is complete", hint=f"See why: ckpttool inspect {path}")
    return run.latest_complete


def _role(path: Path, role: str) -> Path:
    if not (path / role).is_dir():
        roles = sorted(p.name for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
        raise NotACheckpoint(f"{path}: no role {role}", hint=f"There is {listing(roles)}." if roles else "")
    return path / role
