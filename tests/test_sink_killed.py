"""A plan carried out by a process that is killed at every file-system call, and on a disk that becomes full."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import gathering, reading, sink
from ckpttool.errors import CannotWrite
from ckpttool.plan import Plan, weight_files, whole
from ckpttool.staging import check_space, clear_stale
from ckpttool.tensors import TensorInfo
from tests.killing import KILLED, _end_at
from tests.test_sink import carry_out, content, stored, tiny

MOST = 400
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def work() -> Iterator[Path]:
    """A directory in memory where there is one."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield Path(name)


# Killed


def old_one(target: Path) -> dict[str, bytes]:
    (target / "sub").mkdir(parents=True)
    (target / "config.json").write_bytes(b"old")
    (target / "sub/more").write_bytes(b"old")
    return content(target)


def kill_everywhere(work: Path, *, force: bool, before: bool) -> None:
    """Run in forked children, each of which ends at its next file-system call and leaves what it leaves."""
    plan, sources, _ = tiny(work / "in", work / "side")
    ended = 0
    for at in range(1, MOST):
        here = work / f"states/{at:03d}"
        here.mkdir(parents=True)
        if force:
            old_one(here / "out")
        child = os.fork()
        if not child:
            _run(plan, sources, work / "in", here / "out", at, force=force, before=before)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED)
        ended = ended + 1 if code == 0 else 0
        if ended == 3:  # one may have come to its end because the call that was to be its last one failed
            return
    raise AssertionError("it never ends")


def _run(
    plan: Plan, sources: dict[str, TensorInfo], root: Path, target: Path, at: int, *, force: bool, before: bool
) -> None:
    code = 70
    try:
        pytest.MonkeyPatch().setattr(reading, "BAND", 2048)
        pytest.MonkeyPatch().setattr(sink, "BAND", 2048)
        pytest.MonkeyPatch().setattr(gathering, "BAND", 2048)
        _end_at(at, before=before)
        carry_out(plan, sources, root, target, force=force)
        code = 0
    finally:
        os._exit(code)


@dataclass(frozen=True)
class Case:
    """What each of the possible kills left, and what there was before and is to be."""

    states: list[Path]
    root: Path
    plan: Plan
    sources: dict[str, TensorInfo]
    old: dict[str, bytes]
    new: dict[str, bytes]
    force: bool

    def again(self, here: Path) -> None:
        """Run once more, to the end."""
        carry_out(self.plan, self.sources, self.root, here / "out", force=self.force)


@pytest.fixture(params=["after", "before"])
def before(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "before")


@pytest.fixture(params=["new", "force"])
def case(request: pytest.FixtureRequest, work: Path, before: bool, monkeypatch: pytest.MonkeyPatch) -> Case:
    """The states are made by a process of its own: forking this one, with its threads, is not sound."""
    force = request.param == "force"
    script = "import sys; from pathlib import Path; from tests.test_sink_killed import kill_everywhere as kill\n"
    script += f"kill(Path(sys.argv[1]), force={force}, before={before})"
    subprocess.run([sys.executable, "-c", script, str(work)], cwd=ROOT, check=True, timeout=120)
    monkeypatch.setattr(os, "fsync", lambda _handle: None)
    plan, sources, new = tiny(work / "again", work / "side again")
    assert content(work / "again") == content(work / "in")
    states = sorted((work / "states").iterdir())
    assert len(states) > 25
    return Case(states, work / "in", plan, sources, old_one(work / "old") if force else {}, new, force)


def outcome(here: Path) -> dict[str, bytes]:
    """What has the name of the target; nothing is nothing."""
    return content(here / "out") if (here / "out").exists() else {}


