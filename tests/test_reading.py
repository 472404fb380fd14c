"""Boxes of tensors read from their pieces: against the slow and obvious way, in every format, whatever was cut how."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpttool import reading
from ckpttool.elements import dtype_of
from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint
from ckpttool.formats.hf import read_torch
from ckpttool.reading import SCATTERED, Reader
from ckpttool.source import Source, open_checkpoint
from ckpttool.tensors import Box, Index, Piece, Place, TensorInfo, Wrap, contiguous_strides, dtype_bytes
from tests import builders
from tests.conftest import DATA
from tests.pieces import read_piece, read_tensor

Array = np.ndarray[Any, np.dtype[Any]]

bounded = settings(max_examples=250, deadline=None, derandomize=True)

ROOTS = [
    *(f"data/{path.relative_to(DATA)}" for kind in ("fsdp", "megatron") for path in sorted((DATA / kind).glob("*/"))),
    *("fsdp/fsdp1", "fsdp/fsdp1-shardedtensor", "fsdp/fsdp2", "fsdp/fsdp-tp", "fsdp/hsdp", "fsdp/single"),
    *("fsdp/tied-bf16", "fsdp/critic", "fsdp/dcp/step-10", "fsdp/accelerate/pytorch_model_fsdp_0"),
    *("megatron/dense-v1/dist_ckpt", "megatron/moe-v1/dist_ckpt", "megatron/dense-v2/optimizer/dist_ckpt"),
    *("hf/safetensors", "hf/bin"),
]


@pytest.fixture(params=ROOTS)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Source:
    """A checkpoint of each format and writer."""
    kind, name = request.param.split("/", 1)
    if kind == "hf":
        return open_checkpoint(hugging_face(tmp_path, name))
    root: Path = DATA if kind == "data" else request.getfixturevalue(f"{kind}_checkpoints")
    return open_checkpoint(root / name)


def hugging_face(root: Path, kind: str) -> Path:
    torch.manual_seed(0)
    tensors = {
        "matrix": torch.randn(7, 30),
        "half": torch.randn(4, 5, 6).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "float8": torch.randn(8).to(torch.float8_e4m3fn),
        "none": torch.empty(0, 4),
    }
    (root / "config.json").write_text('{"model_type": "llama"}')
    if kind == "safetensors":
        save_file(tensors, root / "model.safetensors")
    else:
        more = {"turned": torch.randn(5, 4).T, "part": torch.randn(9, 4)[2:5, 1:3]}
        torch.save({**tensors, **more}, root / "pytorch_model.bin")
    return root


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


def read(root: Path, tensor: TensorInfo, box: Box | None = None) -> Array:
    box = box or ((0,) * len(tensor.shape), tensor.shape)
    out: Array = np.zeros(box[1], dtype_of(tensor.dtype))
    with Reader(root) as reader:
        reader.read(tensor, box, out)
    return out


def test_whole_tensors_are_read(source: Source) -> None:
    """And every piece by itself, and every copy of one."""
    assert source.tensors
    for name, tensor in source.tensors.items():
        assert read(source.root, tensor).tobytes() == read_tensor(source.root, tensor).tobytes(), name
        for piece in (*tensor.pieces, *tensor.copies):
            out: Array = np.empty(piece.size, dtype_of(tensor.dtype))
            with Reader(source.root) as reader:
                reader.read_piece(tensor, piece, (piece.offset, piece.size), out)
            assert out.tobytes() == read_piece(source.root, tensor, piece).tobytes(), name


def test_boxes_are_read(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of every tensor, into buffers of any order, with bands so small that everything is cut."""
    monkeypatch.setattr(reading, "BAND", 64)
    random = np.random.default_rng(0)
    with Reader(source.root) as reader:
        for name, tensor in source.tensors.items():
            expected, dtype = read_tensor(source.root, tensor), dtype_of(tensor.dtype)
            for _ in range(3):
                offset = tuple(int(random.integers(max(n, 1))) for n in tensor.shape)
                size = tuple(min(n - o, int(random.integers(1, 9))) for n, o in zip(tensor.shape, offset, strict=True))
                for out in (np.empty(size, dtype), np.empty(size[::-1], dtype).T):
                    reader.read(tensor, (offset, size), out)
                    assert out.tobytes() == expected[slices((offset, size))].tobytes(), name


# Strides that torch saves


