"""The index of a ``torch.save`` archive: a zip of uncompressed records, read by hand.

Reading by hand costs two positioned reads an archive, works inside a larger file (every ``.distcp`` record is such
an archive) and sees what ``zipfile`` hides: where each payload lies. Nothing but ``data.pkl`` and small records is
read. The zip format is PKWARE's APPNOTE, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, NotACheckpoint

_EOCD = struct.Struct("<4sHHHHLLH")
_EOCD64_LOCATOR = struct.Struct("<4sLQL")
_EOCD64 = struct.Struct("<4sQHHLLQQQQ")
_CENTRAL = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
LOCAL_HEADER = _LOCAL.size
"""Bytes of a record's local header before its name."""

_BEHIND = (0, 12, 16, 20, 24)
"""Bytes between a record and what follows it: none, or a data descriptor in one of its forms (APPNOTE 4.3.9)."""

_TAIL = 66_000  # the end record and its longest comment
_LEGACY_MAGIC = bytes.fromhex("80028a0a6cfc9c46")

SMALL = 256 << 20
"""Most bytes that a record read whole (``data.pkl``) may have: its reader has them up to three times."""

DIRECTORY_MOST = 128 << 20
"""Most bytes of a directory: those of two million records."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A record: where its local header lies (bytes from the archive's begin), its size and recorded CRC-32.

    ``end`` is where the next record or the directory begins, ``listed`` where its own record of the directory does.
    """

    header: int
    size: int
    crc: int
    stored: bool
    end: int = 0
    listed: int = 0


@dataclass(frozen=True, slots=True)
class TorchZip:
    """An indexed archive inside ``[base, base + length)`` of a file. Records are named without the root folder."""

    path: Path
    base: int
    length: int
    entries: Mapping[str, Entry]

    def payload(self, name: str) -> int:
        """Return the byte offset in the file at which a record's payload begins (one small read)."""
        local = read_range(self.path, self.base + self._entry(name).header, _LOCAL.size)
        return self.base + self.begin(name, local)

    def begin(self, name: str, local: bytes) -> int:
        """Return where a record's payload begins, from the archive's begin on, by the bytes of its local header."""
        entry = self._entry(name)
        if len(local) != _LOCAL.size or not local.startswith(b"PK\x03\x04"):
            raise _damaged(self.path, f"no local header for record {name}")
        name_length, extra_length = struct.unpack_from("<HH", local, 26)
        start: int = entry.header + _LOCAL.size + name_length + extra_length
        if entry.end - start - entry.size not in _BEHIND:
            raise _damaged(self.path, f"the local header of record {name} does not lead to its bytes")
        return start

    def read(self, name: str) -> bytes:
        """Return a whole small record, such as ``data.pkl``."""
        entry = self._entry(name)
        if entry.size > SMALL:
            raise _damaged(self.path, f"record {name} claims {entry.size:,} bytes")
        return read_range(self.path, self.payload(name), entry.size)

    def check(self, name: str) -> None:
        """Raise :class:`BrokenCheckpoint` for a record that is not there, or is compressed."""
        self._entry(name)

    def _entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise _damaged(self.path, f"record {name} is not in the archive")
        if not self.entries[name].stored:
            raise compressed(self.path, name)
        return self.entries[name]


