"""Tensors that only one side has: are some of them one tensor under two names? Their content says so."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from ckpttool.comparison.pairing import Laid
from ckpttool.comparison.result import Renamed
from ckpttool.comparison.values import Stream
from ckpttool.tensors import Index

Kind = tuple[str, Index]


def suggest(a: Laid, b: Laid, only_a: Iterable[str], only_b: Iterable[str]) -> tuple[tuple[Renamed, ...], int]:
    """Pair tensors of one dtype, shape and content; returns them in the order of A, and the bytes that were read.

    Of several of one content (a norm of ones, a bias of zeros) those of the most similar names are paired. Only
    tensors are read of which the other side has some of the same dtype and shape.
    """
    ours, theirs = _by_kind(a, only_a), _by_kind(b, only_b)
    found: list[Renamed] = []
    read = 0
    mine, other = Stream(a.stock), Stream(b.stock)
    try:
        for kind in [kind for kind in ours if kind in theirs]:
            there: dict[bytes, list[str]] = {}
            for name in theirs[kind]:
                there.setdefault(_digest(other, b, name), []).append(name)
                read += b.targets[name].nbytes
            for name in ours[kind]:
                fitting = there.get(_digest(mine, a, name), [])
                read += a.targets[name].nbytes
                if fitting:
                    found.append(Renamed(a=name, b=_most_similar(name, fitting)))
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


def _digest(stream: Stream, side: Laid, name: str) -> bytes:
    digest = hashlib.sha256()
    for run in stream.runs(side.targets[name]):
        digest.update(run.view("u1").data)
    return digest.digest()


SIMILAR = 64
"""Names among which the most similar one is looked for; among more, the first is taken."""


def _most_similar(name: str, names: list[str]) -> str:
    """Take the name out of the list that is most like another one."""
    best = names[0]
    if 1 < len(names) <= SIMILAR:
        best = max(names, key=lambda other: SequenceMatcher(None, name, other, autojunk=False).ratio())
    names.remove(best)
    return best
