"""The records of a ``torch.save`` archive against the CRC-32 that the zip directory, and the record itself, have.

Nothing is unpickled. Archives of one length are mostly alike but for payloads and checksums (the items of a
distributed checkpoint are): where all other bytes are those of one that was taken apart before, so are the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ckpttool.formats.torchzip import LOCAL_HEADER, TorchZip, index_archive

BEHIND = 24
"""Most bytes of what follows a record and has its checksum again."""

LAYOUTS, LAYOUT_MOST = 1024, 1 << 14
"""Lengths of archives whose layout is remembered, and most bytes around the records of one that is."""

_CRC, _LOCAL_CRC, _FLAGS = 16, 14, 6


class Span(NamedTuple):
    """A record with bytes in it: where they lie, and its checksum as the directory and as it itself has it.

    Offsets are from the begin of a file. ``again`` is ``None`` where it is recorded once.
    """

    name: str
    begin: int
    end: int
    crc: int
    again: int | None

    def fault(self, found: int) -> str:
        """Say what is wrong with a record of this checksum; nothing where it is right."""
        if found != self.crc:
            return f"record {self.name} has the CRC-32 {found:08x}, recorded is {self.crc:08x}"
        if self.again is not None and self.again != self.crc:
            return f"record {self.name}: its two recorded CRC-32 are {self.again:08x} and {self.crc:08x}"
        return ""


Read = Callable[[int, int], bytes]
"""Returns bytes of a file, from an offset on."""


def are_recorded(archive: TorchZip) -> bool:
    """Tell whether an archive has checksums: torch can be told to write none, and they all are 0 then."""
    return any(entry.crc for entry in archive.entries.values() if entry.size)


def span_of(archive: TorchZip, name: str, read: Read) -> Span:
    """Return where a record lies; raises :class:`BrokenCheckpoint` where its header does not lead there."""
    entry, header = archive.entries[name], archive.base + archive.entries[name].header
    local = read(header, LOCAL_HEADER)
    begin = archive.base + archive.begin(name, local)
    end = begin + entry.size
    behind = read(end, archive.base + entry.end - end) if local[_FLAGS] & 8 else b""
    return Span(name, begin, end, entry.crc, _again(local, behind))


def _again(local: bytes, behind: bytes) -> int | None:
    """Return the checksum in a local header or, where its flag says so, in the descriptor behind the record."""
    if not local[_FLAGS] & 8:
        return int.from_bytes(local[_LOCAL_CRC : _LOCAL_CRC + 4], "little")
    if len(behind) < 12:
        return None
    at = 4 if behind.startswith(b"PK\x07\x08") else 0
    return int.from_bytes(behind[at : at + 4], "little")


class Layout(NamedTuple):
    """Archives that are alike: their records, and the bytes around payloads and checksums as one has them.

    A record is its name, its payload, and where its checksum stands, once or twice; ``size`` is that of all payloads.
    """

    size: int
    records: tuple[tuple[str, slice, tuple[slice, ...]], ...]
    around: Callable[[memoryview], tuple[memoryview, ...]]
    bytes_around: bytes
    recorded: bool


class Alike:
    """Checks whole archives in memory, and remembers what they look like. Not shared between threads."""

    def __init__(self) -> None:
        self._known: dict[int, Layout] = {}

    @property
    def remembered(self) -> int:
        """How many layouts are remembered."""
        return len(self._known)

    def check(self, view: memoryview, path: Path, base: int) -> tuple[Layout, list[str]]:
        """Return what the archive at ``base`` of a file looks like, and its faults.

        ``view`` has its bytes. Raises :class:`BrokenCheckpoint` for what is no such archive.
        """
        layout = self._known.get(len(view))
        if layout is None or b"".join(layout.around(view)) != layout.bytes_around:
            layout = _layout_of(view, index_archive(path, base, len(view)))
            few = len(self._known) < LAYOUTS or len(view) in self._known
            if few and len(layout.bytes_around) <= LAYOUT_MOST:
                self._known[len(view)] = layout
        faults = list(_faults(view, layout)) if layout.recorded else []
        return layout, faults


def _faults(view: memoryview, layout: Layout) -> Iterator[str]:
    for name, payload, places in layout.records:
        found = crc32(view[payload]).to_bytes(4, "little")
        for place in places:
            if view[place] != found:
                said = [int.from_bytes(part, "little") for part in (found, view[place])]
                yield f"record {name} has the CRC-32 {said[0]:08x}, recorded is {said[1]:08x}"
                break


def _layout_of(view: memoryview, archive: TorchZip) -> Layout:
    """Take an archive apart; raises :class:`BrokenCheckpoint` where a header does not lead to its record."""
    records = []
    for name, entry in archive.entries.items():
        local = bytes(view[entry.header : entry.header + LOCAL_HEADER])
        begin = archive.begin(name, local)
        end, places = begin + entry.size, [entry.listed + _CRC]
        if not local[_FLAGS] & 8:
            places.append(entry.header + _LOCAL_CRC)
        elif entry.end - end >= 12:
            places.append(end + 4 * (bytes(view[end : end + 4]) == b"PK\x07\x08"))
        records.append((name, slice(begin, end), tuple(slice(at, at + 4) for at in places)))
    inside = sorted((part.start, part.stop) for _, payload, places in records for part in (payload, *places))
    edges = [(0, 0), *inside, (len(view), len(view))]
    around = itemgetter(*(slice(a[1], b[0]) for a, b in pairwise(edges)))
    size = sum(entry.size for entry in archive.entries.values())
    return Layout(size, tuple(records), around, b"".join(around(view)), are_recorded(archive))
