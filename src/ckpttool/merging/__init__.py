"""``merge-fsdp``: the shards of all ranks to a Hugging Face directory. Planned, checked, then carried out."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, Problem, Table
from ckpttool.export import outputs, ties
from ckpttool.export.comparing import differing
from ckpttool.export.config import Edits
from ckpttool.export.running import Prepared, run
from ckpttool.export.writing import Ready, check_unchanged
from ckpttool.formats.findings import counted, ranges
from ckpttool.merging import planning
from ckpttool.merging.opening import Opened, checked_options, find_folders, open_save, stamps_of
from ckpttool.merging.replicas import compare_copies
from ckpttool.merging.result import Copies, Merge, Mismatch, Options
from ckpttool.plan import Plan, header_faults
from ckpttool.reading import Reader
from ckpttool.staging import check_outside, check_space

__all__ = ["Merge", "Options", "merge"]


def merge(path: Path, output: Path, options: Options, ready: Ready = lambda _total: lambda _bytes: None) -> Merge:
    """Merge the FSDP shards at or below a path into a new Hugging Face directory.

    ``ready`` is told how many bytes will be written and returns what is told of each part. With ``dry_run`` everything
    is checked and nothing is written. Raises :class:`BrokenCheckpoint` with all problems when the shards are not a
    whole checkpoint or hold what is refused, :class:`Unmapped` for adapters, :class:`UsageError` for a choice that is
    the user's, :class:`~ckpttool.errors.CannotWrite`, :class:`NotACheckpoint`.
    """
    started = time.monotonic()
    path, output = (Path(os.path.abspath(p)) for p in (path, output))  # noqa: PTH100 - resolve() would follow links
    options = checked_options(options)
    folders, notes = find_folders(path, output, options)

    def prepare() -> Prepared[Merge]:
        opened = open_save(folders, notes, options)
        check_outside(output, opened.around)
        checked = _check(output, opened, options)
        return Prepared(
            _result(output, opened, checked, options),
            checked.plan,
            opened.tensors,
            opened.source.root,
            lambda: check_unchanged(opened.source.root, opened.stamps, stamps_of(opened.folders)),
        )

    return run(output, folders, options, prepare, ready, started)


@dataclass(frozen=True, slots=True)
class _Checked:
    """A plan that holds, and what it took to know."""

    plan: Plan
    copies: Copies
    config_changes: tuple[str, ...]
    notes: tuple[Problem, ...]
    bytes_read: int


def _check(output: Path, opened: Opened, options: Options) -> _Checked:
    """Plan, and compare what has to be equal; everything that is refused is told at once."""
    read = 0

    def differs(a: str, b: str) -> str:
        nonlocal read
        read += opened.tensors[a].nbytes + opened.tensors[b].nbytes
        with Reader(opened.source.root) as reader:
            return differing(reader, opened.tensors[a], opened.tensors[b])

    check_space(output, planning.nbytes(opened.tensors, options))
    tie = ties.decide(opened.tensors, opened.config, differs, untie=options.untie, drop_head=options.drop_lm_head)
    draft = planning.draft(opened.tensors, tie, options)
    copies, compared = compare_copies(
        opened.source.root, opened.tensors.values(), opened.divided, replicas=options.check_replicas
    )
    parted = [_parted(mismatch) for mismatch in copies.mismatches if mismatch.name in opened.divided]
    taken = [mismatch for mismatch in copies.mismatches if mismatch.name not in opened.divided]
    if draft.problems or parted or (taken and options.on_mismatch == "error"):
        raise _refusal(opened, [*draft.problems, *parted], taken if options.on_mismatch == "error" else ())
    plan, changes = outputs.directory(
        draft.targets,
        draft.tie.dropped,
        opened.config,
        opened.side,
        Edits(untie=draft.tie.untie),
        most=options.max_shard_size,
        is_buffer=planning.buffers(opened.tensors),
    )
    if too_long := header_faults(plan.weights):
        raise _refusal(opened, too_long, ())
    notes = [Problem(code="tied", message=note, severity="note") for note in tie.notes]
    notes += [_taken(mismatch) for mismatch in copies.mismatches]
    if options.dtype is None:
        written = outputs.main_dtype(draft.targets, planning.buffers(opened.tensors))
        notes += outputs.dtype_note(written, opened.config, "the shards hold")
    read += compared + sum(opened.tensors[target.name].nbytes for target in draft.targets)
    return _Checked(plan, copies, changes, tuple(notes), read)


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


def _result(output: Path, opened: Opened, checked: _Checked, options: Options) -> Merge:
    source, plan, config = opened.source, checked.plan, opened.config
    return Merge(
        path=str(source.root),
        folders=tuple(map(str, opened.folders)),
        output=str(output),
        done=False,
        title=f"{counted(len(source.files.ranks('model', source.world_size)), 'FSDP shard')} of world size "
        f"{source.world_size}" + (f", mesh {source.mesh}" if source.mesh is not None else ""),
        model=", ".join((*config.model_types[:1], *config.architectures[:1])) if config is not None else "",
        tensors=len(plan.targets),
        parameters=outputs.parameters(plan.targets, planning.buffers(opened.tensors)),
        dtypes=outputs.dtypes(plan),
        files=outputs.output_files(plan),
        copies=checked.copies,
        casts=outputs.casts(plan.targets, opened.tensors, {}),
        kept=outputs.kept(plan.targets, options.dtype),
        dropped=plan.dropped,
        renamed=opened.unwrapped,
        config_changes=checked.config_changes,
        side_files_from=str(opened.side_folder) if opened.side_folder is not None else None,
        left=opened.side.left,
        missing=opened.side.missing,
        notes=(*opened.notes, *checked.notes),
        bytes_read=checked.bytes_read,
        bytes_written=plan.nbytes,
        options=options,
    )
