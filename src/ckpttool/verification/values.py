"""Elements that no training means: NaN, infinity, tensors of nothing but zeros. Counted by bits, band by band."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckpttool.crew import Crew, Ready
from ckpttool.elements import Array, dtype_of
from ckpttool.errors import CkpttoolError, Problem, Refused
from ckpttool.formats.folding import folded
from ckpttool.reading import Reader
from ckpttool.tensors import DTYPE_BITS, Box, Piece, TensorInfo, bands
from ckpttool.verification.result import ValueCheck

PART = 1 << 20
"""Bytes that are looked at at once: they stay in the cache of a core while their bits are counted."""


class Bits(NamedTuple):
    """How a format of floating point writes what is no number: all bits but the sign, NaN from here on, infinity."""

    unsigned: str
    magnitude: int
    infinity: int | None
    nan: int


_FORMATS: Mapping[str, Bits] = {
    "float64": Bits("u8", 0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0001),
    "float32": Bits("u4", 0x7FFF_FFFF, 0x7F80_0000, 0x7F80_0001),
    "float16": Bits("u2", 0x7FFF, 0x7C00, 0x7C01),
    "bfloat16": Bits("u2", 0x7FFF, 0x7F80, 0x7F81),
    "float8_e5m2": Bits("u1", 0x7F, 0x7C, 0x7D),
    "float8_e4m3fn": Bits("u1", 0x7F, None, 0x7F),
    "float8_e4m3fnuz": Bits("u1", 0xFF, None, 0x80),
    "float8_e5m2fnuz": Bits("u1", 0xFF, None, 0x80),
    "float8_e8m0fnu": Bits("u1", 0xFF, None, 0xFF),
}
_PARTS = {"complex128": "float64", "complex64": "float32", "complex32": "float16"}
"""The two numbers that a complex one is."""

_ONLY_ONE = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
"""Formats in which NaN is this pattern alone, the sign included."""


@dataclass(slots=True)
class Count:
    """What the elements of one tensor are, so far; a complex one is two of them."""

    dtype: str
    elements: int = 0
    nan: int = 0
    inf: int = 0
    zero: bool = True

    def add(self, values: Array) -> None:
        """Count one more contiguous part."""
        self.elements += values.size
        raw = values.reshape(-1).view(np.uint8)
        form = _FORMATS.get(_PARTS.get(self.dtype, self.dtype))
        bits = raw.view(form.unsigned) if form is not None else raw
        if form is not None:
            magnitude = bits & bits.dtype.type(form.magnitude)
            self._count(magnitude, form)
            bits = magnitude
        if self.zero:
            self.zero = not bits.any()

    def _count(self, magnitude: Array, form: Bits) -> None:
        kind = magnitude.dtype.type
        if self.dtype in _ONLY_ONE:
            self.nan += int(np.count_nonzero(magnitude == kind(form.nan)))
            return
        first = form.infinity if form.infinity is not None else form.nan
        if magnitude.max(initial=0) < first:
            return
        self.nan += int(np.count_nonzero(magnitude >= kind(form.nan)))
        if form.infinity is not None:
            self.inf += int(np.count_nonzero(magnitude == kind(form.infinity)))


class Stored(NamedTuple):
    """A tensor of a source: where that one lies, how it is called from the base on."""

    root: Path
    where: str
    tensor: TensorInfo

    @property
    def nbytes(self) -> int:
        """Bytes that are read of it: every element that is here once, also where others are missing."""
        return sum(piece.numel for piece in self.tensor.pieces) * dtype_of(self.tensor.dtype).itemsize


def can_be_counted(tensor: TensorInfo) -> bool:
    """Tell whether the elements of a tensor are whole bytes; smaller ones have neither NaN nor infinity."""
    return DTYPE_BITS[tensor.dtype] % 8 == 0


def count_values(stored: Sequence[Stored], threads: int, ready: Ready) -> tuple[list[ValueCheck], list[Problem], int]:
    """Return what the elements of tensors are, what speaks against it, and how many bytes were read."""
    crew: Crew[_Readers] = Crew(threads, _begin, ready(sum(one.nbytes for one in stored)))

    def count(readers: _Readers, one: Stored) -> tuple[ValueCheck, list[Problem]]:
        return _count(readers.of(one.root), one, crew)

    found = list(crew.run(count, stored))
    values = [value for value, _ in found]
    problems = [problem for _, some in found for problem in some]
    return values, [*problems, *_zeros(values)], sum(one.nbytes for one in stored)


class _Readers:
    """The readers of one thread, a root each, and its buffer."""

    def __init__(self) -> None:
        self._by_root: dict[Path, Reader] = {}
        self.buffer: Array = np.empty(PART, np.uint8)

    def of(self, root: Path) -> tuple[Reader, Array]:
        """Return the reader of a root, and the buffer."""
        return self._by_root.setdefault(root, Reader(root)), self.buffer

    def close(self) -> None:
        for reader in self._by_root.values():
            reader.close()


def _begin() -> tuple[_Readers, Callable[[], None]]:
    readers = _Readers()
    return readers, readers.close


def _count(tools: tuple[Reader, Array], one: Stored, crew: Crew[_Readers]) -> tuple[ValueCheck, list[Problem]]:
    reader, buffer = tools
    tensor, dtype = one.tensor, dtype_of(one.tensor.dtype)
    count, problems = Count(tensor.dtype), list[Problem]()
    shown = f"{one.where}/{tensor.name}" if one.where else tensor.name
    try:
        for piece, box in _boxes(tensor, PART // dtype.itemsize):
            size = math.prod(box[1])
            part = buffer[: size * dtype.itemsize].view(dtype).reshape(box[1])
            reader.read_piece(tensor, piece, box, part)
            count.add(part)
            crew.advance(part.nbytes)
    except Refused:
        raise
    except CkpttoolError as error:
        problems.append(Problem(code=error.code, message=f"{shown}: {error.message}", path=one.where, hint=error.hint))
    for code, number, what in (("not-a-number", count.nan, "NaN"), ("infinite", count.inf, "infinite")):
        if number:
            message = f"{shown}: {number:,} of {count.elements:,} elements are {what}"
            problems.append(Problem(code=code, message=message, path=one.where))
    zero = count.zero and count.elements > 0
    told = ValueCheck(
        name=tensor.name, where=one.where, elements=count.elements, nan=count.nan, inf=count.inf, zero=zero
    )
    return told, problems


def _boxes(tensor: TensorInfo, most: int) -> Iterator[tuple[Piece, Box]]:
    """Yield boxes in the coordinates of the tensor, each of one piece and small enough."""
    for piece in tensor.pieces:
        for offset, size in bands(piece.size, most):
            yield piece, (tuple(a + b for a, b in zip(piece.offset, offset, strict=True)), size)


def _zeros(values: Sequence[ValueCheck]) -> Iterator[Problem]:
    """Yield a note of the tensors that hold nothing but zeros, a directory each."""
    by_folder: dict[str, list[str]] = {}
    for value in values:
        if value.zero:
            by_folder.setdefault(value.where, []).append(value.name)
    for where, names in by_folder.items():
        what = f"nothing but zeros: {', '.join(pattern for pattern, _ in folded(names))}"
        message = f"{where}: {what}" if where else what
        yield Problem(code="all-zero", message=message, path=where, severity="note")
