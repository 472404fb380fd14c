"""The smallest inputs of faults that campaigns have found."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.errors import BrokenCheckpoint, Problem
from ckpttool.formats import torchzip
from ckpttool.formats.jsonfile import VALUES_MOST
from ckpttool.formats.safetensorsfile import read_safetensors
from ckpttool.formats.shardfiles import DISTINCT_MOST, Sizes
from ckpttool.inspection import inspect
from ckpttool.records import shape_of
from ckpttool.render.terminal import FOLDED_LONGEST, MOST_PROBLEMS, console, print_each
from ckpttool.tensors import MOST_DIMENSIONS
from tests.campaign.giants import make_deep, safetensors, shard, zip_of
from tests.conftest import Call
from tests.looking import faults, problem
from tests.migrating import move, tiny_role


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0"])
def test_a_header_of_millions_of_values(value: bytes, tmp_path: Path, ckpttool: Callable[..., Call]) -> None:
    """They took a gigabyte and more from a file of a few megabytes; where that was not there, exit code 70."""
    path = tmp_path / "model.safetensors"
    header = b'{"__metadata__":[' + b",".join([value] * (VALUES_MOST + 1)) + b"]}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    (told,) = ckpttool("inspect", path, "--json").json["problems"]
    assert told["code"] == "bad-json"
    assert "model.safetensors" in told["message"]
    assert "more than is read" in told["message"]
    assert ckpttool("diff", path, path, "--json").code == 4


@pytest.mark.parametrize("size", ["1", str(1 << 63)])
def test_a_shape_of_many_dimensions_is_damage(tmp_path: Path, size: str) -> None:
    """The product of a million large sizes is a number that takes minutes."""
    shape = ",".join([size] * (MOST_DIMENSIONS + 1))
    safetensors(
        tmp_path / "a.safetensors", f'{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}'.encode(), 1
    )
    with pytest.raises(BrokenCheckpoint, match="the header entry of w is damaged"):
        read_safetensors(tmp_path / "a.safetensors")


def test_sizes_are_numbers_of_no_great_length(tmp_path: Path) -> None:
    entry = f'{{"w":{{"dtype":"U8","shape":[{1 << 128},0],"data_offsets":[0,0]}}}}'
    safetensors(tmp_path / "a.safetensors", entry.encode())
    with pytest.raises(BrokenCheckpoint, match="the header entry of w is damaged"):
        read_safetensors(tmp_path / "a.safetensors")


def test_a_pickled_shape_has_as_many_dimensions_at_most() -> None:
    assert shape_of([1] * MOST_DIMENSIONS) == (1,) * MOST_DIMENSIONS
    with pytest.raises(BrokenCheckpoint, match="stands where a shape should"):
        shape_of([1] * (MOST_DIMENSIONS + 1))


def test_a_pickle_of_a_gigabyte_that_is_a_hole(tmp_path: Path) -> None:
    zip_of(shard(tmp_path), [(b"a/data.pkl", b"")], claims=1 << 30)
    assert "record data.pkl claims 1,073,741,824 bytes" in problem(inspect(tmp_path), "damaged-zip").message


def test_a_directory_of_a_zip_that_is_a_hole(tmp_path: Path) -> None:
    """Its end says so, and says that it is one; nothing is read."""
    path = shard(tmp_path)
    zip_of(path, [(b"a/data.pkl" + b"\0" * 60_000, b"")])
    raw = path.read_bytes()
    end = raw.index(b"PK\6\6")
    fields = [1, 1, torchzip.DIRECTORY_MOST + 1, 0]
    record = raw[end : end + 24] + b"".join(n.to_bytes(8, "little") for n in fields)
    locator = b"PK\6\7" + bytes(4) + (torchzip.DIRECTORY_MOST + 1).to_bytes(8, "little") + b"\1\0\0\0"
    with path.open("wb") as file:
        file.truncate(torchzip.DIRECTORY_MOST + 1)
        file.seek(torchzip.DIRECTORY_MOST + 1)
        file.write(record + locator + raw[-22:])
    assert "its directory lies outside the file" in problem(inspect(tmp_path), "damaged-zip").message


def test_sizes_of_other_ranks_are_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a look at all others for each one, a hundred thousand shards that are damaged take hours."""
    names = [f"{n}" for n in range(50)]
    for n, name in enumerate(names):
        (tmp_path / name).write_bytes(b"x" * min(n, 2))
    looks: list[Path] = []
    size = torchzip.file_size

    def counted(path: Path) -> int:
        looks.append(path)
        return size(path)

    monkeypatch.setattr(torchzip, "file_size", counted)
    sizes = Sizes(tmp_path, names)
    assert [sizes.beside(name) for name in names] == [{1, 2}, {0, 2}, *[{0, 1, 2}] * 48]
    assert len(looks) == 50


