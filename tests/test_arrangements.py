"""Targets that are turned, cast, shifted and made of anything: bytes as NumPy has them, whatever fits into memory."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import gathering, reading, sink
from ckpttool.elements import dtype_of
from ckpttool.plan import Arrangement, Rows, Target, weight_files
from ckpttool.sink import write_weights
from ckpttool.tensors import CASTABLE, Index, TensorInfo
from tests.arranging import Array, numbers, regrouped, store, sums, taken, tilings, turned

bounded = settings(max_examples=120, deadline=None, derandomize=True)

FLOATS = ("float32", "float16", "bfloat16")
OTHERS = ("int64", "int16", "float8_e4m3fn")


@dataclass(frozen=True)
class Case:
    """Targets, what they are made of and how that is cut, and what NumPy says of them."""

    targets: list[Target]
    arrays: Mapping[str, tuple[str, Array]]
    cuts: Mapping[str, Any]
    expected: Mapping[str, Array]


@st.composite
def parts(draw: st.DrawFn, name: str, count: int, width: Index) -> tuple[Rows, Index]:
    """A run of so many rows, with blocks and gaps between them or without, and a shape of a source that has them."""
    lead = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    start = draw(st.integers(0, 3))
    block = draw(st.integers(0, 3))
    step = block + draw(st.integers(0, 3)) if block else 0
    column = draw(st.integers(0, 2)) if width else 0
    last = start + ((count - 1) // block * step + (count - 1) % block if block else count - 1)
    rows = max(last, 0) + 1 + draw(st.integers(0, 1))
    columns = (width[0] + column + draw(st.integers(0, 1)), *width[1:]) if width else ()
    return Rows(name, start, count, lead, block, step, column), (*(n + 1 for n in lead), rows, *columns)


@st.composite
def views(draw: st.DrawFn) -> Arrangement:
    view = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    if draw(st.integers(0, 19)) == 0:
        view = (*view[:-1], 0)
    order = tuple(draw(st.permutations(range(len(view)))))
    return Arrangement(view, order, draw(st.integers(1, len(view))))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    arrays: dict[str, tuple[str, Array]] = {}
    cuts: dict[str, Any] = {}
    targets, expected = [], {}
    for number in range(draw(st.integers(1, 3))):
        name, how = f"t{number}", draw(views())
        width = how.concatenated[1:]
        dtype = draw(st.sampled_from([*FLOATS, *OTHERS]))
        shift = draw(st.sampled_from([0, 0, 0, 1, -1])) if dtype in FLOATS else 0
        made = []
        for count in draw(sums(how.concatenated[0])):
            source = f"s{len(arrays)}"
            rows, shape = draw(parts(source, count, width))
            # a sum is rounded once where the source has the dtype of the target
            stored = draw(st.sampled_from(FLOATS)) if dtype in FLOATS and not shift else dtype
            arrays[source] = stored, draw(numbers(shape, stored))
            cuts[source] = draw(tilings(shape)), draw(st.booleans())
            made.append(rows)
        joined = np.concatenate([as_dtype(taken(r, arrays[r.source][1], width), dtype) for r in made])
        shape = draw(regrouped(how.turned))
        values = turned(how, joined, shape)
        expected[name] = as_dtype(values.astype(np.float64) + shift, dtype) if shift else values
        targets.append(Target(name, dtype, shape, tuple(made), how, shift=shift))
    return Case(targets, arrays, cuts, expected)


def as_dtype(values: Array, dtype: str) -> Array:
    with np.errstate(all="ignore"):
        return values.astype(dtype_of(dtype))


@contextmanager
def bands_of(band: int, held: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (sink, gathering, reading):
            patch.setattr(module, "BAND", band)
        patch.setattr(gathering, "TURNED", held)
        yield


def written(targets: list[Target], sources: Mapping[str, TensorInfo], root: Path) -> dict[str, bytes]:
    """The bytes of every target."""
    folder = root / "out"
    folder.mkdir()
    (file,) = weight_files(targets, 1 << 40)
    write_weights([file], sources, root, folder)
    content = (folder / file.name).read_bytes()
    assert len(content) == file.nbytes
    found, at = {}, len(file.header)
    for target in file.targets:
        found[target.name] = content[at : at + target.nbytes]
        at += target.nbytes
    return found


def same(raw: bytes, wanted: Array) -> bool:
    """Whether bytes are an array's, but for which NaN a NaN is."""
    if wanted.dtype.kind in "iu" or wanted.dtype.itemsize == 1:
        return raw == wanted.tobytes()
    got, value = np.frombuffer(raw, wanted.dtype).astype(np.float64), wanted.reshape(-1).astype(np.float64)
    return np.array_equal(got, value, equal_nan=True) and bool(
        (np.signbit(got) == np.signbit(value))[~np.isnan(value)].all()
    )


