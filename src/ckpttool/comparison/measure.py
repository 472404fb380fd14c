"""How far apart two runs of elements are: bits, differences, norms, units in the last place. Sums are in float64.

Elements are taken in parts that stay in the cache of a core, so that one pass over memory serves all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ckpttool.comparison.result import Metrics
from ckpttool.elements import Array, bits, cast, dtype_of
from ckpttool.tensors import CASTABLE

PART = 1 << 15
"""Elements that are measured at once: their copies in float64 are 256 KiB each."""

_EXPONENTS = 1 << 12
"""Values that sign and exponent of a float64 have together."""

_ORDER = ("float64", "float32", "float16", "bfloat16")
"""Plain floats from the finest to the coarsest."""


def finest(*dtypes: str) -> str:
    """Return which of these plain floats has the most digits; bfloat16 and float16 together fit into float32."""
    if set(dtypes) == {"float16", "bfloat16"}:
        return "float32"
    return min(dtypes, key=_ORDER.index)


def coarsest(*dtypes: str) -> str:
    """Return which of these plain floats has the fewest digits."""
    return max(dtypes, key=_ORDER.index)


def are_equal(a: Array, b: Array) -> bool:
    """Tell whether two flat contiguous runs of one dtype have the same bits, a word at a time."""
    a, b = a.view(np.uint8), b.view(np.uint8)
    words = a.size & ~7
    same = np.array_equal(a[:words].view(np.uint64), b[:words].view(np.uint64))
    return same and np.array_equal(a[words:], b[words:])


@dataclass(slots=True)
class Sums:
    """What is added up over finite elements: squares of A, of B and of their difference, products, magnitudes.

    A number that a square of float64 cannot hold makes them infinite: what follows from that is then unknown.
    """

    a: float = 0.0
    b: float = 0.0
    product: float = 0.0
    apart: float = 0.0
    magnitude: float = 0.0
    largest: float = 0.0
    count: int = 0

    def add(self, x: Array, y: Array, apart: Array) -> None:
        """Count finite elements in float64 (of complex ones both parts), and how far they are apart."""
        self.a += float(x @ x)
        self.b += float(y @ y)
        self.product += float(x @ y)
        self.apart += float(apart @ apart)
        self.magnitude += float(apart.sum())
        self.largest = max(self.largest, float(apart.max(initial=0.0)))
        self.count += apart.size


@dataclass(slots=True)
class Measure:
    """The difference of two tensors in the making. Both sides come in ``dtype``; ``ulp`` is the dtype of the units.

    ``tolerance`` is absolute, ``ulps`` in units in the last place; an element that is beyond both is one too many.
    """

    dtype: str
    ulp: str
    tolerance: float = 0.0
    ulps: int = 0
    elements: int = 0
    changed: int = 0
    beyond: int = 0
    not_finite: int = 0
    sums: Sums = field(default_factory=Sums)
    _steps: Array = field(default_factory=lambda: np.zeros(_EXPONENTS, np.int64))

    def add(self, a: Array, b: Array) -> None:
        """Count one more run of both, flat and contiguous."""
        for begin in range(0, a.size, PART):
            self._add(a[begin : begin + PART], b[begin : begin + PART])

    def _add(self, a: Array, b: Array) -> None:
        self.elements += a.size
        where = bits(a) != bits(b)
        where = where if where.ndim == 1 else where.any(axis=1)
        changed = int(np.count_nonzero(where))
        self.changed += changed
        if dtype_of(self.dtype).type is np.void:
            self.beyond += changed
            return
        with np.errstate(all="ignore"):
            apart, clear = self._sum(a, b)
            if changed:
                self._judge(a, b, where, apart, clear)

    def _sum(self, a: Array, b: Array) -> tuple[Array, Array | None]:
        """Add to the sums what is finite; return how far elements are apart, and which are clear where not all are."""
        x, y = _wide(a, self.dtype), _wide(b, self.dtype)
        apart = _apart(a, b) if a.dtype.kind in "iu" else np.abs(y - x)
        clear = None if math.isfinite(apart.sum()) else np.isfinite(apart)
        if clear is None:
            self.sums.add(_parts(x), _parts(y), apart)
        else:
            self.sums.add(_parts(x[clear]), _parts(y[clear]), apart[clear])
        return apart, clear

    def _judge(self, a: Array, b: Array, where: Array, apart: Array, clear: Array | None) -> None:
        """Count elements that are unclear or too far from each other, and all by their steps."""
        if clear is not None:
            self.not_finite += int(np.count_nonzero(where & ~clear))
        close = apart <= self.tolerance if self.tolerance else None
        if self.ulp in CASTABLE:
            steps = _steps(_as(a, self.dtype, self.ulp), _as(b, self.dtype, self.ulp))
            if self.ulps:
                close = steps <= self.ulps if close is None else close | (steps <= self.ulps)
            counted = steps if clear is None else steps[clear]
            self._steps += np.bincount(_exponents(counted), minlength=_EXPONENTS)
            self._steps[_NONE] -= counted.size - int(np.count_nonzero(where if clear is None else where & clear))
        if close is not None and clear is not None:
            close = close & clear
        self.beyond += int(np.count_nonzero(where if close is None else where & ~close))

    def metrics(self) -> Metrics:
        """Return what was measured."""
        sums = self.sums
        return Metrics(
            elements=self.elements,
            changed=self.changed,
            not_finite=self.not_finite,
            max_abs=_number(sums.largest) or 0.0,
            mean_abs=_number(sums.magnitude / max(sums.count, 1)) or 0.0,
            rel_l2=_ratio(math.sqrt(sums.apart), math.sqrt(sums.a)),
            cosine=_cosine(sums),
            ulps=_buckets(self._steps),
        )


def _cosine(sums: Sums) -> float | None:
    found = _ratio(sums.product, math.sqrt(sums.a) * math.sqrt(sums.b))
    return None if found is None else max(-1.0, min(1.0, found))


def _ratio(above: float, below: float) -> float | None:
    return _number(above / below) if below else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


@lru_cache(maxsize=16)
def _values(dtype: str) -> Array:
    """Return the value of every bit pattern of a dtype of at most 16 bits."""
    kind = dtype_of(dtype)
    every = np.arange(1 << (8 * kind.itemsize), dtype=f"u{kind.itemsize}")
    values: Array = every.view(kind).astype(np.float32)
    return values


def _wide(values: Array, dtype: str) -> Array:
    """Return elements in float64 or complex128; for narrow floats, measured, by far the fastest ways of NumPy."""
    if dtype == "bfloat16":
        values = (bits(values).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif dtype.startswith("float") and values.itemsize <= 2:
        values = _values(dtype)[bits(values)]
    return values.astype(np.complex128 if dtype.startswith("complex") else np.float64)


def _parts(values: Array) -> Array:
    """Return complex numbers as pairs of floats, others as they are."""
    return values.view(np.float64)


def _apart(a: Array, b: Array) -> Array:
    """Return the distance of integers: 64 bits do not fit into a float, their difference may."""
    apart: Array = np.maximum(a, b).view(f"u{a.itemsize}") - np.minimum(a, b).view(f"u{a.itemsize}")
    return apart.astype(np.float64)


def _as(values: Array, dtype: str, to: str) -> Array:
    if dtype == to:
        return values
    out: Array = np.empty(values.shape, dtype_of(to))
    cast(values, out, dtype, to)
    return out


def _steps(a: Array, b: Array) -> Array:
    """Return how many representable numbers lie between elements of one plain floating dtype; both zeros are one."""
    x, y = _place(a), _place(b)
    steps: Array = (np.maximum(x, y) - np.minimum(x, y)).view(f"u{a.itemsize}")
    return steps


def _place(values: Array) -> Array:
    """Return the place of elements on the line of all numbers of their dtype, by their bits, as signed integers."""
    raw = values.view(f"i{values.itemsize}")
    sign = raw >> (8 * values.itemsize - 1)
    place: Array = ((raw & np.iinfo(raw.dtype).max) ^ sign) - sign
    return place


def _exponents(steps: Array) -> Array:
    """Return sign and exponent of half a step less, as a float64: the same for all of one bucket."""
    less = steps.astype(np.float64)
    less -= 0.5
    exponents: Array = less.view(np.int64) >> 52 & (_EXPONENTS - 1)
    return exponents


_NONE, _ONE = 0x800 | 1022, 1022
"""What :func:`_exponents` has for no step and for one."""


def _buckets(counts: Array) -> tuple[int, ...]:
    """Return counts by none, one, and every power of two above it, without the zeros at the end."""
    found = [int(counts[_NONE]), *(int(count) for count in counts[_ONE : _ONE + 66])]
    while found and not found[-1]:
        found.pop()
    return tuple(found)
