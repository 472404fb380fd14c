"""Where the structure of a file has its borders, its numbers and its texts; where payloads lie."""

from __future__ import annotations

import json
import pickletools
import re
import struct
import zipfile
from collections.abc import Iterator
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

EXTREMES = (
    *(-1, 0, 1, 2, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53 + 1, 2**62, 2**63 - 1, 2**63),
    *(2**64 - 1, 2**64, 10**30, -(2**31), -(2**63), -(2**63) - 1),
)
"""Numbers that a careless reader takes for sizes, offsets and counts."""

WEIRD = (
    *("a\nb", "\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "../../../escaped", "/absolute/escaped", "a\0b"),
    *("\u202egpj.exe", "\u2066a\u2069", "\u200b", "\ud800", "\udcff", "..", ".", "", " ", "a/b/c", "a\tb\rc", "CON"),
    *("x" * 300, "w" * 1_000_000, "\n" * 70_000, "[red]a[/red]", "model.layers.99999999999999999999.x", "%s{0}$x`y`"),
)
"""Names that move a cursor, lead out of a directory, or are none."""

FIELDS: dict[bytes, tuple[tuple[int, int], ...]] = {
    b"PK\3\4": ((6, 2), (8, 2), (14, 4), (18, 4), (22, 4), (26, 2), (28, 2)),
    b"PK\1\2": ((8, 2), (10, 2), (16, 4), (20, 4), (24, 4), (28, 2), (30, 2), (32, 2), (42, 4)),
    b"PK\5\6": ((4, 2), (6, 2), (8, 2), (10, 2), (12, 4), (16, 4), (20, 2)),
    b"PK\6\6": ((4, 8), (24, 8), (32, 8), (40, 8), (48, 8)),
    b"PK\6\7": ((4, 4), (8, 8), (16, 4)),
    b"PK\7\x08": ((4, 4), (8, 4), (12, 4)),
}
"""Offset and width of the fields of each record of a zip archive, by its signature."""

SIZES = {b"PK\3\4": 30, b"PK\1\2": 46, b"PK\5\6": 22, b"PK\6\6": 56, b"PK\6\7": 20, b"PK\7\x08": 16}


class Field(NamedTuple):
    """A number in a file."""

    at: int
    width: int


def kind_of(path: Path) -> str:
    """The format of a file, by its name."""
    if path.suffix in (".pt", ".bin", ".distcp"):
        return "zip"
    return {".safetensors": "safetensors", ".json": "json"}.get(
        path.suffix, "pickle" if path.name == ".metadata" else ""
    )


def signatures(raw: bytes) -> list[tuple[int, bytes]]:
    """Where records of zip archives begin."""
    return [
        (m.start(), m[0]) for m in re.finditer(rb"PK(?:\x03\x04|\x01\x02|\x05\x06|\x06\x06|\x06\x07|\x07\x08)", raw)
    ]


def zip_fields(raw: bytes) -> list[Field]:
    """Every number in the structure of the archives in a file."""
    every = [Field(at + first, width) for at, mark in signatures(raw) for first, width in FIELDS[mark]]
    return [field for field in every if field.at + field.width <= len(raw)]


def borders(path: Path, raw: bytes) -> list[int]:
    """Offsets where one part of the structure ends and the next begins."""
    kind = kind_of(path)
    if kind == "zip":
        found = {at + more for at, mark in signatures(raw) for more in (0, 4, SIZES[mark])} | payload_ends(raw)
    elif kind == "pickle":
        found = {position for _, _, position in pickletools.genops(raw) if position is not None}
    elif kind == "safetensors":
        length = int.from_bytes(raw[:8], "little")
        data = {8 + length + at for entry in tensors(raw).values() for at in entry["data_offsets"]}
        found = {8 + at for at in tokens(raw[8 : 8 + length])} | {8, 8 + length} | data
    else:
        found = tokens(raw)
    return sorted(at for at in {0, len(raw) - 1} | found if at < len(raw))


def tokens(text: bytes) -> set[int]:
    """Where JSON has a word or a sign."""
    return {m.start() for m in re.finditer(rb'["{}\[\],:]', text)}


def payload_ends(raw: bytes) -> set[int]:
    """The first byte of the bytes of each record, and the one behind the last."""
    found: set[int] = set()
    for at, mark in signatures(raw):
        if mark == b"PK\3\4" and at + 30 <= len(raw):
            size, name, extra = struct.unpack_from("<L", raw, at + 22)[0], *struct.unpack_from("<HH", raw, at + 26)
            found |= {at + 30 + name, at + 30 + name + extra, at + 30 + name + extra + size}
    return found


def records(raw: bytes) -> dict[str, range]:
    """Where the bytes of the tensors of an archive lie, in a file that is one."""
    found = {}
    with zipfile.ZipFile(BytesIO(raw)) as archive:
        for entry in archive.infolist():
            name, extra = struct.unpack_from("<HH", raw, entry.header_offset + 26)
            begin = entry.header_offset + 30 + name + extra
            if "/data/" in entry.filename:
                found[entry.filename] = range(begin, begin + entry.file_size)
    return found


def tensors(raw: bytes) -> dict[str, Any]:
    """The entries of the header of a safetensors file."""
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def instructions(raw: bytes) -> list[tuple[str, Any, bytes]]:
    """The instructions of a pickle: name, argument, bytes."""
    ops = [(op.name, argument, at) for op, argument, at in pickletools.genops(raw) if at is not None]
    ends = [*(at for _, _, at in ops), len(raw)]
    return [(name, argument, raw[a:b]) for (name, argument, _), (a, b) in zip(ops, pairwise(ends), strict=True)]


def number(value: int) -> bytes:
    """An instruction that pushes a number, whatever its size."""
    width = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([width]) + value.to_bytes(width, "little", signed=True)


def text(value: str) -> bytes:
    """An instruction that pushes a text."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<L", len(data)) + data


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with each of its keys."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from nodes(inner)
