"""`verify` finds every byte that is not what its checksum was made of: as ``zipfile`` and ``zlib`` say it."""

from __future__ import annotations

import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders import copy
from tests.checksums import FIXTURES, ZipRecord, corrupt, flip, payloads, records
from tests.conftest import DATA, Call
from tests.looking import save_dcp

Run = Callable[..., Call]


@pytest.fixture(params=FIXTURES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy(DATA / request.param, tmp_path / "checkpoint")


def damaged(verified: Call) -> set[str]:
    """The files that a mismatch was told of; every one is an error."""
    found = [problem for problem in verified.json["problems"] if problem["code"] == "crc-mismatch"]
    assert {problem["severity"] for problem in found} <= {"error"}
    return {problem["path"] for problem in found}


def state_of(verified: Call, name: str) -> str:
    (check,) = [check for check in verified.json["data"]["checks"] if check["name"] == name]
    return str(check["state"])


def test_a_sound_checkpoint_is_sound(root: Path, ckpttool: Run) -> None:
    verified = ckpttool("verify", root, "--json")
    assert (verified.code, verified.json["ok"], verified.json["data"]["sound"]) == (0, True, True)
    assert state_of(verified, "crc") == "sound"
    assert damaged(verified) == set()
    files: dict[str, list[ZipRecord]] = {}
    for record in records(root):
        files.setdefault(record.file, []).append(record)
    told: dict[str, Any] = {file["name"]: file for file in verified.json["data"]["files"]}
    assert files.keys() <= told.keys()
    for name, held in files.items():
        assert told[name]["records"] == told[name]["recorded"] == len(held), name
        assert told[name]["checked"], name
    assert verified.json["data"]["bytes_read"] >= sum(record.size for record in records(root))


@pytest.mark.parametrize("end", ["first", "last"])
def test_the_ends_of_a_storage(root: Path, ckpttool: Run, end: str) -> None:
    record = random.Random(1).choice(payloads(root))
    flip(root, record, 0 if end == "first" else record.size - 1, bit=7)
    verified = ckpttool("verify", root, "--json")
    assert (verified.code, verified.json["ok"]) == (1, False)
    assert state_of(verified, "crc") == "faults"
    assert damaged(verified) == corrupt(root) == {record.file}


def test_all_faults_are_listed(root: Path, ckpttool: Run) -> None:
    """A bit in one storage of every file."""
    chance = random.Random(2)
    by_file: dict[str, list[ZipRecord]] = {}
    for record in payloads(root):
        by_file.setdefault(record.file, []).append(record)
    for held in by_file.values():
        record = chance.choice(held)
        flip(root, record, chance.randrange(record.size), chance.randrange(8))
    verified = ckpttool("verify", root, "--json")
    assert verified.code == 1
    assert damaged(verified) == corrupt(root) == by_file.keys()


@pytest.mark.parametrize("seed", range(6))
def test_any_bit_anywhere(tmp_path: Path, ckpttool: Run, seed: int) -> None:
    """A few bits in any records, pickles too: what a checksum tells is told, whatever else is wrong."""
    chance = random.Random(seed)
    root = copy(DATA / FIXTURES[seed % len(FIXTURES)], tmp_path / "checkpoint")
    for record in chance.sample([record for record in records(root) if record.size], 3):
        flip(root, record, chance.randrange(record.size), chance.randrange(8))
    wrong = corrupt(root)
    assert wrong
    verified = ckpttool("verify", root, "--json")
    assert verified.code in (1, 7)  # a bit can make a name that is refused
    if verified.code == 1:
        assert damaged(verified) == wrong


@pytest.mark.usefixtures("no_checksums")
@pytest.mark.parametrize("kind", ["bin", "dcp"])
def test_no_checksum_is_no_fault(tmp_path: Path, ckpttool: Run, kind: str) -> None:
    value = torch.arange(5.0)
    if kind == "dcp":
        save_dcp(tmp_path, {"a": value})
    else:
        torch.save({"a": value}, tmp_path / "pytorch_model.bin")
    assert {record.intact for record in records(tmp_path)} == {None}
    verified = ckpttool("verify", tmp_path, "--json")
    assert (verified.code, state_of(verified, "crc")) == (0, "not recorded")
    assert "not-recorded" in {problem["code"] for problem in verified.json["problems"]}


def test_a_checksum_of_zero_among_others_is_a_fault(tmp_path: Path, ckpttool: Run) -> None:
    """torch records all of an archive or nothing: one zero is no "not recorded"."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.arange(5.0), "b": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as archive:
        crc = next(info.CRC for info in archive.infolist() if info.filename.endswith("/data/0"))
    raw = path.read_bytes()
    assert crc
    path.write_bytes(raw.replace(crc.to_bytes(4, "little"), bytes(4)))
    assert corrupt(tmp_path) == {path.name}
    verified = ckpttool("verify", tmp_path, "--json")
    assert (verified.code, damaged(verified)) == (1, {path.name})
