"""The trainer that trains nothing: what it writes is what was asked for, and what it tells is true."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpttool.inspection import inspect
from tests.builders import ROOT
from tests.producers import KINDS, PRODUCERS
from tests.trainer import contents, crash, cut, later, move, perform, read_log, remove, tell, text, together, write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """An empty directory of a run."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_save_is_whole_when_it_is_told_to_be(producer: str, run: Path, lives: list[dict[str, Path]]) -> None:
    first, second = lives
    save = PRODUCERS[producer]
    told = []
    for step, sources in ((10, first), (20, second)):
        for moment in perform(run, save(step, sources)):
            if not isinstance(moment, dict):
                continue
            told.append((moment["step"], moment["what"]))
            if moment["what"] == "finished":
                found = [inspect(run / name) for name in moment["names"]]
                assert {(each.kind, each.state) for each in found} == {(KINDS[producer], "complete")}
                assert all(contents(run / name) == moment["files"][name] for name in moment["names"])
    per_step = len(told) // 4
    assert told == [(step, what) for step in (10, 20) for _ in range(per_step) for what in ("signal", "finished")]


@pytest.mark.parametrize("producer", PRODUCERS)
def test_two_saves_have_the_same_names_and_other_contents(producer: str, lives: list[dict[str, Path]]) -> None:
    """So that a mixture of them can be told from both."""
    first, second = lives
    assert first.keys() == second.keys()
    for role in first:
        one, other = contents(first[role]), contents(second[role])
        same = [name for name in one if one[name] == other.get(name)]
        both = one.keys() & other.keys()
        assert len(both) >= 3
        assert len(same) < len(both)


def test_a_file_is_empty_then_short_then_whole(run: Path, tmp_path: Path) -> None:
    (tmp_path / "source").write_text("abcdef")
    sizes: list[object] = []
    for moment in perform(run, [write("a/b", tmp_path / "source", pieces=3, last={"what": "signal"})]):
        path = run / "a/b"
        size = path.stat().st_size if path.is_file() else None
        sizes.append(moment["what"] if isinstance(moment, dict) else size)
    assert sizes == [None, 0, 2, 4, "signal", 6]


def test_scripts_take_turns_are_cut_and_can_be_followed(run: Path) -> None:
    acts = [
        together([text("a", "1"), text("b", "2")], [text("c", "3")]),
        cut([text("d", "4")], 1),
        later(),
        move("a", "e"),
        tell("there", names=["."]),
    ]
    names = ["".join(sorted(path.name for path in run.iterdir())) for _ in perform(run, acts)]
    assert names == ["a", "ac", "ac", "ac", "abc", "abc", "abcd", "abcd", "abcd", "bcde", "bcde"]
    assert {name: size.split()[0] for name, size in contents(run).items()} == {"b": "1", "c": "1", "d": "0", "e": "1"}


def test_what_is_written_later_is_newer(run: Path) -> None:
    """Time stamps are as coarse as the file system's clock."""
    list(perform(run, [text("a", "1"), later(), text("b", "2")]))
    assert (run / "a").stat().st_mtime_ns < (run / "b").stat().st_mtime_ns


def test_a_tree_is_deleted_file_by_file_or_half(run: Path) -> None:
    list(perform(run, [text(f"step/role/{name}", "x") for name in "abc"]))
    list(perform(run, [remove("step", entries=2)]))
    assert len(list((run / "step/role").iterdir())) == 1
    list(perform(run, [remove("step")]))
    assert list(run.iterdir()) == []


def test_as_a_process_it_tells_and_dies(run: Path, tmp_path: Path, data: Path) -> None:
    acts = [*PRODUCERS["verl-sft"](10, {"": data / "fsdp/torch2.6-fsdp2"}), crash(), text("never", "x")]
    orders = {"run": str(run), "log": str(tmp_path / "log"), "acts": acts, "pause": 0}
    (tmp_path / "script.json").write_text(json.dumps(orders))
    command = [sys.executable, "-m", "tests.trainer", str(tmp_path / "script.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "", "")
    told = read_log(tmp_path / "log")
    assert [moment["what"] for moment in told] == ["signal", "finished", "crash"]
    assert told[1]["files"] == {"global_step_10": contents(run / "global_step_10")}
    assert not (run / "never").exists()
