"""What every command that writes a Hugging Face directory shows of it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ckpttool.export.result import Export, Fused
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


def show_export(
    result: Export,
    done: str,
    facts: Iterable[tuple[str, str]],
    command: str,
    flags: Iterable[str],
    out: Console,
    *,
    quiet: bool,
    verbose: bool,
) -> None:
    """Print the verdict (``done`` is what was done), the facts, the files, the notes and what to type next."""
    out.print(_verdict(result, done), soft_wrap=True)
    if quiet:
        return
    out.print()
    grid = new_grid()
    for name, text in facts:
        grid.add_row(name, Text(clean(text, lines=True)))
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))
    out.print()
    out.print(Text("Files", "bold"))
    _show_files(result, out, verbose=verbose)
    if result.notes:
        show_problems(result.notes, out)
    if not result.exit_code:
        _show_next(result, command, flags, out)


def _verdict(result: Export, done: str) -> Text:
    source, target = shown_path(result.path), shown_path(result.output)
    if result.done:
        rate = f", {size(result.bytes_written / result.seconds)}/s" if result.seconds > 1 else ""
        tail = f": {_summary(result)} in {duration(result.seconds)}{rate}"
        return Text(done, "bold green") + Text(f" {clean(f'{source} into {target}')}", "bold") + Text(tail)
    what = f"{source} can be {done} into {target}"
    but = ", and it would not fit there" if result.exit_code else ""
    return Text(clean(what), "bold") + Text(f": {_summary(result)}; dry run: nothing was written{but}")


def _summary(result: Export) -> str:
    files = sum(file.tensors > 0 for file in result.files)
    return (
        f"{number(result.parameters)} parameters, {plural(result.tensors, 'tensor')} in {plural(files, 'file')}, "
        f"{size(result.bytes_written)}"
    )


def dtypes(result: Export) -> str:
    """Return the bytes of each dtype."""
    return ", ".join(f"{dtype} {size(count)}" for dtype, count in result.dtypes.items())


def changes(result: Export, why_kept: str, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield what is cast and what is not, although ``--dtype`` was given."""
    for cast in result.casts:
        listed = f": {', '.join(cast.names)}" if verbose else ""
        yield "cast", f"{cast.dtype} to {cast.to}: {plural(len(cast.names), 'tensor')}, {size(cast.bytes)}{listed}"
        if not result.done and cast.to == "float16":
            yield "", "values that do not fit are counted and refused while it is written, not here"
        for name, lost in cast.overflowed.items():
            yield "overflow", f"{name}: {plural(lost, 'value')} became infinite"
    if result.kept:
        yield "not cast", f"{names(result.kept, verbose)} ({why_kept})"


def named(result: Export, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield what was done to match a reference: one line a rule, and what does not match and was allowed."""
    found = result.names
    if found is None:
        return
    yield "like", f"{shown_path(found.like)}; {plural(found.as_they_are, 'name')} as they are"
    for rule in found.rules:
        stated = f" ({rule.stated})" if rule.stated else ""
        counts = plural(rule.tensors, "tensor") + (f" into {rule.targets:,}" if rule.targets != rule.tensors else "")
        yield rule.kind, f"{counts} by {rule.rule}{stated}"
        yield "", f"{names(rule.sources, verbose)} to {names(rule.names, verbose)}"
    for word, every in (("missing", found.missing), ("extra", found.extra)):
        if every:
            yield word, f"{names(every, verbose)}: allowed by --allow-{word}"


def adapters(every: Iterable[Fused], *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield what each adapter is, what it weighs and where that is said."""
    for adapter in every:
        kind = "DoRA" if adapter.dora else "LoRA"
        ranks = " and ".join(map(str, adapter.ranks))
        by = "square root of the rank" if adapter.rslora else "rank"
        others = f", other alphas for {plural(len(adapter.alphas), 'pattern')}" if adapter.alphas else ""
        yield "adapter", f"{adapter.name}: {kind} of rank {ranks or '?'} on {plural(adapter.layers, 'layer')}"
        yield "", f"alpha {adapter.alpha:g} over the {by}{others} ({shown_path(adapter.settings)})"
        if adapter.copies:
            yield "", f"trained whole: {names(adapter.copies, verbose)}"


def left_out(result: Export, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield what is not written, by reason."""
    by_reason: dict[str, list[str]] = {}
    for drop in result.dropped:
        by_reason.setdefault(drop.reason, []).append(drop.name)
    for reason, every in by_reason.items():
        yield "left out", f"{names(every, verbose)}: {reason}"


def beside(result: Export, *, verbose: bool) -> Iterator[tuple[str, str]]:
    """Yield what lies beside the weights, and what was read."""
    for change in result.config_changes:
        yield "config", change
    if result.side_files_from:
        yield "side files", f"from {shown_path(result.side_files_from)}"
    if result.left:
        yield "not copied", names(result.left, verbose)
    if result.missing:
        yield "not found", ", ".join(result.missing)
    yield "read", size(result.bytes_read)
    if result.bytes_free is not None:
        yield "disk", f"{size(result.bytes_written)} needed, {size(result.bytes_free)} free"


def names(every: Sequence[str], verbose: bool) -> str:
    """Join names, a few of them without ``verbose``."""
    shown = every if verbose else every[:FEW]
    more = len(every) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def _show_files(result: Export, out: Console, *, verbose: bool) -> None:
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


def _show_next(result: Export, command: str, flags: Iterable[str], out: Console) -> None:
    target = shlex.quote(typed_path(result.output))
    if result.done:
        show_next([("look at it, and have it checked", f"ckpttool inspect {target} --strict")], out)
    else:
        source = shlex.quote(typed_path(result.path))
        tail = "".join(f" {word}" for word in flags)
        show_next([("do it", f"ckpttool {command} {source} -o {target}{tail}")], out)
