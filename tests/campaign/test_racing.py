"""Two commands at once, and a trainer that writes while a command reads: see `racing.py`."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign import racing, trainers
from tests.campaign.children import End, run
from tests.campaign.racing import Field, Runner
from tests.campaign.subjects import Export, Migration, content
from tests.campaign.trainers import CHANGES, MUTATIONS, Reading, copied_meanwhile

MAKING = ("merge-fsdp", "to-hf")


@pytest.fixture(scope="module")
def field() -> Iterator[Field]:
    """Everything, in memory where there is some."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield racing.field(Path(name))


def reading(field: Field, command: str) -> Reading:
    return next(found for found in field.readings if found.command == command)


def migration(field: Field, name: str) -> Migration:
    return next(found for found in field.migrations if found.name == name)


def export(field: Field, name: str) -> Export:
    return next(found for found in field.exports if found.name == name)


# Reading


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.parametrize("command", MAKING)
def test_a_trainer_that_writes_meanwhile(field: Field, command: str, name: str) -> None:
    """Whatever it does and whenever: an error, or the whole of one version."""
    found, rng = reading(field, command), random.Random(name)
    moments = field.readings[found]
    for at in (moments[0], moments[1], *sorted(rng.sample(moments[2:-1], 3)), moments[-1]):
        end, wrong = found.play(field.folder, at, MUTATIONS[name], rng)
        assert not wrong, (at, wrong)
        assert at in moments[:3] or end.code, (at, end)


