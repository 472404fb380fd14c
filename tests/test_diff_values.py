"""What is measured of two tensors, held against torch in float64 and against all representable numbers in order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpttool import gathering, reading
from ckpttool.comparison import Options, compare, measure, values
from ckpttool.comparison.result import Metrics, TensorDiff
from ckpttool.comparison.values import Stock, in_step
from ckpttool.plan import Rows, Target
from ckpttool.tensors import TensorInfo

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.fixture(params=[None, 96, 4096])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything at once, or in bands and parts of a few elements."""
    if request.param is not None:
        for module in (gathering, reading, values):
            monkeypatch.setattr(module, "BAND", request.param)
        monkeypatch.setattr(measure, "PART", request.param // 16)


def compared(folder: Path, a: torch.Tensor, b: torch.Tensor, options: Options = Options()) -> TensorDiff:  # noqa: B008
    """The one tensor that two files hold."""
    save_file({"w": a.contiguous()}, folder / "a.safetensors")
    save_file({"w": b.contiguous()}, folder / "b.safetensors")
    (found,) = compare(str(folder / "a.safetensors"), str(folder / "b.safetensors"), options).tensors
    return found


def measured(folder: Path, a: torch.Tensor, b: torch.Tensor) -> Metrics:
    found = compared(folder, a, b).metrics
    assert found is not None
    return found


def unlike(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements have other bits."""
    bits = [value.contiguous().view(torch.uint8).reshape(value.numel(), value.element_size()) for value in (a, b)]
    return (bits[0] != bits[1]).any(1)


def check(found: Metrics, a: torch.Tensor, b: torch.Tensor) -> None:
    """Hold every number against torch."""
    x, y = a.reshape(-1).to(torch.float64), b.reshape(-1).to(torch.float64)
    changed, clear = unlike(a, b), torch.isfinite(x) & torch.isfinite(y)
    assert (found.elements, found.changed) == (a.numel(), int(changed.sum()))
    assert found.not_finite == int((changed & ~clear).sum())
    assert found.share == pytest.approx(float(changed.double().mean()))
    x, y = x[clear], y[clear]
    assert found.max_abs == pytest.approx(float((y - x).abs().max()), rel=1e-12)
    assert found.mean_abs == pytest.approx(float((y - x).abs().mean()), rel=1e-12)
    assert found.rel_l2 == pytest.approx(float((y - x).norm() / x.norm()), rel=1e-12)
    assert found.cosine == pytest.approx(float(torch.dot(x, y) / x.norm() / y.norm()), rel=1e-12)


def pairs(dtype: torch.dtype, seed: int = 0, size: int = 1501) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor and one that is near it in most of its elements, equal in a third and far off in a few."""
    chance = torch.Generator().manual_seed(seed)
    a = torch.randn(size, generator=chance, dtype=torch.float64)
    b = a + torch.randn(size, generator=chance, dtype=torch.float64) * 0.01
    b[::3] = a[::3]
    b[::97] *= -40
    return a.to(dtype), b.to(dtype)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b = pairs(dtype)
    found = measured(tmp_path, a, b)
    check(found, a, b)
    assert bool(found.ulps) == (dtype not in (torch.float8_e4m3fn, torch.float8_e5m2))


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", WHOLE, ids=str)
def test_whole_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    chance = torch.Generator().manual_seed(1)
    low, high = (0, 2) if dtype is torch.bool else (-100, 100) if dtype.is_signed else (0, 200)
    a, b = (torch.randint(low, high, (700,), generator=chance).to(dtype) for _ in range(2))
    found = measured(tmp_path, a, b)
    check(found, a, b)
    assert found.ulps == ()


def test_complex_numbers(tmp_path: Path) -> None:
    a = torch.randn(50, dtype=torch.complex64)
    b = a + torch.randn(50, dtype=torch.complex64) * 0.1
    found = measured(tmp_path, a, b)
    apart = (b - a).to(torch.complex128).abs()
    assert found.changed == 50
    assert found.max_abs == pytest.approx(float(apart.max()), rel=1e-6)
    assert found.rel_l2 == pytest.approx(float(apart.norm() / a.to(torch.complex128).norm()), rel=1e-6)


def test_integers_that_no_float_holds(tmp_path: Path) -> None:
    a, b = torch.tensor([2**62, -(2**62), 5]), torch.tensor([2**62 + 1, -(2**62) - 3, 5])
    found = measured(tmp_path, a, b)
    assert (found.changed, found.max_abs) == (2, 3.0)
    ends = torch.iinfo(torch.int64)
    assert measured(tmp_path, torch.tensor([ends.min]), torch.tensor([ends.max])).max_abs == 2.0**64


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_what_is_not_finite_is_counted_and_left_out(dtype: torch.dtype, tmp_path: Path) -> None:
    a, b = pairs(dtype, 2)
    a[5], b[5] = math.nan, math.nan
    b[7] = math.nan
    a[11], b[11] = math.inf, math.inf
    a[13], b[13] = math.inf, -math.inf
    b[1400] = math.inf
    check(measured(tmp_path, a, b), a, b)
    assert measured(tmp_path, a, b).not_finite == 3


def test_a_difference_that_a_float_cannot_hold_is_not_finite(tmp_path: Path) -> None:
    most = torch.finfo(torch.float64).max
    found = measured(tmp_path, torch.tensor([most, 1.0]).double() * 1, torch.tensor([-most, 1.0]).double())
    assert (found.changed, found.not_finite, found.max_abs) == (1, 1, 0.0)


def test_zeros_have_no_ratio(tmp_path: Path) -> None:
    found = measured(tmp_path, torch.zeros(4), torch.ones(4))
    assert (found.rel_l2, found.cosine, found.max_abs, found.mean_abs) == (None, None, 1.0, 1.0)


def test_the_sign_of_zero_is_a_change_of_no_step(tmp_path: Path) -> None:
    found = measured(tmp_path, torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.changed, found.max_abs, found.ulps) == (1, 0.0, (1,))


def line(dtype: torch.dtype) -> torch.Tensor:
    """Every finite number of a dtype of 16 bits in order, both zeros as one."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return torch.unique(every[torch.isfinite(every)].double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_steps_are_places_on_the_line_of_all_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = line(dtype)
    chance = torch.Generator().manual_seed(3)
    at = torch.randint(0, len(numbers), (4000,), generator=chance)
    to = torch.where(torch.rand(4000, generator=chance) < 0.7, at + torch.randint(-9, 9, (4000,), generator=chance), at)
    to[:500] = torch.randint(0, len(numbers), (500,), generator=chance)
    to = to.clamp(0, len(numbers) - 1)
    found = measured(tmp_path, numbers[at].to(dtype), numbers[to].to(dtype))
    steps = (to - at).abs()
    steps = steps[steps > 0]
    expected = [0] + [int(((steps > 2 ** (i - 2)) & (steps <= 2 ** (i - 1))).sum()) for i in range(1, 18)]
    expected[1] = int((steps == 1).sum())
    while not expected[-1]:
        expected.pop()
    assert list(found.ulps) == expected


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_steps_of_wide_floats(dtype: type[np.floating], tmp_path: Path) -> None:
    """A few steps by the library's own next number, also over zero and over a power of two."""
    starts = [1.0, -1.0, 1.999999, 2.0, 1e-40, 0.0, -3e-45, 123456.789, np.finfo(dtype).max]
    a, b, expected = [], [], [0] * 6
    for start in starts:
        for steps in (1, 2, 3, 4, 5, 8, 9, 16):
            value = dtype(start)
            for _ in range(steps):
                value = np.nextafter(value, dtype(-np.inf))
            a.append(dtype(start))
            b.append(value)
            expected[1 + math.ceil(math.log2(steps))] += 1
    found = measured(tmp_path, torch.from_numpy(np.array(a)), torch.from_numpy(np.array(b)))
    assert list(found.ulps) == expected


@pytest.mark.parametrize(
    ("dtypes", "coarse"),
    [
        ((torch.float32, torch.bfloat16), torch.bfloat16),
        ((torch.float16, torch.float32), torch.float16),
        ((torch.float16, torch.bfloat16), torch.bfloat16),
        ((torch.float64, torch.float32), torch.float32),
    ],
    ids=str,
)
def test_two_dtypes(dtypes: tuple[torch.dtype, torch.dtype], coarse: torch.dtype, tmp_path: Path) -> None:
    """A cast is a difference in the dtype; its values are measured without loss, and are none in the coarser one."""
    a, _ = pairs(torch.float32, 4)
    a = a.to(dtypes[0])
    b = a.to(coarse).to(dtypes[1])
    found = compared(tmp_path, a, b)
    assert (found.state, found.why) == ("differs", "dtype")
    assert found.metrics is not None
    apart = (b.double() - a.double()).abs()
    assert found.metrics.max_abs == pytest.approx(float(apart.max()), rel=1e-12)
    assert found.metrics.changed == int((a.double() != b.double()).sum())
    assert set(found.metrics.ulps[1:]) <= {0}
    assert compared(tmp_path, a, b, Options(ignore_dtype=True)).state == "equal"
    b[3] += 1
    assert compared(tmp_path, a, b, Options(ignore_dtype=True)).state == "differs"


def test_integers_of_two_sizes_are_not_measured(tmp_path: Path) -> None:
    found = compared(tmp_path, torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32))
    assert (found.state, found.why, found.metrics) == ("differs", "dtype", None)
    assert compared(tmp_path, torch.tensor([1]), torch.tensor([1.0]), Options(ignore_dtype=True)).state == "differs"


@pytest.mark.parametrize(("tolerance", "state"), [(0.0, "differs"), (0.24, "differs"), (0.25, "close"), (1.0, "close")])
def test_a_tolerance_is_what_no_element_exceeds(tolerance: float, state: str, tmp_path: Path) -> None:
    a = torch.ones(5000)
    b = a.clone()
    b[4999], b[3] = 1.25, 0.875
    assert compared(tmp_path, a, b, Options(tolerance=tolerance)).state == state


@pytest.mark.parametrize(("ulps", "state"), [(1, "differs"), (2, "differs"), (3, "close")])
def test_a_tolerance_in_steps(ulps: int, state: str, tmp_path: Path) -> None:
    a = torch.tensor([1.0, -2.0, 0.0], dtype=torch.bfloat16)
    b = a.clone()
    b.view(torch.int16)[0] += 3
    b.view(torch.int16)[1] += 1
    assert compared(tmp_path, a, b, Options(ulps=ulps)).state == state


@pytest.mark.parametrize("options", [Options(tolerance=1e9), Options(ulps=2**29)])
def test_no_tolerance_takes_a_nan(options: Options, tmp_path: Path) -> None:
    a = torch.tensor([1.0, 2.0])
    assert compared(tmp_path, a, torch.tensor([1.0, math.nan]), options).state == "differs"
    assert compared(tmp_path, a, torch.tensor([1.0, math.inf]), options).state == "differs"
    assert compared(tmp_path, a, torch.tensor([1.0, 2.5]), Options(tolerance=0.5)).state == "close"


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 4)])
def test_shapes_of_all_kinds(shape: tuple[int, ...], tmp_path: Path) -> None:
    a = torch.randn(shape)
    assert compared(tmp_path, a, a.clone()).state == "equal"
    if a.numel():
        assert compared(tmp_path, a, a + 1).state == "differs"


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("at", [0, 1, 700, 1499, 1500])
def test_one_bit(at: int, tmp_path: Path) -> None:
    a = torch.randn(1501)
    b = a.clone()
    b.view(torch.int32)[at] ^= 1
    assert measured(tmp_path, a, b).changed == 1


