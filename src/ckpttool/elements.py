"""Elements of tensors in NumPy: dtypes by torch's names, casts that count what they lose, comparison.

bfloat16 and the fp8 types come from ml_dtypes. A dtype that NumPy cannot compute with is moved as raw bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from ckpttool.tensors import DTYPE_BITS

Array = np.ndarray[Any, np.dtype[Any]]

_INFINITY: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "float64": (0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000),
        "float32": (0x7FFF_FFFF, 0x7F80_0000),
        "float16": (0x7FFF, 0x7C00),
        "bfloat16": (0x7FFF, 0x7F80),
    }
)
"""All bits but the sign, and those of infinity."""


@lru_cache(maxsize=64)
def dtype_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype for torch's name; raw bytes of that size where NumPy has none."""
    if name == "float4_e2m1fn_x2" or DTYPE_BITS[name] % 8:
        return np.dtype(f"V{-(-DTYPE_BITS[name] // 8)}")
    known = getattr(ml_dtypes, name, None)
    try:
        return np.dtype(known or name)
    except TypeError:
        return np.dtype(f"V{DTYPE_BITS[name] // 8}")


def cast(source: Array, target: Array, dtype: str, to: str) -> int:
    """Cast ``source`` (of ``dtype``) into ``target`` (of ``to``), to nearest even; NaN stays NaN.

    Returns how many finite elements became infinite.
    """
    with np.errstate(all="ignore"):
        narrow = _to_odd(source) if (dtype, to) == ("float64", "bfloat16") else source
        np.copyto(target, narrow, casting="unsafe")
    infinite = _infinite(target, to)
    return infinite - _infinite(source, dtype) if infinite else 0


def _infinite(values: Array, dtype: str) -> int:
    mask, infinity = _INFINITY[dtype]
    bits = values.view(f"u{values.itemsize}")
    return int(np.count_nonzero((bits & bits.dtype.type(mask)) == infinity))


def _to_odd(values: Array) -> Array:
    """Round float64 to float32 so that rounding once more to fewer bits is as if it had been rounded once.

    What is inexact gets the last bit set on the side towards zero (rounding to odd), which no later tie can hide.
    """
    nearest = values.astype(np.float32)
    inexact = (nearest.astype(np.float64) != values) & np.isfinite(nearest)
    too_far = inexact & (np.abs(nearest.astype(np.float64)) > np.abs(values))
    bits = nearest.view(np.uint32)
    bits[too_far] -= 1
    bits[inexact] |= 1
    return nearest


TILE, FEW = 32, 64
"""Rows that are turned at once, so that both sides stay in the cache, and matrices for which that pays."""


def turn(source: Array, target: Array) -> None:
    """Copy a view of an array whose axes have been exchanged; measured, three times as fast as one assignment."""
    axes = sorted((axis for axis in range(source.ndim) if source.shape[axis] > 1), key=lambda a: source.strides[a])
    others = [axis for axis in range(source.ndim) if axis not in axes[:2]]
    if len(axes) < 2 or axes[0] == source.ndim - 1 or math.prod(source.shape[axis] for axis in others) > FEW:
        target[...] = source
        return
    index: list[int | slice] = [slice(None)] * source.ndim
    for lead in product(*(range(source.shape[axis]) for axis in others)):
        for axis, at in zip(others, lead, strict=True):
            index[axis] = at
        for begin in range(0, source.shape[axes[1]], TILE):
            index[axes[1]] = slice(begin, begin + TILE)
            target[tuple(index)] = source[tuple(index)]


@dataclass(slots=True)
class Difference:
    """How two tensors differ. ``changed`` counts elements whose bits differ, ``nans`` those of them with a NaN."""

    elements: int = 0
    changed: int = 0
    nans: int = 0
    largest: float = 0.0

    def add(self, a: Array, b: Array, dtype: str) -> None:
        """Count one more part of both, given contiguous arrays of the same shape and dtype."""
        a, b = a.reshape(-1), b.reshape(-1)
        self.elements += a.size
        where = bits(a) != bits(b)
        where = where if where.ndim == 1 else where.any(axis=1)
        changed = int(np.count_nonzero(where))
        self.changed += changed
        if changed and dtype_of(dtype).type is not np.void:
            self._measure(a[where], b[where], dtype)

    def join(self, other: Difference) -> None:
        """Count what another one has counted of further parts."""
        self.elements += other.elements
        self.changed += other.changed
        self.nans += other.nans
        self.largest = max(self.largest, other.largest)

    def __str__(self) -> str:
        nans = f", {self.nans:,} with a NaN" if self.nans else ""
        return f"{self.changed:,} of {self.elements:,} elements differ, by up to {self.largest:.3g}{nans}"

    def _measure(self, a: Array, b: Array, dtype: str) -> None:
        if a.dtype.kind in "iu":  # 64 bits do not fit into a float
            apart: Array = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        else:
            wide = np.complex128 if dtype.startswith("complex") else np.float64
            with np.errstate(all="ignore"):
                x, y = a.astype(wide), b.astype(wide)
                unclear = np.isnan(x) | np.isnan(y)
                self.nans += int(np.count_nonzero(unclear))
                apart = np.abs(x - y)[~unclear]
            apart = apart[~np.isnan(apart)]  # the same infinity on both sides
        self.largest = max(self.largest, float(apart.max(initial=0)))


def bits(values: Array) -> Array:
    """View elements as unsigned integers; those of other sizes as rows of their bytes."""
    size = values.itemsize
    return values.view(f"u{size}") if size in (1, 2, 4, 8) else values.view(np.uint8).reshape(-1, size)