def test_a_kill_leaves_all_or_nothing_and_the_next_run_clears_it(case: Case) -> None:
    """Where something was replaced, it is there, or what replaces it; or the next run finds it again."""
    seen = []
    for here in case.states:
        left = outcome(here)
        assert left in ({}, case.old, case.new)
        clear_stale(here / "out")
        assert os.listdir(here) in ([], ["out"])
        assert outcome(here) == (left or case.old)
        if case.force or not left:
            case.again(here)
        assert (os.listdir(here), outcome(here)) == (["out"], case.new)
        seen.append(left)
    assert case.new in seen
    assert {} in seen


def test_a_kill_and_a_new_run_without_a_look_between(case: Case) -> None:
    for here in case.states:
        if case.force or not outcome(here):
            case.again(here)
            assert (os.listdir(here), outcome(here)) == (["out"], case.new)


def test_what_comes_back_is_complete_even_when_the_new_one_was_moved_away(case: Case) -> None:
    """To its final place, by a user who does not know that it was the old one which was not yet removed."""
    moved = [here for here in case.states if outcome(here) == case.new]
    assert moved
    for here in moved:
        (here / "out").rename(here / "final")
        clear_stale(here / "out")
        assert outcome(here) in ({}, case.old)
        assert content(here / "final") == case.new


def test_sources_are_only_read(case: Case, work: Path) -> None:
    assert content(work / "in") == content(work / "again")
    assert content(work / "side") == content(work / "side again")


# Full


@pytest.fixture
def small_disk(disk: Callable[[str], Path]) -> Path:
    """A file system of one megabyte."""
    return disk("size=1m")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("rows", [200_000, 2_000_000])
def test_a_disk_that_becomes_full_is_left_empty(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch, threads: int, rows: int
) -> None:
    """In the middle of a band, or after many."""
    monkeypatch.setattr(sink, "BAND", 100_000)
    monkeypatch.setattr(gathering, "BAND", 100_000)
    monkeypatch.setattr(reading, "BAND", 100_000)
    arrays: dict[str, Any] = {name: ("float32", np.ones(rows, np.float32)) for name in "abc"}
    sources = stored(tmp_path / "in", arrays)
    plan = Plan(weight_files([whole(tensor) for tensor in sources.values()], rows * 4), (), {}, ())
    with pytest.raises(CannotWrite, match="No space left on device") as raised:
        carry_out(plan, sources, tmp_path / "in", small_disk / "deep/model", threads=threads)
    assert (raised.value.code, raised.value.hint[:10]) == ("ENOSPC", "Free some ")
    assert list((small_disk / "deep").iterdir()) == []
    assert shutil.disk_usage(small_disk).used < 50_000


def test_a_full_disk_keeps_what_was_to_be_replaced(tmp_path: Path, small_disk: Path) -> None:
    old = old_one(small_disk / "model")
    sources = stored(tmp_path / "in", {"a": ("float32", np.ones(1_000_000, np.float32))})
    plan = Plan(weight_files([whole(sources["a"])], 1 << 30), (), {}, ())
    with pytest.raises(CannotWrite, match="No space left on device"):
        carry_out(plan, sources, tmp_path / "in", small_disk / "model", force=True)
    assert (os.listdir(small_disk), content(small_disk / "model")) == (["model"], old)


def test_too_small_a_disk_is_told_beforehand(small_disk: Path) -> None:
    check_space(small_disk / "a/b", 900_000)
    with pytest.raises(CannotWrite, match="2,000,000 bytes are needed, 1,0") as raised:
        check_space(small_disk / "a/b", 2_000_000)
    assert raised.value.code == "no-space"


def test_a_side_file_that_does_not_fit_is_told(tmp_path: Path, small_disk: Path) -> None:
    plan, sources, _ = tiny(tmp_path / "in", tmp_path / "side")
    (tmp_path / "side/vocab.json").write_bytes(bytes(3_000_000))
    with pytest.raises(CannotWrite, match="No space left on device"):
        carry_out(plan, sources, tmp_path / "in", small_disk / "model")
    assert os.listdir(small_disk) == []