def cut(length: int, sizes: list[int]) -> Iterator[np.ndarray]:
    at = 0
    while at < length:
        size = sizes.pop() if sizes else length
        yield np.arange(at, min(at + size, length))
        at += size


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 60), st.lists(st.integers(1, 20)), st.lists(st.integers(1, 20)))
def test_two_sides_are_read_in_step(length: int, one: list[int], other: list[int]) -> None:
    got = list(in_step(cut(length, one), cut(length, other)))
    assert all(a.size and np.array_equal(a, b) for a, b in got)
    assert [int(n) for a, _ in got for n in a] == list(range(length))


@pytest.mark.parametrize("options", [Options(ignore_dtype=True), Options(as_written=True)])
def test_a_finite_number_that_a_cast_makes_infinite_differs(options: Options, tmp_path: Path) -> None:
    a = torch.tensor([1e30, 1.0])
    found = compared(tmp_path, a, a.to(torch.float16), options)
    assert found.state == "differs"
    assert found.metrics is not None
    assert (found.metrics.changed, found.metrics.not_finite) == (1, 1)
    infinite = torch.tensor([math.inf, 1.0])
    assert compared(tmp_path, infinite, infinite.to(torch.float16), options).state == "equal"


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
def test_half_complex_numbers_have_an_imaginary_part(tmp_path: Path) -> None:
    """By ``.pt`` files, as safetensors has no such dtype."""
    for name, imaginary in (("a", 0.0), ("b", 3.0)):
        parts = torch.tensor([[1.0, imaginary], [2.0, 0.0]], dtype=torch.float16)
        torch.save({"w": torch.view_as_complex(parts)}, tmp_path / f"{name}.pt")
    (found,) = compare(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), Options(tolerance=1.0)).tensors
    assert found.state == "differs"
    assert found.metrics is not None
    assert found.metrics.changed == 1


