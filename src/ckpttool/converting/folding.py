"""Write many names as few: ``model.layers.[0-35].mlp.experts.[0-127].up_proj.weight``, and none left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from ckpttool.architectures.slots import NUMBER
from ckpttool.formats.findings import ranges

_NUMBER = re.compile(rf"(?<![^.\[ ]){NUMBER}(?![^.\], ])")


_HERE = "\0"
"""Stands where a number was; no name of a tensor has one."""


def folded(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield patterns that together stand for exactly these names, and how many each stands for."""
    groups: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(found) for found in _NUMBER.findall(name))
        groups.setdefault(_NUMBER.sub(_HERE, name), set()).add(numbers)
    for pattern, found in groups.items():
        yield from ((_filled(pattern, axes), math.prod(map(len, axes))) for axes in _boxes(found))


def _boxes(found: set[tuple[int, ...]]) -> list[list[set[int]]]:
    """Split tuples into sets whose product they are: by their first number, where they are not one product."""
    axes = [set(axis) for axis in zip(*found, strict=True)]
    if math.prod(map(len, axes)) == len(found):
        return [axes]
    rest: dict[int, set[tuple[int, ...]]] = {}
    for first, *others in found:
        rest.setdefault(first, set()).add(tuple(others))
    alike: dict[frozenset[tuple[int, ...]], set[int]] = {}
    for first, tails in rest.items():
        alike.setdefault(frozenset(tails), set()).add(first)
    return [[firsts, *box] for tails, firsts in alike.items() for box in _boxes(set(tails))]


def _filled(pattern: str, axes: list[set[int]]) -> str:
    texts = iter(ranges(axis).replace(", ", ",") for axis in axes)
    several = iter(len(axis) > 1 for axis in axes)
    return re.sub(_HERE, lambda _: f"[{next(texts)}]" if next(several) else next(texts), pattern)
