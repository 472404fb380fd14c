"""Runs and steps: directories of checkpoints, and the tracker that names the latest one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import CkpttoolError, NotACheckpoint, Problem, Refused
from ckpttool.formats.torchzip import read_range
from ckpttool.inspection.access import is_directory
from ckpttool.inspection.beside import add_dataloader, add_lora_meta
from ckpttool.inspection.draft import Draft, refusals_of, role_of
from ckpttool.inspection.result import Inspection, Run, StepRow
from ckpttool.telling import tell

TRACKERS = (layout.TRACKER, "latest_ckpt_global_step.txt")
"""Tracker files: verl and Megatron-LM, SkyRL."""

Look = Callable[[Path], Inspection]


def steps(path: Path) -> list[Path]:
    """Return the step directories of a run, oldest first; ``release`` of Megatron-LM comes first."""
    found = [(layout.step_of(p.name), p) for p in path.iterdir()]
    numbered = sorted((step, p.name, p) for step, p in found if step is not None and is_directory(p))
    release = [path / "release"] if is_directory(path / "release") else []
    return [*release, *(p for _, _, p in numbered)]


def tracker(path: Path) -> Path | None:
    """Return the tracker file of a run, if it has one."""
    return next((path / name for name in TRACKERS if (path / name).is_file()), None)


def inspect_run(path: Path, look: Look, roles: Callable[[Path], list[Path]], *, itself: bool) -> Draft:
    """Describe a run: every role of every step, the tracker, the newest step that is complete.

    ``itself`` tells that a checkpoint lies beside the steps, such as the final model of a Hugging Face trainer.
    """
    names = steps(path)
    kind, title = _run_kind(names)
    file = tracker(path)
    evidence = [_steps_in_words(names)]
    if file is not None:
        evidence.append(file.name)
    draft = Draft(path=path, kind=kind, title=title, evidence=tuple(evidence))
    rows = [row for step in names for row in _rows(step, path, look, roles, draft)]
    rows += [_row(path, path, look, draft)] if itself else []
    _check_roles(rows, draft)
    latest = _latest_complete(rows, draft)
    said = _said(file, draft) if file is not None else None
    draft.run = Run(tuple(rows), file.name if file is not None else None, said, latest)
    if file is not None and said is not None:
        _check_tracker(draft, file.name, said, names, latest)
    if file is None and kind in ("verl-run", "megatron-run"):
        hint = f"echo {latest} > {layout.TRACKER}" if latest is not None else ""
        draft.note("tracker-missing", f"no {layout.TRACKER}: a trainer that looks for it starts over", hint=hint)
    if not names:
        draft.fault("no-steps", "a tracker file, but no step directory beside it")
    return draft


def _steps_in_words(names: list[Path]) -> str:
    if len(names) == 1:
        return f"1 step directory ({names[0].name})"
    return f"{len(names)} step directories" + (f" ({names[0].name} to {names[-1].name})" if names else "")


def _said(file: Path, draft: Draft) -> str | None:
    try:
        return read_range(file, 0, 64).decode(errors="replace").strip()
    except NotACheckpoint as error:
        draft.fault(error.code, error.message, path=file.name, hint=error.hint)
        return None


def _run_kind(names: list[Path]) -> tuple[str, str]:
    first = names[-1].name if names else ""
    if first.startswith("global_step"):
        return "verl-run", "training run (verl and kin)"
    if first.startswith("iter_") or first == "release":
        return "megatron-run", "Megatron-LM checkpoint directory"
    return "run", "training run"


def _rows(step: Path, run: Path, look: Look, roles: Callable[[Path], list[Path]], draft: Draft) -> list[StepRow]:
    """Inspect every role of a step; a step that is a checkpoint itself is one row."""
    return [_row(path, run, look, draft) for path in roles(step) or [step]]


def _row(path: Path, base: Path, look: Look, draft: Draft) -> StepRow:
    where = str(path.relative_to(base))
    step, role = layout.numbered(path), role_below(path, base)
    tell(where)
    try:
        with refusals_of(where):
            found = look(path)
    except Refused as error:
        draft.fault("refused", error.message, hint=error.hint)
        return StepRow(step, role, where, "refused", "refused: it would run code", "refused", error.message, 0, 0.0)
    except OSError as error:
        draft.fault("unreadable", f"{where}: {error.strerror}", hint="Is a training run at work here? Try again.")
        return StepRow(step, role, where, "unknown", "not readable", "unknown", str(error.strerror), 0, 0.0)
    reason = _reason(found)
    if found.faults:
        first = found.faults[0]
        draft.problems.append(Problem(code=first.code, message=reason, path=where, hint=first.hint))
    elif found.state in ("absent", "unknown"):
        draft.fault(found.state, reason, path=where)
    draft.problems += [replace(p, path=where) for p in found.problems if p.code == "migration-interrupted"]
    size, modified = (found.disk.unique, found.disk.modified) if found.disk else (0, 0.0)
    return StepRow(step, role, where, found.kind, found.title, found.state, reason, size, modified)


def role_below(path: Path, base: Path) -> str:
    """Return the role of a checkpoint in a run: the directory below the step, also where the checkpoint lies deeper."""
    parts = path.relative_to(base).parts
    below = next((parts[at + 1] for at, part in enumerate(parts[:-1]) if layout.step_of(part) is not None), "")
    return below or role_of(path) or ""


def _check_roles(rows: list[StepRow], draft: Draft) -> None:
    """A step that lacks a role which the steps before it have was not saved to its end."""
    by_step: dict[int, set[str]] = {}
    for row in rows:
        if row.step is not None and row.role and not row.kind.startswith("huggingface"):  # a model made of a role
            by_step.setdefault(row.step, set()).add(row.role)
    usual: set[str] = set()
    for step, roles in sorted(by_step.items()):
        for role in sorted(usual - roles):
            draft.fault("role-missing", f"step {step} has no {role}, which earlier steps have", path=f"{step}/{role}")
            draft.lacking.add(step)
        usual |= roles


def _reason(found: Inspection) -> str:
    """Say in one line why a role is not complete."""
    more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
    return found.faults[0].message + more if found.faults else "" if found.state == "complete" else found.title


def _latest_complete(rows: list[StepRow], draft: Draft) -> int | None:
    """Return the newest step of which no row is less than complete, and no role is missing."""
    broken = {row.step for row in rows if row.state != "complete"} | draft.lacking
    return max((row.step for row in rows if row.step is not None and row.step not in broken), default=None)


def _check_tracker(draft: Draft, name: str, said: str, names: list[Path], latest: int | None) -> None:
    rows = draft.run.rows if draft.run else ()
    other = next((f"{row.path} is complete" for row in rows if row.step is None and row.state == "complete"), "")
    usable = f"the latest complete step is {latest}" if latest is not None else other or "no step is complete"
    present = {layout.step_of(p.name) for p in names}
    if said == "release":
        if "release" not in {p.name for p in names}:
            draft.fault("tracker-ahead", f"{name} says release, which is not here; {usable}", path=name)
        return
    if not said.isascii() or not said.isdigit():
        holds = f"holds {said!r}, not a step" if said else "is empty"
        draft.fault("tracker-unreadable", f"{name} {holds}; {usable}", path=name)
    elif int(said) not in present:
        draft.fault("tracker-ahead", f"{name} says step {said}, which is not here; {usable}", path=name)
    elif any(row.step == int(said) and row.state == "not opened" for row in rows):
        draft.note("not-opened", f"{name} says step {said}, which is of a kind that is not opened", path=name)
    elif int(said) in draft.lacking or any(row.step == int(said) and row.state != "complete" for row in rows):
        hint = f"To resume from step {latest}: echo {latest} > {name}, or give the trainer that path." if latest else ""
        draft.fault("tracker-ahead", f"{name} says step {said}, which is not complete; {usable}", path=name, hint=hint)
    elif latest is not None and int(said) < latest:
        draft.note("tracker-behind", f"{name} says step {said}; {usable}", path=name)


def inspect_step(path: Path, look: Look, roles: list[Path]) -> Draft:
    """Describe a step that holds role directories."""
    names = [role.name for role in roles]
    if layout.step_of(path.name) is not None:
        kind, title = "step", "training step"
    elif any(name.startswith("pytorch_model_fsdp_") for name in names):
        kind, title = "accelerate", "accelerate checkpoint (SHARDED_STATE_DICT)"
    else:
        kind, title = "collection", "directory of checkpoints"
    draft = Draft(path=path, kind=kind, title=title, evidence=tuple(f"{name}/" for name in names))
    rows = [_row(role, path, look, draft) for role in roles]
    draft.run = Run(tuple(rows), None, None, None)
    try:
        add_dataloader(draft)
    except (CkpttoolError, OSError):
        draft.note("unreadable", "the dataloader state cannot be read")
    add_lora_meta(draft)
    return draft
