"""The chart of the page: a bar a layer, one drawing for each measure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ckpttool.comparison.result import Cell, Comparison
from ckpttool.render.heat import Scale, brief, cell_of, columns
from ckpttool.render.page.writing import MEASURES, Measure, Scales, shown, spanned, told

MOST_BARS = 160
WIDTH, HEIGHT = 1000, 250
LEFT, RIGHT, TOP, BOTTOM = 58, 6, 12, 42
FLOOR = HEIGHT - BOTTOM
WIDEST = 40
"""Of a bar and the space beside it, in units of the drawing."""

Bars = list[tuple[Sequence[int], Cell]]


class Axis:
    """From values to heights: linear from 0, or logarithmic from below the least value."""

    def __init__(self, measure: Measure, cells: Sequence[Cell]) -> None:
        values = [measure.value(cell) for cell in cells if cell.changed]
        self._log, known = measure.logarithmic, [value for value in values if 0 < value < math.inf]
        high = max(known, default=1.0)
        self.low, self.high = _decades(min(known, default=1e-6), high) if self._log else (0.0, _round(high))

    def part(self, value: float) -> float:
        """Return the part of the whole height that a value takes, from 0 to 1."""
        if not self._log:
            return min(value / self.high, 1.0)
        if value in (0, math.inf):
            return float(value > 0)
        return min(max((math.log10(value) - self.low) / (self.high - self.low), 0.0), 1.0)

    def marks(self) -> Iterator[tuple[float, str]]:
        """Yield the parts of the height at which a line is drawn, and what is written there."""
        if not self._log:
            yield from ((i / 4, f"{25 * self.high * i:.3g}%") for i in range(5))
            return
        every = max(1, math.ceil((self.high - self.low) / 6))
        fine = (1, 2, 5) if self.high - self.low <= 2 else (1,)
        for decade in range(int(self.low), int(self.high) + 1, every):
            for digit in fine if decade < self.high else (1,):
                part = (decade + math.log10(digit) - self.low) / (self.high - self.low)
                yield part, brief(digit * 10.0**decade)


def _round(share: float) -> float:
    """Return the next share above that one can write."""
    return next(step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if step >= min(share, 1.0))


def _decades(least: float, most: float) -> tuple[float, float]:
    """Return the powers of ten around two values; the least one still shows as a bar."""
    low, high = math.floor(math.log10(least) - 0.1), math.ceil(math.log10(most) - 1e-9)
    low = min(max(low, -300), 307)
    return low, min(max(high, low + 1), 308)


def charts(found: Comparison, scales: Scales) -> str:
    """Return the section with the chart of each measure, of which one is shown."""
    bars: Bars = [(layers, cell) for layers in columns(found, MOST_BARS) if (cell := cell_of(found.layers, layers))]
    if not bars:
        return ""
    drawings = "".join(_chart(measure, scale, bars) for measure, scale in zip(MEASURES, scales, strict=True))
    most = max(len(layers) for layers, _ in bars)
    much = f" <small>a bar is {most} layers: the largest of them</small>" if most > 1 else ""
    return f"<section><h2>Layers{much}</h2>\n{drawings}</section>\n"


def _chart(measure: Measure, scale: Scale, bars: Bars) -> str:
    axis = Axis(measure, [cell for _, cell in bars])
    parts = [*_grid(axis), *_bars(measure, scale, axis, bars), *_numbers(bars)]
    title = f"{measure.name[0].upper()}{measure.name[1:]} by layer"
    return (
        f'<div class="scroll of-{measure.key}" tabindex="0"><svg class="chart" id="chart-{measure.key}" role="img" '
        f'aria-labelledby="title-{measure.key}" aria-describedby="desc-{measure.key}" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<title id="title-{measure.key}">{title}</title>'
        f'<desc id="desc-{measure.key}">{shown(_description(measure, bars))}</desc>'
        f"{''.join(parts)}</svg></div>\n"
    )


def _description(measure: Measure, bars: Bars) -> str:
    moved = [(layers, cell) for layers, cell in bars if cell.changed]
    if not moved:
        return "No layer changed."
    layers, cell = max(moved, key=lambda bar: measure.value(bar[1]))
    still = len(bars) - len(moved)
    tail = f" {still} did not change." if still else ""
    return f"{len(moved)} of {len(bars)} bars; the highest is layer {spanned(layers)} with {measure.words(cell)}.{tail}"


def _grid(axis: Axis) -> Iterator[str]:
    for part, text in axis.marks():
        y = FLOOR - part * (FLOOR - TOP)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        yield f'<text class="mark" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{shown(text)}</text>'


def _step(count: int) -> float:
    return min((WIDTH - LEFT - RIGHT) / count, WIDEST)


def _bars(measure: Measure, scale: Scale, axis: Axis, bars: Bars) -> Iterator[str]:
    step = _step(len(bars))
    for i, (layers, cell) in enumerate(bars):
        x, part = LEFT + i * step, axis.part(measure.value(cell)) if cell.changed else 0.0
        height = max(part * (FLOOR - TOP), 1.5 if cell.changed else 0.0)
        yield f'<g class="bar" data-layer="{spanned(layers)}" data-part="{part:.4f}">'
        yield f"<title>{shown(f'layer {spanned(layers)}')}\n{shown(told(cell))}</title>"
        yield f'<rect class="hit" x="{x:.2f}" y="{TOP}" width="{step:.2f}" height="{FLOOR - TOP}"/>'
        level = measure.level(cell, scale)
        if cell.changed:
            yield (
                f'<rect class="l{level}" x="{x + step * 0.1:.2f}" y="{FLOOR - height:.2f}" '
                f'width="{step * 0.8:.2f}" height="{height:.2f}" rx="{min(2.0, step / 8):.2f}"/>'
            )
        if cell.missing:
            yield f'<path class="lost" d="M{x + step * 0.1:.2f} {FLOOR + 3}h{step * 0.8:.2f}"/>'
        yield "</g>"


def _numbers(bars: Bars) -> Iterator[str]:
    step = _step(len(bars))
    widest = 7 * len(str(bars[-1][0][0])) + 8
    every = next(n for n in (1, 2, 4, 5, 8, 10, 16, 20, 50, 100) if n * step >= widest)
    yield f'<path class="axis" d="M{LEFT} {FLOOR}H{WIDTH - RIGHT}"/>'
    for i, (layers, _) in enumerate(bars):
        if i % every == 0:
            middle = LEFT + (i + 0.5) * step
            yield f'<text class="mark" x="{middle:.1f}" y="{FLOOR + 17}" text-anchor="middle">{layers[0]}</text>'
    yield f'<text class="mark" x="{LEFT}" y="{HEIGHT - 6}">layer</text>'
