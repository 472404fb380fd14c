"""What ``diff`` found, for people: the verdict, a strip of heat over the layers, the tensors that differ most."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ckpttool.comparison.result import Cell, Comparison, Side, State, Strip, TensorDiff
from ckpttool.formats.folding import folded
from ckpttool.render.heat import (
    LEVELS,
    VALUES,
    Scale,
    by_distance,
    cell_of,
    columns,
    cosine,
    difference,
    elsewhere,
    flags,
    headline,
    labels,
    layered,
    log_scale,
    loose,
    percent,
    relative,
    scientific,
    ulps,
)
from ckpttool.render.terminal import (
    clean,
    duration,
    new_grid,
    new_table,
    plural,
    show_next,
    show_problems,
    shown_path,
    size,
    typed_path,
)

MOST_TENSORS = 12
MOST_MODULES, MOST_LOOSE = 40, 12
WIDEST_CELL = 3
LONG_NAME = 60
"""Columns that a name may want; longer ones are folded."""

_STATE_STYLES: dict[State, str] = {
    "equal": "green",
    "close": "yellow",
    "differs": "bold red",
    "only in A": "bold magenta",
    "only in B": "bold magenta",
}

# Of one lightness, so that both dark and light terminals show them, from blue to orange, which all eyes tell apart.
_HEAT = ("", *(f"color({code})" for code in (33, 69, 105, 141, 170, 205, 203, 202)))
_MISSING = "bold magenta"


def show_comparison(found: Comparison, out: Console, *, quiet: bool = False, page: str = "") -> None:
    """Print a comparison; ``page`` is the path of the page that was written of it, if one was."""
    word, what = headline(found)
    out.print(Text(word, "bold green" if found.same else "bold red") + Text(f": {what}"), soft_wrap=True)
    if quiet:
        return
    _show_facts(found, page, out)
    if not found.same:
        _show_heat(found, out)
        _show_furthest(found, out)
        _show_one_sided(found, out)
    if found.notes:
        show_problems(found.notes, out)
    if not found.same and not page:
        _show_next(found, out)


def _show_facts(found: Comparison, page: str, out: Console) -> None:
    grid = new_grid()
    for name, text in _facts(found, page):
        grid.add_row(name, text)
    out.print()
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))


def _facts(found: Comparison, page: str) -> Iterator[tuple[str, Text]]:
    for name, side in (("A", found.a), ("B", found.b)):
        yield name, Text(clean(shown_path(side.path)), "bold") + Text(f"  {_side(side)}")
    if found.plan:
        yield "compared", Text(clean(found.plan))
    counts = [(state, count) for state, count in found.counts.items() if count]
    parts = [Text(f"{count:,} ") + Text(_words(state, count), _STATE_STYLES[state]) for state, count in counts]
    yield "tensors", Text(", ").join(parts) if parts else Text("none")
    if found.excluded:
        yield "excluded", Text(f"{plural(found.excluded, 'tensor')} by --include and --exclude")
    if found.trusted:
        why = "both sides record the same checksum (--trust-crc)"
        yield "not read", Text(f"{plural(found.trusted, 'tensor')}: {why}")
    rate = f", {size(found.bytes_read / found.seconds)}/s" if found.seconds > 1 else ""
    yield "read", Text(f"{size(found.bytes_read)} in {duration(found.seconds)}{rate}")
    if page:
        yield "page", Text(clean(shown_path(page)))


def _words(state: State, count: int) -> str:
    return {"differs": "differ" if count != 1 else "differs", "close": "within tolerance"}.get(state, state)


def _side(side: Side) -> str:
    left = "".join(f"; not compared: {name} ({plural(n, 'tensor')})" for name, n in side.left_out.items())
    there = f" in {root}" if (root := elsewhere(side)) else ""
    return clean(f"{side.title}{there}, {plural(side.tensors, 'tensor')}{left}")


def _show_heat(found: Comparison, out: Console) -> None:
    """Print the heat map, with what its glyphs mean, and the modules that are in no layer."""
    rows, others = layered(found), loose(found)
    cells = [cell for strip in rows for cell in strip.layers.values()] + [strip.whole for strip in others]
    scale = log_scale(relative(cell) for cell in cells)
    glyphs = _glyphs(out)
    if rows:
        out.print()
        out.print(Text("Layers", "bold") + Text("  relative L2 difference of each module", "dim"))
        _show_strips(found, rows, scale, glyphs, out)
    if moved := [strip for strip in others if strip.whole.changed or strip.whole.missing]:
        out.print()
        out.print(Text("Outside of layers", "bold"))
        _show_loose(moved, scale, glyphs, out)
    if rows or moved:
        levels = range(1, LEVELS + 1) if any(cell.changed for cell in cells) else ()
        out.print(Padding(_legend(scale, levels, glyphs), (1, 0, 0, 2), expand=False))


def _glyphs(out: Console) -> str:
    """Return what stands for unchanged, for the levels from 1, and for what one side lacks."""
    return "·▁▂▃▄▅▆▇█×" if "utf" in out.encoding.lower() else ".12345678x"  # noqa: RUF001


def _cell(cell: Cell | None, scale: Scale, glyphs: str, width: int) -> Text:
    """Return a cell so many columns wide; a block fills them, what would read as another number does not."""
    if cell is None:
        return Text(" " * width)
    if cell.missing:
        return Text(glyphs[-1].ljust(width), _MISSING)
    level = scale.level(relative(cell)) if cell.changed else 0
    wide = level > 0 and not glyphs.isascii()
    return Text(glyphs[level] * width if wide else glyphs[level].ljust(width), _HEAT[level] or "dim")


def _show_strips(found: Comparison, rows: Sequence[Strip], scale: Scale, glyphs: str, out: Console) -> None:
    shown, more = _fewer(rows, MOST_MODULES)
    names = ["all", *labels(shown)]
    label = min(max(map(len, names)), max(out.width // 3, 12))
    room = max(out.width - label - 14, 8)
    across = columns(found, room)
    width = max(1, min(WIDEST_CELL, room // len(across)))
    out.print(Text(" " * (label + 4) + _ruler(across, width), "dim"), no_wrap=True)
    lines: list[tuple[Mapping[int, Cell] | Mapping[int | None, Cell], Cell | None]] = [(found.layers, None)]
    lines += [(strip.layers, strip.whole) for strip in shown]
    for name, (cells, whole) in zip(names, lines, strict=True):
        line = Text(f"  {_cut(name, label):<{label}}  ", "bold" if whole is None else "")
        line += Text().join(_cell(cell_of(cells, column), scale, glyphs, width) for column in across)
        out.print(line + Text(f"  {_told(whole)}", "dim"), no_wrap=True)
    if more:
        out.print(Text(f"  and {plural(more, 'module')} that moved less", "dim"))
    if len(across) < len(found.layers):
        out.print(Text(f"  a column is {len(across[0])} layers: the largest of them", "dim"))


def _told(whole: Cell | None) -> str:
    if whole is None or not whole.changed:
        return ""
    return "infinite" if whole.rel_l2 is None else scientific(whole.rel_l2)


def _ruler(across: Sequence[Sequence[int]], width: int) -> str:
    """Write the numbers of layers over their columns, as many as have room."""
    line = ""
    every = next(n for n in (1, 2, 4, 5, 10, 20, 50, 100, 500, 10**6) if n * width > len(str(across[-1][-1])))
    for i, column in enumerate(across):
        if i % every == 0 and i * width >= len(line):
            line = line.ljust(i * width) + str(column[0])
    return line


def _cut(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most // 3]}..{name[len(name) - (most - most // 3 - 2) :]}"


def _fewer(strips: Sequence[Strip], most: int) -> tuple[list[Strip], int]:
    """Return those that moved most, in the order of the model, and how many more there are."""

    def moved(i: int) -> tuple[bool, float]:
        return strips[i].whole.missing > 0, relative(strips[i].whole)

    kept = sorted(sorted(range(len(strips)), key=moved, reverse=True)[:most])
    return [strips[i] for i in kept], len(strips) - len(kept)


def _show_loose(strips: Sequence[Strip], scale: Scale, glyphs: str, out: Console) -> None:
    shown, more = _fewer(strips, MOST_LOOSE)
    grid = new_grid()
    grid.columns[0].style = ""
    for strip in shown:
        cell = strip.whole
        what = f"{scientific(cell.rel_l2) if cell.rel_l2 is not None else 'infinite'}" if cell.changed else ""
        missing = "missing, or of another shape" if cell.missing else ""
        grid.add_row(
            Text(_cut(clean(strip.module), out.width // 2)),
            _cell(cell, scale, glyphs, WIDEST_CELL) + Text("  " + (what or missing), "dim"),
        )
    out.print(Padding(grid, (0, 0, 0, 2), expand=False))
    if more:
        out.print(Text(f"  and {plural(more, 'module')} that moved less", "dim"))


def _legend(scale: Scale, levels: Iterable[int], glyphs: str) -> Text:
    text = Text(f"{glyphs[0]} unchanged")
    for level in levels:
        text += Text("  ") + Text(glyphs[level], _HEAT[level]) + Text(f" {scale.words(level)}")
    return text + Text("  ") + Text(glyphs[-1], _MISSING) + Text(" missing, or of another shape")


_Column = Callable[[TensorDiff], str]
_FURTHEST: dict[str, _Column] = {
    "name": lambda tensor: clean(tensor.name),
    "differs in": difference,
    "changed": lambda tensor: percent(tensor.metrics.changed, tensor.metrics.elements) if tensor.metrics else "-",
    "max abs": lambda tensor: scientific(tensor.metrics.max_abs) if tensor.metrics else "-",
    "mean abs": lambda tensor: scientific(tensor.metrics.mean_abs) if tensor.metrics else "-",
    "rel L2": lambda tensor: scientific(tensor.metrics.rel_l2) if tensor.metrics else "-",
    "cosine": lambda tensor: cosine(tensor.metrics.cosine) if tensor.metrics else "-",
    "ULP distance": lambda tensor: ulps(tensor.metrics),
}
_DROPPED = ("mean abs", "cosine", "ULP distance")
_RIGHT = ("changed", "max abs", "mean abs", "rel L2", "cosine")


def _show_furthest(found: Comparison, out: Console) -> None:
    differing = by_distance(found.of(["differs"]))
    if not differing:
        return
    cells = {name: [column(tensor) for tensor in differing[:MOST_TENSORS]] for name, column in _FURTHEST.items()}
    _drop_columns(cells, out.width)
    table = new_table(*cells, right=_RIGHT)
    for column in table.columns:
        column.no_wrap = column.header not in ("name", "differs in")
    for row in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, row))
    out.print()
    out.print(Text("Furthest apart", "bold"))
    out.print(Padding(table, (0, 0, 0, 2), expand=False))
    if (more := len(differing) - MOST_TENSORS) > 0:
        out.print(Text(f"  and {more:,} more (--json lists all)", "dim"))


def _drop_columns(cells: dict[str, list[str]], room: int) -> None:
    """Drop what says nothing, and then what is least missed, while names of some length do not fit."""
    if set(cells["differs in"]) == {VALUES}:
        del cells["differs in"]
    for name in _DROPPED:
        widths = [max(map(len, (title, *column))) + 2 for title, column in cells.items()]
        widths[0] = min(widths[0], LONG_NAME)
        if sum(widths) > room:
            del cells[name]


def _show_one_sided(found: Comparison, out: Console) -> None:
    """Print every tensor that only one side has, folded, and which of them may be one under two names."""
    sides: tuple[State, ...] = ("only in A", "only in B")
    for state in sides:
        names = [tensor.name for tensor in found.of([state])]
        if names:
            out.print()
            out.print(Text(f"O{state[1:]}", "bold"))
            for pattern, count in folded(names):
                told = f"  ({count:,})" if count > 1 else ""
                out.print(Text(f"  {clean(pattern)}{told}"), soft_wrap=True)
    if found.renamed:
        out.print()
        out.print(Text("Perhaps renamed", "bold") + Text("  same shape, dtype and content", "dim"))
        for pair in found.renamed:
            out.print(Text(f"  {clean(pair.a)}  ->  {clean(pair.b)}"), soft_wrap=True)


def _show_next(found: Comparison, out: Console) -> None:
    words = [*(typed_path(side.path) for side in (found.a, found.b)), *flags(found.options), "--html", "diff.html"]
    show_next([("see all of it in a browser", f"ckpttool diff {shlex.join(words)}")], out)
