"""Read boxes of tensors from where their pieces lie, into buffers of the caller. Nothing larger is ever held.

A part of a piece that lies in one run of the file is one positioned read; where the buffer takes it as it lies, it
goes straight there. Other strides (a transposed view, a slice of columns) are read as the run that spans them when
that is not much more than them, and are cut in half along the widest stride until it is.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import NamedTuple

import numpy as np

from ckpttool.elements import Array, dtype_of
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.formats.payload import Payload, Seen, locate
from ckpttool.formats.torchzip import open_file
from ckpttool.tensors import Box, Index, Piece, Place, TensorInfo, Wrap, contiguous_strides, extent, overlap

BAND = 8 << 20
"""Bytes that are moved at once. Measured: less costs more system calls, more is slower (it leaves the cache)."""

OPEN_FILES = 64
"""Files that a reader keeps open; a checkpoint of 1,024 ranks has more than a process may open."""

PAYLOADS = 1 << 12
"""Places whose headers a reader remembers: those of one tensor are asked for again with every band."""

SPARSE = 4
"""How many times the wanted bytes a run may have and still be read whole."""

SCATTERED, SHORT = 64, 4096
"""The same for elements that lie in stretches of less than ``SHORT`` bytes: a call costs more than reading those."""


INDEXED = 16
"""Tensors of many pieces whose pieces a reader keeps sorted."""


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces by where they begin on one axis; ``longest`` is the most rows of it that one has."""

    axis: int
    sorted: tuple[Piece, ...]
    starts: tuple[int, ...]
    longest: int

    def overlapping(self, box: Box) -> tuple[Piece, ...]:
        """Return the pieces that a box may overlap, as far as this axis tells."""
        first, rows = box[0][self.axis], box[1][self.axis]
        begin = bisect_left(self.starts, first - self.longest + 1)
        return self.sorted[begin : bisect_left(self.starts, first + rows)]


@dataclass(frozen=True, slots=True)
class _Index:
    """The pieces of a tensor by the first ``lead`` axes, along which each is one element thick: layers, experts."""

    lead: int
    groups: Mapping[Index, _Pieces]

    def overlapping(self, box: Box) -> Iterable[Piece]:
        """Return the pieces that a box may overlap."""
        if box[1][: self.lead] == (1,) * self.lead:
            group = self.groups.get(box[0][: self.lead])
            return group.overlapping(box) if group is not None else ()
        return (piece for group in self.groups.values() for piece in group.overlapping(box))


class Run(NamedTuple):
    """Bytes of an open file that are the elements of a piece, in their order."""

    handle: int
    offset: int
    length: int


