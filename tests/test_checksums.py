"""The oracle of `verify`, held against ``zipfile`` and against where the index says that archives lie."""

from __future__ import annotations

import io
import random
import zipfile
from pathlib import Path

import pytest
import torch

from ckpttool.source import open_checkpoint
from tests.builders import copy
from tests.checksums import FIXTURES, corrupt, flip, payloads, records
from tests.conftest import DATA


@pytest.fixture(params=FIXTURES)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return copy(DATA / request.param, tmp_path / "checkpoint")


def test_the_oracle_agrees_with_zipfile(root: Path) -> None:
    """Sound: all is recorded and intact, and what it finds are the bytes that zipfile reads."""
    found = records(root)
    assert found
    assert {record.intact for record in found} == {True}
    for record in found:
        if record.archive == 0 and record.file.endswith(".pt"):
            with zipfile.ZipFile(root / record.file) as archive:
                raw = (root / record.file).read_bytes()
                assert archive.read(record.name) == raw[record.offset : record.offset + record.size]


def test_the_oracle_sees_every_item() -> None:
    """The archives of a file follow each other without a gap, as torch's index says."""
    root = DATA / "megatron" / "mcore0.19-dense-tp2"
    source = open_checkpoint(root)
    pieces = [piece.place for tensor in source.tensors.values() for piece in (*tensor.pieces, *tensor.copies)]
    items = {(place.file, place.offset) for place in (*pieces, *source.objects.values())}
    assert {(record.file, record.archive) for record in records(root)} == items


def test_the_oracle_finds_a_bit(root: Path) -> None:
    chance = random.Random(7)
    for record in chance.sample(payloads(root), 4):
        flip(root, record, record.size - 1, 7)
        broken = [other[:5] for other in records(root) if other.intact is False]
        assert broken == [record[:5]]
        if record.file.endswith(".pt"):
            with zipfile.ZipFile(io.BytesIO((root / record.file).read_bytes())) as archive:
                assert archive.testzip() == record.name
        flip(root, record, record.size - 1, 7)
    assert corrupt(root) == set()


@pytest.mark.usefixtures("no_checksums")
def test_the_oracle_knows_what_is_not_recorded(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    assert {record.intact for record in records(tmp_path)} == {None}
    assert corrupt(tmp_path) == set()
