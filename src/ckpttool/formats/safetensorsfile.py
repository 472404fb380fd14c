"""A safetensors file: 8 bytes of header length, a JSON header, then the elements. Only the header is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats import torchzip
from ckpttool.formats.jsonfile import parse_json
from ckpttool.tensors import DTYPE_BITS, MOST_DIMENSIONS, Index, Piece, Place, TensorInfo, Wrap, dtype_bytes

HEADER_MOST = 100_000_000  # the safetensors library's own limit

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "BOOL": "bool",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F6_E2M3": "float6_e2m3fn",
        "F6_E3M2": "float6_e3m2fn",
        "F4": "float4_e2m1fn",
    }
)
"""torch's names for the dtypes of safetensors headers."""


SAFETENSORS_NAMES: Mapping[str, str] = MappingProxyType({name: code for code, name in DTYPES.items()})
"""The names that safetensors headers have for torch's dtypes."""

METADATA = "__metadata__"
"""The key of a header that names no tensor."""


class Entry(NamedTuple):
    """A tensor to write."""

    name: str
    dtype: str
    shape: Index


def header_bytes(entries: Iterable[Entry], align: int) -> bytes:
    """Return the first bytes of a file that holds these tensors in this order, one behind the other.

    The length counts in: 8 bytes of it, then JSON with ``{"format": "pt"}`` (without which several versions of
    transformers do not load the file), then spaces up to a multiple of ``align``.
    """
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, dtype, shape in entries:
        end = at + dtype_bytes(dtype, math.prod(shape))
        header[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    padded = text.ljust(-(-(len(text) + 8) // align) * align - 8)
    return len(padded).to_bytes(8, "little") + padded


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors that a safetensors header lists, after holding it against the file's size.

    Raises :class:`BrokenCheckpoint` for a header that is none, gaps or overlaps, and a file that is short or long.
    """
    size = torchzip.file_size(path)
    length = int.from_bytes(torchzip.read_range(path, 0, 8), "little")
    if size < 8 or length > min(size - 8, HEADER_MOST):
        raise BrokenCheckpoint(
            f"{path.name}: truncated or no safetensors file ({size:,} bytes, the header alone claims {length:,})",
            code="truncated",
        )
    header = parse_json(torchzip.read_range(path, 8, length), path.name)
    if not isinstance(header, dict):
        raise BrokenCheckpoint(f"{path.name}: its header is no JSON object", code="bad-header")
    begin, meta = 8 + length, header.get(METADATA)
    if isinstance(meta, dict) and "DCP_SHARDING_INFO" in meta:
        raise BrokenCheckpoint(
            f"{path.name}: parts of tensors, as torch's DCP writes them in safetensors form",
            hint="torch joins them: torch.distributed.checkpoint._consolidate_hf_safetensors.",
            code="dcp-sharded",
        )
    tensors = {str(k): _entry(path, str(k), v, begin) for k, v in header.items() if k != METADATA}
    _check_coverage(path, tensors, begin, size)
    return tensors


def _entry(path: Path, name: str, value: Any, begin: int) -> TensorInfo:
    try:
        dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
        first, last = value["data_offsets"]
        wanted = dtype_bytes(dtype, 1)
        if len(shape) > MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < 1 << 128 for n in (*shape, first, last)):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path.name}: the header entry of {name} is damaged", code="bad-header") from error
    piece = Piece((0,) * len(shape), shape, Place(path.name, begin + first, last - first, Wrap.RAW))
    info = TensorInfo(name, dtype, shape, (piece,), (), "whole")
    wanted = info.nbytes
    if last - first != wanted:
        raise BrokenCheckpoint(f"{path.name}: {name} has {last - first:,} bytes, {wanted:,} wanted", code="bad-header")
    return info


def _check_coverage(path: Path, tensors: Mapping[str, TensorInfo], begin: int, size: int) -> None:
    """Every byte after the header belongs to one tensor; the format forbids holes."""
    at = begin
    for place in sorted((t.pieces[0].place for t in tensors.values()), key=lambda p: (p.offset, p.length)):
        if place.offset != at:
            raise BrokenCheckpoint(f"{path.name}: the data has a gap or overlap at byte {at:,}", code="bad-header")
        at += place.length
    if at > size:
        raise BrokenCheckpoint(f"{path.name}: truncated, {size:,} bytes where {at:,} are needed", code="truncated")
    if at < size:
        raise BrokenCheckpoint(f"{path.name}: {size - at:,} bytes after the last tensor", code="bad-header")


assert set(DTYPES.values()) <= DTYPE_BITS.keys()
