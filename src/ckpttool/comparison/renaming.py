"""Tensors that only one side has: are some of them one tensor under two names? Their content says so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

from ckpttool.comparison.pairing import Laid
from ckpttool.comparison.result import Renamed
from ckpttool.comparison.values import Stream
from ckpttool.tensors import Index

Kind = tuple[str, Index]


def suggest(a: Laid, b: Laid, only_a: Iterable[str], only_b: Iterable[str]) -> tuple[tuple[Renamed, ...], int]:
    """Pair tensors of one dtype, shape and content; returns them in the order of A, and the bytes that were read.

    Of several of one content those of the most similar names are paired; one value throughout (a norm of ones, a bias
    of zeros) says little, and is paired with names that are much alike only. Only tensors are read of which the other
    side has some of the same dtype and shape.
    """
    ours, theirs = _by_kind(a, only_a), _by_kind(b, only_b)
    found: list[Renamed] = []
    read = 0
    mine, other = Stream(a.stock), Stream(b.stock)
    try:
        for kind in [kind for kind in ours if kind in theirs]:
            there: dict[bytes, list[str]] = {}
            for name in theirs[kind]:
                there.setdefault(_content(other, b, name).digest, []).append(name)
                read += b.targets[name].nbytes
            for name in ours[kind]:
                content = _content(mine, a, name)
                read += a.targets[name].nbytes
                fitting = there.get(content.digest, [])
                best = _most_similar(name, fitting)
                if best is not None and (not content.constant or _likeness(name, best) >= ALIKE):
                    fitting.remove(best)
                    found.append(Renamed(a=name, b=best))
    finally:
        mine.close()
        other.close()
    return tuple(found), read


def _by_kind(side: Laid, names: Iterable[str]) -> Mapping[Kind, list[str]]:
    kinds: dict[Kind, list[str]] = {}
    for name in names:
        target = side.targets[name]
        if target.numel:
            kinds.setdefault((target.dtype, target.shape), []).append(name)
    return kinds


class _Content(NamedTuple):
    """What the elements of a tensor are, and whether they all are the same."""

    digest: bytes
    constant: bool


def _content(stream: Stream, side: Laid, name: str) -> _Content:
    digest, first, constant = hashlib.sha256(), None, True
    for run in stream.runs(side.targets[name]):
        elements = run.view(f"V{run.itemsize}")
        first = elements[:1].copy() if first is None else first
        constant = constant and bool((elements == first).all())
        digest.update(run.view("u1").data)
    return _Content(digest.digest(), constant)


SIMILAR = 64
"""Names among which the most similar one is looked for; among more, the first is taken."""

ALIKE = 0.75
"""How much alike names of tensors of one value have to be."""


def _most_similar(name: str, names: Sequence[str]) -> str | None:
    """Return the name that is most like another one."""
    if len(names) > SIMILAR:
        return names[0]
    return max(names, key=lambda other: _likeness(name, other), default=None)


def _likeness(one: str, other: str) -> float:
    return SequenceMatcher(None, one, other, autojunk=False).ratio()
