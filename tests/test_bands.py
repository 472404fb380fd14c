"""Bands of tensors, what boxes share, and which rows of sources a target is made of: held against NumPy's indexing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import islice, pairwise
from types import EllipsisType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.plan import Rows, Target, whole
from ckpttool.tensors import Box, Index, TensorInfo, bands, overlap

Array = np.ndarray[Any, np.dtype[Any]]

bounded = settings(max_examples=300, deadline=None, derandomize=True)
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def slices(box: Box) -> tuple[slice | EllipsisType, ...]:
    return (*(slice(o, o + n) for o, n in zip(*box, strict=True)), ...)


def numbered(shape: Index) -> Array:
    """An array whose elements say where in C order they lie."""
    return np.arange(math.prod(shape)).reshape(shape)


@st.composite
def boxes(draw: st.DrawFn, shape: Index) -> Box:
    """Any box inside a shape, empty ones too."""
    offset = tuple(draw(st.integers(0, n)) for n in shape)
    return offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))


# Bands


@bounded
@given(shapes, st.integers(0, 50))
def test_bands_follow_each_other_in_c_order(shape: Index, most: int) -> None:
    """What they hold, one after the other, is the tensor; so each of them is one run of it."""
    held = [numbered(shape)[slices(box)].reshape(-1) for box in bands(shape, most)]
    assert np.concatenate([np.empty(0, int), *held]).tolist() == list(range(math.prod(shape)))


@bounded
@given(shapes, st.integers(0, 50))
def test_a_band_is_not_larger_than_asked_for(shape: Index, most: int) -> None:
    """But for a single element, which cannot be cut."""
    sizes = [math.prod(size) for _, size in bands(shape, most)]
    assert [n for n in sizes if not 0 < n <= max(most, 1)] == []


@bounded
@given(shapes, st.integers(0, 50))
def test_bands_are_boxes_of_the_tensor(shape: Index, most: int) -> None:
    for offset, size in bands(shape, most):
        assert len(offset) == len(size) == len(shape)
        assert all(o >= 0 and n >= 1 and o + n <= rows for o, n, rows in zip(offset, size, shape, strict=True))


def joined(box: Box, after: Box) -> int | None:
    """How many elements two boxes have as one, where together they are one."""
    differing = [axis for axis, (o, p) in enumerate(zip(box[0], after[0], strict=True)) if o != p]
    same = all(n == m for axis, (n, m) in enumerate(zip(box[1], after[1], strict=True)) if axis not in differing)
    return math.prod(box[1]) + math.prod(after[1]) if len(differing) == 1 and same else None


@bounded
@given(shapes, st.integers(1, 50))
def test_bands_are_as_large_as_can_be(shape: Index, most: int) -> None:
    sizes = [joined(box, after) for box, after in pairwise(bands(shape, most))]
    assert [size for size in sizes if size is not None and size <= most] == []


def test_what_fits_is_one_band() -> None:
    assert list(bands((3, 4), 12)) == [((0, 0), (3, 4))]
    assert list(bands((3, 4), 11)) == [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    assert list(bands((2, 4), 3)) == [((0, 0), (1, 3)), ((0, 3), (1, 1)), ((1, 0), (1, 3)), ((1, 3), (1, 1))]


@pytest.mark.parametrize("most", [0, 1, 100])
def test_a_scalar_is_one_band(most: int) -> None:
    assert list(bands((), most)) == [((), ())]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 3)])
def test_nothing_has_no_bands(shape: Index) -> None:
    assert list(bands(shape, 10)) == []


def test_a_huge_tensor_is_cut_as_one_goes() -> None:
    first = list(islice(bands((1 << 40, 1 << 13), 1 << 22), 2))
    assert first == [((0, 0), (512, 1 << 13)), ((512, 0), (512, 1 << 13))]


# What boxes share


@bounded
@given(st.data(), shapes)
def test_what_two_boxes_share_is_what_both_hold(data: st.DataObject, shape: Index) -> None:
    box, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    times = np.zeros(shape, int)
    times[slices(box)] += 1
    times[slices(other)] += 1
    shared = overlap(box, other)
    assert shared == overlap(other, box)
    both = np.zeros(shape, int)
    if shared is not None:
        both[slices(shared)] = 1
        assert both.any()
    assert (both == (times == 2)).all()


def test_neighbours_share_nothing() -> None:
    assert overlap(((0, 0), (2, 4)), ((2, 0), (2, 4))) is None
    assert overlap(((0,), (4,)), ((2,), (0,))) is None


def test_scalars_share_their_element() -> None:
    assert overlap(((), ()), ((), ())) == ((), ())


# Rows of sources


@dataclass(frozen=True)
class Case:
    """A target, the arrays it is made of, and what NumPy's indexing makes of them."""

    target: Target
    sources: dict[str, Array]
    expected: Array


