"""Choose a step and a role below a run, by ``--step`` and ``--role``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import NotACheckpoint, Problem, UsageError
from ckpttool.formats.findings import listing
from ckpttool.inspection import Inspection, inspect, runs

LATEST = "latest"


def inspect_chosen(path: Path, step: str | None, role: str | None, *, tensors: str | None = None) -> Inspection:
    """Inspect what the options mean, with a note where ``latest`` is not what the tracker says."""
    chosen, notes = choose(path, step, role)
    found = inspect(chosen, tensors=tensors)
    return replace(found, problems=(*found.problems, *notes))


def choose(path: Path, step: str | None, role: str | None) -> tuple[Path, tuple[Problem, ...]]:
    """Return the directory that the options mean, without options the path itself, and notes on the choice.

    Raises :class:`UsageError` for a word that is no step, :class:`NotACheckpoint` for one that is not there.
    """
    notes: tuple[Problem, ...] = ()
    if step is not None:
        path, notes = _step(path, step)
    return (path if role is None else _role(path, role)), notes


def _step(path: Path, step: str) -> tuple[Path, tuple[Problem, ...]]:
    if step != LATEST and not step.isdecimal():
        raise UsageError(f"--step {step}: neither a number nor {LATEST!r}")
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: no such directory")
    names = runs.steps(path)
    if not names:
        raise NotACheckpoint(f"{path}: no step directories", hint="--step chooses a step of a run directory.")
    wanted, notes = _latest(path) if step == LATEST else (int(step), ())
    for name in names:
        if layout.step_of(name.name) == wanted:
            return name, notes
    raise NotACheckpoint(
        f"{path}: no step {wanted}", hint=f"Steps that are there: {listing(name.name for name in names)}."
    )


def _latest(path: Path) -> tuple[int, tuple[Problem, ...]]:
    """Return the newest step that is complete, and a note when the tracker says otherwise."""
    run = inspect(path).run
    if run is not None and [row.path for row in run.rows] == ["release"]:
        raise NotACheckpoint(f"{path}: no numbered step, only release/", hint="Leave --step out, or give its path.")
    if run is None or run.latest_complete is None:
        raise NotACheckpoint(f"{path}: no step is complete", hint=f"See why: ckpttool inspect {path}")
    if run.tracker in (None, str(run.latest_complete)):
        return run.latest_complete, ()
    message = f"{run.tracker_file} says {run.tracker!r}; the latest complete step is {run.latest_complete}"
    return run.latest_complete, (Problem(code="tracker-disagrees", message=message, severity="note"),)


def _role(path: Path, role: str) -> Path:
    if Path(role).name != role or role == "..":
        raise UsageError(f"--role {role}: no name of a role", hint="A role is a directory in a step, such as actor.")
    if (path / role).is_dir():
        return path / role
    steps = runs.steps(path) if path.is_dir() else []
    having = [step / role for step in steps if (step / role).is_dir()]
    if len(having) == 1:
        return having[0]
    below = sorted(p.name for p in path.iterdir() if p.is_dir()) if path.is_dir() else []
    hint = f"What is there: {listing(below)}." if below else ""
    if steps:
        hint = "Roles lie in steps: add --step latest, or --step N."
    raise NotACheckpoint(f"{path}: no role {role}", hint=hint)
