"""Sum tensors up by module and by layer: which layers has a training step moved, and what in them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckpttool.comparison.measure import Sums
from ckpttool.comparison.result import Cell, Strip, TensorDiff
from ckpttool.formats.folding import NUMBER

_LAYER = re.compile(rf"(?P<stack>(?:.*?\.)?(?:layers?|h|blocks?))\.(?P<layer>{NUMBER})\.(?P<rest>.+)")
_NUMBERS = re.compile(rf"(?<=\.){NUMBER}(?=\.)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies in a model: its layer in the main stack, if it is in one, and its module."""

    layer: int | None
    module: str


def places(names: Iterable[str]) -> dict[str, Place]:
    """Return the place of every name; the main stack is the one that most tensors lie in.

    Numbers in the rest of a name, those of experts and of other stacks, are ``*``.
    """
    matches = {name: _LAYER.fullmatch(name) for name in names}
    stacks = Counter(match["stack"] for match in matches.values() if match is not None)
    main = max(stacks, key=lambda stack: stacks[stack], default="")
    found = {}
    for name, match in matches.items():
        if match is not None and match["stack"] == main:
            found[name] = Place(int(match["layer"]), _NUMBERS.sub("*", f".{match['rest']}")[1:])
        else:
            found[name] = Place(None, _NUMBERS.sub("*", name))
    return found


def strips(tensors: Sequence[TensorDiff], sums: Mapping[str, Sums]) -> tuple[Strip, ...]:
    """Return a row for every module, in the order in which they come."""
    by_module: dict[str, list[TensorDiff]] = {}
    for tensor in tensors:
        by_module.setdefault(tensor.module, []).append(tensor)
    return tuple(
        Strip(module=module, whole=cell(group, sums), layers=_by_layer(group, sums))
        for module, group in by_module.items()
    )


def layers(tensors: Iterable[TensorDiff], sums: Mapping[str, Sums]) -> dict[int, Cell]:
    """Return what all tensors of each layer add up to, by its number."""
    inside = [tensor for tensor in tensors if tensor.layer is not None]
    found = _by_layer(inside, sums)
    return {layer: cell for layer, cell in found.items() if layer is not None}


def _by_layer(tensors: Iterable[TensorDiff], sums: Mapping[str, Sums]) -> dict[int | None, Cell]:
    groups: dict[int | None, list[TensorDiff]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.layer, []).append(tensor)
    return {layer: cell(groups[layer], sums) for layer in sorted(groups, key=lambda n: -1 if n is None else n)}


def cell(tensors: Sequence[TensorDiff], sums: Mapping[str, Sums]) -> Cell:
    """Sum tensors up."""
    metrics = [tensor.metrics for tensor in tensors if tensor.metrics is not None]
    changed = sum(one.changed for one in metrics)
    apart = math.fsum(sums[tensor.name].apart for tensor in tensors if tensor.name in sums)
    size = math.fsum(sums[tensor.name].a for tensor in tensors if tensor.name in sums)
    ratio = math.sqrt(apart / size) if size else None
    return Cell(
        tensors=len(tensors),
        elements=sum(one.elements for one in metrics),
        changed=changed,
        max_abs=max((one.max_abs for one in metrics), default=0.0),
        rel_l2=(ratio if ratio is None or math.isfinite(ratio) else None) if changed else 0.0,
        missing=sum(tensor.metrics is None and not tensor.trusted for tensor in tensors),
    )
