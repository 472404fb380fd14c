"""The index of a ``torch.save`` archive, held against Python's own ``zipfile`` and torch."""

from __future__ import annotations

import io
import os
import struct
import warnings
import zipfile
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest
import torch

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint
from ckpttool.formats import dcp, torchzip
from ckpttool.formats.hf import read_torch
from ckpttool.formats.torchzip import TorchZip, open_archive
from tests.conftest import DATA

REAL = sorted(DATA.rglob("*.pt"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small archive by torch: three storages, one of them empty."""
    path = tmp_path_factory.mktemp("saved") / "tensors.pt"
    torch.save({"a": torch.arange(100), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.empty(0)}, path)
    return path


def same_as_zipfile(archive: TorchZip, whole: bytes) -> None:
    """Names, sizes, checksums and the payload of every record."""
    raw = archive.path.read_bytes()
    with zipfile.ZipFile(io.BytesIO(whole)) as oracle:
        entries = {entry.filename.partition("/")[2]: entry for entry in oracle.infolist()}
        assert archive.entries.keys() == entries.keys()
        for name, entry in entries.items():
            found = archive.entries[name]
            assert (found.size, found.crc, found.stored) == (entry.file_size, entry.CRC, True)
            assert found.header == entry.header_offset
            start = archive.payload(name)
            assert raw[start : start + found.size] == oracle.read(entry)
            assert archive.read(name) == oracle.read(entry)


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_real_archives_are_as_zipfile_says(path: Path) -> None:
    same_as_zipfile(open_archive(path), path.read_bytes())


def test_todays_archive_is_as_zipfile_says(saved: Path) -> None:
    archive = open_archive(saved)
    same_as_zipfile(archive, saved.read_bytes())
    assert archive.payload("data/0") % 64 == 0


def test_archives_inside_a_file_are_as_zipfile_says() -> None:
    """Each record of a ``.distcp`` file is an archive of its own."""
    root = DATA / "megatron/mcore0.16-moe-tp1-ep2"
    places = [piece.place for info in dcp.open_(root).tensors.values() for piece in info.pieces]
    assert len(places) > 20
    for place in places:
        raw = (root / place.file).read_bytes()[place.offset : place.offset + place.length]
        same_as_zipfile(open_archive(root / place.file, place.offset, place.length), raw)


def test_rubbish_around_an_archive_is_not_seen(tmp_path: Path, saved: Path) -> None:
    whole, path = saved.read_bytes(), tmp_path / "file.distcp"
    path.write_bytes(b"PK\x05\x06" * 10 + whole + b"PK\x05\x06" * 10)
    same_as_zipfile(open_archive(path, 40, len(whole)), whole)


# zip64


def write_zip(path: Path, records: dict[str, bytes], *, force_zip64: bool = False, comment: bytes = b"") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.comment = comment
        for name, content in records.items():
            with archive.open(f"archive/{name}", "w", force_zip64=force_zip64) as record:
                record.write(content)
    return path


def test_zip64_sizes_are_read(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "big.pt", {"data.pkl": b"N.", "data/0": b"12345678"}, force_zip64=True)
    same_as_zipfile(open_archive(path), path.read_bytes())


def test_more_records_than_16_bits_count(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "many.pt", {"data.pkl": b"N.", **{f"data/{n}": b"%d" % n for n in range(66_000)}})
    archive = open_archive(path)
    assert len(archive.entries) == 66_001
    assert archive.read("data/65999") == b"65999"


def test_a_record_beyond_four_gigabytes(tmp_path: Path) -> None:
    """A sparse file: its directory gives offset and size in 64 bits."""
    path, size = tmp_path / "large.pt", (4 << 30) + 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data/0", b"")
        (first,) = archive.infolist()
        first.file_size = first.compress_size = size
        archive.start_dir += size
        archive.writestr("archive/data.pkl", b"N.")
    found = open_archive(path)
    assert found.entries["data/0"].size == size
    assert found.payload("data.pkl") == found.payload("data/0") + size + 30 + len("archive/data.pkl")
    assert found.read("data.pkl") == b"N."


@pytest.mark.parametrize("other", ["archive/data/1", "archive/DATA/1", "archive/data.pkl", "archive/Data.pkl"])
@pytest.mark.parametrize("first", [True, False])
def test_two_records_of_one_name_are_broken(tmp_path: Path, other: str, first: bool) -> None:
    """torch does not look at case and takes any of two names that are the same to it."""
    torch.save({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "archive.pt")
    with zipfile.ZipFile(tmp_path / "archive.pt") as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    records.insert(0 if first else len(records), (other, bytes(12)))
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "twice.pt", "w") as archive:
        warnings.simplefilter("ignore")
        for name, data in records:
            archive.writestr(name, data)
    with pytest.raises(BrokenCheckpoint, match="two of its records have one name") as caught:
        open_archive(tmp_path / "twice.pt")
    assert caught.value.code == "damaged-zip"


@pytest.mark.parametrize("comment", [b"x", b"PK\x05\x06" * 9, b"\0" * 65_535])
def test_a_comment_does_not_hide_the_end(tmp_path: Path, comment: bytes) -> None:
    path = write_zip(tmp_path / "commented.pt", {"data.pkl": b"N.", "data/0": b"1234"}, comment=comment)
    assert [(name, entry.size) for name, entry in open_archive(path).entries.items()] == [
        ("data.pkl", 2),
        ("data/0", 4),
    ]


# Damage


def test_every_truncation_is_broken(tmp_path: Path, saved: Path) -> None:
    whole, path = saved.read_bytes(), tmp_path / "short.pt"
    for length in [*range(0, len(whole), 7), *range(len(whole) - 80, len(whole))]:
        path.write_bytes(whole[:length])
        with pytest.raises(BrokenCheckpoint) as caught:
            open_archive(path)
        assert caught.value.code == "truncated" if length >= 4 or not length else "not-torch-save", length


def test_a_part_that_reaches_past_the_file_is_broken(saved: Path) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        open_archive(saved, 10, saved.stat().st_size)
    assert caught.value.code == "truncated"


def test_no_changed_byte_breaks_out(tmp_path: Path, saved: Path) -> None:
    """Whatever a changed byte of a header or of the directory claims, nothing is read outside the file."""
    whole, path = saved.read_bytes(), tmp_path / "changed.pt"
    headers = [range(entry.header, entry.header + 30) for entry in open_archive(saved).entries.values()]
    outcomes = set()
    for at in chain(*headers, range(whole.index(b"PK\x01\x02"), len(whole))):
        for value in (0x00, 0xFF):
            path.write_bytes(whole[:at] + bytes([value]) + whole[at + 1 :])
            outcomes.add(outcome(path))
    refused = {"truncated", "damaged-zip", "not-torch-save", "compressed-zip"}
    assert outcomes == {"read", *refused}


def outcome(path: Path) -> str:
    """What opening and reading everything comes to; any other exception fails the test."""
    try:
        archive = open_archive(path)
        assert all(e.header + e.size <= path.stat().st_size for e in archive.entries.values() if e.stored)
        for name, entry in archive.entries.items():
            assert archive.payload(name) + entry.size <= path.stat().st_size
            archive.read(name)
    except CkpttoolError as error:
        return error.code
    return "read"


def test_a_directory_that_claims_too_much_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    end64 = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 1 << 50, 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 0, 1)
    end = struct.pack("<4sHHHHLLH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    path.write_bytes(end64 + locator + end)
    with pytest.raises(BrokenCheckpoint, match="lies outside the file"):
        open_archive(path)


# Kinds of file that are refused by name


def legacy(path: Path) -> None:
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)


def script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))


def big_endian(path: Path) -> None:
    write_zip(path, {"data.pkl": b"N.", "byteorder": b"big"})


def packed(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"N." + b" " * 100)


def other_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data.pkl", b"N.")


def two_roots(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"N.")
        archive.writestr("b/data.pkl", b"N.")


def text(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\n")


@pytest.mark.parametrize(
    ("write", "code", "words"),
    [
        (legacy, "legacy-pt", "legacy format"),
        (script, "torchscript", "TorchScript"),
        (big_endian, "big-endian", "big-endian"),
        (packed, "compressed-zip", "compressed"),
        (other_zip, "not-torch-save", "a zip, but not"),
        (two_roots, "not-torch-save", "a zip, but not"),
        (text, "not-torch-save", "not a torch.save archive"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, write: Callable[[Path], None], code: str, words: str) -> None:
    path = tmp_path / "file.pt"
    write(path)
    with pytest.raises(BrokenCheckpoint, match=words) as caught:
        open_archive(path).read("data.pkl")
    assert (caught.value.code, "file.pt" in caught.value.message) == (code, True)


def test_a_compressed_storage_is_refused_by_name(tmp_path: Path, saved: Path) -> None:
    """Where only large records are packed, the index alone would look sound."""
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(path, "w") as new:
        for entry in old.infolist():
            method = zipfile.ZIP_DEFLATED if "/data/" in entry.filename else zipfile.ZIP_STORED
            new.writestr(entry.filename, old.read(entry), method)
    with pytest.raises(BrokenCheckpoint, match="record data/0 is compressed"):
        read_torch(path)


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    writer = os.open(tmp_path / "pipe.pt", os.O_RDWR)  # so that opening it would fail the test, not stop it
    try:
        with pytest.raises(NotACheckpoint, match="not a regular file"):
            open_archive(tmp_path / "pipe.pt")
    finally:
        os.close(writer)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match="No such file"):
        open_archive(tmp_path / "absent.pt")


def test_a_record_that_is_not_there(saved: Path) -> None:
    archive = open_archive(saved)
    for call in (archive.read, archive.payload):
        with pytest.raises(BrokenCheckpoint, match="record data/9 is not in the archive"):
            call("data/9")


def test_a_record_too_large_to_be_read_whole(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchzip, "SMALL", 799)
    with pytest.raises(BrokenCheckpoint, match="claims 800 bytes"):
        open_archive(saved).read("data/0")
