"""Casts and comparisons of elements: against torch where it rounds once, against exact arithmetic where it does not."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckpttool.elements import Difference, cast, dtype_of
from ckpttool.tensors import CASTABLE, DTYPE_BITS

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = ("float64", "float32", "float16", "bfloat16")
PAIRS = list(permutations(FLOATS, 2))
EXPONENTS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
"""Where the exponent begins, in bits."""

LIMITS = {"float32": (24, -126, 127), "float16": (11, -14, 15), "bfloat16": (8, -126, 127)}
"""Bits of precision, exponents of the smallest normal number and of the largest one."""

MEASURED = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
)
ONLY_COUNTED = ("qint32", "qint8", "quint8", "float4_e2m1fn_x2")


def tensor(values: Array, dtype: str) -> torch.Tensor:
    """The same bits in torch."""
    return torch.frombuffer(bytearray(values.tobytes()), dtype=getattr(torch, dtype)).reshape(values.shape)


def array(values: torch.Tensor) -> Array:
    """The same bits in NumPy."""
    name = str(values.dtype).removeprefix("torch.")
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return np.frombuffer(raw, dtype_of(name)).reshape(tuple(values.shape))


def bits(values: Array) -> Array:
    return np.frombuffer(values.tobytes(), f"u{values.itemsize}")


def patterns(dtype: str, seed: int = 0) -> Array:
    """All patterns of 16 bits; of larger types random ones, and those around what narrower types can hold."""
    size = dtype_of(dtype).itemsize
    if size == 2:
        return np.arange(1 << 16, dtype=np.uint16).view(dtype_of(dtype))
    random = np.random.default_rng(seed)
    anything = np.frombuffer(random.bytes(size * 60_000), dtype_of(dtype))
    shift = EXPONENTS[dtype] - 9  # what lies around ties of bfloat16, and one bit beside them
    around = (anything.view(f"u{size}") >> shift << shift) + random.integers(0, 3, anything.size).astype(f"u{size}") - 1
    with np.errstate(all="ignore"):
        usual = [(random.standard_normal(20_000) * scale).astype(dtype_of(dtype)) for scale in (1, 1e-7, 6e4, 1e-39)]
    return np.concatenate([anything, around.view(dtype_of(dtype)), *usual])


def exactly(values: Array, to: str) -> Array:
    """Round float64 to nearest even by arithmetic that is exact: scaling by powers of two, and one rounding to integer.

    Infinite where the result is larger than any finite number of the type.
    """
    precision, smallest, largest = LIMITS[to]
    unit = np.maximum(np.frexp(values)[1] - precision, smallest - precision + 1)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(values, -unit)), unit)
    most = (2.0 - 2.0 ** (1 - precision)) * 2.0**largest
    result: Array = np.where(np.abs(rounded) > most, np.copysign(np.inf, values), rounded)
    return result


def made(values: Array, dtype: str, to: str) -> tuple[Array, int]:
    target = np.empty(values.shape, dtype_of(to))
    return target, cast(values, target, dtype, to)


# Casts


def test_what_is_cast() -> None:
    assert frozenset(FLOATS) == CASTABLE


@pytest.mark.parametrize(("dtype", "to"), [pair for pair in PAIRS if pair[0] != "float64" or pair[1] == "float32"])
def test_a_cast_is_that_of_torch(dtype: str, to: str) -> None:
    values = patterns(dtype)
    result, lost = made(values, dtype, to)
    said = tensor(values, dtype).to(getattr(torch, to))
    expected = array(said)
    nan = torch.isnan(said).numpy()
    assert nan.any()
    assert (np.isnan(result) == nan).all()
    assert (bits(result)[~nan] == bits(expected)[~nan]).all()
    assert lost == int((torch.isinf(said) & torch.isfinite(tensor(values, dtype))).sum())


@pytest.mark.parametrize("to", LIMITS)
def test_float64_is_rounded_once(to: str) -> None:
    ties = halves(to)
    beside = [np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf)]
    values = np.concatenate([widened(patterns("float64")), widened(patterns(to)), ties, *beside])
    result, lost = made(values, "float64", to)
    expected = exactly(values, to)
    assert (result.astype(np.float64) == expected).all()
    assert (np.signbit(result.astype(np.float64)) == np.signbit(values)).all()
    assert 0 < lost == np.count_nonzero(np.isinf(expected))


def halves(to: str) -> Array:
    """What lies in the middle of two neighbours of a type, or beside them: the ties."""
    known = widened(patterns(to if to != "float32" else "bfloat16"))
    precision, smallest, _ = LIMITS[to]
    unit = np.maximum(np.frexp(known)[1] - precision, smallest - precision + 1)
    middle: Array = known + np.ldexp(0.5, unit)
    return middle


def widened(values: Array) -> Array:
    """What is finite, as float64."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
    return wide[np.isfinite(wide)]


