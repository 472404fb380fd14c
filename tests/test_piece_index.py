"""Tensors of many pieces: a box finds all of those that it overlaps, of any thickness, and few others."""

from __future__ import annotations

import tempfile
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.errors import BrokenCheckpoint
from ckpttool.reading import Reader
from ckpttool.tensors import Box, Index, Piece, Place, TensorInfo, overlap
from tests.arranging import Array, store, tilings

bounded = settings(max_examples=150, deadline=None, derandomize=True)


def pieces_of(boxes: list[Box]) -> tuple[Piece, ...]:
    return tuple(Piece(offset, size, Place("f", 0, 0)) for offset, size in boxes)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[TensorInfo, Box]:
    """A tensor whose first axes may be cut into single elements and the rest irregularly, and a box of it."""
    lead = tuple(draw(st.lists(st.integers(1, 4), max_size=2)))
    rest = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=2)))
    boxes: list[Box] = []
    alike = draw(st.booleans())
    tiling = draw(tilings(rest, 9))
    for at in product(*map(range, lead)):
        tiling = tiling if alike else draw(tilings(rest, 9))
        boxes += [((*at, *offset), (*(1 for _ in at), *size)) for offset, size in tiling]
    shape = (*lead, *rest)
    if draw(st.booleans()):  # one that holds nothing
        boxes.append(((0,) * len(shape), (*shape[:-1], 0)))
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    size = tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
    return TensorInfo("w", "int64", shape, pieces_of(draw(st.permutations(boxes)))), (offset, size)


@bounded
@given(tensors())
def test_every_piece_that_a_box_overlaps_is_found_once(drawn: tuple[TensorInfo, Box]) -> None:
    tensor, box = drawn
    found = list(Reader(Path())._overlapping(tensor, box))
    wanted = [p for p in tensor.pieces if overlap(box, (p.offset, p.size)) is not None]
    assert [p for p in wanted if found.count(p) != 1] == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data(), st.lists(st.integers(1, 8), min_size=1, max_size=3).map(tuple), st.booleans())
def test_what_is_read_is_what_was_cut(data: st.DataObject, shape: Index, turned: bool) -> None:
    values: Array = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    with tempfile.TemporaryDirectory() as folder, Reader(Path(folder)) as reader:
        tensor = store(Path(folder), "w", "int64", values, data.draw(tilings(shape, 20)), turned)
        for _ in range(4):
            offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
            size = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True))
            out = np.empty(size, np.int64)
            reader.read(tensor, (offset, size), out)
            assert out.tolist() == values[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))].tolist()


def grid(*cuts: tuple[int, int]) -> TensorInfo:
    """A tensor cut into so many pieces of such a thickness along every axis."""
    steps = [[n * step for n in range(count)] for count, step in cuts]
    size = tuple(step for _, step in cuts)
    boxes: list[Box] = [(offset, size) for offset in product(*steps)]
    return TensorInfo("w", "int64", tuple(count * step for count, step in cuts), pieces_of(boxes))


@pytest.mark.parametrize(
    ("tensor", "box", "most"),
    [
        (grid((40, 1), (30, 1), (4, 8), (1, 5)), ((7, 9, 0, 0), (1, 1, 32, 5)), 4),
        (grid((40, 1), (30, 1), (4, 8), (1, 5)), ((7, 9, 9, 0), (1, 1, 3, 5)), 1),
        (grid((500, 1), (1, 6)), ((33, 0), (1, 6)), 1),
        (grid((500, 3), (1, 6)), ((33, 0), (3, 6)), 1),
        (grid((500, 3)), ((34,), (3,)), 2),
    ],
)
def test_a_box_of_a_large_tensor_looks_at_few_pieces(tensor: TensorInfo, box: Box, most: int) -> None:
    assert len(list(Reader(Path())._overlapping(tensor, box))) <= most


def test_tensors_of_one_name_are_not_confused() -> None:
    reader = Reader(Path())
    first, second = grid((9, 1), (2, 2)), grid((9, 2), (1, 4))
    for tensor in (first, second, first):
        found = list(reader._overlapping(tensor, ((8, 0), (1, 4))))
        assert all(any(piece is own for own in tensor.pieces) for piece in found)
        assert found


@pytest.mark.parametrize("lost", [0, 4, 8])
def test_a_hole_is_told(tmp_path: Path, lost: int) -> None:
    values = np.arange(36, dtype=np.int64).reshape(9, 4)
    boxes: list[Box] = [((n, 0), (1, 4)) for n in range(9)]
    whole = store(tmp_path, "w", "int64", values, boxes, turned=False)
    tensor = TensorInfo("w", "int64", (9, 4), tuple(p for p in whole.pieces if p.offset[0] != lost))
    with Reader(tmp_path) as reader, pytest.raises(BrokenCheckpoint, match="4 elements are in no piece"):
        reader.read(tensor, ((0, 0), (9, 4)), np.empty((9, 4), np.int64))