def _damaged(path: Path, why: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(f"{path.name}: {why}", code="damaged-zip")


def compressed(path: Path, name: str) -> BrokenCheckpoint:
    """Return the error for a record whose bytes are not those of its elements."""
    return BrokenCheckpoint(
        f"{path.name}: record {name} is compressed; torch stores its records uncompressed",
        hint="The archive was packed again by another tool; unpack it and save it with torch.",
        code="compressed-zip",
    )


def file_size(path: Path) -> int:
    """Return the size of a regular file; raises :class:`NotACheckpoint` for anything that cannot be read as one."""
    try:
        info = path.stat()
    except OSError as error:
        raise NotACheckpoint(f"{path}: {error.strerror}", code="unreadable") from error
    if not stat.S_ISREG(info.st_mode):
        raise NotACheckpoint(f"{path}: not a regular file", code="unreadable")
    return info.st_size


def open_file(path: Path | str) -> int:
    """Open a regular file to be read and return its handle; raises ``OSError``, for anything else, too.

    A pipe would make who opens it wait for a writer, and a device has bytes without end.
    """
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return handle


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Return up to ``length`` bytes from ``offset``; the file is opened read-only and closed again."""
    try:
        handle = open_file(path)
    except OSError as error:
        raise _unreadable(path, error, "Check the permissions of the file.") from error
    try:
        data = os.pread(handle, length, offset)
        while len(data) < length and (more := os.pread(handle, length - len(data), offset + len(data))):
            data += more  # one call reads 2 GiB at most
        return data
    except MemoryError as error:
        raise BrokenCheckpoint(
            f"{path.name}: {length:,} bytes at {offset:,} are more than there is memory for", code="too-large"
        ) from error
    except OSError as error:
        raise _unreadable(
            path, error, "Is the disk in order? Copy the file again from where it was written."
        ) from error
    finally:
        os.close(handle)


def _unreadable(path: Path, error: OSError, hint: str) -> NotACheckpoint:
    return NotACheckpoint(f"{path}: {error.strerror}", hint=hint, code="unreadable")


def open_archive(path: Path, base: int = 0, length: int | None = None) -> TorchZip:
    """Index a ``torch.save`` archive of tensors that are read here, or the part of a file that is one.

    Raises what :func:`index_archive` raises, and :class:`BrokenCheckpoint` by name for TorchScript and for archives of
    big-endian machines.
    """
    archive = index_archive(path, base, length)
    if "constants.pkl" in archive.entries:
        raise BrokenCheckpoint(
            f"{path.name}: a TorchScript archive, not saved tensors",
            hint="TorchScript carries code; save the module's state_dict instead.",
            code="torchscript",
        )
    order = archive.read("byteorder") if "byteorder" in archive.entries else b"little"
    if order == b"big":
        raise BrokenCheckpoint(
            f"{path.name}: written on a big-endian machine",
            hint="Load and save it again with torch on a little-endian machine.",
            code="big-endian",
        )
    if order != b"little":
        raise _damaged(path, "its record byteorder is damaged")
    return archive


def index_archive(path: Path, base: int = 0, length: int | None = None) -> TorchZip:
    """Index the records of a ``torch.save`` archive, whatever they hold.

    Raises :class:`BrokenCheckpoint` with code ``truncated`` when the central directory is missing, which is what
    a killed or unfinished ``torch.save`` leaves, and by name for what is no such archive at all.
    """
    whole = file_size(path)
    length = whole - base if length is None else length
    if base + length > whole:
        raise BrokenCheckpoint(f"{path.name}: {whole:,} bytes, too short", code="truncated")
    entries = _central_directory(path, base, length)
    root = _root(path, entries)
    return TorchZip(path, base, length, {n[len(root) :]: e for n, e in entries.items() if n.startswith(root)})


def _root(path: Path, entries: Mapping[str, Entry]) -> str:
    """Return the folder that holds ``data.pkl``; torch names it after the file, or ``archive``."""
    roots = [name[: -len("data.pkl")] for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise BrokenCheckpoint(f"{path.name}: a zip, but not one written by torch.save", code="not-torch-save")
    return roots[0]


def _central_directory(path: Path, base: int, length: int) -> dict[str, Entry]:
    tail_at = max(0, length - _TAIL)
    tail = read_range(path, base + tail_at, length - tail_at)
    end = _find_end(tail)
    if end < 0:
        raise _no_directory(path, base, length)
    count, size, offset = _EOCD.unpack_from(tail, end)[4:7]
    if 0xFFFF in (count,) or 0xFFFFFFFF in (size, offset):
        count, size, offset = _zip64_end(path, base, tail, tail_at, end, length)
    if offset + size > length or count * _CENTRAL.size > size or size > DIRECTORY_MOST:
        raise _damaged(path, "its directory lies outside the file")
    if offset >= tail_at:
        directory = tail[offset - tail_at : offset - tail_at + size]
    else:
        directory = read_range(path, base + offset, size)
    return _parse_directory(path, directory, count, offset)


def _find_end(tail: bytes) -> int:
    """Return where the end record begins: the last one whose comment reaches exactly to the end, or -1."""
    at = len(tail)
    while (at := tail.rfind(b"PK\x05\x06", 0, at)) >= 0:
        if len(tail) - at >= _EOCD.size and at + _EOCD.size + _EOCD.unpack_from(tail, at)[7] == len(tail):
            return at
    return -1


def _zip64_end(path: Path, base: int, tail: bytes, tail_at: int, end: int, length: int) -> tuple[int, int, int]:
    locator_at = end - _EOCD64_LOCATOR.size
    if locator_at < 0 or tail[locator_at : locator_at + 4] != b"PK\x06\x07":
        raise _damaged(path, "its zip64 end record is missing")
    where = _EOCD64_LOCATOR.unpack_from(tail, locator_at)[2]
    if where + _EOCD64.size > length:
        raise _damaged(path, "its zip64 end record lies outside the file")
    if where >= tail_at:
        record = tail[where - tail_at : where - tail_at + _EOCD64.size]
    else:
        record = read_range(path, base + where, _EOCD64.size)
    if record[:4] != b"PK\x06\x06":
        raise _damaged(path, "its zip64 end record is damaged")
    count, size, offset = _EOCD64.unpack(record)[7:10]
    return count, size, offset


def _parse_directory(path: Path, directory: bytes, count: int, limit: int) -> dict[str, Entry]:
    found: dict[str, tuple[int, int, int, bool, int]] = {}
    at = 0
    for _ in range(count):
        if at + _CENTRAL.size > len(directory) or directory[at : at + 4] != b"PK\x01\x02":
            raise _damaged(path, "its directory is damaged")
        fields = _CENTRAL.unpack_from(directory, at)
        method, crc, packed, size = fields[4], fields[7], fields[8], fields[9]
        name_length, extra_length, comment_length, header = fields[10], fields[11], fields[12], fields[16]
        name_end = at + _CENTRAL.size + name_length
        if 0xFFFFFFFF in (size, header, packed):
            extra = directory[name_end : name_end + extra_length]
            size, header = _zip64_fields(path, extra, size, packed, header)
        if method == 0 and header + size > limit:
            raise _damaged(path, "a record reaches into its directory")
        name = directory[at + _CENTRAL.size : name_end].decode("utf-8", "backslashreplace")
        found[name] = header, size, crc, method == 0, limit + at
        at = name_end + extra_length + comment_length
    if len({name.lower() for name in found}) < count:  # torch takes any of them, upper case or lower
        raise _damaged(path, "two of its records have one name")
    headers = sorted({header for header, *_ in found.values()})
    if len(headers) < count:  # a small file would be read as often as it says
        raise _damaged(path, "two of its records lie in one place")
    following = dict(pairwise([*headers, limit]))
    return {
        name: Entry(header, size, crc, stored, following[header], listed)
        for name, (header, size, crc, stored, listed) in found.items()
    }


def _zip64_fields(path: Path, extra: bytes, size: int, packed: int, header: int) -> tuple[int, int]:
    """Read the 64-bit values that stand in for fields of 32 set bits, in the order the format fixes."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            numbers = iter(struct.unpack_from(f"<{min(length, len(extra) - at - 4) // 8}Q", extra, at + 4))
            try:
                size = next(numbers) if size == 0xFFFFFFFF else size
                packed = next(numbers) if packed == 0xFFFFFFFF else packed
                header = next(numbers) if header == 0xFFFFFFFF else header
            except StopIteration:
                break
            return size, header
        at += 4 + length
    raise _damaged(path, "a zip64 field is missing")


def _no_directory(path: Path, base: int, length: int) -> BrokenCheckpoint:
    """Say what a file without a zip directory is."""
    head = read_range(path, base, 16)
    if head.startswith(_LEGACY_MAGIC):
        return BrokenCheckpoint(
            f"{path.name}: torch's legacy format, before the zip archives of torch 1.6",
            hint="Load and save it again with a current torch.",
            code="legacy-pt",
        )
    if not length:
        return BrokenCheckpoint(f"{path.name}: empty (0 bytes)", code="truncated")
    if head.startswith(b"PK\x03\x04"):
        return BrokenCheckpoint(f"{path.name}: truncated ({length:,} bytes, its end is missing)", code="truncated")
    return BrokenCheckpoint(f"{path.name}: not a torch.save archive ({length:,} bytes)", code="not-torch-save")