def boxes(shape: Index) -> st.SearchStrategy[Box]:
    """A box of a shape, empty only where the shape is."""
    starts = st.tuples(*(st.integers(0, max(n - 1, 0)) for n in shape))
    return starts.flatmap(
        lambda offset: st.tuples(
            st.just(offset), st.tuples(*(st.integers(min(n, 1), n - o) for n, o in zip(shape, offset, strict=True)))
        )
    )


DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex128, torch.float8_e5m2)


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A view of a storage: any strides (0 too, and odd ones where an axis has one element), any offset."""
    dtype = draw(st.sampled_from(DTYPES))
    size = tuple(draw(st.lists(st.integers(0, 6), max_size=3)))
    strides = tuple(draw(st.sampled_from((0, 1, 2, 3, 5, 6, 12, 36))) for _ in size)
    start = draw(st.integers(0, 9))
    spanned = 1 + sum((n - 1) * step for n, step in zip(size, strides, strict=True)) if 0 not in size else 0
    count = start + spanned + draw(st.integers(1, 5))
    raw = torch.from_numpy(np.random.default_rng(count).integers(0, 256, count * dtype.itemsize, np.uint8))
    storage = raw.view(dtype) if dtype != torch.bool else raw % 2 == 0
    return storage.as_strided(size, strides, start)


def raw(value: torch.Tensor) -> bytes:
    whole = value.clone(memory_format=torch.contiguous_format)
    return bytes(whole.reshape(-1).view(torch.uint8).numpy().tobytes())


def in_a_larger_one(data: st.DataObject, size: Index, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """A larger array of zeros, and a view of it to be filled: with gaps, its axes in any order, turned around."""
    order = data.draw(st.permutations(range(len(size))))
    steps = [data.draw(st.sampled_from((1, 1, 2, -1, -3))) for _ in size]
    room: Array = np.zeros([size[axis] * abs(steps[axis]) for axis in order], dtype)
    cut = (*(slice(None, None, step) for step in steps), ...)
    return room, room.transpose([order.index(axis) for axis in range(len(size))])[cut]


@bounded
@given(st.data(), views(), st.sampled_from((16, 40, 128, 8 << 20)))
def test_any_strides_are_read(data: st.DataObject, value: torch.Tensor, band: int) -> None:
    """Into any buffer, of which nothing else is touched, without reading much more than is wanted."""
    box = data.draw(boxes(tuple(value.shape)))
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        root = Path(name)
        torch.save({"before": torch.ones(3), "t": value}, root / "pytorch_model.bin")
        tensor = read_torch(root / "pytorch_model.bin")["t"]
        room, out = in_a_larger_one(data, box[1], dtype_of(tensor.dtype))
        patch.setattr(reading, "BAND", band)
        moved = counting(patch)
        with Reader(root) as reader:
            reader.read(tensor, box, out)
    assert out.tobytes() == raw(value[slices(box)])
    assert sum(moved) <= SCATTERED * out.nbytes
    out.view(f"V{out.itemsize}")[...] = bytes(out.itemsize)
    assert not room.tobytes().strip(b"\0")


def test_views_of_one_storage_are_told_apart(tmp_path: Path) -> None:
    base = torch.arange(60.0).reshape(6, 10)
    parts = (base, base[2:4], base[:, 3:5], base.T, base[5, 9], base[::2, 1::3], base[3].expand(4, 10), base[6:])
    saved = {str(n): part for n, part in enumerate((*parts, base.view(2, 3, 5, 2)[:, 1]))}
    torch.save(saved, tmp_path / "pytorch_model.bin")
    tensors = read_torch(tmp_path / "pytorch_model.bin")
    assert {name: read(tmp_path, tensors[name]).tobytes() for name in saved} == {k: raw(v) for k, v in saved.items()}


@pytest.mark.parametrize("value", [torch.tensor([1 + 2j, 3 - 1j]).conj(), torch.tensor([1 + 2j]).conj().imag])
def test_lazy_conjugates_and_negatives_are_not_read_as_what_they_are_of(tmp_path: Path, value: torch.Tensor) -> None:
    """torch notes beside the storage that it holds the conjugates: refused or heeded, never overlooked."""
    torch.save({"t": value}, tmp_path / "pytorch_model.bin")
    try:
        result = read(tmp_path, read_torch(tmp_path / "pytorch_model.bin")["t"])
    except BrokenCheckpoint:
        return
    assert result.tobytes() == raw(value.resolve_conj().resolve_neg())


# Pieces that are cut anyhow


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[TensorInfo, Array]:
    """A tensor in a raw file, cut by random lines, its pieces in random order; and what the file holds."""
    shape = (draw(st.integers(1, 14)), *draw(st.lists(st.integers(1, 5), max_size=2)))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=12))}) for n in shape]
    cells = draw(st.permutations(list(product(*(list(pairwise(edges)) for edges in cuts)))))
    values = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    steps = contiguous_strides(shape)
    pieces = []
    for cell in cells:
        offset, size = tuple(a for a, _ in cell), tuple(b - a for a, b in cell)
        start = sum(map(int.__mul__, offset, steps))
        pieces.append(Piece(offset, size, Place("raw", 8, values.nbytes, Wrap.RAW, start, steps)))
    return TensorInfo("t", "int32", shape, tuple(pieces)), values


@bounded
@given(st.data(), cut_tensors(), st.sampled_from((4, 32, 8 << 20)))
def test_any_cut_is_joined(data: st.DataObject, made: tuple[TensorInfo, Array], band: int) -> None:
    """Also when the reader turns from one tensor to another and back."""
    tensor, values = made
    other = replace(tensor, name="other", pieces=tensor.pieces[::-1])
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch, Reader(Path(name)) as reader:
        patch.setattr(reading, "BAND", band)
        Path(name, "raw").write_bytes(bytes(8) + values.tobytes())
        for info in (tensor, other, tensor):
            box = data.draw(boxes(tensor.shape))
            room, out = in_a_larger_one(data, box[1], values.dtype)
            reader.read(info, box, out)
            assert out.tolist() == values[slices(box)].tolist()
            out[...] = 0
            assert not room.any()


@bounded
@given(st.data(), cut_tensors())
def test_a_hole_is_told(data: st.DataObject, made: tuple[TensorInfo, Array]) -> None:
    tensor, values = made
    gone = data.draw(st.integers(0, len(tensor.pieces) - 1))
    with tempfile.TemporaryDirectory() as name:
        Path(name, "raw").write_bytes(bytes(8) + values.tobytes())
        holed = replace(tensor, pieces=(*tensor.pieces[:gone], *tensor.pieces[gone + 1 :]))
        numel = tensor.pieces[gone].numel
        with pytest.raises(BrokenCheckpoint, match=f"t: {numel:,} elements are in no piece"):
            read(Path(name), holed)


# What is read, and how


def counting(patch: pytest.MonkeyPatch, most: int | None = None) -> list[int]:
    """Bytes of every positioned read from now on; with ``most``, none of them returns more."""
    counts: list[int] = []
    real = os.preadv

    def preadv(handle: int, buffers: list[memoryview], at: int) -> int:
        counts.append(real(handle, buffers if most is None else [buffers[0][:most]], at))
        return counts[-1]

    patch.setattr(os, "preadv", preadv)
    return counts


def test_each_piece_is_read_once_and_nothing_else(fsdp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(fsdp_checkpoints / "fsdp2")
    counts = counting(monkeypatch)
    for tensor in source.tensors.values():
        counts.clear()
        read(source.root, tensor)
        assert sorted(counts) == sorted(dtype_bytes(tensor.dtype, piece.numel) for piece in tensor.pieces)


def test_columns_of_contiguous_pieces_cost_no_more_than_their_rows(
    fsdp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor cut along its columns: its rows are joined from all pieces."""
    source = open_checkpoint(fsdp_checkpoints / "fsdp-tp")
    across = [t for t in source.tensors.values() if len({p.offset[1:] for p in t.pieces}) > 1]
    counts = counting(monkeypatch)
    for tensor in across:
        counts.clear()
        read(source.root, tensor, ((1, *(0,) * (len(tensor.shape) - 1)), (2, *tensor.shape[1:])))
        assert sum(counts) == dtype_bytes(tensor.dtype, 2 * math.prod(tensor.shape[1:]))
    assert across


