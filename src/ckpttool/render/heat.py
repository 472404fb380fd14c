"""What a terminal and a page show of a comparison alike: levels of heat, columns of layers, words and numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.comparison.result import Cell, Comparison, Half, Metrics, Options, Side, Strip, TensorDiff
from ckpttool.render.terminal import clean, shown_path

LEVELS = 8
VALUES = "values"
"""What differs where nothing else does."""

FINEST, COARSEST = 8, 1
"""Levels in a decade: what is alike is not blown up, and eight decades fit."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Where each of the levels 1 to 8 begins; all that is smaller but not nothing is of the first."""

    bounds: tuple[float, ...]

    def level(self, value: float) -> int:
        """Return the level of a value that is not 0."""
        return max(1, sum(value >= bound for bound in self.bounds))

    def words(self, level: int) -> str:
        """Say which values are of a level: that from which they are."""
        return f"<{brief(self.bounds[1])}" if level == 1 else brief(self.bounds[level - 1])


def brief(bound: float) -> str:
    """Write where a level begins, in two digits: ``3.2e-5``, ``0.032``, ``1``."""
    return f"{bound:.2g}" if 0.01 <= bound < 100 else scientific(bound, digits=1).replace(".0e", "e")


def log_scale(values: Iterable[float]) -> Scale:
    """Return steps of 10, 3.2, 1.8 or 1.3, the smallest that reach from the least to the greatest value."""
    known = [math.log10(value) for value in values if 0 < value < math.inf]
    low, high = (min(known), max(known)) if known else (-6.0, 1.0)
    for steps in (FINEST, 4, 2, COARSEST):
        top = math.floor(high * steps + 1e-9)
        if low * steps >= top - LEVELS + 1 - 1e-9:
            break
    return Scale(tuple(_power((top - LEVELS + 1 + i) / steps) for i in range(LEVELS)))


def _power(exponent: float) -> float:
    return math.inf if exponent > 308 else 10.0**exponent


SHARES = Scale((0.0, 0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75))


def relative(cell: Cell) -> float:
    """Return the relative difference of a cell; infinite where A is zero and B is not."""
    if cell.rel_l2 is None or math.isnan(cell.rel_l2):
        return math.inf if cell.changed else 0.0
    return cell.rel_l2


def share(cell: Cell) -> float:
    """Return the part of the elements of a cell that changed."""
    return cell.changed / cell.elements if cell.elements else 0.0


def furthest(cells: Sequence[Cell]) -> Cell:
    """Return one cell for several layers: the largest of each measure, the sum of the counts."""
    worst = max(cells, key=lambda cell: (cell.changed > 0, relative(cell)))
    shared = max(cells, key=share)
    return replace(
        worst,
        elements=shared.elements,
        changed=shared.changed,
        max_abs=max(cell.max_abs for cell in cells),
        tensors=sum(cell.tensors for cell in cells),
        missing=sum(cell.missing for cell in cells),
    )