class Reader:
    """Reads from the files below ``root``. Not shared between threads: each has its own files and scratch."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._files: OrderedDict[str, int] = OrderedDict()
        self._payloads: dict[Place, Payload] = {}
        self._seen: Seen = {}
        self._indexes: OrderedDict[str, tuple[TensorInfo, _Index]] = OrderedDict()
        self._scratch: Array = np.empty(0, np.uint8)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all files; one that is asked for again is opened again."""
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, tensor: TensorInfo, box: Box, out: Array) -> None:
        """Fill ``out`` (of the box's size and the tensor's dtype) with the elements of a box of a tensor.

        Raises :class:`BrokenCheckpoint` when a file is not what its index said, or the pieces leave a hole.
        """
        filled = 0
        for piece in self._overlapping(tensor, box):
            shared = overlap(box, (piece.offset, piece.size))
            if shared is not None:
                self.read_piece(tensor, piece, shared, out[_slices(shared, box[0])])
                filled += math.prod(shared[1])
        if filled != math.prod(box[1]):
            raise BrokenCheckpoint(f"{tensor.name}: {math.prod(box[1]) - filled:,} elements are in no piece")

    def _overlapping(self, tensor: TensorInfo, box: Box) -> Iterable[Piece]:
        """Return the pieces that may overlap a box."""
        if len(tensor.pieces) < 8 or not tensor.shape:
            return tensor.pieces
        known = self._indexes.get(tensor.name)
        if known is None or known[0] is not tensor:
            if len(self._indexes) >= INDEXED:
                self._indexes.popitem(last=False)
            known = self._indexes[tensor.name] = tensor, _indexed(tensor)
        return known[1].overlapping(box)

    def run(self, tensor: TensorInfo, piece: Piece) -> Run | None:
        """Return where a whole piece lies, if it lies there in C order; the handle is good until the next call."""
        payload, size = self._payload(tensor, piece), dtype_of(tensor.dtype).itemsize
        if payload.strides is not None and not _in_order(piece.size, payload.strides):
            return None
        begin, length = payload.start * size, piece.numel * size
        if begin + length > payload.length:
            raise BrokenCheckpoint(f"{piece.place.file}: {tensor.name} reaches out of its storage")
        return Run(self._open(piece.place.file), payload.offset + begin, length)

    def read_piece(self, tensor: TensorInfo, piece: Piece, box: Box, out: Array) -> None:
        """Fill ``out`` with the part of one stored piece that a box (in the tensor's coordinates) names."""
        payload = self._payload(tensor, piece)
        steps = payload.strides if payload.strides is not None else contiguous_strides(piece.size)
        local = tuple(o - p for o, p in zip(box[0], piece.offset, strict=True))
        first = payload.start + sum(map(int.__mul__, local, steps))
        if (first + extent(box[1], steps)) * out.itemsize > payload.length:
            raise BrokenCheckpoint(f"{piece.place.file}: {tensor.name} reaches out of its storage")
        self._read(piece.place.file, payload.offset, first, steps, out)

    def _read(self, file: str, base: int, first: int, steps: Index, out: Array) -> None:
        """Read a strided box that begins at element ``first`` of a payload."""
        span, at = extent(out.shape, steps), base + first * out.itemsize
        if span == out.size and _in_order(out.shape, steps):
            if out.flags.c_contiguous:
                self._fill(file, at, out.reshape(-1).view(np.uint8))
            else:
                self._through_scratch(file, at, span, contiguous_strides(out.shape), out)
        elif span * out.itemsize <= BAND and span <= _sparse(out, steps) * out.size:
            self._through_scratch(file, at, span, steps, out)
        else:
            self._halves(file, base, first, steps, out)

    def _through_scratch(self, file: str, at: int, span: int, steps: Index, out: Array) -> None:
        """Read a run and copy the elements that are wanted to their places; too large a run goes in halves."""
        if span * out.itemsize > BAND:
            self._halves(file, at, 0, steps, out)
            return
        if self._scratch.size < span * out.itemsize:
            self._scratch = np.empty(BAND, np.uint8)
        run = self._scratch[: span * out.itemsize]
        self._fill(file, at, run)
        bytes_ = tuple(step * out.itemsize for step in steps)
        out[...] = np.ndarray(out.shape, out.dtype, run.data, 0, bytes_)

    def _halves(self, file: str, base: int, first: int, steps: Index, out: Array) -> None:
        axis = max((d for d in range(out.ndim) if out.shape[d] > 1), key=lambda d: steps[d] * (out.shape[d] - 1))
        middle = out.shape[axis] // 2
        before, behind = (slice(None),) * axis + (slice(0, middle),), (slice(None),) * axis + (slice(middle, None),)
        self._read(file, base, first, steps, out[before])
        self._read(file, base, first + middle * steps[axis], steps, out[behind])

    def _payload(self, tensor: TensorInfo, piece: Piece) -> Payload:
        known = self._payloads.get(piece.place)
        if known is None:
            if len(self._payloads) >= PAYLOADS:
                self._payloads.clear()
            known = self._payloads[piece.place] = self._locate(piece.place)
        if known.dtype and (known.dtype, known.size) != (tensor.dtype, piece.size):
            raise BrokenCheckpoint(
                f"{piece.place.file}: the record of {tensor.name} holds {known.dtype} {list(known.size)}, "
                f"the index says {tensor.dtype} {list(piece.size)}",
                code="record-disagrees",
            )
        return known

    def _locate(self, place: Place) -> Payload:
        try:
            return locate(self._path(place.file), self._open(place.file), place, self._seen)
        except OSError as error:
            raise BrokenCheckpoint(f"{self._path(place.file)}: {error.strerror}", code="unreadable") from error
        except BrokenCheckpoint as error:
            if place.wrap is not Wrap.ZIP_ARCHIVE:
                raise
            where = f"{self._path(place.file)}: damaged at byte {place.offset:,}, where a tensor begins"
            hint = error.hint or "Copy the file again from where it was written."
            raise BrokenCheckpoint(f"{where} ({error.message})", hint=hint, code=error.code) from error

    def _path(self, file: str) -> str:
        """Return where a file lies; those of other directories have absolute names. Text is faster than a Path."""
        return os.path.join(self._root, file)  # noqa: PTH118

    def _open(self, file: str) -> int:
        handle = self._files.get(file)
        if handle is not None:
            self._files.move_to_end(file)
            return handle
        if len(self._files) >= OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        try:
            handle = open_file(self._path(file))
        except OSError as error:
            raise NotACheckpoint(f"{self._path(file)}: {error.strerror}", code="unreadable") from error
        self._files[file] = handle
        return handle

    def _fill(self, file: str, at: int, out: Array) -> None:
        """Read exactly as many bytes as fit; a short file is one that was changed since its index was read."""
        handle, view = self._open(file), memoryview(out.data).cast("B") if out.size else memoryview(b"")
        while view:
            try:
                count = os.preadv(handle, [view], at)
            except OSError as error:
                raise BrokenCheckpoint(f"{self._path(file)}: {error.strerror}", code="unreadable") from error
            if not count:
                raise BrokenCheckpoint(f"{self._path(file)}: ends early; was it changed meanwhile?", code="truncated")
            view, at = view[count:], at + count


