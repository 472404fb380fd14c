"""What ``merge-fsdp`` plans or did, for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ckpttool.merging.result import Copies, Merge
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
    typed_path,
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
    source, target = shown_path(result.path), shown_path(result.output)
    if result.done:
        rate = f", {size(result.bytes_written / result.seconds)}/s" if result.seconds > 1 else ""
        tail = f": {_summary(result)} in {duration(result.seconds)}{rate}"
        return Text("merged", "bold green") + Text(f" {clean(f'{source} into {target}')}", "bold") + Text(tail)
    what = f"{source} can be merged into {target}"
    return Text(clean(what), "bold") + Text(f": {_summary(result)}; dry run: nothing was written")


def _summary(result: Merge) -> str:
    files = sum(file.tensors > 0 for file in result.files)
    return (
        f"{number(result.parameters)} parameters, {plural(result.tensors, 'tensor')} in {plural(files, 'file')}, "
        f"{size(result.bytes_written)}"
    )


def _facts(result: Merge, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if len(result.folders) > 1:
        yield "united with", ", ".join(map(shown_path, result.folders[1:]))
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
    if result.bytes_free is not None:
        yield "disk", f"{size(result.bytes_written)} needed, {size(result.bytes_free)} free"


def _changes(result: Merge, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield everything that is not as it was in training."""
    for cast in result.casts:
        names = f": {', '.join(cast.names)}" if verbose else ""
        yield "cast", f"{cast.dtype} to {cast.to}: {plural(len(cast.names), 'tensor')}, {size(cast.bytes)}{names}"
        if not result.done and cast.to == "float16":
            yield "", "values that do not fit are counted and refused while it is written, not here"
        for name, lost in cast.overflowed.items():
            yield "overflow", f"{name}: {plural(lost, 'value')} became infinite"
    if result.kept:
        yield "not cast", f"{_names(result.kept, verbose)} (buffers keep their dtype)"
    yield "copies", "; ".join(_copies(result.copies))
    for drop in result.dropped:
        yield "left out", f"{drop.name}: {drop.reason}"
    for segment, count in result.renamed.items():
        yield "renamed", f"{segment}. taken out of {plural(count, 'name')}"
    for change in result.config_changes:
        yield "config", change


def _names(names: Sequence[str], verbose: bool) -> str:
    shown = names if verbose else names[:FEW]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _copies(copies: Copies) -> Iterator[str]:
    if not copies.replicated and not copies.replicas and copies.checked:
        yield "no tensor is stored more than once"
    if copies.replicated:
        what = plural(copies.replicated, "replicated tensor")
        yield f"{what} ({size(copies.replicated_bytes)}) compared byte by byte"
    if copies.replicas:
        how = f"{copies.by_crc:,} by recorded CRC-32, {copies.by_bytes:,} byte by byte"
        yield f"{plural(copies.replicas, 'replica')} of shards compared, {how}"
    elif not copies.checked:
        yield "replicas of shards not compared (--no-check-replicas)"


def _show_files(result: Merge, out: Console, *, verbose: bool) -> None:
    table = new_table("file", "tensors", "bytes", right=("tensors", "bytes"))
    weights = [file for file in result.files if file.tensors]
    few = verbose or len(weights) <= 8
    for file in weights if few else weights[:4]:
        table.add_row(clean(file.name), f"{file.tensors:,}", size(file.bytes))
    if not few:
        between = weights[4:-1]
        tensors, count = sum(file.tensors for file in between), sum(file.bytes for file in between)
        table.add_row(f"... {len(between):,} more", f"{tensors:,}", size(count))
        table.add_row(clean(weights[-1].name), f"{weights[-1].tensors:,}", size(weights[-1].bytes))
    for file in (file for file in result.files if not file.tensors):
        table.add_row(clean(file.name), "", size(file.bytes))
    out.print(Padding(table, (0, 0, 0, 2), expand=False))


def _show_next(result: Merge, out: Console) -> None:
    target = shlex.quote(typed_path(result.output))
    if result.done:
        show_next([("look at it, and have it checked", f"ckpttool inspect {target} --strict")], out)
    else:
        source = shlex.quote(typed_path(result.path))
        flags = "".join(f" {word}" for word in replace(result.options, inputs=result.folders[1:]).flags())
        show_next([("do it", f"ckpttool merge-fsdp {source} -o {target}{flags}")], out)