def check(case: Case, band: int, held: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        sources = {n: store(root, n, dtype, v, *case.cuts[n]) for n, (dtype, v) in case.arrays.items()}
        with bands_of(band, held):
            found = written(case.targets, sources, root)
    assert [name for name, raw in found.items() if not same(raw, case.expected[name])] == []


@bounded
@given(cases(), st.integers(8, 200), st.integers(8, 300))
def test_what_is_written_is_what_numpy_says(case: Case, band: int, held: int) -> None:
    check(case, band, held)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(cases())
def test_memory_does_not_change_what_is_written(case: Case) -> None:
    """The same where everything is held at once."""
    check(case, reading.BAND, gathering.TURNED)


def transposed(name: str, source: str, dtype: str, shape: tuple[int, int]) -> Target:
    how = Arrangement(shape, (1, 0), 1)
    return Target(name, dtype, shape[::-1], (Rows(source, 0, shape[0]),), how)


def plain(root: Path, name: str, values: Array) -> TensorInfo:
    return store(root, name, str(values.dtype), values, [((0,) * values.ndim, values.shape)], turned=False)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every read."""
    counts: list[int] = []
    preadv = os.preadv

    def counted(handle: int, buffers: Any, at: int) -> int:
        count = preadv(handle, buffers, at)
        counts.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counted)
    return counts


def test_a_turned_target_that_fits_is_read_once(tmp_path: Path, read: list[int]) -> None:
    values = np.arange(1 << 18, dtype=np.int32).reshape(512, 512)
    sources = {"a": plain(tmp_path, "a", values)}
    found = written([transposed("t", "a", "int32", (512, 512))], sources, tmp_path)
    assert found["t"] == values.T.tobytes()
    assert read == [values.nbytes]


def test_a_small_turned_target_does_not_make_a_large_one_be_read_again(tmp_path: Path, read: list[int]) -> None:
    small, values = (
        np.arange(1 << 10, dtype=np.int32).reshape(32, 32),
        np.arange(1 << 18, dtype=np.int32).reshape(512, 512),
    )
    sources = {"a": plain(tmp_path, "a", small), "b": plain(tmp_path, "b", values)}
    targets = [transposed("s", "a", "int32", (32, 32)), transposed("t", "b", "int32", (512, 512))]
    found = written(targets, sources, tmp_path)
    assert found == {"s": small.T.tobytes(), "t": values.T.tobytes()}
    assert read == [small.nbytes, values.nbytes]


@pytest.mark.parametrize(("stored", "dtype"), [("float32", "bfloat16"), ("float32", "float16"), ("float64", "float32")])
def test_a_shift_is_added_before_the_cast(tmp_path: Path, stored: str, dtype: str) -> None:
    bits = {"bfloat16": 7, "float16": 10, "float32": 23}[dtype]
    half = 2.0 ** -(bits + 1)  # of the last place of one
    values = np.array([half * (1 + 2.0 ** -(bits + 1)), 0.5, -0.25], dtype_of(stored))
    sources = {"w": plain(tmp_path, "w", values)}
    found = written([Target("t", dtype, (3,), (Rows("w", 0, 3),), shift=1)], sources, tmp_path)
    wanted = (values.astype(np.float64) + 1).astype(dtype_of(dtype))
    assert np.frombuffer(found["t"], dtype_of(dtype)).tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", sorted(CASTABLE))
def test_a_shift_keeps_what_is_no_number(tmp_path: Path, dtype: str) -> None:
    values = np.array([np.nan, np.inf, -np.inf, -1.0, 0.0], dtype_of(dtype))
    sources = {"w": store(tmp_path, "w", dtype, values, [((0,), (5,))], turned=False)}
    found = written([Target("t", dtype, (5,), (Rows("w", 0, 5),), shift=1)], sources, tmp_path)
    made = np.frombuffer(found["t"], dtype_of(dtype)).astype(np.float64).tolist()
    assert math.isnan(made[0])
    assert made[1:] == [math.inf, -math.inf, 0.0, 1.0]


def test_a_scalar_and_an_empty_tensor_are_written(tmp_path: Path) -> None:
    grid = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    sources = {"w": plain(tmp_path, "w", grid), "e": TensorInfo("e", "float32", (0, 4), ())}
    turned_empty = Target("u", "float32", (4, 0), (Rows("e", 0, 0),), Arrangement((0, 4), (1, 0), 1))
    targets = [
        Target("s", "float32", (), (Rows("w", 0, 1, lead=(1, 2)),), shift=1),
        Target("e", "float32", (0, 4), (Rows("e", 0, 0),)),
        turned_empty,
    ]
    assert written(targets, sources, tmp_path) == {"s": np.float32(6).tobytes(), "e": b"", "u": b""}
