"""Write many names as few: ``model.layers.[0-35].mlp.experts.[0-127].up_proj.weight``, and none left out."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from ckpttool.formats.findings import ranges

NUMBER = r"(?:0|[1-9][0-9]{0,8})"
"""A layer or expert in a name; what has leading zeros or does not end is no number of one."""

_NUMBER = re.compile(rf"(?<![^.\[ ])({NUMBER})(?![^.\], ])")


def folded(names: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield patterns that together stand for exactly these names, and how many each stands for."""
    groups: dict[tuple[str, ...], set[tuple[int, ...]]] = {}
    for name in names:
        parts = _NUMBER.split(name)
        groups.setdefault(tuple(parts[::2]), set()).add(tuple(map(int, parts[1::2])))
    for texts, found in groups.items():
        yield from ((_filled(texts, axes), math.prod(map(len, axes))) for axes in _boxes(found))


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


def _filled(texts: Sequence[str], axes: Sequence[set[int]]) -> str:
    numbers = [ranges(axis).replace(", ", ",") for axis in axes]
    shown = [f"[{text}]" if len(axis) > 1 else text for text, axis in zip(numbers, axes, strict=True)]
    return texts[0] + "".join(number + text for number, text in zip(shown, texts[1:], strict=True))


def numbered(names: Iterable[str], prefix: str) -> set[int]:
    """Return the numbers that follow a prefix (a regular expression) at the beginning of names."""
    match = re.compile(rf"{prefix}({NUMBER})\.").match
    return {int(found[1]) for found in map(match, names) if found}
