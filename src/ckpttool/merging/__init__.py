"""``merge-fsdp``: the shards of all ranks to a Hugging Face directory. Planned, checked, then carried out."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpttool.errors import BrokenCheckpoint, Problem, Table, Unmapped, UsageError
from ckpttool.export import doubtful, heads, outputs, ties
from ckpttool.export.comparing import differing
from ckpttool.export.config import QUANTIZATION, unquantised
from ckpttool.export.running import Prepared, run
from ckpttool.export.side_files import SideFiles
from ckpttool.export.ties import Tie
from ckpttool.export.writing import Ready, check_unchanged
from ckpttool.formats.findings import counted, ranges
from ckpttool.formats.hf import ADAPTER_CONFIG
from ckpttool.inspection.search import model_directory
from ckpttool.merging import planning
from ckpttool.merging.adapting import Weights, adapt, is_adapted, plain_weights
from ckpttool.merging.opening import Opened, checked_options, find_folders, open_save
from ckpttool.merging.replicas import compare_copies
from ckpttool.merging.result import Copies, Merge, Mismatch, Options
from ckpttool.merging.serving import served_note, sizes_of
from ckpttool.naming.reference import Reference, read_reference
from ckpttool.plan import Plan, header_faults
from ckpttool.reading import Reader
from ckpttool.staging import check_outside, check_space

__all__ = ["Merge", "Options", "merge"]


def merge(path: Path, output: Path, options: Options, ready: Ready = lambda _total: lambda _bytes: None) -> Merge:
    """Merge the FSDP shards at or below a path into a new Hugging Face directory.

    ``ready`` is told how many bytes will be written and returns what is told of each part. With ``dry_run`` everything
    is checked and nothing is written. Raises :class:`BrokenCheckpoint` with all problems when the shards are not a
    whole checkpoint or hold what is refused, :class:`Unmapped` for what does not match a reference, adapters that are
    no LoRA and heads that no class holds, :class:`UsageError` for a choice that is the user's,
    :class:`~ckpttool.errors.CannotWrite`, :class:`NotACheckpoint`.
    """
    started = time.monotonic()
    path, output = (Path(os.path.abspath(p)) for p in (path, output))  # noqa: PTH100 - resolve() would follow links
    options = checked_options(options)
    folders, notes = find_folders(path, output, options)

    def prepare() -> Prepared[Merge]:
        like = _reference(options)
        opened = open_save(folders, notes, options)
        check_outside(output, [*opened.around, *([Path(like.path)] if like is not None else [])])
        weights = _weights(opened, options)
        opened, weights = _with_head(opened, weights, options)
        checked = _check(output, opened, weights, like, options)
        return Prepared(
            _result(output, opened, weights, checked, options),
            checked.plan,
            weights.sources,
            opened.source.root,
            lambda: check_unchanged(opened.source.root, opened.stamps),
        )

    return run(output, folders, options, prepare, ready, started)


def _reference(options: Options) -> Reference | None:
    given = options.like
    return None if given is None else read_reference(model_directory("--like", given), given)


def _weights(opened: Opened, options: Options) -> Weights:
    """Say what the save is to become; raises :class:`UsageError` where that is the user's choice."""
    if is_adapted(opened.tensors, opened.config):
        base = opened.base.tensors if opened.base is not None else None
        return adapt(opened.source.root, opened.folders, opened.tensors, base, opened.config, options)
    if options.lora is not None:
        raise UsageError(f"--lora {options.lora}: {opened.source.root} has no adapters")
    return plain_weights(opened.tensors)


def _with_head(opened: Opened, weights: Weights, options: Options) -> tuple[Opened, Weights]:
    """Return both with the class that holds the head: in the config, and in what is told."""
    if not weights.model:
        if options.architecture is not None:
            raise UsageError(f"--architecture {options.architecture}: an adapter has no config.json to name it")
        return opened, weights
    shapes = {name: tensor.shape for name, tensor in weights.model.items()}
    config, edits, notes = heads.settle(str(opened.source.root), shapes, opened.config, options.architecture)
    return replace(opened, config=config, edits=edits), replace(weights, notes=(*weights.notes, *notes))


@dataclass(frozen=True, slots=True)
class _Checked:
    """A plan that holds, and what it took to know."""

    plan: Plan
    draft: planning.Draft
    copies: Copies
    config_changes: tuple[str, ...]
    notes: tuple[Problem, ...]
    bytes_read: int


