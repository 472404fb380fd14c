"""The weights that adapters in an archive are on: how they are stored, and which of their rows an adapter has."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count

from ckpttool.adapters.fusion import Part
from ckpttool.architectures.model import Model
from ckpttool.converting.adapters import Layer
from ckpttool.converting.settings import PARALLEL_EXPERTS, Settings
from ckpttool.tensors import Index, TensorInfo

_GROUPED = re.compile(r"(.*\bexperts\.experts)\.(linear_fc[12])")
"""A module that is all experts at once."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight as it was trained: ``front`` are the axes of layers and experts in front of ``[rows, columns]``.

    ``cuts`` is into how many runs of rows the ranks have cut it.
    """

    front: Index
    rows: int
    columns: int
    parts: tuple[Part, ...]
    cuts: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rows of a weight an adapter has; see :class:`~ckpttool.lowrank.LowRank`."""

    rows: int
    start: int = 0
    block: int = 0
    step: int = 0


def find_weight(module: str, tensors: Mapping[str, TensorInfo]) -> Weight | None:
    """Return the weight of a module: under its own key, its two halves apart, or each expert by itself."""
    if (keys := _keys(module, tensors)) or (grouped := _GROUPED.fullmatch(module)) is None:
        return _weight([tensors[key] for key in keys], ())
    experts: list[Weight] = []
    for expert in count():
        keys = _keys(f"{grouped[1]}.{expert}.{grouped[2]}", tensors)
        weight = _weight([tensors[key] for key in keys], (expert,))
        if weight is None or weight.front:
            break
        experts.append(weight)
    if not experts or len({(weight.rows, weight.columns) for weight in experts}) > 1:
        return None
    parts = tuple(part for weight in experts for part in weight.parts)
    return Weight((len(experts),), experts[0].rows, experts[0].columns, parts, experts[0].cuts)


def _keys(module: str, tensors: Mapping[str, TensorInfo]) -> list[str]:
    whole, halves = f"{module}.weight", [f"{module}.weight_w", f"{module}.weight_v"]
    if whole in tensors:
        return [whole]
    return halves if all(half in tensors for half in halves) else []


def _weight(tensors: list[TensorInfo], lead: Index) -> Weight | None:
    """Return the weight whose rows lie in these tensors one after the other."""
    shapes = [tensor.shape for tensor in tensors]
    if not shapes or len(shapes[0]) < 2 or len({(*shape[:-2], shape[-1]) for shape in shapes}) > 1:
        return None
    parts, rows, cuts = [], 0, 0
    for tensor in tensors:
        parts.append(Part(tensor.name, lead, rows))
        rows, cuts = rows + tensor.shape[-2], cuts + _cuts(tensor, -2)
    return Weight(shapes[0][:-2], rows, shapes[0][-1], tuple(parts), cuts)


def _cuts(tensor: TensorInfo, axis: int) -> int:
    """Return into how many runs ranks have cut an axis."""
    return len({piece.offset[axis] for piece in tensor.pieces})


def place(layer: Layer, weight: Weight, model: Model) -> Placement | None:
    """Return which rows an adapter has, nothing where the weight does not unite what it is on."""
    if not layer.of:
        return Placement(weight.rows)
    if layer.of in ("gate", "up"):
        half = weight.rows // 2
        return None if weight.rows % 2 else Placement(half, half * (layer.of == "up"), half)
    heads, groups, width = (model.sizes.get(name, 0) for name in ("heads", "groups", "head_dim"))
    if not groups or heads % groups or (heads + 2 * groups) * width != weight.rows:
        return None
    queries = heads // groups * width
    step = queries + 2 * width
    starts = {"q": 0, "k": queries, "v": queries + width}
    block = queries if layer.of == "q" else width
    return Placement(groups * block, starts[layer.of], block, step)


def fits(layer: Layer, weight: Weight, placed: Placement, adapters: Mapping[str, TensorInfo]) -> bool:
    """Tell whether both factors, and the magnitude, have the shapes that they are to have."""
    down, up = adapters[layer.down].shape, adapters[layer.up].shape
    if len(down) < 2 or len(up) < 2 or not down[-2]:
        return False
    if (up[-2], up[-1], down[-1]) != (placed.rows, down[-2], weight.columns):
        return False
    if layer.magnitude and adapters[layer.magnitude].shape != (*weight.front, weight.rows):
        return False
    fewest = len(weight.front) - (_GROUPED.fullmatch(layer.module) is not None)
    fronts = (down[:-2], up[:-2])
    return all(front == weight.front[: len(front)] and len(front) >= fewest for front in fronts)


def doubts(
    layer: Layer, weight: Weight, adapters: Mapping[str, TensorInfo], run: Settings
) -> Iterator[tuple[str, str]]:
    """Yield code and text of what makes a sound adapter one that cannot be fused."""
    if layer.module.endswith("embeddings"):
        yield "adapter-kind", "on embeddings, of which it is not known how a trainer would keep it"
    if any(len(adapters[name].shape) - 2 < len(weight.front) for name in (layer.down, layer.up)):
        ranks = run.values.get(PARALLEL_EXPERTS)
        if ranks is None:
            yield "adapter-shared", f"the experts of a rank share it, and nothing says {PARALLEL_EXPERTS}"
        elif ranks != 1:
            yield "adapter-shared", f"the experts of each of {ranks} ranks shared one, and one of these was kept"
    if layer.of in ("gate", "up") and run.interleaved:
        yield "adapter-order", "on one of gate and up rows that lie in blocks"
    if layer.module.endswith("linear_fc1") and not _in_order(layer, weight, adapters):
        yield "adapter-order", "ranks have put gate and up rows in another order than those of the weight"


def _in_order(layer: Layer, weight: Weight, adapters: Mapping[str, TensorInfo]) -> bool:
    """Tell whether rows are in the order of the weight's, by how ranks cut them.

    Of the weight every rank gives two runs, gate and up. Bridges cut the rows of a magnitude, and those of an adapter
    on one of the two, as if they were something else; with one rank that is the same.
    """
    cuts = {_cuts(adapters[layer.up], -2)}
    if layer.magnitude:
        cuts.add(_cuts(adapters[layer.magnitude], -1))
    wanted = weight.cuts // 2 if layer.of else weight.cuts
    return wanted <= 1 or cuts <= {1, wanted}
