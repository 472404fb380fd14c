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


def read_json(path: Path, most: int = MOST) -> Any:
    """Return the content of a JSON file; raises :class:`BrokenCheckpoint` naming the file when it is none."""
    size = file_size(path)
    if size > most:
        raise BrokenCheckpoint(f"{path.name}: {size:,} bytes of JSON, more than is read", code="bad-json")
    return parse_json(read_range(path, 0, size), path.name)


def parse_json(raw: bytes, where: str) -> Any:
    """Return the value of UTF-8 JSON text; nesting beyond Python's limit counts as damage."""
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BrokenCheckpoint(f"{where}: not valid JSON ({error})", code="bad-json") from error


def read_object(path: Path, most: int = MOST) -> dict[str, Any]:
    """Return a JSON object; raises :class:`BrokenCheckpoint` for any other value."""
    value = read_json(path, most)
    if not isinstance(value, dict):
        raise BrokenCheckpoint(f"{path.name}: not a JSON object", code="bad-json")
    return value
