"""The elements of a target, band by band: gathered from its sources, fused, turned and cast as a plan says.

Whoever takes them (a file that is written, a comparison) gives the room for each band; nothing larger is held but the
slice of a target whose axes are exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ckpttool.elements import Array, cast, dtype_of, turn
from ckpttool.fusing import PART, Fuser
from ckpttool.lowrank import Fusion
from ckpttool.plan import Arrangement, Target
from ckpttool.reading import BAND, Reader
from ckpttool.tensors import Box, TensorInfo, bands

TURNED = 48 << 20
"""Bytes of a target that is rearranged which are held at once: an expert of most models. More go in slices."""

Room = Callable[[int], Array]
"""Returns that many bytes, at most a band, to be filled before it is called again."""


class Band(NamedTuple):
    """Elements of a target that follow those of the band before, in its dtype, flat.

    ``lost`` is how many finite ones its cast made infinite (told with the first band of a slice that is turned).
    """

    elements: Array
    lost: int


class Gatherer:
    """Reads targets band by band. Not shared between threads: each has its own files and scratch."""

    def __init__(self, sources: Mapping[str, TensorInfo], fusions: Mapping[str, Fusion], reader: Reader) -> None:
        self._sources, self._reader = sources, reader
        self._fuser = Fuser(reader, sources, fusions)
        self._uncast: Array = np.empty(0, np.uint8)
        self._wide: Array = np.empty(0, np.float32)
        self._held: Array = np.empty(0, np.uint8)

    def copies(self, target: Target) -> bool:
        """Tell whether a target is one source as it is stored, byte for byte."""
        tensor = self._sources[target.parts[0].source]
        return target.is_copy_of(tensor) and self._fuser.of(tensor.name) is None

    def bands(self, target: Target, room: Room, part: Box | None = None) -> Iterator[Band]:
        """Yield all elements of a target in order, or those of a ``part`` that is contiguous in its concatenation.

        A band is good until the next one is asked for. Raises what :meth:`Reader.read` and :meth:`Fuser.fuse` raise.
        """
        if target.arrangement is not None and target.arrangement.moves:
            yield from self._turn(target, target.arrangement, room)
            return
        shape, dtype = target.concatenated, dtype_of(target.dtype)
        offset, size = ((0,) * len(shape), shape) if part is None else part
        for start, extent in bands(size, self._most(target)):
            box = tuple(map(int.__add__, offset, start)), extent
            elements = room(math.prod(extent) * dtype.itemsize).view(dtype)
            yield Band(elements, self._gather(target, box, elements.reshape(extent)))

    def _most(self, target: Target) -> int:
        """Return how many elements of a target are moved at once."""
        dtypes = {target.dtype, *(self._sources[part.source].dtype for part in target.parts)}
        most = BAND // max(dtype_of(dtype).itemsize for dtype in dtypes)
        return min(most, PART) if any(self._fuser.of(part.source) for part in target.parts) else most

    def _gather(self, target: Target, box: Box, out: Array) -> int:
        """Fill an array with a box of the concatenation of a target's parts."""
        lost = 0
        for name, rows, source in target.sources(box):
            lost += self._read(self._sources[name], source, target, out[rows])
        return lost

    def _turn(self, target: Target, how: Arrangement, room: Room) -> Iterator[Band]:
        """Yield a target whose elements change their order: a slice of it is gathered as it is stored, then turned."""
        dtype, most = dtype_of(target.dtype), self._most(target)
        if self._held.size < min(TURNED, target.nbytes):
            self._held = np.empty(min(TURNED, target.nbytes), np.uint8)
        for box in bands(how.turned, self._held.size // dtype.itemsize):
            offset, size = (tuple(box[side][how.order.index(axis)] for axis in range(len(how.view))) for side in (0, 1))
            held, lost = self._held[: math.prod(size) * dtype.itemsize].view(dtype).reshape(size), 0
            for rows, where in how.runs((offset, size)):
                run = held[where].reshape(rows[1])
                for start, extent in bands(rows[1], most):
                    part = run[tuple(slice(o, o + n) for o, n in zip(start, extent, strict=True))]
                    lost += self._gather(target, (tuple(map(int.__add__, rows[0], start)), extent), part)
            for elements in _turned(held.transpose(how.order), room):
                yield Band(elements, lost)
                lost = 0

    def _read(self, tensor: TensorInfo, box: Box, target: Target, out: Array) -> int:
        fusion = self._fuser.of(tensor.name)
        if tensor.dtype == target.dtype and not target.shift and fusion is None:
            self._reader.read(tensor, box, out.reshape(box[1]))
            return 0
        stored, count = dtype_of(tensor.dtype), math.prod(box[1])
        if not self._uncast.size:
            self._uncast = np.empty(BAND, np.uint8)
        uncast = self._uncast[: count * stored.itemsize].view(stored)
        self._reader.read(tensor, box, uncast.reshape(box[1]))
        if not target.shift and fusion is None:
            return cast(uncast.reshape(out.shape), out, tensor.dtype, target.dtype)
        # in a dtype in which it is exact enough to be rounded once, by the cast
        wide = "float64" if "float64" in (tensor.dtype, target.dtype) else "float32"
        values = self._widened(uncast, wide)
        if fusion is not None:
            self._fuser.fuse(fusion, box, values.reshape(box[1]))
        if target.shift:
            values += target.shift
        return cast(values.reshape(out.shape), out, wide, target.dtype)

    def _widened(self, values: Array, dtype: str) -> Array:
        """Return elements in a wider dtype, in a buffer that lasts until the next call."""
        if self._wide.size < values.size or self._wide.dtype != dtype:
            self._wide = np.empty(values.size, dtype)
        wide = self._wide[: values.size]
        np.copyto(wide, values, casting="unsafe")
        return wide


def _turned(turned: Array, room: Room) -> Iterator[Array]:
    for start, extent in bands(turned.shape, BAND // turned.itemsize):
        out = room(math.prod(extent) * turned.itemsize).view(turned.dtype)
        turn(turned[tuple(slice(o, o + n) for o, n in zip(start, extent, strict=True))], out.reshape(extent))
        yield out
