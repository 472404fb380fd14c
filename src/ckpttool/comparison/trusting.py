"""Whether two tensors are the same by what their writers recorded: the CRC-32 of every storage, none of them read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.comparison.values import Stock
from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.payload import Seen, locate
from ckpttool.formats.torchzip import open_archive, open_file
from ckpttool.plan import Target
from ckpttool.tensors import Index, Piece, Place, Wrap, contiguous_strides


class _Recorded(NamedTuple):
    """A piece by what is recorded of it: its box, how it lies in its storage, that one's length and checksum."""

    offset: Index
    size: Index
    start: int
    strides: Index
    length: int
    crc: int


class Ledger:
    """The checksums of one side, looked up in the directories of its archives: each is read once."""

    def __init__(self, stock: Stock) -> None:
        self._stock = stock
        self._by_file: dict[str, dict[int, int]] = {}
        self._known: dict[str, list[_Recorded] | None] = {}
        self.equal: dict[tuple[str, str], bool] = {}
        """Whether a source of this side is recorded as equal to one of the other."""
        self._seen: Seen = {}
        self._ends: dict[int, _End] = {}
        self._handle: tuple[str, int] | None = None

    def pieces(self, source: str) -> list[_Recorded] | None:
        """Return all pieces of a stored tensor; ``None`` where one of them has no checksum, or something is fused."""
        if source not in self._known:
            tensor = self._stock.sources[source]
            found = [self._recorded(piece) for piece in tensor.pieces if piece.numel]
            whole = all(one.crc for one in found) and source not in self._stock.fusions
            self._known[source] = sorted(found) if whole else None
        return self._known[source]

    def kind(self, source: str) -> tuple[str, Index]:
        """Return dtype and shape of a stored tensor."""
        tensor = self._stock.sources[source]
        return tensor.dtype, tensor.shape

    def _recorded(self, piece: Piece) -> _Recorded:
        place = piece.place
        if place.wrap is Wrap.RAW:
            return _Recorded(piece.offset, piece.size, 0, (), 0, 0)
        if place.wrap is Wrap.ZIP_ENTRY:
            start, strides, length, crc = place.start, place.strides, place.length, self._of_entry(place)
        else:
            path, handle = self._stock.root / place.file, self._open(place.file)
            _, length, start, strides, *_ = locate(str(path), handle, place, self._seen)
            crc = self._of_archive(path, handle, place)
        strides = strides if strides is not None else contiguous_strides(piece.size)
        return _Recorded(piece.offset, piece.size, start, strides, length, crc)

    def _of_entry(self, place: Place) -> int:
        if place.file not in self._by_file:
            entries = open_archive(self._stock.root / place.file).entries.values()
            self._by_file[place.file] = {entry.header: entry.crc for entry in entries}
        return self._by_file[place.file].get(place.offset, 0)

    def _of_archive(self, path: Path, handle: int, place: Place) -> int:
        """Return the checksum of the one storage of an archive; 0 where it has several.

        Archives of one length are alike (:func:`locate` has seen to that): it is where that of another one was.
        """
        end = place.offset + place.length
        known = self._ends.get(place.length)
        if known is not None:
            found = os.pread(handle, len(known.head), end - known.before)
            if found[:_CRC] + found[_CRC + 4 :] == known.head[:_CRC] + known.head[_CRC + 4 :]:
                return int.from_bytes(found[_CRC : _CRC + 4], "little")
        archive = open_archive(path, place.offset, place.length)
        stored = [entry for name, entry in archive.entries.items() if name.startswith("data/")]
        if len(stored) != 1:
            return 0
        head = os.pread(handle, _HEAD, place.offset + stored[0].listed)
        self._ends[place.length] = _End(place.length - stored[0].listed, head)
        return stored[0].crc

    def _open(self, file: str) -> int:
        if self._handle is None or self._handle[0] != file:
            self.close()
            self._handle = file, open_file(self._stock.root / file)
        return self._handle[1]

    def close(self) -> None:
        """Close the file that was looked into last."""
        if self._handle is not None:
            os.close(self._handle[1])
            self._handle = None


_CRC, _HEAD = 16, 46
"""Where the checksum is in a record of a zip's directory, and how much stands in it before the name."""


class _End(NamedTuple):
    """Where before the end of an archive the directory's record of its storage begins, and that without the name."""

    before: int
    head: bytes


def are_recorded_equal(a: tuple[Ledger, Target], b: tuple[Ledger, Target]) -> bool:
    """Tell whether both are the same part of sources that are cut alike and have the same checksums throughout."""
    (ledger, target), (other_ledger, other) = a, b
    source, other_source = target.parts[0].source, other.parts[0].source
    if len(target.parts) > 1 or _form(target) != _form(other):
        return False
    key = source, other_source
    if key not in ledger.equal:  # of a stack, every layer asks
        ledger.equal[key] = _are_equal(ledger, source, other_ledger, other_source)
    return ledger.equal[key]


def _are_equal(ledger: Ledger, source: str, other_ledger: Ledger, other_source: str) -> bool:
    try:
        if ledger.kind(source) != other_ledger.kind(other_source):
            return False
        mine = ledger.pieces(source)
        return bool(mine) and mine == other_ledger.pieces(other_source)
    except (OSError, BrokenCheckpoint):  # whoever reads it says what it is
        return False


def _form(target: Target) -> Target:
    """Return a target without the names of itself and its sources."""
    return replace(target, name="", parts=tuple(replace(part, source="") for part in target.parts))
