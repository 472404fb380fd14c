"""The list of the page: every tensor that differs, as data; the first of them also as rows."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from ckpttool.comparison.result import Comparison, Metrics, TensorDiff
from ckpttool.render.heat import by_distance, cosine, difference, percent, power_of_two, scientific, ulps
from ckpttool.render.page.writing import cut

FIRST = 100
"""Rows that are there before, or without, the script."""

COLUMNS = ("name", "differs in", "changed", "max abs", "mean abs", "rel L2", "cosine", "ULP distance")
Row = tuple[Any, ...]


def rows_of(found: Comparison) -> list[Row]:
    """Return a row a tensor that differs, furthest first: what is shown, the layer, and numbers to sort by.

    The order of its entries is that of ``page.js``: name, differs in, changed, elements, max abs, mean abs, rel L2,
    cosine, ULP distance, all bins of it, layer.
    """
    return [_row(tensor) for tensor in by_distance(found.of(["differs", "close"]))]


def _row(tensor: TensorDiff) -> Row:
    measured = tensor.metrics
    known = [
        *((measured.changed, measured.elements) if measured else (None, None)),
        *map(
            _finite, (measured.max_abs, measured.mean_abs, measured.rel_l2, measured.cosine) if measured else [None] * 4
        ),
    ]
    return cut(tensor.name), cut(difference(tensor)), *known, ulps(measured), _bins(measured), tensor.layer


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _bins(measured: Metrics | None) -> str:
    """Write how many elements are how far apart, all of the histogram."""
    if measured is None or not sum(measured.ulps):
        return ""
    names = ["0", *(power_of_two(i) for i in range(len(measured.ulps) - 1))]
    up_to = ["" if i < 3 else "up to " for i in range(len(names))]
    return "\n".join(
        f"{up}{name}: {count:,}" for up, name, count in zip(up_to, names, measured.ulps, strict=True) if count
    )


def listing(found: Comparison) -> str:
    """Return the section with the list; its controls are shown by the script, which they need."""
    rows = rows_of(found)
    if not rows:
        return ""
    heads = "".join(
        f'<th scope="col"{" class=number" * (i > 1)} aria-sort="none"><button type="button" disabled data-column="{i}">'
        f"{name}</button></th>"
        for i, name in enumerate(COLUMNS)
    )
    left = " More of them are listed where scripts may run, and by --json." if len(rows) > FIRST else ""
    return (
        "<section><h2>Tensors</h2>\n"
        '<p class="controls" hidden><label>Filter <input type="search" id="filter" autocomplete="off" '
        'spellcheck="false" placeholder="q_proj layer:12"></label> '
        f'<output id="count" for="filter"></output></p>\n'
        f'<p id="static">The first {min(FIRST, len(rows)):,} of {len(rows):,} tensors that differ.{left}</p>\n'
        f'<div class="scroll" tabindex="0"><table class="tensors" id="tensors"><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{''.join(map(_shown, rows[:FIRST]))}</tbody></table></div>\n"
        '<p class="controls" hidden><button type="button" id="more">Show more</button></p></section>\n'
    )


def _shown(row: Row) -> str:
    name, what, changed, elements, *_, told, bins, _layer = row
    cells: Sequence[str] = (
        percent(changed, elements) if elements is not None else "-",
        *map(scientific, row[4:7]),
        cosine(row[7]),
    )
    numbers = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
    title = f' title="{html.escape(bins)}"' if bins else ""
    return (
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(what)}</td>{numbers}'
        f"<td{title}>{html.escape(told)}</td></tr>"
    )
