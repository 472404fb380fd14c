"""Plans against NumPy: tensors cut irregularly into raw files, and what rows and arrangements make of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from ckpttool.elements import dtype_of
from ckpttool.plan import Arrangement, Rows
from ckpttool.tensors import Box, Index, Piece, Place, TensorInfo, contiguous_strides

Array = np.ndarray[Any, np.dtype[Any]]


@st.composite
def tilings(draw: st.DrawFn, shape: Index, most: int = 12) -> list[Box]:
    """Boxes that fill a shape, by cuts of one box after the other: of any thickness, in any order."""
    boxes: list[Box] = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, most))):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axes = [axis for axis, n in enumerate(size) if n > 1]
        if not axes:
            boxes.append((offset, size))
            continue
        axis = draw(st.sampled_from(axes))
        at = draw(st.integers(1, size[axis] - 1))
        boxes.append((offset, _with(size, axis, at)))
        boxes.append((_with(offset, axis, offset[axis] + at), _with(size, axis, size[axis] - at)))
    return draw(st.permutations(boxes))


def _with(index: Index, axis: int, value: int) -> Index:
    return (*index[:axis], value, *index[axis + 1 :])


def store(root: Path, name: str, dtype: str, values: Array, boxes: Sequence[Box], turned: bool) -> TensorInfo:
    """Write a tensor's boxes into one raw file, each behind a gap; ``turned`` ones have their axes backwards there."""
    content, pieces = b"", []
    for count, (offset, size) in enumerate(boxes):
        part = values[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]
        strides = contiguous_strides(size)
        if turned and count % 2:
            part, strides = part.transpose(), contiguous_strides(size[::-1])[::-1]
        gap = b"\xff" * (count % 3) * values.itemsize
        raw = gap + part.tobytes()
        place = Place(f"{name}.raw", len(content), len(raw), start=count % 3, strides=strides)
        pieces.append(Piece(offset, size, place))
        content += raw
    (root / f"{name}.raw").write_bytes(content)
    return TensorInfo(name, dtype, values.shape, tuple(pieces))


@st.composite
def numbers(draw: st.DrawFn, shape: Index, dtype: str) -> Array:
    """Numbers that a 16-bit float can tell apart, a NaN and infinities among them."""
    seed = draw(st.integers(0, 1 << 16))
    random = np.random.default_rng(seed)
    values = random.choice([0.5, 1.0, 3.0, -2.0, 0.0078125], shape) * random.integers(1, 128, shape)
    special = random.random(shape) < 0.05
    if not dtype.startswith(("int", "uint")):
        values = np.where(special, random.choice([np.nan, np.inf, -np.inf, -0.0], shape), values)
    return np.asarray(values).astype(dtype_of(dtype))


def taken(rows: Rows, values: Array, width: Index) -> Array:
    """A run of rows by indexing, one row after the other; ``width`` is the shape of a row."""
    inner: Array = values[rows.lead]
    if not inner.ndim:
        return inner.reshape(1)
    chosen = []
    for row in range(rows.count):
        block, inside = (row // rows.block, row % rows.block) if rows.block else (0, row)
        one = inner[rows.start + block * rows.step + inside]
        chosen.append(one[rows.column : rows.column + width[0]] if width else one)
    return np.stack(chosen) if chosen else np.empty((0, *width), values.dtype)


def turned(how: Arrangement | None, joined: Array, shape: Index) -> Array:
    """What an arrangement makes of a concatenation."""
    made: Array = (joined if how is None else joined.reshape(how.view).transpose(how.order)).reshape(shape)
    return made


def evaluated(made: Any, arrays: Mapping[str, Array]) -> Array:
    """The tensor that a recipe says, by indexing."""
    joined = np.concatenate(
        [taken(rows, arrays[rows.source], arrays[rows.source][rows.lead].shape[1:]) for rows in made.parts]
    )
    values: Array = turned(made.arrangement, joined, made.shape) + np.asarray(made.shift, joined.dtype)
    return values


@st.composite
def sums(draw: st.DrawFn, total: int, most: int = 3) -> list[int]:
    """A few numbers that add up to a total."""
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=most - 1)))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


@st.composite
def regrouped(draw: st.DrawFn, shape: Index) -> Index:
    """The same elements with neighbouring axes made one."""
    out: list[int] = []
    for n, joined in zip(shape, draw(st.lists(st.booleans(), min_size=5, max_size=5)), strict=False):
        if out and joined:
            out[-1] *= n
        else:
            out.append(n)
    assert math.prod(out) == math.prod(shape)
    return tuple(out)
