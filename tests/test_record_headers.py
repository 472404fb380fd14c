"""Records that begin and end like one before are located without their pickle, and are read as if by it."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpttool.elements import dtype_of
from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats import payload, torchzip
from ckpttool.reading import Reader
from ckpttool.tensors import Piece, Place, TensorInfo, Wrap


def saved(value: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def infos(folder: Path, records: Sequence[bytes], values: Sequence[torch.Tensor]) -> list[TensorInfo]:
    """One tensor a record, all in one file."""
    (folder / "f").write_bytes(b"".join(records))
    found, at = [], 0
    for record, value in zip(records, values, strict=True):
        place = Place("f", at, len(record), Wrap.ZIP_ARCHIVE)
        shape = tuple(value.shape)
        dtype = str(value.dtype).removeprefix("torch.")
        found.append(TensorInfo("w", dtype, shape, (Piece((0,) * len(shape), shape, place),)))
        at += len(record)
    return found


def read(reader: Reader, tensor: TensorInfo) -> bytes:
    out = np.empty(tensor.shape, dtype_of(tensor.dtype))
    reader.read(tensor, ((0,) * len(tensor.shape), tensor.shape), out)
    return out.tobytes()


def raw(value: torch.Tensor) -> bytes:
    content: bytes = value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return content


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Offsets of the archives whose directory and pickle were read."""
    found: list[int] = []
    open_archive = torchzip.open_archive

    def told(path: Path, base: int = 0, length: int | None = None) -> Any:
        found.append(base)
        return open_archive(path, base, length)

    monkeypatch.setattr(payload, "open_archive", told)
    return found


def test_records_of_one_shape_are_opened_once(tmp_path: Path, opened: list[int]) -> None:
    values = [torch.randn(6, 5) for _ in range(20)]
    tensors = infos(tmp_path, [saved(value) for value in values], values)
    with Reader(tmp_path) as reader:
        assert [read(reader, tensor) for tensor in tensors] == [raw(value) for value in values]
    assert opened == [0]


def views() -> list[torch.Tensor]:
    """Tensors whose records have one length and which are not alike."""
    storage = torch.arange(72, dtype=torch.float32)
    return [
        storage.clone()[:36].reshape(6, 6),
        storage.clone()[36:].reshape(6, 6),
        storage.clone()[1:37].reshape(6, 6),
        storage.clone()[:36].reshape(6, 6).t(),
        storage.clone().reshape(6, 12)[:, ::2],
        storage.clone().reshape(6, 12)[:, 1::2],
        storage.clone()[:36].reshape(9, 4),
        storage.clone()[:36].reshape(4, 9),
        storage.clone().view(torch.int32)[:36].reshape(6, 6),
        storage.clone().bfloat16().repeat_interleave(2)[:36].reshape(6, 6),
    ]


@pytest.mark.parametrize("turn", range(len(views())))
def test_records_of_one_length_that_differ_are_told_apart(tmp_path: Path, turn: int, opened: list[int]) -> None:
    """Other shapes, dtypes, strides, offsets: whichever came first."""
    values = [*views()[turn:], *views()[:turn], *views()]
    records = [saved(value) for value in values]
    assert len({len(record) for record in records[: len(views())]}) < len(views()) - 2
    tensors = infos(tmp_path, records, values)
    with Reader(tmp_path) as reader:
        assert [read(reader, tensor) for tensor in tensors] == [raw(value) for value in values]
    assert len(opened) >= len({(v.shape, v.dtype, v.stride(), v.storage_offset()) for v in values})