@st.composite
def runs(draw: st.DrawFn, behind: Index, name: str) -> tuple[Rows, Array, Array]:
    """Rows with anything set, a source that has them (numbered apart from others), and those rows by indexing."""
    lead = tuple(draw(st.lists(st.integers(0, 2), max_size=2)))
    count, start = draw(st.integers(0, 9)), draw(st.integers(0, 4))
    block = draw(st.integers(0, 4))
    step = draw(st.integers(0, 6)) if block else 0
    column = draw(st.integers(0, 3)) if behind else 0
    part = Rows(name, start, count, lead, block, step, column)
    wanted = [start + (row // block * step + row % block if block else row) for row in range(count)]
    rows = max(wanted, default=0) + 1 + draw(st.integers(0, 2))
    columns = (behind[0] + column + draw(st.integers(0, 2)), *behind[1:]) if behind else ()
    shape = (*(index + 1 for index in lead), rows, *columns)
    source = numbered(shape) + 1_000_000 * int(name)
    taken = source[lead][wanted] if count else np.empty((0, *columns), int)
    return part, source, taken[:, column : column + behind[0]] if behind else taken


@st.composite
def cases(draw: st.DrawFn) -> Case:
    behind = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    drawn = [draw(runs(behind, str(n))) for n in range(draw(st.integers(1, 3)))]
    expected = np.concatenate([taken for _, _, taken in drawn])
    target = Target("t", "int64", expected.shape, tuple(part for part, _, _ in drawn))
    return Case(target, {part.source: source for part, source, _ in drawn}, expected)


def gathered(case: Case, box: Box) -> Array:
    """A box of the target from its sources; every row must come from one place, inside of its source."""
    made = np.full(box[1], -1)
    for name, rows, (offset, size) in case.target.sources(box):
        source, part = case.sources[name], made[rows]
        assert all(o >= 0 and o + n <= most for o, n, most in zip(offset, size, source.shape, strict=True))
        assert (part == -1).all()
        assert part.size > 0
        part[...] = source[slices((offset, size))].reshape(part.shape)
    return made


@bounded
@given(st.data(), cases())
def test_rows_are_those_that_numpy_takes(data: st.DataObject, case: Case) -> None:
    shape = case.target.shape
    offset = tuple(data.draw(st.integers(0, max(n - 1, 0))) for n in shape)
    size = tuple(data.draw(st.integers(min(1, n), n - o)) for n, o in zip(shape, offset, strict=True))
    assert gathered(case, (offset, size)).tolist() == case.expected[slices((offset, size))].tolist()


@bounded
@given(cases(), st.integers(1, 20))
def test_rows_of_all_bands_are_the_target(case: Case, most: int) -> None:
    made = [gathered(case, box).reshape(-1) for box in bands(case.target.shape, most)]
    assert np.concatenate([np.empty(0, int), *made]).tolist() == case.expected.reshape(-1).tolist()


@bounded
@given(shapes)
def test_a_whole_tensor_is_all_of_its_rows(shape: Index) -> None:
    target = whole(TensorInfo("w", "int64", shape, ()))
    case = Case(target, {"w": numbered(shape)}, numbered(shape))
    assert (target.name, target.dtype, target.shape) == ("w", "int64", shape)
    for box in bands(shape, 7):
        assert gathered(case, box).tolist() == case.expected[slices(box)].tolist()


def test_a_scalar_may_be_an_element_of_a_larger_tensor() -> None:
    target = Target("s", "int64", (), (Rows("w", 0, 1, lead=(1, 2)),))
    case = Case(target, {"w": numbered((2, 3))}, np.array(5))
    assert gathered(case, ((), ())).tolist() == 5


def test_groups_of_heads() -> None:
    """Two rows of each six: as queries lie in a fused projection."""
    target = Target("q", "int64", (6, 2), (Rows("qkv", 0, 6, block=2, step=6),))
    taken = [(name, rows, box) for name, rows, box in target.sources(((1, 0), (4, 2)))]
    assert taken == [
        ("qkv", slice(0, 1), ((1, 0), (1, 2))),
        ("qkv", slice(1, 3), ((6, 0), (2, 2))),
        ("qkv", slice(3, 4), ((12, 0), (1, 2))),
    ]


def test_a_long_run_is_one_box() -> None:
    target = Target("t", "int64", (1000, 4), (Rows("a", 7, 400), Rows("b", 0, 600)))
    taken = list(target.sources(((300, 0), (300, 4))))
    assert taken == [
        ("a", slice(0, 100), ((307, 0), (100, 4))),
        ("b", slice(100, 300), ((0, 0), (200, 4))),
    ]


def test_a_run_can_have_another_name_and_dtype() -> None:
    target = whole(TensorInfo("w", "float32", (3, 2), ()), "v", "bfloat16")
    assert target == Target("v", "bfloat16", (3, 2), (Rows("w", 0, 3),))
    assert target.nbytes == 12
