"""Retention in a watch: what is counted, what is deleted when, and what is told of it, once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.watching import Notice, Settings, Watcher
from tests import builders

ROLES = ("actor", "critic")


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    """Five whole steps of two roles; the tracker says the last."""
    shards = data / "fsdp" / "torch2.13-fsdp2"
    return builders.run_directory(tmp_path / "run", dict.fromkeys(ROLES, shards), (10, 20, 30, 40, 50))


Go = Callable[..., list[Notice]]


@pytest.fixture
def go(run: Path) -> Go:
    def watch(since: int = 0, **settings: Any) -> list[Notice]:
        with Watcher(run, Settings(**{"exec": ("true",), **settings})) as watcher:
            return list(watcher.watch(once=True, since=since))

    return watch


def steps(run: Path) -> list[int]:
    return sorted(int(name.removeprefix("global_step_")) for name in os.listdir(run) if name.startswith("global"))


def said(notices: list[Notice], what: str) -> list[str]:
    return [notice.message for notice in notices if notice.what == what]


def test_old_steps_go_after_all_of_their_roles_are_done(run: Path, go: Go) -> None:
    notices = go(keep_last=2, keep_every=20, yes=True)
    assert steps(run) == [20, 40, 50]
    assert said(notices, "pruned") == ["global_step_10 is deleted", "global_step_30 is deleted"]
    order = [notice.what for notice in notices]
    assert order.index("pruned") > max(at for at, what in enumerate(order) if what == "done")
    assert not (run / ".ckpttool-removing").exists()
    assert all(notice.data["freed"] > 0 for notice in notices if notice.what == "pruned")


def test_without_yes_it_is_only_said(run: Path, go: Go) -> None:
    notices = go(keep_last=2)
    assert steps(run) == [10, 20, 30, 40, 50]
    assert said(notices, "pruned") == [f"global_step_{step} would be deleted; --yes does it" for step in (10, 20, 30)]
    assert [notice.data["deleted"] for notice in notices if notice.what == "pruned"] == [False] * 3


def test_the_tracker_s_step_is_kept_and_that_is_said(run: Path, go: Go) -> None:
    go()  # all are done
    (run / "latest_checkpointed_iteration.txt").write_text("20")  # training was resumed from there
    notices = go(keep_last=1, yes=True)
    assert steps(run) == [20, 50]
    (told,) = said(notices, "kept")
    assert told.startswith("global_step_20 is old, but kept: ")
    assert "latest_checkpointed_iteration.txt" in told


@pytest.mark.parametrize("words", ["", "thirty"])
def test_a_tracker_that_cannot_be_understood_keeps_everything(run: Path, go: Go, words: str) -> None:
    go()
    (run / "latest_checkpointed_iteration.txt").write_text(words)
    go(keep_last=1, yes=True)
    assert steps(run) == [10, 20, 30, 40, 50]


def test_a_step_on_which_an_action_failed_is_kept(run: Path, go: Go) -> None:
    notices = go(keep_last=1, yes=True, keep_going=True, exec=("test {step}{role} != 20critic",))
    assert steps(run) == [20, 50]
    assert said(notices, "kept") == ["global_step_20 is old, but kept: an action on it is not done"]


def test_a_step_that_is_not_whole_is_neither_counted_nor_deleted(run: Path, go: Go) -> None:
    for step in (20, 50):
        builders.drop_rank(run / f"global_step_{step}" / "critic", 0)
    notices = go(keep_last=2, yes=True)
    assert steps(run) == [20, 30, 40, 50]
    assert said(notices, "kept") == ["global_step_20 is old, but kept: not finished"]


def test_a_step_of_which_a_role_has_not_begun_is_not_counted(run: Path, go: Go) -> None:
    """Asynchronous saves of verl write the tracker when the first role is finished."""
    shutil.rmtree(run / "global_step_50" / "critic")
    go(keep_last=1, yes=True)
    assert steps(run) == [40, 50]


def test_a_role_that_is_saved_no_more_is_not_waited_for(run: Path, go: Go) -> None:
    for step in (30, 40, 50):
        shutil.rmtree(run / f"global_step_{step}" / "critic")
    notices = go(keep_last=1, yes=True)
    assert steps(run) == [30, 50]
    assert said(notices, "kept") == ["global_step_30 is old, but kept: not finished"]


def test_what_is_not_acted_on_counts_as_finished_by_its_sign(run: Path, go: Go) -> None:
    go(keep_last=3, yes=True, roles=("actor",))
    assert steps(run) == [30, 40, 50]


def test_steps_before_since_are_left_alone(run: Path, go: Go) -> None:
    go(since=20, keep_last=1, yes=True)
    assert steps(run) == [10, 50]


def test_a_step_can_be_marked(run: Path, go: Go) -> None:
    (run / "global_step_10" / ".ckpttool-keep").touch()
    notices = go(keep_last=1, yes=True)
    assert steps(run) == [10, 50]
    (told,) = said(notices, "kept")
    assert ".ckpttool-keep" in told


def test_nothing_is_told_twice_in_one_watch(run: Path) -> None:
    slept: list[float] = []
    with Watcher(run, Settings(keep_last=3), clock=lambda: time.time() + sum(slept), sleep=slept.append) as watcher:
        notices = list(watcher.watch(timeout=100))
    assert slept == [30.0] * 4
    assert len(said(notices, "pruned")) == 2


def test_a_step_that_was_deleted_and_is_saved_again_is_acted_on_again(run: Path, go: Go, data: Path) -> None:
    go(keep_last=1, yes=True)
    again = builders.run_directory(run.parent / "again", dict.fromkeys(ROLES, data / "fsdp" / "torch2.10-fsdp2"), (20,))
    (again / "global_step_20").rename(run / "global_step_20")
    os.utime(run / "latest_checkpointed_iteration.txt")
    notices = go()
    fired = [notice.event for notice in notices if notice.what == "finished" and notice.event is not None]
    assert [(event.name, event.rewritten) for event in fired] == [(f"global_step_20/{role}", True) for role in ROLES]
