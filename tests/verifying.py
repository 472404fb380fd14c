"""What the tests of `verify` share: where records lie, by Python's own zip reader and torch's own index, and damage."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import Call
from tests.writers.reading import read_metadata


class Record(NamedTuple):
    """A record of an archive: where its payload begins and ends in the file, and what it is called."""

    path: Path
    begin: int
    end: int
    name: str


def records_of(path: Path, base: int = 0, length: int | None = None) -> Iterator[Record]:
    """The records of an archive, by `zipfile`."""
    raw = path.read_bytes()[base:][:length]
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        for info in archive.infolist():
            local = raw[info.header_offset : info.header_offset + 30]
            before = 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
            begin = base + info.header_offset + before
            yield Record(path, begin, begin + info.file_size, info.filename.partition("/")[2])


def items_of(archive: Path) -> Iterator[tuple[str, Path, int, int]]:
    """The items of a distributed checkpoint: key, file, offset, length, by torch's own index."""
    for index, info in read_metadata(archive).storage_data.items():
        yield index.fqn, archive / info.relative_path, info.offset, info.length


def all_records(root: Path) -> list[Record]:
    """Every record of every archive in a directory, those inside of `.distcp` files by the key of their item."""
    found = [record for path in sorted(root.rglob("*.pt")) for record in records_of(path)]
    if (root / ".metadata").is_file():
        for key, path, offset, length in items_of(root):
            found += (record._replace(name=key) for record in records_of(path, offset, length))
    return found


def flip(path: Path, at: int, bit: int = 1) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


def faults(call: Call) -> list[tuple[str, str]]:
    """Code and path of every fault."""
    return [(told["code"], told["path"]) for told in call.json["problems"] if told["severity"] == "error"]


def notes(call: Call) -> list[str]:
    """The codes of the notes."""
    return [told["code"] for told in call.json["problems"] if told["severity"] == "note"]


def check(call: Call, name: str) -> dict[str, Any]:
    """One of the checks."""
    (only,) = [one for one in call.json["data"]["checks"] if one["name"] == name]
    assert isinstance(only, dict)
    return only


def messages(call: Call) -> str:
    """All messages, one a line."""
    return "\n".join(told["message"] for told in call.json["problems"])
