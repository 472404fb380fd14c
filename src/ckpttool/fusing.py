"""Add low-rank updates to boxes of weights, in float32, in memory that depends on no model.

The factors of the weight at hand are kept while they fit into ``HELD``, small ones as floats; larger ones are read
again with every box. Matrices are multiplied in parts of at most ``PART`` elements, which stay in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping

import numpy as np

from ckpttool.elements import Array, dtype_of
from ckpttool.errors import BrokenCheckpoint
from ckpttool.lowrank import Fusion, LowRank
from ckpttool.reading import BAND, Reader
from ckpttool.tensors import Box, Index, TensorInfo, bands

HELD = 48 << 20
"""Bytes of factors that are kept: those of attention and dense layers are a few MiB, of 128 packed experts some 30."""

FEW = 4
"""Factors that are kept: of two weights, as packed experts that are written one by one take turns."""

PART = 1 << 19
"""Elements of a weight, a factor or a product that are held in float32 at once."""

SMALL = 8 << 20
"""Bytes up to which a factor is kept in float32."""

_NOT_FINITE = (
    "Is alpha the right one? Otherwise the training has diverged: take an earlier step.",
    "A row of zeros has no direction that DoRA could give a length. Is alpha the right one?",
)
"""What may be wrong with a sum that is not finite, of LoRA and of DoRA."""


class Fuser:
    """Adds what ``fusions`` say to boxes of their sources. Not shared between threads."""

    def __init__(self, reader: Reader, sources: Mapping[str, TensorInfo], fusions: Mapping[str, Fusion]) -> None:
        self._reader, self._sources, self._fusions = reader, sources, fusions
        self._held: OrderedDict[tuple[str, Index], Array] = OrderedDict()
        self._product: Array = np.empty(0, np.float32)
        self._lengths: tuple[tuple[str, Index], Array] | None = None

    def of(self, name: str) -> Fusion | None:
        """Return what is fused into a source, if anything is."""
        return self._fusions.get(name)

    def fuse(self, fusion: Fusion, box: Box, values: Array) -> None:
        """Turn a box of a stored weight, in a contiguous array of float32 or float64, into that of the fused one.

        Raises :class:`BrokenCheckpoint` for factors and for sums that are not finite.
        """
        offset, size = fusion.trained(box)
        values = values.reshape(size)
        front = len(fusion.lead) + fusion.stacked
        with np.errstate(all="ignore"):
            for index in itertools.product(*map(range, size[:front])):
                at = tuple(o + i for o, i in zip(offset, index, strict=False))
                matrix = offset[front:], size[front:]
                self._add(fusion, at, matrix, values[index])
                if fusion.magnitude:
                    self._stretch(fusion, at, matrix, values[index])
        if not np.isfinite(values).all():
            raise BrokenCheckpoint(
                f"{fusion.source}: with the adapter in it, it holds values that are not finite; nothing was written",
                hint=_NOT_FINITE[bool(fusion.magnitude)],
                code="not-finite",
            )

    def _add(self, fusion: Fusion, at: Index, box: Box, values: Array) -> None:
        """Add all updates to a box of the matrix that lies behind the indices ``at``."""
        for update in fusion.updates:
            if not update.down:
                values += self._read(update.up, (), box, values.dtype) * values.dtype.type(update.scale)
            elif update.start or update.block:
                for rows, part in self._placed(update, box):
                    self._multiply(update, at, rows, values[part])
            else:
                self._multiply(update, at, box, values)

    def _placed(self, update: LowRank, box: Box) -> Iterator[tuple[Box, slice]]:
        """Yield the rows of B that are added to a box, each run with the rows of the box that it is added to."""
        (row, *offset), (rows, *size) = box
        count = self._sources[update.up].shape[-2]
        for first in range(0, count, update.block or count):
            begin = update.start + first // (update.block or count) * update.step
            low, high = max(row, begin), min(row + rows, begin + (update.block or count))
            if low < high:
                yield ((first + low - begin, *offset), (high - low, *size)), slice(low - row, high - row)

    def _multiply(self, update: LowRank, at: Index, box: Box, values: Array) -> None:
        """Add the product of the factors to a box of a matrix (of a filter: all but its first axis are columns)."""
        rank = self._rank(update, at)
        for offset, size in _tiles(box, max(1, PART // rank)):
            part = values[tuple(slice(o - b, o - b + n) for o, b, n in zip(offset, box[0], size, strict=True))]
            rows, columns = (offset[:1], size[:1]), (offset[1:], size[1:])
            if update.turned:
                rows, columns = columns, rows
            up = self._up(update, at, rows, rank, values.dtype)
            down = self._down(update, at, columns, rank, values.dtype)
            product = self._times(down.T, up.T) if update.turned else self._times(up, down)
            product *= product.dtype.type(update.scale)
            part += product.reshape(size)

    def _times(self, left: Array, right: Array) -> Array:
        """Multiply two matrices into a buffer that lasts until the next call."""
        rows, columns = left.shape[0], right.shape[1]
        if self._product.size < rows * columns or self._product.dtype != left.dtype:
            self._product = np.empty(max(rows * columns, PART), left.dtype)
        product = self._product[: rows * columns].reshape(rows, columns)
        np.matmul(left, right, out=product)
        return product

    def _front(self, name: str, at: Index, axes: int = 2) -> Index:
        """Return those of the indices of a matrix that a factor has, too, in front of so many axes of its own."""
        return at[: max(0, len(self._sources[name].shape) - axes)]

    def _rank(self, update: LowRank, at: Index) -> int:
        shape = self._sources[update.down].shape
        return max(1, shape[0] // update.experts if update.experts else shape[len(self._front(update.down, at))])

    def _up(self, update: LowRank, at: Index, rows: Box, rank: int, dtype: np.dtype[np.generic]) -> Array:
        """Return B for some rows, ``[rows, r]``."""
        (first,), (count,) = rows
        front = () if update.experts else self._front(update.up, at)
        shape = self._sources[update.up].shape[len(front) :]
        stored = self._read(update.up, front, ((first, *(0 for _ in shape[1:])), (count, *shape[1:])), None)
        if update.experts:
            stored = stored.reshape(count, rank, update.experts)[:, :, at[0]]
        return stored.reshape(count, rank).astype(dtype, copy=False)

    def _down(self, update: LowRank, at: Index, columns: Box, rank: int, dtype: np.dtype[np.generic]) -> Array:
        """Return A for some columns, ``[r, columns]``."""
        first, front = (at[0] * rank, ()) if update.experts else (0, self._front(update.down, at))
        stored = self._read(update.down, front, ((first, *columns[0]), (rank, *columns[1])), None)
        return stored.reshape(rank, -1).astype(dtype, copy=False)

    def _read(self, name: str, front: Index, box: Box, dtype: np.dtype[np.generic] | None) -> Array:
        """Return a box of a factor behind the indices ``front``, in its own dtype or another one."""
        tensor = self._sources[name]
        held = self._whole(tensor, front)
        if held is not None:
            part = held[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]
        else:
            part = self._checked(tensor, front, box)
        return part if dtype is None else part.astype(dtype, copy=False)

    def _whole(self, tensor: TensorInfo, front: Index) -> Array | None:
        """Return all of a factor that is small enough, read once for all boxes of its weight."""
        key = tensor.name, front
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        shape = tensor.shape[len(front) :]
        if tensor.nbytes // math.prod(tensor.shape[: len(front)]) > HELD:
            return None
        if len(self._held) >= FEW:
            self._held.popitem(last=False)
        held = self._checked(tensor, front, ((0,) * len(shape), shape))
        if held.itemsize < 4 and held.size * 4 <= SMALL:
            held = held.astype(np.float32)
        self._held[key] = held
        return held

    def _checked(self, tensor: TensorInfo, front: Index, box: Box) -> Array:
        out, behind = np.empty(box[1], dtype_of(tensor.dtype)), _behind(front, box)
        self._reader.read(tensor, behind, out.reshape(behind[1]))
        if not np.isfinite(out).all():
            raise BrokenCheckpoint(
                f"{tensor.name}: holds values that are not finite; nothing was written",
                hint="The training has diverged: take an earlier step.",
                code="not-finite",
            )
        return out

    def _stretch(self, fusion: Fusion, at: Index, box: Box, values: Array) -> None:
        """Give a box of the sum the lengths that the magnitude says: of each row, of each column where it is turned."""
        axis = 1 if fusion.updates[0].turned else 0
        shape = self._sources[fusion.source].shape[fusion.stacked :]
        begin, count = box[0][axis], box[1][axis]
        front = self._front(fusion.magnitude, at, 1)
        every = _everything(self._sources[fusion.magnitude].shape[len(front) :])
        wanted = self._read(fusion.magnitude, front, every, values.dtype)
        if all(n == whole for d, (n, whole) in enumerate(zip(box[1], shape, strict=True)) if d != axis):
            lengths = np.sqrt(_squares(values, axis))
        else:
            lengths = self._all_lengths(fusion, at, axis)[begin - fusion.first :][:count]
        factor = wanted.reshape(-1)[begin : begin + count] / lengths.astype(values.dtype)
        values *= factor.reshape([-1 if d == axis else 1 for d in range(values.ndim)])

    def _all_lengths(self, fusion: Fusion, at: Index, axis: int) -> Array:
        """Read the whole matrix for the lengths of what runs across the boxes that are written."""
        key = fusion.source, at
        if self._lengths is not None and self._lengths[0] == key:
            return self._lengths[1]
        tensor = self._sources[fusion.source]
        shape = tensor.shape[fusion.stacked :]
        wide = np.dtype("float64" if tensor.dtype == "float64" else "float32")
        squares: Array = np.zeros(shape[axis], np.float64)
        for offset, size in bands(shape, BAND // wide.itemsize):
            stored: Array = np.empty(size, dtype_of(tensor.dtype))
            behind = _behind(at[len(fusion.lead) :], (offset, size))
            self._reader.read(tensor, behind, stored.reshape(behind[1]))
            values = stored.astype(wide)
            self._add(fusion, at, ((offset[0] + fusion.first, *offset[1:]), size), values)
            squares[offset[axis] : offset[axis] + size[axis]] += _squares(values, axis)
        self._lengths = key, np.sqrt(squares, out=squares)
        return squares


def _tiles(box: Box, most: int) -> Iterator[Box]:
    """Cut a box so that neither its rows nor its columns are more than ``most``."""
    (row, *offset), (rows, *size) = box
    for begin, extent in bands(tuple(size), most):
        for first in range(0, rows, most):
            at = tuple(o + b for o, b in zip(offset, begin, strict=True))
            yield (row + first, *at), (min(most, rows - first), *extent)


def _squares(values: Array, axis: int) -> Array:
    """Return the sum of squares over all axes but one."""
    others = tuple(d for d in range(values.ndim) if d != axis)
    return np.asarray(np.sum(np.square(values), axis=others, dtype=np.float64))


def _behind(front: Index, box: Box) -> Box:
    """Return a box behind fixed indices as one of the whole tensor."""
    return (*front, *box[0]), (*(1 for _ in front), *box[1])


def _everything(shape: Index) -> Box:
    return (0,) * len(shape), shape