def test_short_reads_are_continued(fsdp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_checkpoint(fsdp_checkpoints / "fsdp2")
    tensor = max(source.tensors.values(), key=lambda t: t.nbytes)
    counts = counting(monkeypatch, 1000)
    assert read(source.root, tensor).tobytes() == read_tensor(source.root, tensor).tobytes()
    assert (max(counts), sum(counts)) == (1000, tensor.nbytes)


def many_files(root: Path, count: int) -> TensorInfo:
    """A tensor of which each row lies in a file of its own."""
    for row in range(count):
        (root / f"{row}.bin").write_bytes(np.full(5, row, np.int16).tobytes())
    pieces = tuple(Piece((row, 0), (1, 5), Place(f"{row}.bin", 0, 10)) for row in range(count))
    return TensorInfo("t", "int16", (count, 5), pieces)


def open_below(root: Path) -> int:
    """How many files of a directory this process has open."""
    links = Path("/proc/self/fd")
    return sum(os.path.realpath(link).startswith(f"{root.resolve()}/") for link in links.iterdir())


def test_few_files_are_open_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "OPEN_FILES", 2)
    monkeypatch.setattr(reading, "PAYLOADS", 3)
    tensor = many_files(tmp_path, 20)
    seen: list[int] = []
    real = os.preadv

    def preadv(*arguments: Any) -> int:
        seen.append(open_below(tmp_path))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    with Reader(tmp_path) as reader:
        for _ in range(2):
            out: Array = np.zeros((20, 5), np.int16)
            reader.read(tensor, ((0, 0), (20, 5)), out)
            assert out[:, 3].tolist() == list(range(20))
    assert (max(seen), len(seen), open_below(tmp_path)) == (2, 40, 0)


