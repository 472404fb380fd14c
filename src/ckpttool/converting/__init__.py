"""``to-hf``: a Megatron distributed checkpoint to a Hugging Face directory. Planned, checked, then carried out."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.adapters.settings import check_alpha
from ckpttool.converting import planning
from ckpttool.converting.choosing import find_archive
from ckpttool.converting.opening import Opened, open_archive
from ckpttool.converting.result import Conversion, Options
from ckpttool.errors import BrokenCheckpoint, Problem, UsageError
from ckpttool.export import doubtful, outputs
from ckpttool.export.precision import is_kept
from ckpttool.export.running import Prepared, check_names, run, with_torch_dtype
from ckpttool.export.writing import Ready, check_unchanged
from ckpttool.inspection.search import model_directory
from ckpttool.naming.reference import Reference, as_mapped, read_reference
from ckpttool.plan import Plan, Target, header_faults
from ckpttool.staging import check_outside, space_problems

__all__ = ["Conversion", "Options", "convert"]


def convert(
    path: Path, output: Path, options: Options, ready: Ready = lambda _total: lambda _bytes: None
) -> Conversion:
    """Convert the Megatron archive at or below a path into a new Hugging Face directory.

    ``ready`` is told how many bytes will be written and returns what is told of each part. With ``dry_run`` everything
    is checked but the bytes of tensors, and nothing is written. Raises :class:`BrokenCheckpoint` with all problems when
    the archive is not whole or holds what is refused, :class:`Unmapped` with everything that does not fit the weight
    map, :class:`UsageError` for a choice that is the user's, :class:`~ckpttool.errors.CannotWrite`,
    :class:`NotACheckpoint`.
    """
    started = time.monotonic()
    path, output = (Path(os.path.abspath(p)) for p in (path, output))  # noqa: PTH100 - resolve() would follow links
    options = _checked(options)
    archive, notes = find_archive(path, output, options)

    def prepare() -> Prepared[Conversion]:
        like = _reference(options)
        opened = open_archive(archive, notes, options)
        check_outside(output, [opened.side_folder, *([Path(like.path)] if like is not None else [])])
        checked = _check(output, opened, like, options)
        return Prepared(
            _result(output, opened, checked, options),
            checked.plan,
            opened.sources,
            archive,
            lambda: check_unchanged(archive, opened.stamps),
        )

    return run(output, [archive], options, prepare, ready, started)


def _checked(options: Options) -> Options:
    """Return options with torch's name of the dtype; raises :class:`UsageError` for a contradiction in them."""
    if options.allow_overflow and options.dtype is None and options.like is None:
        raise UsageError("--allow-overflow without --dtype or --like: nothing is cast")
    if options.lora_alpha is not None and options.lora is None:
        raise UsageError("--lora-alpha without --lora", hint="Say that adapters are to be fused: --lora fuse.")
    check_alpha(options.lora_alpha)
    check_names(options)
    return with_torch_dtype(options)


def _reference(options: Options) -> Reference | None:
    given = options.like
    return None if given is None else as_mapped(read_reference(model_directory("--like", given), given))


@dataclass(frozen=True, slots=True)
class _Checked:
    """A plan that holds, and what it took to know."""

    draft: planning.Draft
    plan: Plan
    config_changes: tuple[str, ...]
    notes: tuple[Problem, ...]


def _check(output: Path, opened: Opened, like: Reference | None, options: Options) -> _Checked:
    draft = planning.draft(opened, like, options)
    if draft.problems:
        raise _refusal(opened, draft.problems)
    space = space_problems(output, sum(target.nbytes for target in draft.targets), dry_run=options.dry_run)
    plan, changes = outputs.directory(
        draft.targets,
        draft.dropped,
        opened.config,
        opened.side,
        draft.edits,
        most=options.max_shard_size,
        is_buffer=_is_buffer,
    )
    plan = replace(plan, fusions=draft.fusions.by_source)
    if too_long := header_faults(plan.weights):
        raise _refusal(opened, tuple(too_long))
    notes = [*space, *draft.notes, *doubtful.notes(plan, draft.targets, _is_buffer)]
    if options.dtype is None and like is None:
        written = outputs.main_dtype(draft.targets, _is_buffer)
        notes += outputs.dtype_note(written, opened.config, "the checkpoint holds")
    return _Checked(draft, plan, changes, tuple(notes))


def _refusal(opened: Opened, problems: tuple[Problem, ...]) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{opened.source.root}: cannot be converted as it is; nothing was written",
        code=problems[0].code,
        problems=problems,
    )


def _is_buffer(target: Target) -> bool:
    """Tell a buffer by its name: an archive does not say which tensors are parameters."""
    return is_kept(target.name)


def _heads(draft: planning.Draft) -> str:
    """Say how the rows of attention were shared out, which shapes alone do not show."""
    if not draft.family.groups_rows:
        return ""
    heads, groups, width = (draft.model.size(name) for name in ("heads", "groups", "head_dim"))
    how = "the run says the same" if draft.confirmed else "shapes cannot show it"
    return f"{heads} heads, {groups} for keys and values, of {width} (config.json; {how})"


def _result(output: Path, opened: Opened, checked: _Checked, options: Options) -> Conversion:
    plan, draft, source = checked.plan, checked.draft, opened.source
    written = plan.targets
    names = dict.fromkeys((*draft.config.model_types[:1], *draft.config.architectures[:1]))
    by = f" by {source.writer}" if source.writer else ""
    return Conversion(
        path=str(source.root),
        output=str(output),
        done=False,
        title=f"Megatron archive of {len(opened.tensors):,} keys, written by {source.ranks:,} ranks{by}",
        model=", ".join(names),
        family=draft.family.name,
        proven=draft.family.proven,
        layers=draft.model.size("layers"),
        experts=draft.model.sizes.get("experts", 0),
        mtp=draft.model.size("mtp"),
        value_head=draft.value_head,
        heads=_heads(draft),
        row_order=draft.orders,
        tensors=len(written),
        parameters=outputs.parameters([t for t in written if not t.twice], _is_buffer),
        dtypes=outputs.dtypes(plan),
        files=outputs.output_files(plan),
        casts=outputs.casts(written, opened.tensors, {}),
        kept=outputs.kept(written, options.dtype),
        dropped=plan.dropped,
        skipped=opened.skipped,
        config_changes=checked.config_changes,
        side_files_from=str(opened.side_folder),
        left=opened.side.left,
        missing=opened.side.missing,
        notes=(*opened.notes, *checked.notes),
        bytes_read=sum(opened.sources[name].nbytes for name in plan.sources),
        bytes_written=plan.nbytes,
        names=draft.names,
        lora=options.lora,
        adapters=draft.fusions.told,
        options=options,
    )
