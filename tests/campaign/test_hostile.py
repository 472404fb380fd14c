"""Hostile pickles: nothing of them runs, wherever they lie; and what was found on the way."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats import dcp, hf
from ckpttool.inspection import inspect
from ckpttool.records import SHARD_NAMES, stored_tensor
from ckpttool.unpickle import loads
from tests.campaign.hostile import cases, harmless, started
from tests.campaign.payloads import REFUSED, call, payloads
from tests.campaign.places import DEMO, EXTRA, PLACES, Place, fsdp_with, pipe, zipped
from tests.hostile import PROTO, STOP, named, text


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory of a short name: sockets have no longer ones."""
    path = Path(tempfile.mkdtemp(prefix="ckpttool-"))
    yield path
    shutil.rmtree(path)


def test_the_payloads_would_act(short: Path) -> None:
    """Otherwise it proves nothing that they do not."""
    assert harmless(short) == []


def test_there_are_many_payloads_and_each_is_tried() -> None:
    table = payloads(Path("x"))
    acting = [payload for payload in table.values() if payload.acts]
    assert len(table) > 100
    assert len(acting) > 35
    assert {payload.strict for payload in acting} == {payload.lenient for payload in acting} == {REFUSED}
    every = cases(1, 0)
    assert len(every) == len(set(every)) == len(table) * sum(len(p.opening) + len(p.passing) for p in PLACES.values())


def test_nothing_runs(short: Path) -> None:
    """Some hundred cases, the same each time; `python -m tests.campaign hostile` tries all of them."""
    done = started(7, 300, short)
    assert done.stderr == ""
    assert done.returncode == 0
    counts = dict(line.rsplit(": ", 1) for line in done.stdout.splitlines())
    assert sum(map(int, counts.values())) == 300
    assert {name.split(", ")[0] for name in counts} == set(PLACES)
    assert {name.rsplit(", ", 1)[1] for name in counts} == {"0", "1", "4", "5", "7"}


def test_what_is_never_opened_may_be_anything(tmp_path: Path) -> None:
    """A pipe that nobody writes to, in the place of a file of random states."""
    place = Place((), fsdp_with("extra_state", EXTRA), pipe(EXTRA.format(2)))
    place.base(tmp_path / "in")
    place.put(tmp_path / "in", b"")
    line = [sys.executable, "-m", "ckpttool", "merge-fsdp", str(tmp_path / "in"), "-o", str(tmp_path / "out")]
    ended = subprocess.run(line, capture_output=True, timeout=60, check=False, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()


# What was found


def test_a_tensor_without_its_dtype_is_damaged() -> None:
    """``_rebuild_tensor_v3`` carries the dtype behind six other arguments; found by fuzzing."""
    storage = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
    rebuild = named("torch._utils", "_rebuild_tensor_v3")
    value, _ = loads(
        PROTO + call(rebuild, storage, b"K\x00", b"K\x04\x85", b"K\x01\x85") + STOP, SHARD_NAMES, where="x"
    )
    with pytest.raises(BrokenCheckpoint, match="dtype"):
        stored_tensor(value)


@pytest.mark.parametrize("field", ["state_dict_metadata", "storage_data"])
def test_an_index_without_a_list_is_damaged(field: str, tmp_path: Path) -> None:
    shutil.copytree(DEMO / "megatron" / "dist_ckpt", tmp_path / "archive")
    path = tmp_path / "archive" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    setattr(metadata, field, None)
    path.write_bytes(pickle.dumps(metadata))
    faults = [problem for problem in dcp.open_(tmp_path / "archive").problems if field in problem.message]
    assert [(problem.code, problem.path, problem.severity) for problem in faults] == [
        ("unreadable-pickle", ".metadata", "error")
    ]


def test_a_file_of_weights_without_any_is_damaged(tmp_path: Path) -> None:
    shutil.copytree(DEMO / "fsdp" / "huggingface", tmp_path / "model")
    file = tmp_path / "model" / "pytorch_model.bin"
    file.write_bytes(zipped(PROTO + b"}" + text("weight") + b"K\x01s" + STOP))
    with pytest.raises(BrokenCheckpoint, match=r"pytorch_model\.bin: no value of its state dict is a tensor"):
        hf.read_torch(file)
    assert "no-state-dict" in [problem.code for problem in inspect(tmp_path / "model").faults]


def test_a_damaged_tensor_of_a_file_of_weights_is_named_with_the_file(tmp_path: Path) -> None:
    """The errors of a reference showed what was wrong, and not where."""
    storage = b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + b"K\x04tQ"
    tensor = call(named("torch._utils", "_rebuild_tensor_v2"), storage, b"K\x00", b"K\x04\x85", b"K\x01\x85")
    file = tmp_path / "pytorch_model.bin"
    file.write_bytes(zipped(PROTO + b"}" + text("some.weight") + tensor + b"s" + STOP))
    with pytest.raises(BrokenCheckpoint, match=r"^pytorch_model\.bin: some\.weight: storage 0 is not in the archive$"):
        hf.read_torch(file)


_LITTLE = """
import resource, sys
from ckpttool.cli import main
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
sys.exit(main(["to-hf", sys.argv[1], "-o", sys.argv[1] + ".out"]))
"""


@pytest.mark.parametrize(("end", "words"), [(b"\0", "do not end as a pickle does"), (b".", "than there is memory for")])
def test_an_index_with_a_hole_of_gigabytes(end: bytes, words: str, tmp_path: Path) -> None:
    """It ended with exit code 70 where there was no memory for it."""
    shutil.copytree(DEMO / "megatron", tmp_path / "role")
    index = tmp_path / "role" / "dist_ckpt" / ".metadata"
    with index.open("r+b") as file:
        file.seek((3 << 30) - 1)
        file.write(end)
    ended = subprocess.run(
        [sys.executable, "-c", _LITTLE, str(tmp_path / "role")], capture_output=True, timeout=60, check=False, text=True
    )
    assert ended.returncode == 4, ended.stderr
    assert ".metadata: " in ended.stderr
    assert words in ended.stderr


def test_the_child_was_watched(short: Path) -> None:
    """A watch that sees nothing would find nothing."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        from tests.campaign.watching import Acted, Watch

        watch = Watch()
        seen = 0
        for act in (lambda: os.system("true"), lambda: (short / "x").write_text(""), lambda: eval("1")):
            try:
                with watch.over(short / "room"):
                    act()
            except Acted:
                seen += 1
        os.write(write, str(seen).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"3"
    os.close(read)
    os.close(write)
