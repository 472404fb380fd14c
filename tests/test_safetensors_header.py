"""Headers of safetensors files: as the library writes them, and as it refuses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.safetensorsfile import DTYPES, read_safetensors
from ckpttool.tensors import DTYPE_BITS

Header = dict[str, Any]

GOOD: Header = {
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    "c": {"dtype": "U8", "shape": [0, 7], "data_offsets": [26, 26]},
}


def size8(number: int) -> bytes:
    return number.to_bytes(8, "little")


def write(path: Path, header: Header | bytes, body: int = 26) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(size8(len(raw)) + raw + bytes(body))
    return path


def changed(name: str, **fields: Any) -> Header:
    return {**GOOD, name: {**GOOD[name], **fields}}


def library_refuses(path: Path) -> bool:
    try:
        with safe_open(path, "np"):
            return False
    except SafetensorError:
        return True


@pytest.mark.parametrize("dtype", sorted(DTYPES.values()))
def test_every_dtype_is_read_as_the_library_writes_it(tmp_path: Path, dtype: str) -> None:
    path, kind = tmp_path / "file.safetensors", getattr(torch, dtype, None)
    if kind is None:
        name = next(name for name, known in DTYPES.items() if known == dtype)
        length = -(-DTYPE_BITS[dtype] * 8 // 8)
        write(path, {"x": {"dtype": name, "shape": [8], "data_offsets": [0, length]}}, length)
        assert not library_refuses(path)
    else:
        save_file({"x": torch.zeros(8).to(kind)}, path)
    info = read_safetensors(path)["x"]
    assert (info.dtype, info.shape, info.nbytes) == (dtype, (8,), DTYPE_BITS[dtype])


def test_metadata_padding_and_order_do_not_matter(tmp_path: Path) -> None:
    header = json.dumps({"c": GOOD["c"], "__metadata__": {"format": "pt"}, "b": GOOD["b"], "a": GOOD["a"]}).encode()
    path = write(tmp_path / "file.safetensors", header + b" " * (4096 - 8 - len(header)))
    assert not library_refuses(path)
    tensors = read_safetensors(path)
    assert list(tensors) == ["c", "b", "a"]
    assert [(t.pieces[0].place.offset, t.pieces[0].place.length) for t in tensors.values()] == [
        *((4122, 0), (4120, 2), (4096, 24))
    ]


@pytest.mark.parametrize(
    ("header", "body", "words"),
    [
        (GOOD, 25, "truncated, .* bytes where .* are needed"),
        (GOOD, 0, "truncated"),
        (GOOD, 27, "1 bytes after the last tensor"),
        (changed("b", data_offsets=[25, 27]), 27, "gap or overlap at byte"),
        (changed("b", data_offsets=[23, 25]), 26, "gap or overlap at byte"),
        ({"b": GOOD["b"]}, 26, "gap or overlap at byte"),
        (changed("a", shape=[2, 4]), 26, "a has 24 bytes, 32 wanted"),
        (changed("a", data_offsets=[24, 0]), 26, "a has -24 bytes, 24 wanted"),
        (changed("a", shape=[-2, -3]), 26, "entry of a is damaged"),
        (changed("a", shape=[1 << 70, 1 << 70, 0]), 26, "a has 24 bytes, 0 wanted"),
        (changed("a", shape=None), 26, "entry of a is damaged"),
        (changed("a", shape=[2.0, 3]), 26, "entry of a is damaged"),
        (changed("a", dtype="F31"), 26, "entry of a is damaged"),
        (changed("a", dtype=["F32"]), 26, "entry of a is damaged"),
        (changed("a", data_offsets=[0]), 26, "entry of a is damaged"),
        ({"a": 3}, 0, "entry of a is damaged"),
        (b"[]", 0, "no JSON object"),
        (b"{", 0, "not valid JSON"),
        (b"\xff\xfe", 0, "not valid JSON"),
        (b"[" * 100_000, 0, "not valid JSON"),
    ],
)
def test_what_the_library_refuses_is_broken(tmp_path: Path, header: Header | bytes, body: int, words: str) -> None:
    path = write(tmp_path / "file.safetensors", header, body)
    assert library_refuses(path)
    with pytest.raises(BrokenCheckpoint, match=rf"file\.safetensors: .*{words}"):
        read_safetensors(path)


@pytest.mark.parametrize(
    "raw", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 64, size8(1000) + b"{}", size8(1 << 62) + b"{}"]
)
def test_a_header_longer_than_the_file_is_broken(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "file.safetensors"
    path.write_bytes(raw)
    assert library_refuses(path)
    with pytest.raises(BrokenCheckpoint) as caught:
        read_safetensors(path)
    assert caught.value.code == "truncated"


def test_every_truncation_is_broken(tmp_path: Path) -> None:
    path = write(tmp_path / "file.safetensors", GOOD)
    whole = path.read_bytes()
    assert len(read_safetensors(path)) == 3
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenCheckpoint):
            read_safetensors(path)
