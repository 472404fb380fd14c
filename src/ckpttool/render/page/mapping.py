"""The heat map of the page: a row a module, a column a layer; and what is in no layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ckpttool.comparison.result import Cell, Comparison, Strip
from ckpttool.render.heat import cell_of, columns, labels, layered, loose, relative
from ckpttool.render.page.writing import MEASURES, Scales, shown, spanned, told
from ckpttool.render.terminal import plural

MOST_COLUMNS, MOST_ROWS = 128, 150
FEW = 16
"""Columns that need not fill the page."""

Cells = Mapping[int, Cell] | Mapping[int | None, Cell]


def maps(found: Comparison, scales: Scales) -> str:
    """Return the section with the map of the layers, and the list of what is in none."""
    rows, others = layered(found), loose(found)
    inside = _inside(found, rows, scales) if rows else ""
    outside = _outside(others, scales) if others else ""
    return f"<section><h2>Modules</h2>\n{inside}{outside}</section>\n"


def _inside(found: Comparison, rows: Sequence[Strip], scales: Scales) -> str:
    across = columns(found, MOST_COLUMNS)
    shown_rows, more = _fewer(rows)
    head = "".join(f'<th scope="col">{layers[0]}</th>' for layers in across)
    lines = [_line("all modules", "all modules", found.layers, across, scales)]
    for name, strip in zip(labels(shown_rows), shown_rows, strict=True):
        lines.append(_line(name, strip.module, strip.layers, across, scales))
    wide, few = len(across[0]), " few" * (len(across) <= FEW)
    caption = "Modules by layer" + (f"; a column is {wide} layers, the largest of them" if wide > 1 else "")
    return (
        f'<div class="scroll" tabindex="0"><table class="heat{few}" id="heat"><caption>{caption}</caption>\n'
        f'<thead><tr><th scope="col">module</th>{head}</tr></thead>\n<tbody>{"".join(lines)}</tbody></table></div>\n'
        f"{more}"
    )


def _fewer(rows: Sequence[Strip]) -> tuple[list[Strip], str]:
    """Return the rows that moved most, in the order of the model, and what is said of the others."""
    kept = sorted(sorted(range(len(rows)), key=lambda i: relative(rows[i].whole), reverse=True)[:MOST_ROWS])
    left = len(rows) - len(kept)
    return [rows[i] for i in kept], f"<p>{plural(left, 'module')} that moved less are not shown.</p>\n" if left else ""


def _line(name: str, module: str, cells: Cells, across: Sequence[Sequence[int]], scales: Scales) -> str:
    boxes = "".join(_box(name, layers, cell_of(cells, layers), scales) for layers in across)
    return f'<tr><th scope="row" title="{shown(module)}">{shown(name)}</th>{boxes}</tr>\n'


def _box(name: str, layers: Sequence[int], cell: Cell | None, scales: Scales) -> str:
    if cell is None:
        return "<td></td>"
    where = f"{name}, layer {spanned(layers)}"
    return f'<td data-layer="{spanned(layers)}">{swatch(cell, where, scales)}</td>'


def swatch(cell: Cell, where: str, scales: Scales) -> str:
    """Return the coloured box of a cell, which says its values to whoever points at it."""
    classes = ["cell", *_levels(cell, scales), *(["missing"] if cell.missing else [])]
    return f'<i class="{" ".join(classes)}" title="{shown(where)}\n{shown(told(cell))}"></i>'


def _levels(cell: Cell, scales: Scales) -> Iterator[str]:
    for measure, scale in zip(MEASURES, scales, strict=True):
        if level := measure.level(cell, scale):
            yield f"{measure.key}-{level}"


def _outside(others: Sequence[Strip], scales: Scales) -> str:
    shown_rows, more = _fewer(others)
    lines = []
    for strip in shown_rows:
        cell = strip.whole
        values = "".join(f"<td>{shown(measure.words(cell)) if cell.changed else ''}</td>" for measure in MEASURES)
        box = swatch(cell, strip.module, scales)
        lines.append(f'<tr><th scope="row">{shown(strip.module)}</th><td>{box}</td>{values}</tr>\n')
    heads = "".join(f'<th scope="col">{measure.name}</th>' for measure in MEASURES)
    return (
        '<div class="scroll" tabindex="0"><table class="loose" id="loose"><caption>Outside of layers</caption>\n'
        f'<thead><tr><th scope="col">module</th><td></td>{heads}</tr></thead>\n'
        f"<tbody>{''.join(lines)}</tbody></table></div>\n{more}"
    )
