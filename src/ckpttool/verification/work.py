"""What there is to read of each file: the units that have checksums, and the hashes that are asked for."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from ckpttool.errors import CkpttoolError, Problem
from ckpttool.formats.dcp import PLAIN_DCP, DcpSource
from ckpttool.formats.safetensorsfile import read_safetensors
from ckpttool.formats.torchzip import TorchZip, index_archive, read_range
from ckpttool.tensors import Place, Wrap
from ckpttool.verification.chains import chain
from ckpttool.verification.records import are_recorded
from ckpttool.verification.result import Subset
from ckpttool.verification.subset import choose
from ckpttool.verification.tree import Entry, Tree

TORCH = (".pt", ".pth")
MAYBE_TORCH = (".bin", ".ckpt")
"""Endings of what ``torch.save`` writes, and of what else may have been written there."""

_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"

MOST_BYTES, MOST_UNITS = 64 << 20, 4096
"""What one task takes of a file: enough that starting it costs nothing, not too much to be shared out."""


class Unit(NamedTuple):
    """A part of a file that has a checksum, with the headers around it.

    It is a record of an archive or, without one, an archive of its own: an item of a distributed checkpoint. Only an
    object of plain DCP may be none (``bare``), which a planner stores as it likes; it has no checksum then.
    """

    begin: int
    end: int
    name: str
    archive: TorchZip | None = None
    bare: bool = False


@dataclass(slots=True)
class Work:
    """A file to check. ``algorithms`` are the hashes that are asked for; ``unrecorded`` counts records without CRC."""

    entry: Entry
    units: list[Unit] = field(default_factory=list)
    algorithms: set[str] = field(default_factory=set)
    unrecorded: int = 0


class Task(NamedTuple):
    """What one thread does next: units of a file in the order of their bytes, or with ``whole`` all bytes of it."""

    work: Work
    units: Sequence[Unit]
    whole: bool

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it."""
        return self.work.entry.size if self.whole else sum(unit.end - unit.begin for unit in self.units)


def tasks(works: Sequence[Work]) -> Iterator[Task]:
    """Yield what is to be done; a file that is hashed goes from its begin to its end, the largest one first."""
    yield from (Task(w, w.units, True) for w in sorted(works, key=lambda w: -w.entry.size) if w.algorithms)
    for work in works:
        group: list[Unit] = []
        for unit in work.units if not work.algorithms else ():
            if group and (unit.end - group[0].begin > MOST_BYTES or len(group) >= MOST_UNITS):
                yield Task(work, group, False)
                group = []
            group.append(unit)
        if group:
            yield Task(work, group, False)


class Plan:
    """The works of a tree by file, and what is wrong with files before their bytes are looked at."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.works: dict[tuple[int, int], Work] = {}
        self.problems: list[Problem] = []

    def work(self, entry: Entry) -> Work:
        """Return the work of a file, a new one where there is none."""
        return self.works.setdefault(entry.identity, Work(entry))

    def add_archives(self) -> None:
        """Take every file of the tree that ``torch.save`` has written, by its directory."""
        for entry in self.tree.files.values():
            suffix = Path(entry.shown).suffix
            if suffix in TORCH or (suffix in MAYBE_TORCH and _begins(entry.path, _ZIP)):
                try:
                    self._add_archive(entry)
                except CkpttoolError as error:
                    if suffix in TORCH or error.code != "not-torch-save":  # others write zips under such names, too
                        self.fault(error, entry.shown)

    def add_headers(self) -> None:
        """Hold the header of every safetensors file against its size, wherever it lies."""
        for entry in self.tree.files.values():
            if Path(entry.shown).suffix == ".safetensors":
                try:
                    read_safetensors(entry.path)
                except CkpttoolError as error:
                    self.fault(error, entry.shown)

    def fault(self, error: CkpttoolError, shown: str) -> None:
        """Note that a file is not what it has to be."""
        message = error.message if shown in error.message else f"{shown}: {error.message}"
        self.problems.append(Problem(code=error.code, message=message, hint=error.hint, path=shown))

    def _add_archive(self, entry: Entry) -> None:
        archive = index_archive(entry.path)
        work = self.work(entry)
        if not are_recorded(archive):
            work.unrecorded += len(archive.entries)
            return
        for name, record in archive.entries.items():
            archive.check(name)
            work.units.append(Unit(record.header, record.end, name, archive))

    def add_items(self, source: DcpSource) -> None:
        """Take every item of a distributed checkpoint, by its index; the items of a file may not overlap."""
        by_file: dict[str, dict[tuple[int, int], Unit]] = {}
        for name, place in _places(source):
            key = (place.offset, place.offset + place.length)
            bare = name in source.objects and source.format == PLAIN_DCP
            unit = Unit(*key, name, bare=bare or place.wrap is not Wrap.ZIP_ARCHIVE)
            by_file.setdefault(place.file, {}).setdefault(key, unit)
        for file, items in by_file.items():
            entry = self.tree.entry(source.root / file)
            if entry is not None and not self.work(entry).units:  # two trees may share one archive
                self._add_items(entry, items)

    def _add_items(self, entry: Entry, items: Mapping[tuple[int, int], Unit]) -> None:
        at, units = 0, self.work(entry).units
        for (begin, end), unit in sorted(items.items()):
            if end > entry.size:
                continue  # the index promises more than is there: the structure tells of it
            if begin < at:
                message = f"{entry.shown}: {unit.name} begins at byte {begin:,}, inside of what lies before it"
                self.problems.append(Problem(code="items-overlap", message=message, path=entry.shown))
                continue
            at = end
            units.append(unit)

    def add_chains(self, indexed: Container[Path]) -> None:
        """Take the items of data files that no index tells of, one before the other from the end of each file."""
        for entry in self.tree.files.values():
            if Path(entry.shown).suffix == ".distcp" and entry.path.parent not in indexed:
                try:
                    begin, archives = chain(entry.path, entry.size)
                except OSError:  # whoever reads it says so
                    begin, archives = 0, [(0, entry.size)]
                self.work(entry).units = [Unit(a, b, f"the item at byte {a:,}") for a, b in archives]
                if begin:
                    message = (
                        f"{entry.shown}: what its first {begin:,} bytes are is told by .metadata, which is not here"
                    )
                    self.problems.append(Problem(code="items-unknown", message=message, path=entry.shown))

    def cut(self, subset: Subset) -> None:
        """Keep the units that belong to a subset."""
        works = list(self.works.values())
        kept = choose(subset, [unit.end - unit.begin for work in works for unit in work.units])
        taken = iter(kept)
        for work in works:
            work.units = [unit for unit in work.units if next(taken)]

    def sort(self) -> None:
        """Put the units of each file into the order of their bytes."""
        for work in self.works.values():
            work.units.sort(key=lambda unit: unit.begin)


def _places(source: DcpSource) -> Iterator[tuple[str, Place]]:
    for name, tensor in source.tensors.items():
        for piece in tensor.pieces:
            yield name, piece.place
    yield from source.objects.items()


def is_raw(begin: bytes, end: bytes) -> bool:
    """Tell an item that is no zip, and so has no checksum, from one whose begin or end is damaged."""
    return begin[:4] != _ZIP and _ZIP_END not in end[-64:]


def _begins(path: Path, magic: bytes) -> bool:
    try:
        return read_range(path, 0, len(magic)) == magic
    except CkpttoolError:
        return False
