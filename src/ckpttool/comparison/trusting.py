"""Whether two tensors are the same by what their writers recorded: the CRC-32 of every storage, none of them read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ckpttool.comparison.values import Stock
from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.payload import locate
from ckpttool.formats.torchzip import open_archive
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
        place, path = piece.place, self._stock.root / piece.place.file
        if place.wrap is Wrap.RAW:
            return _Recorded(piece.offset, piece.size, 0, (), 0, 0)
        handle = os.open(path, os.O_RDONLY)
        try:
            payload = locate(str(path), handle, place)
        finally:
            os.close(handle)
        crc = self._of_entry(path, place.offset) if place.wrap is Wrap.ZIP_ENTRY else _of_archive(path, place)
        strides = payload.strides if payload.strides is not None else contiguous_strides(piece.size)
        return _Recorded(piece.offset, piece.size, payload.start, strides, payload.length, crc)

    def _of_entry(self, path: Path, header: int) -> int:
        if str(path) not in self._by_file:
            entries = open_archive(path).entries.values()
            self._by_file[str(path)] = {entry.header: entry.crc for entry in entries}
        return self._by_file[str(path)].get(header, 0)


def _of_archive(path: Path, place: Place) -> int:
    """Return the checksum of the one storage of an archive that holds a tensor; 0 where it has several."""
    archive = open_archive(path, place.offset, place.length)
    stored = [entry.crc for name, entry in archive.entries.items() if name.startswith("data/")]
    return stored[0] if len(stored) == 1 else 0


def are_recorded_equal(a: tuple[Ledger, Target], b: tuple[Ledger, Target]) -> bool:
    """Tell whether both are the same part of sources that are cut alike and have the same checksums throughout."""
    (ledger, target), (other_ledger, other) = a, b
    source, other_source = target.parts[0].source, other.parts[0].source
    if len(target.parts) > 1 or _form(target) != _form(other):
        return False
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