def _check(output: Path, opened: Opened, weights: Weights, like: Reference | None, options: Options) -> _Checked:
    """Plan, and compare what has to be equal; everything that is refused is told at once."""
    read = 0

    def differs(a: str, b: str) -> str:
        nonlocal read
        if fused := [name for name in (a, b) if name in weights.fusions]:
            return f"an adapter is fused into {' and '.join(fused)}"
        read += weights.model[a].nbytes + weights.model[b].nbytes
        with Reader(opened.source.root) as reader:
            return differing(reader, weights.model[a], weights.model[b])

    check_space(output, planning.nbytes(weights, options))
    tie = Tie()
    if weights.model:
        tie = ties.decide(
            weights.model,
            opened.config,
            differs,
            untie=options.untie,
            drop_head=options.drop_lm_head,
            changed={*weights.fusions, *weights.copies},
        )
    draft = planning.draft(weights, tie, like, sizes_of(opened.config), options)
    if draft.unlike.problems and not draft.problems:
        raise _unlike(opened, draft)
    copies, compared = compare_copies(
        opened.source.root, opened.tensors.values(), opened.divided, replicas=options.check_replicas
    )
    parted = [_parted(mismatch) for mismatch in copies.mismatches if mismatch.name in opened.divided]
    taken = [mismatch for mismatch in copies.mismatches if mismatch.name not in opened.divided]
    if draft.problems or parted or (taken and options.on_mismatch == "error"):
        raise _refusal(opened, [*draft.problems, *parted], taken if options.on_mismatch == "error" else ())
    plan, changes = _plan(opened, weights, draft, options)
    if too_long := header_faults(plan.weights):
        raise _refusal(opened, too_long, ())
    read += compared + sum(weights.sources[name].nbytes for name in plan.sources)
    notes = [*weights.notes, *_notes(opened, weights, draft, copies.mismatches, options)]
    notes += doubtful.notes(plan, draft.targets, planning.buffers(weights.sources))
    return _Checked(plan, draft, copies, changes, tuple(notes), read)


def _plan(opened: Opened, weights: Weights, draft: planning.Draft, options: Options) -> tuple[Plan, tuple[str, ...]]:
    """Distribute the targets over files; returns what is changed in ``config.json``, too."""
    contents = {f"{file.folder}{ADAPTER_CONFIG}": file.config for file in weights.files}
    if not weights.model and weights.files:
        return Plan(draft.adapters, (), contents, draft.dropped), ()
    plain = unquantised(draft.targets)
    removed, fields = {**opened.edits.removed, **plain}, {**opened.edits.fields, **({} if plain else _of_base(opened))}
    plan, changes = outputs.directory(
        draft.targets,
        draft.dropped,
        opened.config,
        opened.side,
        replace(opened.edits, untie=draft.tie.untie, fields=fields, removed=removed),
        most=options.max_shard_size,
        is_buffer=planning.buffers(weights.sources),
    )
    plan = replace(
        plan,
        weights=(*plan.weights, *draft.adapters),
        contents={**plan.contents, **contents},
        fusions=weights.fusions,
    )
    return plan, changes


def _of_base(opened: Opened) -> Mapping[str, tuple[Any, str]]:
    """Return what only the base model's config says of its weights: how they are quantised."""
    config = opened.base.config if opened.base is not None else None
    said = {name: config.values[name] for name in QUANTIZATION if name in config.values} if config is not None else {}
    return {name: (value, "so are the weights of the base model") for name, value in said.items()}


def _notes(
    opened: Opened, weights: Weights, draft: planning.Draft, mismatches: Sequence[Mismatch], options: Options
) -> Iterator[Problem]:
    for note in draft.tie.notes:
        yield Problem(code="tied", message=note, severity="note")
    yield from map(_taken, mismatches)
    if options.dtype is None and options.like is None and draft.targets:
        written = outputs.main_dtype(draft.targets, planning.buffers(weights.sources))
        what = "the base model holds" if weights.base else "the shards hold"
        yield from outputs.dtype_note(written, opened.config, what)
    if options.like is None and draft.targets:
        yield from served_note(weights.model, opened.config)


