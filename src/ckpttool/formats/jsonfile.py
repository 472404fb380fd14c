"""JSON files beside a checkpoint: small, untrusted, sometimes half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.torchzip import file_size, read_range

MOST = 16 << 20
"""Bytes of the largest configuration or manifest that we read."""

INDEX_MOST = 256 << 20
"""Bytes of the largest index: that of a trillion parameters in small experts has about 100 MB."""

VALUES_MOST = 4_000_000
"""Values of the largest JSON text: a value of three bytes can take two hundred once it is read."""


def read_raw(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a JSON file; raises :class:`BrokenCheckpoint` for one that is larger than is read."""
    size = file_size(path)
    if size > most:
        raise BrokenCheckpoint(f"{path.name}: {size:,} bytes of JSON, more than is read", code="bad-json")
    return read_range(path, 0, size)


def parse_json(raw: bytes, where: str) -> Any:
    """Return the value of UTF-8 JSON text; nesting beyond Python's limit, or millions of values, count as damage."""
    if (values := sum(map(raw.count, (b",", b"[", b"{")))) > VALUES_MOST:
        raise BrokenCheckpoint(f"{where}: up to {values:,} values of JSON, more than is read", code="bad-json")
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{where}: not valid JSON ({error})", code="bad-json") from error


def read_object(path: Path, most: int = MOST) -> dict[str, Any]:
    """Return the object in a JSON file; raises :class:`BrokenCheckpoint` naming the file for anything else."""
    return parse_object(read_raw(path, most), path.name)


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Return a JSON object; raises :class:`BrokenCheckpoint` for any other value."""
    value = parse_json(raw, where)
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{where}: not a JSON object", code="bad-json")
    return value