def test_a_record_that_is_not_what_the_index_says_is_named(tmp_path: Path) -> None:
    values = [torch.zeros(4, 6), torch.ones(4, 6), torch.ones(4, 6)]
    records = [saved(values[0]), saved(values[1]), saved(torch.ones(6, 4))]
    assert len({len(record) for record in records}) == 1
    tensors = infos(tmp_path, records, values)
    with Reader(tmp_path) as reader:
        assert [read(reader, tensor) for tensor in tensors[:2]] == [raw(value) for value in values[:2]]
        with pytest.raises(BrokenCheckpoint, match=r"holds float32 \[6, 4\]"):
            read(reader, tensors[2])
        # the index is wrong about a record that begins and ends like the first one
        wrong = TensorInfo("w", "float32", (6, 4), (Piece((0, 0), (6, 4), tensors[1].pieces[0].place),))
        with pytest.raises(BrokenCheckpoint, match=r"holds float32 \[4, 6\]"):
            read(reader, wrong)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("begin", "end"), [(0, 64), (0, -1), (-22, None), (-400, None)])
def test_a_record_with_zeros_at_an_end_is_damaged(tmp_path: Path, begin: int, end: int | None, first: bool) -> None:
    """Whether one like it was whole or not."""
    values = [torch.ones(8, 8), torch.ones(8, 8)]
    damaged = bytearray(saved(values[1]))
    damaged[begin:end] = bytes(len(damaged[begin:end]))
    records = [bytes(damaged), saved(values[0])] if first else [saved(values[0]), bytes(damaged)]
    tensors = infos(tmp_path, records, values)
    broken, whole = (tensors[0], tensors[1]) if first else (tensors[1], tensors[0])
    with Reader(tmp_path) as reader:
        if not first:
            assert read(reader, whole) == raw(values[0])
        with pytest.raises(BrokenCheckpoint):
            read(reader, broken)
        assert read(reader, whole) == raw(values[0])


def test_a_record_in_the_place_of_another_is_not_taken_for_it(tmp_path: Path) -> None:
    """As long as the first, with the bytes of a file that was cut off and filled up."""
    values = [torch.ones(40, 40), torch.ones(40, 40)]
    record = saved(values[0])
    tensors = infos(tmp_path, [record, record[: len(record) // 2] + bytes(len(record) - len(record) // 2)], values)
    with Reader(tmp_path) as reader:
        read(reader, tensors[0])
        with pytest.raises(BrokenCheckpoint):
            read(reader, tensors[1])


def test_a_few_lengths_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: list[int]) -> None:
    monkeypatch.setattr(payload, "SEEN_MOST", 2)
    values = [torch.ones(n, 100) for n in (1, 2, 3)] * 2
    tensors = infos(tmp_path, [saved(value) for value in values], values)
    with Reader(tmp_path) as reader:
        assert [read(reader, tensor) for tensor in tensors] == [raw(value) for value in values]
        assert len(reader._seen) == 2
    assert len(opened) == 4


class Stream(io.RawIOBase):
    """A file that cannot be sought in: checksums follow the records, as torch writes them."""

    def __init__(self) -> None:
        self.content = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.content += bytes(data)
        return len(data)


def packed_again(record: bytes, before: int = 0) -> bytes:
    """The same records with the elements before the pickle, and so many other bytes before all."""
    stream = Stream()
    with zipfile.ZipFile(io.BytesIO(record)) as old, zipfile.ZipFile(stream, "w") as new:
        if before:
            new.writestr(zipfile.ZipInfo("archive/other"), bytes(before))
        for name in sorted(old.namelist(), key=lambda name: name.endswith("data.pkl")):
            new.writestr(zipfile.ZipInfo(name), old.read(name))
    return stream.content


def test_a_pickle_behind_the_elements_is_read_too(tmp_path: Path) -> None:
    square = torch.arange(36, dtype=torch.float32).reshape(6, 6)
    values = [square, square.t()]
    records = [packed_again(saved(value)) for value in values]
    assert len({len(record) for record in records}) == 1
    tensors = infos(tmp_path, records, values)
    with Reader(tmp_path) as reader:
        assert [read(reader, tensor) for tensor in tensors] == [raw(value) for value in values]


def test_what_is_remembered_is_small(tmp_path: Path) -> None:
    value = torch.ones(2, 2)
    tensors = infos(tmp_path, [packed_again(saved(value), 1 << 22)], [value])
    with Reader(tmp_path) as reader:
        assert read(reader, tensors[0]) == raw(value)
        assert sum(len(header.head) for header in reader._seen.values()) < 1 << 20
