"""The items of a ``.distcp`` file without its index: archives without a gap, found from their ends on."""

from __future__ import annotations

import os
import struct
from pathlib import Path

_END, _END64, _LOCATOR = 22, 56, 20

LEAST = 200
"""Bytes that the smallest archive of torch has: three records with their headers."""


def chain(path: Path, size: int) -> tuple[int, list[tuple[int, int]]]:
    """Return how many bytes at the begin are in no archive, and where each archive begins and ends, the last one first.

    A file that ends in something else has none.
    """
    found, end = list[tuple[int, int]](), size
    with path.open("rb", buffering=0) as file:
        while end:
            length = _length(file.fileno(), end)
            if not LEAST <= length <= end:
                break
            found.append((end - length, end))
            end -= length
    return end, found


def _length(handle: int, end: int) -> int:
    """Return how long the archive is that ends at a byte of a file, by its end record; 0 where there is none."""
    begin = max(end - _END - _LOCATOR - _END64, 0)
    tail = os.pread(handle, end - begin, begin)
    last = tail[-_END:]
    if len(last) < _END or not last.startswith(b"PK\x05\x06"):
        return 0
    if tail.startswith(b"PK\x06\x06") and tail[_END64:].startswith(b"PK\x06\x07"):
        size, offset = struct.unpack_from("<QQ", tail, 40)  # torch writes the record for 64 bits always
        return int(offset + size + len(tail))
    size, offset = struct.unpack_from("<LL", last, 12)
    return int(offset + size + _END)