def _indexed(tensor: TensorInfo) -> _Index:
    """Sort the pieces of a tensor: by layer and expert, then along the axis that comes next."""
    last = len(tensor.shape) - 1
    lead = next((axis for axis in range(last) if any(piece.size[axis] != 1 for piece in tensor.pieces)), last)
    groups: dict[Index, list[Piece]] = {}
    for piece in tensor.pieces:
        groups.setdefault(piece.offset[:lead], []).append(piece)
    return _Index(lead, {offset: _along(lead, group) for offset, group in groups.items()})


def _along(axis: int, pieces: list[Piece]) -> _Pieces:
    ordered = tuple(sorted(pieces, key=lambda piece: piece.offset[axis]))
    return _Pieces(axis, ordered, tuple(p.offset[axis] for p in ordered), max(p.size[axis] for p in ordered))


def _slices(box: Box, origin: Index) -> tuple[slice | EllipsisType, ...]:
    """Return the index of a box in the array of a larger one; the dots keep a 0-d result an array."""
    return (*(slice(o - begin, o - begin + n) for o, n, begin in zip(*box, origin, strict=True)), ...)


def _sparse(out: Array, steps: Index) -> int:
    """Return how many times the wanted bytes a run may have, by how long the stretches in it are."""
    stretch = out.itemsize
    for n, step, want in zip(out.shape[::-1], steps[::-1], contiguous_strides(out.shape)[::-1], strict=True):
        if n > 1 and step != want:
            break
        stretch *= n
    return SPARSE if stretch >= SHORT else SCATTERED


def _in_order(size: Index, steps: Index) -> bool:
    """Tell whether a strided box lies in C order without gaps; an axis of one element may have any stride."""
    wanted = contiguous_strides(size)
    return all(n == 1 or step == want for n, step, want in zip(size, steps, wanted, strict=True))