@pytest.mark.parametrize("command", MAKING)
def test_what_changed_is_named(field: Field, command: str) -> None:
    """All files were as they should be when they were read, and were others in the end."""
    found = reading(field, command)
    middle = field.readings[found][len(field.readings[found]) // 2]
    for name, file in (("rewritten", "config.json"), ("side_files", "config.json"), ("grown", "rank_")):
        end, wrong = found.play(field.folder, middle, MUTATIONS[name], random.Random(1))
        assert (end.code, wrong) == (4, [])
        assert "changed while it was read: " in end.text
        assert (file if command == "merge-fsdp" or file != "rank_" else ".distcp") in end.text


def test_a_config_that_is_replaced_after_the_shards_were_looked_at(field: Field) -> None:
    """The output would have the weights of one save and the config of the next."""
    found = reading(field, "merge-fsdp")
    for at in field.readings[found][::12]:
        end, wrong = found.play(field.folder, at, trainers.side_files, random.Random(1))
        assert (end.code, wrong) == (4, [])


def test_an_archive_that_is_replaced_right_after_its_index_was_read(field: Field) -> None:
    """The index of one save would have been applied to the files of the next."""
    found = reading(field, "to-hf")
    for at in field.readings[found][:6]:
        end, wrong = found.play(field.folder, at, trainers.rewritten, random.Random(1))
        assert wrong == []
        assert end.code == 4


def test_a_checkpoint_that_is_gone_at_the_last_look(field: Field) -> None:
    """It is the source that is not there, and not a fault of the disk that is written to."""
    found = reading(field, "merge-fsdp")
    end, wrong = found.play(field.folder, field.readings[found][-1], trainers.cleared, random.Random(1))
    assert wrong == []
    assert end.code in (3, 4)


@pytest.mark.parametrize("name", ["rewritten", "one_replaced", "cut", "cleared"])
@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_looking_at_what_is_written_meanwhile(field: Field, command: str, name: str) -> None:
    """It says what it saw, or that something is not there any more; no comparison is with two saves at once."""
    for found in (found for found in field.readings if found.command == command):
        moments = field.readings[found]
        for at in {*moments[:2], *moments[:: len(moments) // 3], moments[-1]}:
            _, wrong = found.play(field.folder, at, MUTATIONS[name], random.Random(at))
            assert not wrong, (at, wrong)


# Migrations


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("mode", ["copy", "hardlink", "symlink"])
def test_an_archive_that_changes_while_it_is_migrated(field: Field, mode: str, name: str) -> None:
    """A tree is of one save, or there is none, and the next run makes it."""
    found, ends = migration(field, f"migrate --mode {mode}"), set()
    writes = field.migrations[found]
    for at in range(1, writes + 1, 10 if mode == "copy" else 9):
        end, wrong = copied_meanwhile(found, field.folder, at, CHANGES[name])
        assert not wrong, (at, wrong)
        ends.add(end.code)
    assert 0 in ends
    assert (4 in ends) == (mode == "copy" or (mode, name) == ("hardlink", "renamed"))


@pytest.mark.parametrize("first", ["migrate --mode copy", "migrate --remove-v1", "migrate --mode hardlink"])
@pytest.mark.parametrize("second", ["migrate --mode hardlink", "migrate --undo", "migrate --remove-v1"])
def test_two_migrations_of_one_role(field: Field, first: str, second: str) -> None:
    """While one is at work the other ends with 6 and says so; layout v1 can always be had back."""
    one, other = migration(field, first), migration(field, second)
    busy = []
    for at in (1, 2, field.migrations[one] // 2, field.migrations[one] - 1):
        end, late, wrong = racing.two_migrations(field.folder, one, other, at)
        assert not wrong, (at, wrong)
        assert end.code == 0
        busy.append(late.code == 6 and "another migration is at work here" in late.text)
    assert busy[1:] == [True] * 3


# Destinations


def runners(field: Field, *names: str) -> tuple[Runner, Runner]:
    one, two = (Runner(export(field, name), name.endswith("--force")) for name in names)
    return one, two


def moments(writes: int) -> list[int]:
    """The first, some in the middle, and all of the end, where names change."""
    return [1, 2, writes // 3, 2 * writes // 3, *range(writes - 5, writes + 1)]


PAIRS = [
    ("merge-fsdp", "merge-fsdp"),
    ("merge-fsdp", "to-hf"),
    *(("merge-fsdp", "to-hf --force"), ("to-hf --force", "merge-fsdp"), ("merge-fsdp --force", "to-hf --force")),
]


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_one_command_while_another_is_at_work(field: Field, pair: tuple[str, str]) -> None:
    """One of them wins; the other says that the place is taken, if it was not told to replace what is there."""
    one, two = runners(field, *pair)
    old = field.old if one.force else None
    for at in moments(field.exports[one.export]):
        ends, wrong = racing.one_in_the_other(field.folder, (one, two), at, old)
        assert not wrong, (at, wrong)
        assert {end.code for _, end in ends} <= {0, 6}


@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_two_commands_at_once(field: Field, pair: tuple[str, str]) -> None:
    rng = random.Random(" ".join(pair))
    for _ in range(3):
        one, two = runners(field, *pair)
        _, wrong = racing.at_once(field.folder, (one, two), rng, field.old if one.force else None)
        assert not wrong, wrong


def test_a_migration_while_the_role_is_converted(field: Field, tmp_path: Path) -> None:
    """Names are added and taken away; the bytes are the same, and so is what becomes of them."""
    found = reading(field, "to-hf")

    def migrated(live: Path, _other: Path, _rng: random.Random) -> None:
        assert run(["migrate", live], live, tmp_path / "text").code == 0

    for at in field.readings[found][::60]:
        end, wrong = found.play(field.folder, at, migrated, random.Random(1))
        assert (end.code, wrong) == (0, [])


def test_what_is_wrong_is_found(field: Field, tmp_path: Path) -> None:
    """A judge that sees nothing would have let all of the above pass."""
    found = reading(field, "merge-fsdp")
    (tmp_path / "out").mkdir()
    (tmp_path / "live").mkdir()
    for file, value in found.results[0].items():
        (tmp_path / "out" / file).write_bytes(value)
    assert list(found.wrong(tmp_path, End(0, ""), tmp_path / "live")) == []
    (tmp_path / "out" / "LICENSE").write_bytes(found.results[1]["LICENSE"])
    assert list(found.wrong(tmp_path, End(0, ""), tmp_path / "live")) == ["a mixture of two versions"]
    (tmp_path / "live").rmdir()
    one, two = runners(field, "merge-fsdp", "to-hf")
    fine, late = End(0, ""), End(6, f"{tmp_path}: exists already")
    assert len(list(racing._judge(tmp_path, ((one, fine), (two, late)), {}))) == 1
    assert len(list(racing._judge(tmp_path, ((one, late), (two, late)), content(tmp_path / "out")))) == 0
    assert len(list(racing._judge(tmp_path, ((one, late), (two, late)), {}))) == 2
