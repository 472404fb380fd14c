"""Where a piece's elements really begin: what a :class:`~ckpttool.tensors.Place` leaves to whoever reads."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.torchzip import LOCAL_HEADER, open_archive
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


def locate(path: str, handle: int, place: Place) -> Payload:
    """Return where the elements lie, from the file's own headers; ``handle`` is the open file at ``path``.

    Raises :class:`BrokenCheckpoint` where the file no longer has there what its index says.
    """
    if place.wrap is Wrap.RAW:
        return Payload(place.offset, place.length, place.start, place.strides)
    if place.wrap is Wrap.ZIP_ENTRY:
        header = os.pread(handle, LOCAL_HEADER, place.offset)
        if len(header) < LOCAL_HEADER or not header.startswith(b"PK\x03\x04"):
            raise BrokenCheckpoint(f"{path}: no local header at byte {place.offset:,}", code="damaged-zip")
        before = LOCAL_HEADER + sum(struct.unpack_from("<HH", header, 26))
        return Payload(place.offset + before, place.length, place.start, place.strides)
    archive = open_archive(Path(path), place.offset, place.length)
    value, _ = loads(archive.read("data.pkl"), SHARD_NAMES, where=archive.path.name)
    view = stored_tensor(value)
    record = f"data/{view.storage}"
    length = archive.entries[record].size
    return Payload(archive.payload(record), length, view.start, view.strides, view.dtype, view.size)
