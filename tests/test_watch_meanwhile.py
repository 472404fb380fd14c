"""What a look has seen is old when actions have run since, and what lies there for long has no sign that is newer."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from ckpttool.watching import Settings, Watcher
from tests import builders
from tests.trainer import contents

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    """Two whole steps; the tracker says the second."""
    return builders.run_directory(tmp_path / "run", {"actor": data / "fsdp" / "torch2.13-fsdp2"}, (10, 20))


def test_a_step_that_is_saved_anew_during_an_action_on_an_earlier_one_waits_for_its_sign(run: Path, data: Path) -> None:
    """Training was begun again from step 10 while that was uploaded, and has written one of the files of step 20."""
    again, step = data / "fsdp" / "torch2.6-fsdp2", run / "global_step_20" / "actor"
    fired, first = [], "model_world_size_4_rank_0.pt"
    with Watcher(run, Settings(exec=("true",))) as watcher:
        for notice in watcher.watch(once=True):
            if notice.what == "acting" and notice.event is not None:
                fired.append(notice.event.name)
                shutil.copyfile(again / first, step / first)
    assert fired == ["global_step_10/actor"]

    shutil.copytree(again, step, copy_function=shutil.copyfile, dirs_exist_ok=True)
    os.utime(run / TRACKER)
    with Watcher(run, Settings(exec=("true",))) as watcher:
        for notice in watcher.watch(once=True):
            if notice.what == "finished" and notice.event is not None:
                fired.append(notice.event.name)
                assert contents(step) == contents(again)
    assert fired == ["global_step_10/actor", "global_step_20/actor"]


def test_a_step_that_is_removed_during_an_action_on_an_earlier_one_is_told_to_be_gone(run: Path) -> None:
    with Watcher(run, Settings(exec=("true",))) as watcher:
        told = []
        for notice in watcher.watch(once=True):
            told.append(notice.what)
            if notice.what == "acting":
                shutil.rmtree(run / "global_step_20")
    assert told == ["watching", "finished", "acting", "acted", "done", "gone", "stopped"]


@pytest.mark.parametrize(("minutes", "fired"), [(9, 0), (11, 2)])
def test_a_copy_whose_tracker_is_older_is_acted_on_by_one_call(run: Path, minutes: int, fired: int) -> None:
    """As cron makes it, again and again: no call is there for ten minutes."""
    written = time.time() - 60 * minutes
    for path in run.rglob("*.pt"):
        os.utime(path, (written, written))
    os.utime(run / TRACKER, (written - 100, written - 100))
    slept: list[float] = []
    with Watcher(run, Settings(exec=("true",)), sleep=slept.append) as watcher:
        told = [notice.what for notice in watcher.watch(once=True)]
    assert (told.count("done"), slept) == (fired, [1.0] if fired else [])
