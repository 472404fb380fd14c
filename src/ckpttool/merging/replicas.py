"""Tensors that several ranks store: are the copies the same?

What every rank stores whole (buffers) is compared byte by byte: a recorded CRC-32 says what was written, not what lies
on the disk now. The replicas of HSDP are as large as the model; there the recorded CRCs do, where they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckpttool.elements import Difference, dtype_of
from ckpttool.formats.rank import PLAIN
from ckpttool.merging.result import Copies, Mismatch
from ckpttool.reading import BAND, Reader
from ckpttool.telling import tell
from ckpttool.tensors import Piece, TensorInfo, bands


@dataclass(slots=True)
class _Tally:
    """Counts so far: replicas of shards, those of them with equal CRCs, bytes read."""

    replicas: int = 0
    by_crc: int = 0
    read: int = 0
    mismatches: list[Mismatch] = field(default_factory=list)


def compare_copies(
    root: Path, tensors: Collection[TensorInfo], divided: Collection[str], *, replicas: bool
) -> tuple[Copies, int]:
    """Compare all stored copies; return what was found, and the bytes read.

    Copies of sharded tensors are compared with ``replicas``, and always those of tensors that are ``divided`` over
    several meshes: nothing but their values says that they are copies.
    """
    tally = _Tally()
    with Reader(root) as reader:
        for tensor in tensors:
            plain = tensor.placement == PLAIN
            if tensor.copies and (plain or replicas or tensor.name in divided):
                tell(tensor.name)
                _compare(tensor, reader, tally, plain=plain)
    replicated = [tensor for tensor in tensors if tensor.placement == PLAIN]
    copies = Copies(
        replicated=len(replicated),
        replicated_bytes=sum(tensor.nbytes for tensor in replicated),
        replicas=tally.replicas,
        by_crc=tally.by_crc,
        by_bytes=tally.replicas - tally.by_crc,
        checked=replicas,
        mismatches=tuple(tally.mismatches),
    )
    return copies, tally.read


def _compare(tensor: TensorInfo, reader: Reader, tally: _Tally, *, plain: bool) -> None:
    """Compare every copy with the piece of the same box, which is the one of the lowest rank."""
    differences: dict[int, dict[int, Difference]] = {}
    for piece, copies in _groups(tensor):
        unread = [copy for copy in copies if plain or not _same_crc(piece, copy)]
        if not plain:
            tally.replicas += len(copies)
            tally.by_crc += len(copies) - len(unread)
        by_rank = differences.setdefault(piece.rank or 0, {})
        for rank, difference in _differences(tensor, reader, piece, unread):
            by_rank.setdefault(rank, Difference()).join(difference)
        tally.read += piece.numel * dtype_of(tensor.dtype).itemsize * (len(unread) + bool(unread))
    for reference, by_rank in differences.items():
        changed = {rank: difference for rank, difference in by_rank.items() if difference.changed}
        if changed:
            tally.mismatches.append(_mismatch(tensor, reference, changed))


def _groups(tensor: TensorInfo) -> Iterator[tuple[Piece, list[Piece]]]:
    copies: dict[object, list[Piece]] = {}
    for copy in tensor.copies:
        copies.setdefault((copy.offset, copy.size), []).append(copy)
    for piece in tensor.pieces:
        yield piece, copies.get((piece.offset, piece.size), [])


def _same_crc(a: Piece, b: Piece) -> bool:
    """Tell whether both are the same view of storages of the same recorded length and CRC (0: not recorded)."""
    first, other = a.place, b.place
    views = (first.length, first.start, first.strides) == (other.length, other.start, other.strides)
    return views and first.crc == other.crc != 0


def _differences(
    tensor: TensorInfo, reader: Reader, piece: Piece, copies: list[Piece]
) -> Iterator[tuple[int, Difference]]:
    """Yield by rank how its copy differs; each band of the piece is read once for all of them."""
    dtype = dtype_of(tensor.dtype)
    found = [Difference() for _ in copies]
    for offset, size in bands(piece.size, BAND // dtype.itemsize) if copies else ():
        box = tuple(o + p for o, p in zip(offset, piece.offset, strict=True)), size
        mine, theirs = (np.empty(size, dtype) for _ in range(2))
        reader.read_piece(tensor, piece, box, mine)
        for copy, difference in zip(copies, found, strict=True):
            reader.read_piece(tensor, copy, box, theirs)
            difference.add(mine, theirs, tensor.dtype)
    yield from ((copy.rank or 0, difference) for copy, difference in zip(copies, found, strict=True))


def _mismatch(tensor: TensorInfo, reference: int, differences: dict[int, Difference]) -> Mismatch:
    return Mismatch(
        name=tensor.name,
        reference=reference,
        ranks=tuple(sorted(differences)),
        elements=math.prod(tensor.shape),
        changed=max(difference.changed for difference in differences.values()),
        largest=max(difference.largest for difference in differences.values()),
        nans=max(difference.nans for difference in differences.values()),
    )
