"""Names, boxes and bytes: where each part of a logical tensor lies on disk.

A :class:`Piece` is a box of one tensor (in the coordinates of the whole tensor) and the place of its bytes.
A :class:`TensorInfo` is a tensor as the sum of its pieces. Both are plain data: nothing here opens a file.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from types import MappingProxyType

Index = tuple[int, ...]

Box = tuple[Index, Index]
"""Offset and size in every dimension, in the coordinates of the whole tensor."""

MOST_DIMENSIONS = 1000
"""Dimensions of a tensor that are read; the product of more may be a number that takes minutes to work out."""

MOST_COMPARISONS = 5_000_000
"""Comparisons of boxes that an irregular tiling may cost; no real checkpoint needs them."""

DTYPE_BITS: Mapping[str, int] = MappingProxyType(
    {
        "float64": 64,
        "float32": 32,
        "float16": 16,
        "bfloat16": 16,
        "float8_e4m3fn": 8,
        "float8_e4m3fnuz": 8,
        "float8_e5m2": 8,
        "float8_e5m2fnuz": 8,
        "float8_e8m0fnu": 8,
        "float6_e2m3fn": 6,
        "float6_e3m2fn": 6,
        "float4_e2m1fn": 4,
        "float4_e2m1fn_x2": 8,
        "complex128": 128,
        "complex64": 64,
        "complex32": 32,
        "int64": 64,
        "int32": 32,
        "int16": 16,
        "int8": 8,
        "uint64": 64,
        "uint32": 32,
        "uint16": 16,
        "uint8": 8,
        "bool": 8,
        "qint32": 32,
        "qint8": 8,
        "quint8": 8,
    }
)
"""Bits of one element, by torch's name of the dtype (safetensors' sub-byte types under names of their own)."""


CASTABLE = frozenset({"float64", "float32", "float16", "bfloat16"})
"""What is cast. Integers, bools, complex numbers and fp8 (whose scales lie elsewhere) never are."""


class Wrap(enum.Enum):
    """What lies at a place's offset: the elements themselves, or a container that has to be opened first."""

    RAW = "raw"
    ZIP_ENTRY = "zip entry"  # the local header of a stored zip entry; the elements follow it
    ZIP_ARCHIVE = "zip archive"  # a whole ``torch.save`` archive of one tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a piece's bytes lie.

    ``file`` is relative to the source's root; ``offset`` and ``length`` (bytes) delimit what ``wrap`` names;
    ``start`` is the first element, in elements from the begin of the payload; ``strides`` are in elements
    (``None``: C order). ``crc`` is the CRC-32 of the whole payload as its writer recorded it; 0 is "not recorded".
    Finding the payload inside a container is left to the reader, because opening a checkpoint must not touch every
    record of it.
    """

    file: str
    offset: int
    length: int
    wrap: Wrap = Wrap.RAW
    start: int = 0
    strides: Index | None = None
    crc: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """The box ``offset``, ``size`` of a tensor; ``rank`` is the global rank that stored it, where known."""

    offset: Index
    size: Index
    place: Place
    rank: int | None = None

    @property
    def numel(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.size)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A logical tensor.

    ``pieces`` are the distinct boxes; ``copies`` are further stored copies of those boxes (replicated buffers,
    the replicas of HSDP). ``placement`` says in words how ranks share it.
    """

    name: str
    dtype: str
    shape: Index
    pieces: tuple[Piece, ...]
    copies: tuple[Piece, ...] = ()
    placement: str = ""

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, counted once, whatever was stored."""
        return dtype_bytes(self.dtype, self.numel)


def dtype_bytes(dtype: str, numel: int) -> int:
    """Bytes of ``numel`` elements, rounded up to a byte; raises ``KeyError`` for a dtype we do not know."""
    return -(-DTYPE_BITS[dtype] * numel // 8)


def contiguous_strides(shape: Sequence[int]) -> Index:
    """Strides in elements of a C-ordered tensor of this shape."""
    return tuple(accumulate((max(n, 1) for n in reversed(shape[1:])), int.__mul__, initial=1))[::-1] if shape else ()


def extent(size: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first to the last one of a strided box, both included; 0 for an empty box."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True))


def overlap(box: Box, other: Box) -> Box | None:
    """Return the box that two boxes share, or ``None`` when they share no element."""
    starts = tuple(map(max, box[0], other[0]))
    size = tuple(min(o + n, p + m) - s for o, n, p, m, s in zip(*box, *other, starts, strict=True))
    return (starts, size) if all(n > 0 for n in size) else None


def bands(shape: Index, most: int) -> Iterator[Box]:
    """Cut a tensor into boxes that are contiguous in C order, in that order, of at most ``most`` elements each."""
    if not math.prod(shape):
        return
    most = max(most, 1)
    axis = next((d for d in range(len(shape)) if math.prod(shape[d + 1 :]) <= most), len(shape))
    if axis == len(shape):  # a single element, whatever it takes
        yield (), ()
        return
    step = max(most // math.prod(shape[axis + 1 :]), 1)
    behind, whole = (0,) * (len(shape) - axis - 1), shape[axis + 1 :]
    for lead in product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            yield (*lead, start, *behind), ((1,) * axis + (min(step, shape[axis] - start), *whole))


def is_cut_in_rows(tensor: TensorInfo) -> bool:
    """Tell whether every piece is a run of whole rows, and so contiguous in the tensor."""
    return bool(tensor.shape) and all(piece.size[1:] == tensor.shape[1:] or not piece.numel for piece in tensor.pieces)


def tiling_faults(shape: Index, boxes: Iterable[tuple[Index, Index]]) -> Iterator[str]:
    """Say why these (offset, size) boxes do not cover ``shape`` exactly once; nothing when they do."""
    boxes = list(boxes)
    if boxes == [((0,) * len(shape), shape)]:
        return
    inside: list[tuple[Index, Index]] = []
    for offset, size in boxes:
        if not _fits(shape, offset, size):
            yield f"box at {list(offset)} of size {list(size)} lies outside {list(shape)}"
        elif math.prod(size):
            inside.append((offset, size))
    try:
        clash = _overlap(inside)
    except TimeoutError:
        yield "cut too irregularly to check"
        return
    if clash:
        yield f"boxes at {list(clash[0])} and {list(clash[1])} overlap"
    held, wanted = sum(math.prod(size) for _, size in inside), math.prod(shape)
    if not clash and held < wanted:
        yield f"{wanted - held:,} of {wanted:,} elements are in no piece"


def _fits(shape: Index, offset: Index, size: Index) -> bool:
    return len(offset) == len(size) == len(shape) and all(
        o >= 0 and n >= 0 and o + n <= whole for o, n, whole in zip(offset, size, shape, strict=True)
    )


def _overlap(boxes: list[tuple[Index, Index]]) -> tuple[Index, Index] | None:
    """Return the offsets of two boxes that share an element.

    Boxes on a grid (every real checkpoint) differ in their offset or clash at once; only irregular ones are
    swept along the dimension with the most cuts, comparing each with those still open.
    """
    if len(boxes) < 2:
        return None
    seen: set[Index] = set()
    for offset, _ in boxes:
        if offset in seen:
            return offset, offset
        seen.add(offset)
    if _on_a_grid(boxes):
        return None
    axis = max(range(len(boxes[0][0])), key=lambda d: len({offset[d] for offset, _ in boxes}))
    return _sweep(sorted(boxes, key=lambda box: box[0][axis]), axis)


def _on_a_grid(boxes: list[tuple[Index, Index]]) -> bool:
    """Tell whether every box spans exactly one cell of the grid that all their edges draw."""
    for axis in range(len(boxes[0][0])):
        edges = sorted({o[axis] for o, _ in boxes} | {o[axis] + n[axis] for o, n in boxes})
        follows = dict(pairwise(edges))
        if any(follows[o[axis]] != o[axis] + n[axis] for o, n in boxes):
            return False
    return True


def _sweep(boxes: list[tuple[Index, Index]], axis: int) -> tuple[Index, Index] | None:
    open_boxes: list[tuple[Index, Index]] = []
    looks = 0
    for offset, size in boxes:
        looks += len(open_boxes)
        if looks > MOST_COMPARISONS:
            raise TimeoutError
        open_boxes = [b for b in open_boxes if b[0][axis] + b[1][axis] > offset[axis]]
        for other, extent_ in open_boxes:
            if all(o < p + m and p < o + n for o, n, p, m in zip(offset, size, other, extent_, strict=True)):
                return other, offset
        open_boxes.append((offset, size))
    return None
