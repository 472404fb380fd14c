"""What all parts of the page share: escaped text, the measures, cells of heat in words and classes."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ckpttool.comparison.result import Cell
from ckpttool.render.heat import LEVELS, SHARES, Scale, log_scale, percent, relative, scientific, share
from ckpttool.render.terminal import clean

LONGEST = 400
"""Characters of a name that are shown; a page of names of a megabyte helps nobody."""


def shown(text: str) -> str:
    """Return text as HTML: a name from a file can neither be markup nor turn the direction of what follows."""
    return html.escape(cut(text))


def shown_lines(lines: Iterable[str]) -> str:
    """Return lines as HTML, one below the other."""
    return "\n".join(map(shown, lines))


def cut(text: str) -> str:
    """Escape what is not printed, and leave the middle of what is very long out: how much, is said."""
    text = clean(text)
    if len(text) <= LONGEST:
        return text
    half = LONGEST // 2
    return f"{text[:half]}[... {len(text) - 2 * half:,} characters ...]{text[-half:]}"


Scales = list[Scale]


@dataclass(frozen=True, slots=True)
class Measure:
    """Something that is drawn: its key in addresses and classes, its name, its value in a cell, how that is written."""

    key: str
    name: str
    value: Callable[[Cell], float]
    words: Callable[[Cell], str]
    logarithmic: bool = True

    def scale(self, cells: Iterable[Cell]) -> Scale:
        """Return the levels of heat for these cells."""
        return log_scale(map(self.value, cells)) if self.logarithmic else SHARES

    def level(self, cell: Cell, scale: Scale) -> int:
        """Return the level of a cell, 0 where nothing changed."""
        return scale.level(self.value(cell)) if cell.changed else 0


def _relative(cell: Cell) -> str:
    return "infinite" if relative(cell) == math.inf else scientific(relative(cell))


MEASURES = (
    Measure("rel_l2", "relative L2", relative, _relative),
    Measure("share", "share of elements", share, lambda cell: percent(cell.changed, cell.elements), logarithmic=False),
    Measure("max_abs", "largest difference", lambda cell: cell.max_abs, lambda cell: scientific(cell.max_abs)),
)


def switching() -> str:
    """Return the rules by which the choice of a measure shows what belongs to it."""
    rules = []
    for measure in MEASURES:
        chosen = f"body:has(#measure-{measure.key}:checked)"
        rules.append(f"{chosen} .of-{measure.key}{{display:block}}")
        rules += [f"{chosen} .{measure.key}-{n}{{background:var(--heat-{n})}}" for n in range(1, LEVELS + 1)]
    return "\n".join(rules)


def scales_of(cells: Sequence[Cell]) -> Scales:
    """Return the levels of heat of each measure: a colour means the same all over the page."""
    return [measure.scale(cells) for measure in MEASURES]


def told(cell: Cell) -> str:
    """Say all of a cell in lines, for whoever points at it."""
    lines = [f"{measure.name}: {measure.words(cell)}" for measure in MEASURES] if cell.changed else ["unchanged"]
    if cell.missing:
        lines.append(f"{cell.missing:,} missing, or of another shape")
    if cell.tensors != 1:
        lines.append(f"{cell.tensors:,} tensors")
    return "\n".join(lines)


def spanned(column: Sequence[int]) -> str:
    """Write the layers of a column."""
    return f"{column[0]}" if len(column) == 1 else f"{column[0]}-{column[-1]}"


def legends(scales: Scales) -> str:
    """Return what the colours mean, for each measure."""
    return "".join(_legend(measure, scale) for measure, scale in zip(MEASURES, scales, strict=True))


def _legend(measure: Measure, scale: Scale) -> str:
    if measure.logarithmic:
        steps = [scale.words(level) for level in range(1, LEVELS + 1)]
    else:
        steps = [f"<{scale.bounds[1]:.1%}", *(f"{bound:.3g}%" for bound in (100 * b for b in scale.bounds[1:]))]
    swatches = "".join(f'<li><i class="cell l{i + 1}"></i>{html.escape(step)}</li>' for i, step in enumerate(steps))
    return (
        f'<ul class="legend of-{measure.key}" aria-label="colours: {measure.name}, from"><li><i class="cell"></i>'
        f'unchanged</li>{swatches}<li><i class="cell missing"></i>missing, or of another shape</li></ul>\n'
    )