def test_the_exact_rounding_is_exact() -> None:
    """By fractions: nothing else of its type is nearer, and a tie goes to an even number of units."""
    values = np.concatenate([halves("bfloat16")[::129], widened(patterns("float64"))[:2000]])
    values = values[np.isfinite(exactly(values, "bfloat16"))]
    for value, result in zip(values.tolist(), exactly(values, "bfloat16").tolist(), strict=True):
        unit = Fraction(2) ** max(math.frexp(value)[1] - 8, -133)
        units = Fraction(value) / unit
        assert Fraction(result) == round(units) * unit  # Python rounds fractions to even


def test_rounding_twice_would_be_wrong() -> None:
    """Slightly more than a tie: float32 forgets how much, and torch with it."""
    values = np.array([1 + 2.0**-8 + 2.0**-40, -1 - 2.0**-8 - 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40])
    assert torch.from_numpy(values).to(torch.bfloat16).tolist() == [1.0, -1.0, 1.015625]
    result, lost = made(values, "float64", "bfloat16")
    assert (result.astype(float).tolist(), lost) == ([1.0078125, -1.0078125, 1.0078125], 0)


@pytest.mark.parametrize(("dtype", "to"), PAIRS)
def test_nan_stays_nan_and_infinity_infinity(dtype: str, to: str) -> None:
    size = dtype_of(dtype).itemsize
    infinity = bits(np.array([np.inf], dtype_of(dtype)))[0]
    sign = bits(np.array([-0.0], dtype_of(dtype)))[0]
    quiet = 1 << (EXPONENTS[dtype] - 1)
    payloads = np.array([1, 3, quiet - 1, quiet, quiet + 1, 2 * quiet - 1], f"u{size}")
    nans = np.concatenate([infinity | payloads, sign | infinity | payloads]).view(dtype_of(dtype))
    result, lost = made(nans, dtype, to)
    with np.errstate(invalid="ignore"):
        assert np.isnan(nans).all()
        assert np.isnan(result).all()
    assert lost == 0
    result, lost = made(np.array([np.inf, -np.inf, -0.0], dtype_of(dtype)), dtype, to)
    assert (str(result.astype(float).tolist()), lost) == ("[inf, -inf, -0.0]", 0)


@pytest.mark.parametrize(
    ("dtype", "to", "fits", "too_large"),
    [
        ("float32", "float16", 65519.996, 65520.0),
        ("bfloat16", "float16", 65280.0, 65536.0),
        ("float64", "float16", 65519.99999999999, 65520.0),
        ("float32", "bfloat16", 3.3961773e38, 3.3961776e38),
        ("float64", "bfloat16", float(2**128 - 2**119 - 2**80), float(2**128 - 2**119)),
        ("float64", "float32", float(2**128 - 2**103 - 2**80), float(2**128 - 2**103)),
    ],
)
def test_what_becomes_infinite_is_counted(dtype: str, to: str, fits: float, too_large: float) -> None:
    values = np.array([fits, too_large, -fits, -too_large, np.inf, np.nan, -too_large], dtype_of(dtype))
    result, lost = made(values, dtype, to)
    assert np.isinf(result.astype(float)).tolist() == [False, True, False, True, True, False, True]
    assert lost == 3


@pytest.mark.parametrize(("dtype", "to"), PAIRS)
def test_buffers_may_lie_anyhow(dtype: str, to: str) -> None:
    """At odd addresses, with gaps, turned around: as bands of files give them."""
    values = patterns(dtype)
    values = values[:: values.size // 2400][:2400].reshape(40, 60)
    expected, lost = made(values, dtype, to)
    assert len(set(bits(expected).tolist())) > 40
    for source in (values, odd(values), np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2]):
        room: Array = np.zeros((80, 60), dtype_of(to))
        for target in (odd(expected), room[::2], room[78::-2, ::-1], np.zeros((60, 40), dtype_of(to)).T):
            target[...] = 0
            assert cast(source, target, dtype, to) == lost
            assert target.tobytes() == expected.tobytes()
        assert not room[1::2].tobytes().strip(b"\0")


