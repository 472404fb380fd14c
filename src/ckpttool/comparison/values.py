"""The values of two tensors, band by band and in step: equal bits first, and what is measured where they are not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from ckpttool.comparison.measure import PART, Measure, Sums, are_equal, coarsest, finest
from ckpttool.comparison.result import Metrics, Options, State
from ckpttool.elements import Array
from ckpttool.gathering import Gatherer
from ckpttool.lowrank import Fusion
from ckpttool.plan import Target
from ckpttool.reading import BAND, Reader
from ckpttool.tensors import CASTABLE, DTYPE_BITS, TensorInfo, bands

_NO_FUSIONS: Mapping[str, Fusion] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Stock:
    """Where the tensors of one side come from: its sources by name below a root, and what is fused into them."""

    root: Path
    sources: Mapping[str, TensorInfo]
    fusions: Mapping[str, Fusion] = field(default_factory=lambda: _NO_FUSIONS)

    def dtype(self, target: Target) -> str:
        """Return the dtype that a target's sources are stored in; of several, one that holds the values of all."""
        stored = dict.fromkeys(self.sources[part.source].dtype for part in target.parts)
        return finest(*stored) if stored.keys() <= CASTABLE else next(iter(stored))


class Stream:
    """One side, opened for one thread: tensors as runs of elements, in a buffer of its own."""

    def __init__(self, stock: Stock) -> None:
        self._reader = Reader(stock.root)
        self._sources = stock.sources
        self._gatherer = Gatherer(stock.sources, stock.fusions, self._reader)
        self._buffer: Array = np.empty(BAND, np.uint8)
        self.lost = 0
        """How many finite elements the cast has made infinite, of all that was read."""

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def runs(self, target: Target) -> Iterator[Array]:
        """Yield the elements of a target in order; a run is good until the next one is asked for."""
        if DTYPE_BITS[target.dtype] % 8:  # stored packed, and read so
            stored = packed(self._sources[target.parts[0].source])
            yield from self._bytes(stored)
            return
        for band in self._gatherer.bands(target, lambda count: self._buffer[:count]):
            self.lost += band.lost
            yield band.elements

    def _bytes(self, stored: TensorInfo) -> Iterator[Array]:
        for box in bands(stored.shape, BAND):
            out = self._buffer[: box[1][0]]
            self._reader.read(stored, box, out)
            yield out


@dataclass(frozen=True, slots=True)
class Found:
    """What comparing two tensors has come to; ``read`` are the bytes of both sides that were looked at."""

    state: State
    metrics: Metrics
    read: int
    sums: Sums = field(default_factory=Sums)


def compare_values(a: tuple[Stream, Target], b: tuple[Stream, Target], options: Options) -> Found | None:
    """Compare two targets of one shape; ``None`` where there is no dtype that holds the values of both.

    What a cast would make infinite is compared in the finer dtype: a finite number and an infinity are not the same.
    """
    dtypes = a[1].dtype, b[1].dtype
    common = _common(*dtypes, options)
    if common is None:
        return None
    before = a[0].lost + b[0].lost
    found = _compare_in(common, a, b, options)
    if a[0].lost + b[0].lost == before:
        return found
    finer = _compare_in(finest(*dtypes), a, b, options)
    return replace(finer, read=found.read + finer.read)


def _compare_in(common: str, a: tuple[Stream, Target], b: tuple[Stream, Target], options: Options) -> Found:
    dtypes = a[1].dtype, b[1].dtype
    sides = tuple((stream, replace(target, dtype=common)) for stream, target in (a, b))
    read = 0
    for x, y in in_step(*(stream.runs(target) for stream, target in sides)):
        if not are_equal(x, y):
            break
        read += x.nbytes * 2
    else:
        return Found("equal", Metrics(elements=a[1].numel, changed=0), read)
    if DTYPE_BITS[common] % 8:
        changed = _changed(in_step(*(stream.runs(target) for stream, target in sides)), DTYPE_BITS[common])
        metrics = Metrics(elements=a[1].numel, changed=changed, rel_l2=None, cosine=None)
        return Found("differs", metrics, read + a[1].nbytes + b[1].nbytes)
    ulp = coarsest(*dtypes) if common in CASTABLE else common
    measure = Measure(common, ulp, options.tolerance, options.ulps)
    for x, y in in_step(*(stream.runs(target) for stream, target in sides)):
        measure.add(x, y)
        read += x.nbytes * 2
    return Found("differs" if measure.beyond else "close", measure.metrics(), read, measure.sums)


def packed(tensor: TensorInfo) -> TensorInfo:
    """Return a tensor of elements smaller than a byte as the bytes that it is stored in, one file's piece."""
    (piece,) = tensor.pieces
    size = (tensor.nbytes,)
    return replace(tensor, dtype="uint8", shape=size, pieces=(replace(piece, offset=(0,), size=size),))


def _changed(runs: Iterable[tuple[Array, Array]], width: int) -> int:
    """Count the elements of so many bits, packed from the lowest bit on, that differ."""
    at, last, changed = 0, -1, 0
    for x, y in runs:
        for begin in range(0, x.size, PART):
            part: Array = np.bitwise_xor(x[begin : begin + PART], y[begin : begin + PART])
            where = np.flatnonzero(np.unpackbits(part, bitorder="little"))
            elements = np.unique((where + 8 * at) // width)
            if elements.size:
                changed += elements.size - int(elements[0] == last)
                last = int(elements[-1])
            at += part.size
    return changed


def _common(a: str, b: str, options: Options) -> str | None:
    """Return the dtype in which both are compared: their own, or one that holds all values of both."""
    if a == b:
        return a
    if not {a, b} <= CASTABLE:
        return None
    if options.as_written:
        return b
    return coarsest(a, b) if options.ignore_dtype else finest(a, b)


def in_step(a: Iterator[Array], b: Iterator[Array]) -> Iterator[tuple[Array, Array]]:
    """Yield the elements of two tensors of one size as runs of one length, however each of them is cut."""
    x = y = np.empty(0, np.uint8)
    while True:
        x = x if x.size else next(a, x)
        y = y if y.size else next(b, y)
        count = min(x.size, y.size)
        if not count:
            return
        yield x[:count], y[:count]
        x, y = x[count:], y[count:]