@pytest.mark.parametrize(("code", "width"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
@pytest.mark.usefixtures("parts")
def test_elements_smaller_than_a_byte(code: str, width: int, tmp_path: Path) -> None:
    """Packed from the lowest bit on; every one whose bits differ is counted once, wherever a part ends."""
    count = 40000
    values = np.random.default_rng(0).integers(0, 1 << width, count)
    other = values.copy()
    other[[0, 5, 6, 7, 20001, count - 1]] ^= (1 << width) - 1
    for name, elements in (("a", values), ("b", other)):
        bits = (elements[:, None] >> np.arange(width)) & 1
        data = np.packbits(bits.reshape(-1).astype(np.uint8), bitorder="little").tobytes()
        header = json.dumps({"w": {"dtype": code, "shape": [count // 8, 8], "data_offsets": [0, len(data)]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    a, b = (str(tmp_path / f"{name}.safetensors") for name in "ab")
    assert compare(a, a, Options()).same
    (found,) = compare(a, b, Options()).tensors
    assert found.state == "differs"
    assert found.metrics is not None
    assert (found.metrics.elements, found.metrics.changed) == (count, 6)


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        (("bfloat16", "bfloat16"), "bfloat16"),
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
        (("int8", "int8"), "int8"),
    ],
)
def test_experts_of_several_dtypes_are_compared_in_one_that_holds_all(stored: tuple[str, ...], dtype: str) -> None:
    """Not in that of the first, to which the others would be rounded before anything is compared."""
    sources = {str(at): TensorInfo(str(at), of, (2, 3), ()) for at, of in enumerate(stored)}
    parts = tuple(Rows(name, 0, 2) for name in sources)
    assert Stock(Path(), sources).dtype(Target("experts", stored[0], (4, 3), parts)) == dtype