def odd(values: Array) -> Array:
    """A copy at an address that is no multiple of anything."""
    room = np.empty(values.nbytes + 1, np.uint8)
    room[1:] = np.frombuffer(values.tobytes(), np.uint8)
    copy: Array = room[1:].view(values.dtype).reshape(values.shape)
    assert copy.ctypes.data % values.itemsize == 1
    return copy


@pytest.mark.parametrize(("dtype", "to"), PAIRS)
def test_scalars_and_nothing_are_cast(dtype: str, to: str) -> None:
    scalar: Array = np.array(1.2345678901234567, dtype_of(dtype))
    result, lost = made(scalar, dtype, to)
    assert (result.tobytes(), lost) == (made(scalar.reshape(1), dtype, to)[0].tobytes(), 0)
    assert abs(float(result) - 1.2345678901234567) < 0.01
    assert made(np.empty((0, 3), dtype_of(dtype)), dtype, to)[1] == 0


@pytest.mark.parametrize(("dtype", "to"), PAIRS)
def test_a_source_is_not_changed(dtype: str, to: str) -> None:
    values = patterns(dtype).copy()
    before = values.tobytes()
    made(values, dtype, to)
    assert values.tobytes() == before


# Dtypes


@pytest.mark.parametrize("name", DTYPE_BITS)
def test_every_dtype_has_elements_of_its_size(name: str) -> None:
    assert dtype_of(name).itemsize == -(-DTYPE_BITS[name] // 8)


def test_dtypes_are_those_that_compute() -> None:
    assert [dtype_of(name).type is np.void for name in MEASURED] == [False] * len(MEASURED)
    assert dtype_of("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert [dtype_of(name).type is np.void for name in ONLY_COUNTED] == [True] * len(ONLY_COUNTED)


# Differences


def some(dtype: str, seed: int) -> Array:
    """Random patterns, or booleans, which have two only."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, 5000).astype(bool)
    return np.frombuffer(random.bytes(5000 * dtype_of(dtype).itemsize), dtype_of(dtype))


def pair(dtype: str) -> tuple[Array, Array]:
    """Two arrays of any bits, of which two thirds are equal."""
    a, b = some(dtype, 1), some(dtype, 2)
    return a, np.where(np.arange(a.size) % 3 == 0, b, a)


def difference(a: Array, b: Array, dtype: str) -> Difference:
    found = Difference()
    found.add(a, b, dtype)
    return found


def counted(a: Array, b: Array) -> list[int]:
    """Where the bytes differ."""
    size = a.itemsize
    x, y = (values.tobytes() for values in (a, b))
    return [n for n in range(a.size) if x[n * size : (n + 1) * size] != y[n * size : (n + 1) * size]]


@pytest.mark.parametrize("dtype", MEASURED)
def test_differences_are_those_of_torch(dtype: str) -> None:
    a, b = pair(dtype)
    where = counted(a, b)
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    x, y = (tensor(values, dtype)[where].to(wide) for values in (a, b))
    clear = ~(torch.isnan(x) | torch.isnan(y))
    assert len(where) > 500
    assert difference(a, b, dtype) == Difference(
        elements=5000,
        changed=len(where),
        nans=int((~clear).sum()),
        largest=float((x - y)[clear].abs().max()),
    )


@pytest.mark.parametrize("dtype", [*MEASURED, *ONLY_COUNTED])
def test_what_is_equal_does_not_differ(dtype: str) -> None:
    a = some(dtype, 1)
    assert difference(a, a.copy(), dtype) == Difference(elements=5000)


@pytest.mark.parametrize("dtype", ONLY_COUNTED)
def test_what_cannot_be_measured_is_counted(dtype: str) -> None:
    a, b = some(dtype, 1), some(dtype, 2)
    assert difference(a, b, dtype) == Difference(elements=5000, changed=len(counted(a, b)))


@pytest.mark.parametrize("dtype", MEASURED)
def test_parts_add_up(dtype: str) -> None:
    """In any cut, of any shape, in one tally or in several that are joined."""
    a, b = pair(dtype)
    whole = difference(a, b, dtype)
    running, joined = Difference(), Difference()
    for begin, end in ((0, 0), (0, 1200), (1200, 1201), (1201, 5000)):
        running.add(a[begin:end], b[begin:end], dtype)
        joined.join(difference(a[begin:end].reshape(-1, 1), b[begin:end].reshape(-1, 1), dtype))
    assert running == joined == whole
    assert difference(a.reshape(50, 2, 50), b.reshape(50, 2, 50), dtype) == whole


@pytest.mark.parametrize("dtype", MEASURED)
def test_a_scalar_is_compared(dtype: str) -> None:
    none, one = np.zeros((), dtype_of(dtype)), np.ones((), dtype_of(dtype))
    assert difference(one, one.copy(), dtype) == Difference(elements=1)
    assert difference(none, one, dtype) == Difference(elements=1, changed=1, largest=1.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_zeros_of_either_sign_differ_by_nothing(dtype: str) -> None:
    a, b = np.array([0.0, 1.0], dtype_of(dtype)), np.array([-0.0, 1.0], dtype_of(dtype))
    assert difference(a, b, dtype) == Difference(elements=2, changed=1, largest=0.0)


@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e5m2"])
def test_infinities_and_nans(dtype: str) -> None:
    a = np.array([np.inf, np.inf, -np.inf, 1.0, np.nan, np.nan, 2.0], dtype_of(dtype))
    b = np.array([np.inf, np.inf, -np.inf, 3.0, np.nan, 1.0, np.nan], dtype_of(dtype))
    assert difference(a, b, dtype) == Difference(elements=7, changed=3, nans=2, largest=2.0)
    assert difference(a[:4], -b[:4], dtype) == Difference(elements=4, changed=4, largest=math.inf)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nans_of_other_bits_differ(dtype: str) -> None:
    a = np.array([np.nan], dtype_of(dtype))
    b = (a.view(f"u{a.itemsize}") | 1).view(a.dtype)
    assert difference(a, b, dtype) == Difference(elements=1, changed=1, nans=1)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_an_infinite_part_hides_no_other_difference(dtype: str) -> None:
    a = np.array([complex(math.inf, 1), 1, complex(0, math.nan)], dtype_of(dtype))
    b = np.array([complex(math.inf, 3), 6, 0], dtype_of(dtype))
    assert difference(a[1:], b[1:], dtype) == Difference(elements=2, changed=2, nans=1, largest=5.0)
    assert difference(a, b, dtype) == Difference(elements=3, changed=3, nans=1, largest=5.0)


def test_halves_of_complex_numbers_are_complex_or_only_counted() -> None:
    """ml_dtypes has them since 0.6."""
    a = np.array([1, 2, 1, 2], np.float16).view(dtype_of("complex32"))
    b = np.array([1, 2, 1, 5], np.float16).view(dtype_of("complex32"))
    largest = 0.0 if dtype_of("complex32").type is np.void else 3.0
    assert difference(a, b, "complex32") == Difference(elements=2, changed=1, largest=largest)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "apart"),
    [
        ("int64", 2**62, 2**62 + 1, 1.0),
        ("int64", -(2**63), 2**63 - 1, 2.0**64),
        ("uint64", 2**64 - 1, 2**64 - 4, 3.0),
        ("uint64", 0, 2**64 - 1, 2.0**64),
        ("uint8", 3, 250, 247.0),
        ("int8", -128, 127, 255.0),
    ],
)
def test_integers_are_exactly_as_far_apart(dtype: str, a: int, b: int, apart: float) -> None:
    x, y = np.array([a], dtype_of(dtype)), np.array([b], dtype_of(dtype))
    assert difference(x, y, dtype).largest == difference(y, x, dtype).largest == apart


def test_a_difference_says_itself() -> None:
    assert str(Difference(1234, 1000, 0, 0.03125)) == "1,000 of 1,234 elements differ, by up to 0.0312"
    assert str(Difference(9, 3, 2, 1.0)) == "3 of 9 elements differ, by up to 1, 2 with a NaN"
