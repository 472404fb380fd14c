"""Which kind of checkpoint a directory is: the first one that has evidence in it.

Each kind imports its reader when it is asked, so that looking at FSDP shards does not load Megatron's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ckpttool import layout
from ckpttool.inspection.access import HINT, closed, is_directory
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Inspection


def recognise(path: Path, *, in_run: bool = False) -> Draft | None:
    """Describe a directory, or return ``None`` when no kind has evidence in it. A run lies in no other run.

    A directory with steps is a run before anything else: a checkpoint that lies beside them must not hide them.
    """
    names = os.listdir(path)
    if not names:
        return Draft(path=path, kind="absent", title="empty directory", state="absent")
    of_a_run: tuple[Callable[[Path], Draft | None], ...] = () if in_run else (_run,)
    of_a_step: tuple[Callable[[Path], Draft | None], ...] = () if in_run else (_step,)
    run_first = of_a_run if any(layout.step_of(name) is not None for name in names) else ()
    for kind in (*run_first, _fsdp, _megatron_role, _archive, *of_a_run, _foreign, *of_a_step, _hf):
        draft = kind(path)
        if draft is not None:
            return draft
    return None


def is_checkpoint(path: Path) -> bool:
    """Tell by names alone whether a checkpoint lies directly in a directory."""
    from ckpttool.formats import dcp, foreign, fsdp, hf, shardfiles
    from ckpttool.inspection import megatron

    return not closed(path) and bool(
        fsdp.detect(path)
        or megatron.detect(path)
        or dcp.detect(path)
        or foreign.detect(path)
        or hf.detect(path)
        or (path / shardfiles.CONFIG_FILE).is_file()
    )


def roles(path: Path) -> list[Path]:
    """Return the role directories of a step, empty and closed ones too; none when it is a checkpoint itself."""
    if closed(path) or is_checkpoint(path):
        return []
    is_step = layout.step_of(path.name) is not None
    below = [p for p in sorted(path.iterdir()) if is_directory(p)]
    return [role for p in below for role in ([p] if _may_be_role(p, of_step=is_step) else _weights_of(p))]


def _weights_of(path: Path) -> list[Path]:
    """Return the checkpoints of a NeMo-RL role: ``policy/weights/iter_0000000`` of Megatron.

    Of DTensors, it is ``policy/weights`` (torch DCP) or ``policy/weights/model`` (safetensors).
    """
    weights = path / "weights"
    if closed(path) or not is_directory(weights) or closed(weights):
        return []
    for place in (weights, weights / "model"):
        if is_directory(place) and is_checkpoint(place):
            return [place]
    return [p for p in sorted(weights.iterdir()) if layout.step_of(p.name) is not None and is_checkpoint(p)]


def _may_be_role(path: Path, *, of_step: bool) -> bool:
    if path.name == layout.TRANSFER_QUEUE:
        return False
    return of_step if closed(path) else not os.listdir(path) or is_checkpoint(path)


def _look(path: Path) -> Inspection:
    if closed(path):
        draft = Draft(path=path, kind="unknown", title="not readable", state="unknown")
        draft.fault("unreadable", f"{path.name}/: permission denied", hint=HINT)
        return draft.finish()
    unknown = Draft(path=path, kind="unknown", title="not recognised", state="unknown")
    return (recognise(path, in_run=True) or unknown).finish()


def _fsdp(path: Path) -> Draft | None:
    from ckpttool.formats import fsdp, shardfiles

    evidence = fsdp.detect(path)
    remains = not evidence and (path / shardfiles.CONFIG_FILE).is_file()
    if not evidence and not remains:
        return None
    from ckpttool.inspection.fsdp import inspect_fsdp, inspect_fsdp_remains

    return inspect_fsdp(path, evidence) if evidence else inspect_fsdp_remains(path)


def _megatron_role(path: Path) -> Draft | None:
    from ckpttool.inspection import megatron

    evidence = megatron.detect(path)
    return megatron.inspect_role(path, evidence) if evidence else None


def _archive(path: Path) -> Draft | None:
    from ckpttool.formats import dcp
    from ckpttool.inspection.archive import inspect_archive

    if (path / dcp.BACKEND_FILE).is_file() and (other := _foreign(path)) is not None:
        return other
    evidence = dcp.detect(path)
    return inspect_archive(path, evidence) if evidence else None


def _foreign(path: Path) -> Draft | None:
    from ckpttool.formats import foreign

    model = path / "model"
    other = foreign.detect(path) or (foreign.detect(model) if model.is_dir() and not closed(model) else None)
    if other is None:
        return None
    draft = Draft(path=path, kind=other.kind, title=other.title, evidence=other.evidence, state="not opened")
    draft.note("not-opened", "recognised by name, not opened", hint=other.hint)
    return draft


def _hf(path: Path) -> Draft | None:
    from ckpttool.formats import hf
    from ckpttool.inspection.huggingface import inspect_hf

    evidence = hf.detect(path)
    return inspect_hf(path, evidence) if evidence else None


def _run(path: Path) -> Draft | None:
    from ckpttool.inspection import runs

    return runs.inspect_run(path, _look, roles, itself=is_checkpoint(path)) if is_run(path) else None


def is_run(path: Path) -> bool:
    """Tell whether a directory holds steps with something in them, or a tracker that says so."""
    from ckpttool.inspection import runs

    names = runs.steps(path)
    if not names and is_checkpoint(path):
        return False
    return runs.tracker(path) is not None or any(is_checkpoint(step) or roles(step) for step in names)


def _step(path: Path) -> Draft | None:
    from ckpttool.inspection import runs

    found = roles(path)
    if not found or (len(found) == 1 and layout.step_of(path.name) is None):
        return None
    return runs.inspect_step(path, _look, found)