def _unlike(opened: Opened, draft: planning.Draft) -> Unmapped:
    """Return the error for everything that does not match the reference."""
    theirs, ours = draft.unlike.of, next(iter(opened.config.model_types if opened.config is not None else ()), None)
    why = [*draft.unlike.sizes]
    if theirs is not None and ours is not None and theirs != ours:
        why.insert(0, f"the reference is of type {theirs}, the checkpoint of type {ours}")
    error = Unmapped(
        f"{opened.source.root}: is not as the reference is{': ' if why else ''}{'; '.join(why)}; nothing was written",
        hint="What may be missing or extra all the same is allowed by name: --allow-missing NAME, --allow-extra NAME.",
        code=draft.unlike.problems[0].code,
        problems=draft.unlike.problems,
    )
    error.data = draft.unlike.data
    return error


def _refusal(opened: Opened, problems: Sequence[Problem], mismatches: Sequence[Mismatch]) -> BrokenCheckpoint:
    """Return the error for everything in the tensors themselves that is refused."""
    what = "cannot be merged as it is"
    if mismatches:
        are = "is" if len(mismatches) == 1 else "are"
        what = f"{counted(len(mismatches), 'tensor')} stored by several ranks {are} not the same on all of them"
    error = BrokenCheckpoint(
        f"{opened.source.root}: {what}; nothing was written",
        hint="To take the copy of the lowest rank where they differ: --on-mismatch rank0." if mismatches else "",
        code="copies-differ" if mismatches else problems[0].code,
        problems=problems,
    )
    if mismatches:
        error.table, error.data = _table(mismatches), {"mismatches": [asdict(m) for m in mismatches]}
    return error


def _parted(mismatch: Mismatch) -> Problem:
    """Return the problem of a tensor whose ranks lie on several meshes and hold different values."""
    return Problem(
        code="not-replicas",
        message=f"{mismatch.name}: on rank {ranges(mismatch.ranks)} it lies on another mesh than on rank "
        f"{mismatch.reference} and holds other values: parts of several tensors under one name",
        hint="Experts or stages of a pipeline? Which part is which, the shards do not say.",
    )


def _taken(mismatch: Mismatch) -> Problem:
    """Return the note on a tensor whose copies differ and of which the first one is written."""
    nans = f", {mismatch.nans:,} with a NaN" if mismatch.nans else ""
    return Problem(
        code="copies-differ",
        severity="note",
        message=f"{mismatch.name}: taken from rank {mismatch.reference}; on rank {ranges(mismatch.ranks)} up to "
        f"{mismatch.changed:,} of {mismatch.elements:,} elements differ, by up to {mismatch.largest:.3g}{nans}",
    )


def _table(mismatches: Sequence[Mismatch]) -> Table:
    rows = [
        (
            mismatch.name,
            ranges(mismatch.ranks),
            str(mismatch.reference),
            f"{mismatch.changed:,} of {mismatch.elements:,}",
            f"{mismatch.largest:.3g}",
            f"{mismatch.nans:,}",
        )
        for mismatch in mismatches
    ]
    return Table(("tensor", "on rank", "not as on", "elements that differ", "by up to", "NaN"), tuple(rows))


def _result(output: Path, opened: Opened, weights: Weights, checked: _Checked, options: Options) -> Merge:
    source, plan, config, draft = opened.source, checked.plan, opened.config, checked.draft
    is_buffer = planning.buffers(weights.sources)
    side = opened.side if draft.targets else SideFiles()
    return Merge(
        path=str(source.root),
        folders=tuple(map(str, opened.folders)),
        output=str(output),
        done=False,
        title=f"{counted(len(source.files.ranks('model', source.world_size)), 'FSDP shard')} of world size "
        f"{source.world_size}" + (f", mesh {source.mesh}" if source.mesh is not None else ""),
        model=", ".join((*config.model_types[:1], *config.architectures[:1])) if config is not None else "",
        tensors=len(plan.targets),
        parameters=outputs.parameters(draft.targets or plan.targets, is_buffer),
        dtypes=outputs.dtypes(plan),
        files=outputs.output_files(plan),
        copies=checked.copies,
        casts=outputs.casts(plan.targets, weights.sources, {}),
        kept=outputs.kept(plan.targets, options.dtype),
        dropped=plan.dropped,
        renamed=opened.unwrapped,
        config_changes=checked.config_changes,
        names=draft.names,
        side_files_from=str(opened.side_folder) if opened.side_folder is not None and draft.targets else None,
        left=side.left,
        missing=side.missing,
        notes=(*opened.notes, *checked.notes),
        bytes_read=checked.bytes_read,
        bytes_written=plan.nbytes,
        lora=options.lora,
        adapters=weights.adapters,
        base=options.base,
        options=options,
    )
