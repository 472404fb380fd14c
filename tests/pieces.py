"""Read checkpoints piece by piece with NumPy, as their places say: the slow and obvious way."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from ckpttool.source import Source
from ckpttool.tensors import Piece, Place, TensorInfo, Wrap, contiguous_strides

Array = np.ndarray[Any, np.dtype[Any]]


def dtype_of(name: str) -> np.dtype[Any]:
    """NumPy's dtype of torch's name."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def read_piece(root: Path, info: TensorInfo, piece: Piece) -> Array:
    """The elements of a piece."""
    dtype, place = dtype_of(info.dtype), piece.place
    if place.wrap is Wrap.ZIP_ARCHIVE:
        saved = torch.load(io.BytesIO(_bytes(root, place)), weights_only=True)
        assert tuple(saved.shape) == piece.size
        whole: Array = np.ndarray(piece.size, dtype, _raw(saved))
        return whole
    strides = contiguous_strides(piece.size) if place.strides is None else place.strides
    offset, steps = place.start * dtype.itemsize, [step * dtype.itemsize for step in strides]
    view: Array = np.ndarray(piece.size, dtype, _payload(root, place), offset, steps)
    return view


def _bytes(root: Path, place: Place) -> bytes:
    return (root / place.file).read_bytes()[place.offset : place.offset + place.length]


def _payload(root: Path, place: Place) -> bytes:
    """The record whose local header lies at the offset, by the standard library."""
    if place.wrap is Wrap.RAW:
        return _bytes(root, place)
    with zipfile.ZipFile(root / place.file) as archive:
        entry = next(entry for entry in archive.infolist() if entry.header_offset == place.offset)
        assert entry.file_size == place.length
        return archive.read(entry)


def read_tensor(root: Path, info: TensorInfo) -> Array:
    """The whole tensor; every element must come from exactly one piece, and copies must equal their piece."""
    whole = np.zeros(info.shape, dtype_of(info.dtype))
    times = np.zeros(info.shape, np.int64)
    for piece in info.pieces:
        box = _box(piece)
        whole[box] = read_piece(root, info, piece)
        times[box] += 1
    assert (times == 1).all(), info.name
    for copy in info.copies:
        assert read_piece(root, info, copy).tobytes() == whole[_box(copy)].tobytes(), info.name
    return whole


def _box(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(piece.offset, piece.size, strict=True))


def differing(source: Source, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that are not, bit for bit, what torch says they are."""
    assert source.tensors.keys() == expected.keys()
    return [name for name, info in source.tensors.items() if not _same(source.root, info, expected[name])]


def _same(root: Path, info: TensorInfo, value: torch.Tensor) -> bool:
    said = (str(value.dtype).removeprefix("torch."), tuple(value.shape))
    return (info.dtype, info.shape) == said and read_tensor(root, info).tobytes() == _raw(value)


def _raw(value: torch.Tensor) -> bytes:
    raw: bytes = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return raw
