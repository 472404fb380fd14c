"""Compare two tensors of a checkpoint, band by band."""

from __future__ import annotations

import numpy as np

from ckpttool.elements import Array, Difference, dtype_of
from ckpttool.reading import BAND, Reader
from ckpttool.tensors import TensorInfo, bands


def differing(reader: Reader, a: TensorInfo, b: TensorInfo) -> str:
    """Say how two tensors of one checkpoint differ in their bytes; nothing when they do not."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    if [p.place for p in a.pieces] == [p.place for p in b.pieces]:
        return ""
    dtype, difference = dtype_of(a.dtype), Difference()
    for box in bands(a.shape, BAND // dtype.itemsize):
        mine: Array = np.empty(box[1], dtype)
        other: Array = np.empty(box[1], dtype)
        reader.read(a, box, mine)
        reader.read(b, box, other)
        difference.add(mine, other, a.dtype)
    return str(difference) if difference.changed else ""