# Damage after the index was read


@pytest.fixture(params=["fsdp/torch2.13-fsdp2", "megatron/mcore0.16-dense-tp2", "hf/safetensors", "hf/bin"])
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    """A checkpoint of each format, of which files are changed after it was opened."""
    root = tmp_path / "root"
    if request.param.startswith("hf"):
        root.mkdir()
        yield open_checkpoint(hugging_face(root, request.param[3:]))
    else:
        yield open_checkpoint(builders.copy(DATA / request.param, root))


def outcomes(source: Source, damage: Callable[[Path], object]) -> list[CkpttoolError]:
    """Damage the largest file, then read everything: what fails must name it, all else must be as it was."""
    files = {piece.place.file for tensor in source.tensors.values() for piece in tensor.pieces}
    file = max(sorted(files), key=lambda name: (source.root / name).stat().st_size)
    tensors = [(tensor, read_tensor(source.root, tensor)) for tensor in source.tensors.values()]
    damage(source.root / file)
    errors = []
    for tensor, expected in tensors:
        try:
            assert read(source.root, tensor).tobytes() == expected.tobytes()
        except CkpttoolError as error:
            errors.append(error)
    assert [error.message for error in errors if file not in error.message] == []
    return errors


@pytest.mark.parametrize("fraction", [0.0, 0.2, 0.5])
def test_a_file_that_became_short_is_named(copy: Source, fraction: float) -> None:
    errors = outcomes(copy, lambda file: builders.truncate(file, fraction))
    assert {type(error) for error in errors} == {BrokenCheckpoint}


def test_a_file_that_went_away_is_named(copy: Source) -> None:
    errors = outcomes(copy, Path.unlink)
    assert {(type(error), error.code) for error in errors} == {(NotACheckpoint, "unreadable")}


def test_a_file_that_became_a_directory_is_named(copy: Source) -> None:
    """It can be opened all the same, but not read: as with a disk that fails."""

    def replaced(file: Path) -> None:
        file.unlink()
        file.mkdir()

    assert outcomes(copy, replaced) != []


def test_records_that_moved_are_named(tmp_path: Path) -> None:
    source = open_checkpoint(builders.copy(DATA / "fsdp/torch2.13-fsdp2", tmp_path / "root"))
    errors = outcomes(source, lambda file: file.write_bytes(bytes(file.stat().st_size)))
    assert {error.code for error in errors} == {"damaged-zip"}


def test_a_record_that_became_short_is_told(tmp_path: Path) -> None:
    """A tensor that reaches out of its storage is never filled with what comes after it."""
    (tmp_path / "raw").write_bytes(bytes(100))
    tensor = TensorInfo("t", "int32", (4,), (Piece((0,), (4,), Place("raw", 8, 15)),))
    with pytest.raises(BrokenCheckpoint, match="raw: t reaches out of its storage"):
        read(tmp_path, tensor)


@pytest.mark.parametrize("stored", [torch.ones(3, 2), torch.ones(6), torch.ones(2, 3).double(), torch.ones(2, 4)])
def test_a_record_of_another_shape_or_dtype_is_refused(tmp_path: Path, stored: torch.Tensor) -> None:
    """In a ``.distcp`` file the index says one thing, the record itself another: not read as if they agreed."""
    torch.save(stored, tmp_path / "__0_0.distcp")
    place = Place("__0_0.distcp", 0, (tmp_path / "__0_0.distcp").stat().st_size, Wrap.ZIP_ARCHIVE)
    with pytest.raises(BrokenCheckpoint, match=r"__0_0\.distcp"):
        read(tmp_path, TensorInfo("t", "float32", (2, 3), (Piece((0, 0), (2, 3), place),)))
