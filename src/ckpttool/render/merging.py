"""What ``merge-fsdp`` plans or did, for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ckpttool.merging.result import Copies, Merge, Options
from ckpttool.render.terminal import (
    clean,
    duration,
    new_grid,
    new_table,
    number,
    plural,
    show_next,
    show_problems,
    shown_path,
    size,
)

FEW = 4
"""Names that are shown in a line; the rest are counted, and listed with ``--verbose``."""


def show_merge(result: Merge, out: Console, *, quiet: bool = False, verbose: bool = False) -> None:
    """Print what was (or would be) written, from what, and everything that is not as it was."""
    out.print(_verdict(result), soft_wrap=True)
    if quiet:
        return
    out.print()
    facts = new_grid()
    for name, text in _facts(result, verbose=verbose):
        facts.add_row(name, Text(clean(text, lines=True)))
    out.print(Padding(facts, (0, 0, 0, 2), expand=False))
    out.print()
    out.print(Text("Files", "bold"))
    _show_files(result, out, verbose=verbose)
    if result.notes:
        show_problems(result.notes, out)
    _show_next(result, out)


def _verdict(result: Merge) -> Text:
    if result.done:
        rate = f", {size(result.bytes_written / result.seconds)}/s" if result.seconds > 1 else ""
        tail = f": {_summary(result)} in {duration(result.seconds)}{rate}"
        return Text("merged", "bold green") + Text(f" into {clean(shown_path(result.output))}", "bold") + Text(tail)
    head = Text("can be merged", "bold") + Text(f" into {clean(shown_path(result.output))}: {_summary(result)}")
    return head + Text("; dry run: nothing was written", "bold")


def _summary(result: Merge) -> str:
    files = sum(file.tensors > 0 for file in result.files)
    return (
        f"{number(result.parameters)} parameters, {plural(result.tensors, 'tensor')} in {plural(files, 'file')}, "
        f"{size(result.bytes_written)}"
    )


def _facts(result: Merge, *, verbose: bool) -> Iterator[tuple[str, str]]:
    yield "from", shown_path(result.path)
    yield "shards", result.title
    if result.model:
        yield "model", result.model
    yield "dtypes", ", ".join(f"{dtype} {size(count)}" for dtype, count in result.dtypes.items())
    yield from _changes(result, verbose=verbose)
    if result.side_files_from:
        yield "side files", f"from {shown_path(result.side_files_from)}"
    if result.left:
        yield "not copied", _names(result.left, verbose)
    if result.missing:
        yield "not found", ", ".join(result.missing)
    yield "read", size(result.bytes_read)
    if not result.done:
        yield "disk", f"{size(result.bytes_written)} needed, {size(result.bytes_free)} free"


def _changes(result: Merge, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield everything that is not as it was in training."""
    for cast in result.casts:
        lost = f", {plural(cast.overflowed, 'value')} became infinite" if cast.overflowed else ""
        yield "cast", f"{cast.dtype} to {cast.to}: {plural(cast.tensors, 'tensor')}, {size(cast.bytes)}{lost}"
    if result.kept:
        yield "not cast", f"{_names(result.kept, verbose)} (buffers keep their dtype)"
    yield "copies", "; ".join(_copies(result.copies))
    for drop in result.dropped:
        yield "left out", f"{drop.name}: {drop.reason} ({drop.rule})"
    for segment, count in result.renamed.items():
        yield "renamed", f"{segment}. taken out of {plural(count, 'name')}"
    for change in result.config_changes:
        yield "config", change


def _names(names: Sequence[str], verbose: bool) -> str:
    shown = names if verbose else names[:FEW]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _copies(copies: Copies) -> Iterator[str]:
    if not copies.replicated and not copies.replicas:
        yield "no tensor is stored more than once"
    if copies.replicated:
        what = plural(copies.replicated, "replicated tensor")
        yield f"{what} ({size(copies.replicated_bytes)}) compared byte by byte"
    if copies.replicas:
        how = f"{copies.by_crc:,} by recorded CRC-32, {copies.by_bytes:,} byte by byte"
        yield f"{plural(copies.replicas, 'replica')} of shards compared, {how}"
    elif not copies.checked:
        yield "replicas of shards not compared (--no-check-replicas)"
    if copies.mismatches:
        names = ", ".join(mismatch.name for mismatch in copies.mismatches[:FEW])
        more = len(copies.mismatches) - FEW
        yield f"{len(copies.mismatches):,} DIFFER, taken from the lowest rank: {names}" + (
            f" and {more:,} more" if more > 0 else ""
        )


def _show_files(result: Merge, out: Console, *, verbose: bool) -> None:
    table = new_table("file", "tensors", "bytes", right=("tensors", "bytes"))
    weights = [file for file in result.files if file.tensors]
    shown = weights if verbose or len(weights) <= 8 else [*weights[:4], *weights[-2:]]
    for file in shown:
        table.add_row(clean(file.name), f"{file.tensors:,}", size(file.bytes))
    if len(shown) < len(weights):
        table.add_row(f"and {len(weights) - len(shown):,} more", "", "")
    for file in (file for file in result.files if not file.tensors):
        table.add_row(clean(file.name), "", size(file.bytes))
    out.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_next(result: Merge, out: Console) -> None:
    target = shlex.quote(shown_path(result.output))
    if result.done:
        show_next([("look at it, and have it checked", f"ckpttool inspect {target} --strict")], out)
    else:
        source = shlex.quote(shown_path(result.path))
        flags = "".join(f" {word}" for word in _flags(result.options))
        show_next([("do it", f"ckpttool merge-fsdp {source} -o {target}{flags}")], out)


_SWITCHES = ("cast_buffers", "allow_overflow", "untie", "drop_lm_head", "force")
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_WORDS = ("world_size", "dtype", "on_mismatch", "hf_config", "max_shard_size", "threads")


def _flags(options: Options) -> Iterator[str]:
    """Yield the options as they were typed, but for the dry run and the choice of a step, which is made."""
    for folder in options.inputs:
        yield f"--input {shlex.quote(folder)}"
    for name in _WORDS:
        value = getattr(options, name)
        if value != getattr(Options(), name):
            yield f"--{name.replace('_', '-')} {shlex.quote(_SHORT.get(value, str(value)))}"
    yield from (f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(options, name))
    if not options.check_replicas:
        yield "--no-check-replicas"
