"""Which records of a checkpoint are intact, by Python's own ``zipfile`` and ``zlib``: an oracle for ``verify``.

Nothing of ckpttool is used, and no index: the items of a ``.distcp`` file are archives, one behind the other.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ARCHIVES = (".pt", ".bin", ".pth")

FIXTURES = (
    *("fsdp/torch2.6-fsdp1-shardedtensor", "fsdp/torch2.13-fsdp2-hsdp"),
    *("megatron/mcore0.12-dense-tp2", "megatron/mcore0.16-moe-tp1-ep2", "megatron/mcore0.19-dense-tp2"),
)
"""Checkpoints in which every record has its checksum."""


class ZipRecord(NamedTuple):
    """A record of an archive in a file (relative to the checkpoint): its payload lies at ``offset`` of the file.

    ``intact`` is ``None`` where its archive records no checksum at all, as torch writes it without CRC-32.
    """

    file: str
    archive: int
    name: str
    offset: int
    size: int
    intact: bool | None


def records(root: Path) -> list[ZipRecord]:
    """All records of all archives below a directory, in the order of files and offsets."""
    found = [record for path in _files(root) for record in _of_file(root, path)]
    return sorted(found, key=lambda record: (record.file, record.archive, record.offset))


def payloads(root: Path) -> list[ZipRecord]:
    """The records that are elements of tensors: what no reader of headers ever looks at."""
    return [record for record in records(root) if record.size and "/data/" in record.name]


def corrupt(root: Path) -> set[str]:
    """The files that have a record whose bytes are not those that its checksum was made of."""
    return {record.file for record in records(root) if record.intact is False}


def flip(root: Path, record: ZipRecord, at: int, bit: int = 0) -> None:
    """Turn one bit in byte ``at`` of a payload."""
    with (root / record.file).open("r+b") as file:
        file.seek(record.offset + at)
        byte = file.read(1)[0]
        file.seek(record.offset + at)
        file.write(bytes([byte ^ (1 << bit)]))


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.suffix in (*ARCHIVES, ".distcp"))


def _of_file(root: Path, path: Path) -> Iterator[ZipRecord]:
    """Take one archive after the other from the end of a file; ``zipfile`` finds where the last one begins."""
    raw, end = path.read_bytes(), path.stat().st_size
    while end:
        with zipfile.ZipFile(io.BytesIO(raw[:end])) as archive:
            entries = archive.infolist()
        base = min(entry.header_offset for entry in entries)
        yield from _of_archive(str(path.relative_to(root)), raw, base, entries)
        end = base


def _of_archive(file: str, raw: bytes, base: int, entries: list[zipfile.ZipInfo]) -> Iterator[ZipRecord]:
    recorded = any(entry.CRC for entry in entries)
    for entry in entries:
        lengths = raw[entry.header_offset + 26 : entry.header_offset + 30]
        begin = entry.header_offset + 30 + sum(int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
        data = raw[begin : begin + entry.file_size]
        intact = (zlib.crc32(data) == entry.CRC) if recorded else None
        yield ZipRecord(file, base, entry.filename, begin, entry.file_size, intact)
