"""Where a piece's elements really begin: what a :class:`~ckpttool.tensors.Place` leaves to whoever reads."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.torchzip import LOCAL_HEADER, TorchZip, open_archive
from ckpttool.records import SHARD_NAMES, stored_tensor
from ckpttool.tensors import Index, Place, Wrap
from ckpttool.unpickle import loads


class Payload(NamedTuple):
    """Byte offset in the file, bytes from there on, first element and strides (in elements; ``None``: C order).

    ``dtype`` and ``size`` are what the record itself says of its tensor, where it does.
    """

    offset: int
    length: int
    start: int
    strides: Index | None
    dtype: str = ""
    size: Index = ()


END = 22
"""Bytes of the record with which a zip ends: how many entries, and where their directory lies."""

SEEN_MOST, HEAD_MOST = 4096, 1 << 16
"""Lengths of archives whose headers are remembered, and the longest header that is."""


_DESCRIPTOR, _NEXT = (b"PK\x07\x08",), (b"PK\x03\x04", b"PK\x01\x02")
"""What a stored entry of a zip ends at: its data descriptor, where a flag says so, else the next entry or directory."""


class Header(NamedTuple):
    """What stands before the elements of an archive and at its end, and where it says they are."""

    head: bytes
    end: bytes
    payload: Payload


Seen = dict[int, Header]
"""Headers of archives that have been read, by the length of the archive."""


def locate(path: str, handle: int, place: Place, seen: Seen | None = None) -> Payload:
    """Return where the elements lie, from the file's own headers; ``handle`` is the open file at ``path``.

    The archives of one shape and dtype differ in their elements and in checksums only: one that begins and ends as
    another of its length in ``seen``, every local header up to the elements included, has them at the same place.
    Raises :class:`BrokenCheckpoint` where the file no longer has there what its index says.
    """
    if place.wrap is Wrap.RAW:
        return Payload(place.offset, place.length, place.start, place.strides)
    if place.wrap is Wrap.ZIP_ENTRY:
        header = os.pread(handle, LOCAL_HEADER, place.offset)
        if len(header) < LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
            raise BrokenCheckpoint(f"{path}: no local header at byte {place.offset:,}", code="damaged-zip")
        before = LOCAL_HEADER + sum(struct.unpack_from("<HH", header, 26))
        follows = os.pread(handle, 4, place.offset + before + place.length)
        if follows not in (_DESCRIPTOR if header[6] & 8 else _NEXT):
            raise BrokenCheckpoint(f"{path}: the local header at byte {place.offset:,} is damaged", code="damaged-zip")
        return Payload(place.offset + before, place.length, place.start, place.strides)
    known = seen.get(place.length) if seen is not None else None
    if known is not None and _is_like(known, handle, place):
        return known.payload._replace(offset=place.offset + known.payload.offset)
    archive, payload = _of_archive(path, place)
    if seen is not None and len(seen) < SEEN_MOST and _is_told_before(archive, payload.offset - place.offset):
        head = os.pread(handle, payload.offset - place.offset, place.offset)
        end = os.pread(handle, END, place.offset + place.length - END)
        seen[place.length] = Header(head, end, payload._replace(offset=payload.offset - place.offset))
    return payload


def _is_like(known: Header, handle: int, place: Place) -> bool:
    if os.pread(handle, END, place.offset + place.length - END) != known.end:
        return False
    return os.pread(handle, len(known.head), place.offset) == known.head


def _is_told_before(archive: TorchZip, elements: int) -> bool:
    """Tell whether everything that says what the elements are stands before them, as torch writes it."""
    says = [entry.header + entry.size for name, entry in archive.entries.items() if name in ("data.pkl", "byteorder")]
    return elements <= HEAD_MOST and all(end <= elements for end in says)


def _of_archive(path: str, place: Place) -> tuple[TorchZip, Payload]:
    archive = open_archive(Path(path), place.offset, place.length)
    value, _ = loads(archive.read("data.pkl"), SHARD_NAMES, where=archive.path.name)
    view = stored_tensor(value)
    record = f"data/{view.storage}"
    offset, length = archive.payload(record), archive.entries[record].size
    return archive, Payload(offset, length, view.start, view.strides, view.dtype, view.size)
