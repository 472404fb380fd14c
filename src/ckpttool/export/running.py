"""The course of every command that writes a Hugging Face directory: look at the place, prepare a plan, write it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

from ckpttool.errors import NotACheckpoint, UsageError
from ckpttool.export import outputs
from ckpttool.export.heads import check_name
from ckpttool.export.precision import DTYPES
from ckpttool.export.result import Export, ExportOptions
from ckpttool.export.writing import Ready, give_back, is_replaceable, names_of, write
from ckpttool.plan import Plan
from ckpttool.staging import check_outside, check_target, clear_stale, free_space
from ckpttool.tensors import TensorInfo
from ckpttool.unpickle import collector_paused

Told = TypeVar("Told", bound=Export)


Given = TypeVar("Given", bound=ExportOptions)


def check_names(options: ExportOptions) -> None:
    """Raise :class:`UsageError` for names that are allowed to be missing or extra without a reference to say so."""
    for option, names in (("--allow-missing", options.allow_missing), ("--allow-extra", options.allow_extra)):
        if names and options.like is None:
            raise UsageError(f"{option} without --like: there is nothing to compare with")


def with_torch_dtype(options: Given) -> Given:
    """Return options with torch's name of the dtype; raises :class:`UsageError` for what no such command takes."""
    check_name(options.architecture)
    if options.untie and options.drop_lm_head:
        raise UsageError("--untie and --drop-lm-head ask for opposite things")
    if options.dtype is None:
        return options
    if options.dtype not in DTYPES:
        raise UsageError(f"dtype {options.dtype}: not one of {', '.join(DTYPES)}")
    return replace(options, dtype=DTYPES[options.dtype])


@dataclass(frozen=True, slots=True)
class Prepared(Generic[Told]):
    """A plan that holds: what is told of it, its sources below ``root``, and what sees whether they have changed."""

    result: Told
    plan: Plan
    sources: Mapping[str, TensorInfo]
    root: Path
    check: Callable[[], None]


def run(
    output: Path,
    around: Iterable[Path],
    options: ExportOptions,
    prepare: Callable[[], Prepared[Told]],
    ready: Ready,
    started: float,
) -> Told:
    """Write what ``prepare`` plans into a directory outside of those ``around`` it; in a dry run, only plan it.

    ``started`` is when the command began, by ``time.monotonic``. Raises what ``prepare`` raises,
    :class:`~ckpttool.errors.CannotWrite`, :class:`NotACheckpoint` for what may not be read.
    """
    check_outside(output, around)
    if not options.dry_run:
        clear_stale(output)
    known = is_replaceable(output)
    if known or not options.force:
        check_target(output, force=options.force, replaceable=known)
    try:
        with collector_paused():
            ours = prepare()
    except PermissionError as error:
        raise NotACheckpoint(f"{error.filename}: permission denied", code="unreadable") from error
    check_target(output, force=options.force, replaceable=known or is_replaceable(output, names_of(ours.plan)))
    give_back()
    if options.dry_run:
        return replace(ours.result, bytes_free=free_space(output), seconds=time.monotonic() - started)
    overflows = write(output, ours.plan, ours.sources, ours.root, options, ready(ours.plan.nbytes), ours.check)
    casts = outputs.casts(ours.plan.targets, ours.sources, overflows)
    return replace(ours.result, done=True, casts=casts, seconds=time.monotonic() - started)