def columns(found: Comparison, most: int) -> list[tuple[int, ...]]:
    """Return the layers of each column: one, or so many neighbours that there are at most ``most`` columns."""
    layers = sorted({*found.layers, *(n for strip in found.strips for n in strip.layers if n is not None)})
    width = max(1, -(-len(layers) // max(most, 1)))
    return [tuple(layers[i : i + width]) for i in range(0, len(layers), width)]


def cell_of(layers: Mapping[int, Cell] | Mapping[int | None, Cell], column: Sequence[int]) -> Cell | None:
    """Return what a row has in a column, if anything."""
    there = [layers[layer] for layer in column if layer in layers]
    return furthest(there) if there else None


def layered(found: Comparison) -> list[Strip]:
    """Return the modules that are in layers."""
    return [strip for strip in found.strips if any(layer is not None for layer in strip.layers)]


def loose(found: Comparison) -> list[Strip]:
    """Return the modules that are in no layer."""
    return [strip for strip in found.strips if not any(layer is not None for layer in strip.layers)]


def labels(strips: Sequence[Strip]) -> list[str]:
    """Return short names of modules: without what all begin with, and without ``.weight`` where that is clear."""
    names = [strip.module for strip in strips]
    heads = [name.split(".")[:-1] for name in names]
    common = 0
    while len(names) > 1 and all(len(head) > common and head[common] == heads[0][common] for head in heads):
        common += 1
    short = [".".join(name.split(".")[common:]) for name in names]
    shorter = [name.removesuffix(".weight") for name in short]
    once = {name for name in shorter if shorter.count(name) == 1} if len(shorter) < 1000 else set()
    return [clean(b if b in once else a) for a, b in zip(short, shorter, strict=True)]


def by_distance(tensors: Iterable[TensorDiff]) -> list[TensorDiff]:
    """Sort tensors, those first that differ most: by shape, by what is not finite, by relative difference."""

    def distance(tensor: TensorDiff) -> tuple[bool, bool, float, float]:
        found = tensor.metrics
        if found is None:
            return True, True, math.inf, math.inf
        rel = math.inf if found.rel_l2 is None and found.changed else found.rel_l2 or 0.0
        return False, found.not_finite > 0, rel, found.max_abs

    return sorted(tensors, key=distance, reverse=True)


def compared(found: Comparison) -> tuple[int, int]:
    """Return how many elements changed, and how many both sides have in tensors of one shape."""
    both = [tensor for tensor in found.tensors if tensor.a and tensor.b and tensor.a.shape == tensor.b.shape]
    changed = sum(tensor.metrics.changed for tensor in both if tensor.metrics)
    return changed, sum(math.prod(tensor.a.shape) for tensor in both if tensor.a)


def greatest(found: Comparison) -> TensorDiff | None:
    """Return the tensor with the largest difference of a value, if any value differs."""
    known = [tensor for tensor in found.tensors if tensor.metrics and tensor.metrics.max_abs > 0]
    return max(known, key=lambda tensor: tensor.metrics.max_abs if tensor.metrics else 0.0, default=None)


def difference(tensor: TensorDiff) -> str:
    """Say what differs: shape and dtype of both where they do, otherwise values."""
    said = []
    if tensor.a is not None and tensor.b is not None and tensor.a.shape != tensor.b.shape:
        said.append(f"shape {_shape(tensor.a)} / {_shape(tensor.b)}")
    if tensor.a is not None and tensor.b is not None and tensor.a.dtype != tensor.b.dtype:
        said.append(f"{clean(tensor.a.dtype)} / {clean(tensor.b.dtype)}")
    if tensor.metrics is not None and tensor.metrics.not_finite:
        said.append(f"{tensor.metrics.not_finite:,} not finite")
    if tensor.state == "close":
        said.append("within tolerance")
    return ", ".join(said) or clean(tensor.why) or VALUES


def _shape(half: Half) -> str:
    return "[" + ", ".join(map(str, half.shape)) + "]"


def scientific(value: float | None, digits: int = 2) -> str:
    """Write a number: ``3.12e-4``, ``0``, ``-`` for what is not known."""
    if value is None or not math.isfinite(value):
        return "-"
    return re.sub(r"e([+-])0?", r"e\1", f"{value:.{digits}e}") if value else "0"


def percent(part: int, whole: int) -> str:
    """Write a share: ``12.34%``; what is not all is never 100, what is not nothing never 0."""
    if not whole or part in (0, whole):
        return "100%" if part else "0%"
    value = 100 * part / whole
    return "<0.01%" if value < 0.01 else ">99.99%" if value >= 99.995 else f"{value:.2f}%"


def cosine(value: float | None) -> str:
    """Write a cosine: ``0.987654``, or how far it is from 1 where six digits do not show that."""
    if value is None or not math.isfinite(value):
        return "-"
    return "1" if value == 1 else f"1-{1 - value:.0e}".replace("e-0", "e-") if value > 0.9999995 else f"{value:.6f}"


def ulps(metrics: Metrics | None) -> str:
    """Write the histogram of distances: ``1:80% 2:15% >2:5% up to 64``, or ``half<=2^14 all<=2^20``."""
    counts = metrics.ulps if metrics is not None else ()
    total = sum(counts)
    if not total:
        return "-"
    last = max(i for i, count in enumerate(counts) if count)
    if sum(counts[:3]) * 2 < total:
        half = next(i for i in range(len(counts)) if sum(counts[: i + 1]) * 2 >= total)
        return f"half<={power_of_two(half - 1)} all<={power_of_two(last - 1)}"
    bins = [*zip(("0:", "1:", "2:"), counts[:3], strict=False), (">2:", sum(counts[3:]))]
    told = " ".join(f"{name}{100 * count / total:.0f}%" for name, count in bins if count * 200 >= total)
    return told + (f" up to {power_of_two(last - 1)}" if last > 2 else "")


def power_of_two(exponent: int) -> str:
    """Write a power of two, in full where that is short."""
    return str(1 << exponent) if exponent < 14 else f"2^{exponent}"


def elsewhere(side: Side) -> str:
    """Return where what was read lies, if that is not the path that was given."""
    given, root = (os.path.normpath(shown_path(path)) for path in (side.path, side.root))
    return "" if not side.root or root == given else root


def headline(found: Comparison) -> tuple[str, str]:
    """Return the verdict in a word, and what it rests on."""
    count, counts = len(found.tensors), found.counts
    if found.same:
        if not count:
            return "same", "no tensor was compared"
        close = f", {counts['close']:,} of them within the tolerance ({tolerance(found.options)})"
        return "same", f"{_tensors(count)} of both are equal" + (close if counts["close"] else "")
    changed, elements = compared(found)
    said = [f"{counts['differs']:,} of {_tensors(count)} differ{'s' * (counts['differs'] == 1)}"]
    if changed:
        said.append(f"{percent(changed, elements)} of the elements")
    said += [f"{counts[side]:,} {side}" for side in ("only in A", "only in B") if counts[side]]
    largest = greatest(found)
    tail = ""
    if largest is not None and largest.metrics is not None:
        tail = f"; the largest difference is {scientific(largest.metrics.max_abs)}, in {clean(largest.name)}"
    return "different", ", ".join(said) + tail


def tolerance(options: Options) -> str:
    """Write a tolerance as it is given."""
    return f"{options.ulps}ulp" if options.ulps else f"{options.tolerance:g}"


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'s' * (count != 1)}"


def flags(options: Options) -> list[str]:
    """Return the options of a command line that compares in the same way."""
    valued = {
        "--role": [options.role],
        "--step": [options.step],
        "--include": options.include,
        "--exclude": options.exclude,
        "--tolerance": [tolerance(options)] if options.ulps or options.tolerance else [],
        "--hf-config": [options.hf_config],
        "--arch": [options.arch],
        "--producer": [options.producer],
        "--lora": [options.lora],
        "--lora-alpha": [] if options.lora_alpha is None else [f"{options.lora_alpha:g}"],
    }
    given = {"--ignore-dtype": options.ignore_dtype, "--trust-crc": options.trust_crc, "--all": options.everything}
    words = [word for name, values in valued.items() for value in values if value is not None for word in (name, value)]
    return words + [name for name, wanted in given.items() if wanted]