def test_a_thousand_different_sizes_say_nothing(tmp_path: Path) -> None:
    for n in range(DISTINCT_MOST + 1):
        os.truncate(os.open(tmp_path / f"{n}", os.O_CREAT | os.O_WRONLY), n)
    assert Sizes(tmp_path, os.listdir(tmp_path)).beside("0") == set()


def test_a_problem_of_any_length_is_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    message = "word " * (FOLDED_LONGEST // 4) + "end"
    print_each([Problem(code="x", message=message, severity="note")], console())
    assert capsys.readouterr().out == f"- {message}\n"


def test_the_list_of_tensors_is_no_wider_than_one_reads(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    """Every row was as long as the longest name, and the spaces were looked through again from each of them."""
    name = "x" * 300_000
    entries = {key: {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n, key in enumerate((name, "a", "b"))}
    safetensors(tmp_path / "model.safetensors", json.dumps(entries).encode(), 3)
    told = ckpttool("inspect", tmp_path, "--tensors").out.splitlines()
    assert [len(line) < 300 for line in told if "U8" not in line and "uint8" in line] == [False, True, True]


def test_an_undoing_that_could_not_end_does_not_begin(tmp_path: Path) -> None:
    """It ended half way, and again at each further attempt."""
    role = tiny_role(tmp_path / "role")
    move(role, mode="copy", remove_v1=True)
    make_deep(role / "extra" / "dist_ckpt", "d" * 200, 30)
    before = list(os.walk(role))
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role, undo=True)
    (reason,) = caught.value.problems
    assert (reason.code, reason.path) == ("too-deep", "extra/dist_ckpt")
    assert list(os.walk(role)) == before


def test_inspect_reads_the_config_beside_shards_as_the_merge_does(
    ckpttool: Callable[..., Call], tmp_path: Path, data: Path
) -> None:
    """accelerate's users have it there."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for rank in range(4):
        raw = (data / "fsdp" / "torch2.13-fsdp2" / f"model_world_size_4_rank_{rank}.pt").read_bytes()
        (folder / f"pytorch_model_fsdp_0_rank{rank}.bin").write_bytes(raw)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    assert faults(inspect(folder)) == []
    (folder / "config.json").write_text('{"model_type": "q')
    assert faults(inspect(folder)) == ["bad-json"]
    assert ckpttool("merge-fsdp", folder, "-o", tmp_path / "out").code == 4


def test_an_error_with_thousands_of_reasons_shows_a_thousand(capsys: pytest.CaptureFixture[str]) -> None:
    """A hundred thousand took more than half a minute; --json has them all."""
    print_each([Problem(code="x", message=f"reason {n}") for n in range(MOST_PROBLEMS + 9)], console())
    lines = capsys.readouterr().out.splitlines()
    assert lines[:-1] == [f"! reason {n}" for n in range(MOST_PROBLEMS)]
    assert lines[-1].startswith("and 9 more of the kind x")


@pytest.mark.parametrize("command", ["verify {} --values", "diff {} {}", "diff {} {} --trust-crc"])
def test_a_pipe_in_the_place_of_a_data_file(
    ckpttool: Callable[..., Call], tmp_path: Path, data: Path, command: str
) -> None:
    """Who opened it waited for a writer, in a thread that no signal ends."""
    archive = shutil.copytree(data / "megatron" / "mcore0.14-dense-tp2", tmp_path / "archive")
    (archive / "__1_0.distcp").unlink()
    os.mkfifo(archive / "__1_0.distcp")
    call = ckpttool(*command.format(archive, archive).split())
    assert call.code == (1 if command.startswith("verify") else 4)
    assert "__1_0.distcp" in call.out + call.err


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_only_a_regular_file_is_opened(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "file")
    with pytest.raises(OSError, match="not a regular file"):
        torchzip.open_file(tmp_path / "file")


@pytest.mark.parametrize("text", ['{"a": "\xe9"}'.encode("utf-16"), b'{"a": "\xe1"}', b'{"a": "\xed\xa0\x80"}'])
def test_a_manifest_that_is_no_utf_8(ckpttool: Callable[..., Call], tmp_path: Path, text: bytes) -> None:
    """JSON in UTF-16 and halves of characters can be read as JSON, and not be kept as text: it ended with 70."""
    role = tiny_role(tmp_path / "role")
    (role / "ckpt_contents.json").write_bytes(text)
    call = ckpttool("migrate", role)
    assert (call.code, "ckpt_contents.json" in call.err) == (4, True)
    assert (role / "ckpt_contents.json").read_bytes() == text
