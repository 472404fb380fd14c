"""Boxes that tile, and boxes that do not: against a brute-force count of every element."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.tensors import (
    DTYPE_BITS,
    Index,
    Piece,
    Place,
    TensorInfo,
    contiguous_strides,
    dtype_bytes,
    extent,
    tiling_faults,
)
from tests.pieces import dtype_of

Box = tuple[Index, Index]
Tiling = tuple[Index, list[Box]]


def count(shape: Index, boxes: list[Box]) -> np.ndarray:
    """How many boxes hold each element."""
    times = np.zeros(shape, int)
    for offset, size in boxes:
        times[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))] += 1
    return times


@st.composite
def grids(draw: st.DrawFn) -> Tiling:
    """A shape cut by a grid of random lines."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    cells = product(*(list(pairwise(edges)) for edges in cuts))
    return shape, [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]


@st.composite
def splits(draw: st.DrawFn) -> Tiling:
    """A shape cut again and again, each box on its own: no grid."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, size[axis]))
        boxes += [cut(offset, size, axis, 0, at), cut(offset, size, axis, at, size[axis])]
    return shape, draw(st.permutations(boxes))


def cut(offset: Index, size: Index, axis: int, first: int, last: int) -> Box:
    """The part of a box between two positions along an axis."""
    return (
        (*offset[:axis], offset[axis] + first, *offset[axis + 1 :]),
        (*size[:axis], last - first, *size[axis + 1 :]),
    )


@st.composite
def piles(draw: st.DrawFn) -> Tiling:
    """Boxes anywhere inside a small shape."""
    shape = tuple(draw(st.lists(st.integers(0, 4), min_size=1, max_size=3)))
    boxes = []
    for _ in range(draw(st.integers(0, 5))):
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        boxes.append((offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset, strict=True))))
    return shape, boxes


tilings = st.one_of(grids(), splits())
bounded = settings(max_examples=250, deadline=None, derandomize=True)


@bounded
@given(tilings)
def test_what_tiles_has_no_fault(tiling: Tiling) -> None:
    assert (count(*tiling) == 1).all()
    assert list(tiling_faults(*tiling)) == []


@bounded
@given(tilings, st.data())
def test_a_hole_is_found_and_measured(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    at = data.draw(st.integers(0, len(boxes) - 1))
    missing = int(np.prod(boxes[at][1]))
    wanted = [f"{missing} of {int(np.prod(shape))} elements are in no piece"] if missing else []
    assert list(tiling_faults(shape, boxes[:at] + boxes[at + 1 :])) == wanted


@bounded
@given(tilings, st.data())
def test_a_box_that_comes_twice_is_found(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    box = data.draw(st.sampled_from([box for box in boxes if 0 not in box[1]]))
    assert list(tiling_faults(shape, [*boxes, box])) == [f"boxes at {list(box[0])} and {list(box[0])} overlap"]


@bounded
@given(tilings, st.data())
def test_a_shifted_box_is_found(tiling: Tiling, data: st.DataObject) -> None:
    shape, boxes = tiling
    at = data.draw(st.sampled_from([n for n, box in enumerate(boxes) if 0 not in box[1]]))
    axis, by = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.sampled_from([-1, 1]))
    offset, size = boxes[at]
    moved = (*offset[:axis], offset[axis] + by, *offset[axis + 1 :])
    assert list(tiling_faults(shape, [*boxes[:at], (moved, size), *boxes[at + 1 :]]))


@settings(max_examples=600, deadline=None, derandomize=True)
@given(st.one_of(piles(), grids(), splits()))
def test_verdicts_are_those_of_counting(tiling: Tiling) -> None:
    times = count(*tiling)
    faults = list(tiling_faults(*tiling))
    assert (faults == []) == bool((times == 1).all())
    assert any("overlap" in fault for fault in faults) == bool((times > 1).any())
    if not (times > 1).any():
        assert any("no piece" in fault for fault in faults) == bool((times == 0).any())


@pytest.mark.parametrize(
    ("offset", "size"),
    [((0, 3), (4, 2)), ((-1, 0), (4, 4)), ((0, 0), (4, 5)), ((0,), (4,)), ((0, 0, 0), (4, 4, 1)), ((2, 2), (2, -1))],
)
def test_a_box_outside_is_found(offset: Index, size: Index) -> None:
    first, *_ = tiling_faults((4, 4), [(offset, size)])
    assert first == f"box at {list(offset)} of size {list(size)} lies outside [4, 4]"


def test_tensors_without_elements_or_dimensions() -> None:
    assert list(tiling_faults((0, 4), [])) == []
    assert list(tiling_faults((), [((), ())])) == []
    assert list(tiling_faults((), [])) == ["1 of 1 elements are in no piece"]
    assert list(tiling_faults((), [((), ()), ((), ())])) == ["boxes at [] and [] overlap"]


def test_the_pin_wheel_tiles() -> None:
    """The tiling that no straight cut divides."""
    boxes: list[Box] = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert list(tiling_faults((3, 3), boxes)) == []


def test_many_boxes_are_judged_in_no_time() -> None:
    """A stacked tensor of a large model, [layer, expert, row]: 100,000 chunks; quadratic work would take minutes."""
    boxes = [((a, b, c), (1, 1, 1)) for a in range(50) for b in range(50) for c in range(40)]
    assert list(tiling_faults((50, 50, 40), boxes)) == []


# Sizes


@given(st.lists(st.integers(0, 5), max_size=4).map(tuple))
@settings(deadline=None, derandomize=True)
def test_strides_and_extent_are_numpys(shape: Index) -> None:
    array = np.zeros(shape, np.int8)
    strides = contiguous_strides(shape)
    assert extent(shape, strides) == array.size
    if array.size:
        assert tuple(array.strides) == strides or 1 in shape
        assert sum(map(int.__mul__, (n - 1 for n in shape), strides)) == array.size - 1


def test_the_extent_of_a_view() -> None:
    assert extent((3, 2), (1, 10)) == 13  # a transposed slice
    assert extent((3, 0), (1, 10)) == 0
    assert extent((), ()) == 1


def test_dtypes_have_the_size_that_numpy_knows() -> None:
    known = {name for name in DTYPE_BITS if not name.startswith(("q", "float6", "float4", "complex32"))}
    assert {name: dtype_of(name).itemsize * 8 for name in known} == {name: DTYPE_BITS[name] for name in known}
    assert len(known) == 19


@pytest.mark.parametrize(
    ("dtype", "numel", "size"), [("float32", 3, 12), ("float4_e2m1fn", 3, 2), ("float6_e2m3fn", 4, 3), ("bool", 0, 0)]
)
def test_bytes_are_rounded_up(dtype: str, numel: int, size: int) -> None:
    assert dtype_bytes(dtype, numel) == size


def test_a_dtype_that_nobody_knows_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        dtype_bytes("float5", 1)


def test_a_tensor_counts_its_elements_once() -> None:
    piece = Piece((0,), (6,), Place("file", 0, 12))
    info = TensorInfo("name", "bfloat16", (6,), (piece,), (piece, piece))
    assert (piece.numel, info.numel, info.nbytes) == (6, 6, 12)
