"""The state of a watch: what is kept, that it is replaced as a whole, and that two watches do not share it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CannotWrite
from ckpttool.watching.scanning import Anchor
from ckpttool.watching.state import Course, Entry, State

ENTRY = Entry(
    step=20,
    role="actor",
    course="failed",
    anchor=Anchor("model_world_size_2_rank_0.pt", 1_796_033_449_451_965_858),
    actions=("verify",),
    attempts=2,
    at=5.0,
    status=3,
)
NAME = "global_step_20/actor"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state.json"


def opened(path: Path) -> State:
    return State(path, path.parent)


def test_what_is_put_is_there_for_the_next(path: Path) -> None:
    with opened(path) as state:
        assert state.entries == {}
        state.put(NAME, ENTRY)
        state.put("checkpoint-5", Entry(step=5, role="", course="done", anchor=None))
        state.change(NAME, course="done", status=None)
    with opened(path) as state:
        assert state.entries == {
            NAME: replace(ENTRY, course="done", status=None),
            "checkpoint-5": Entry(step=5, role="", course="done", anchor=None),
        }


def test_it_is_on_disk_before_the_next_thing_happens(path: Path) -> None:
    with opened(path) as state:
        state.put(NAME, ENTRY)
        said = json.loads(path.read_text())
    assert said["ckpttool_watch"] == 1
    assert said["checkpoints"][NAME]["actions"] == ["verify"]


def test_a_second_watch_is_kept_out_until_the_first_ends(path: Path) -> None:
    with (
        opened(path),
        pytest.raises(CannotWrite, match="another watch is at work") as told,
        opened(path),
    ):
        pass
    assert told.value.code == "busy"
    with opened(path):
        pass


def test_a_process_that_was_forked_does_not_keep_the_next_watch_out(path: Path) -> None:
    """As trainers fork workers of their data loaders, which have a copy of every handle."""
    with opened(path) as state:
        copy = os.dup(state._lock)
    with opened(path):
        os.close(copy)


GOOD: dict[str, Any] = {
    "step": 20,
    "role": "",
    "course": "done",
    "anchor": {"file": "a", "written": 1},
    "actions": ["verify"],
    "attempts": 1,
    "at": 1.5,
    "status": None,
}


def with_run(checkpoints: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "ckpttool_watch": 1,
        "run": str(folder),
        "inode": folder.stat().st_ino,
        "checkpoints": checkpoints,
        **more,
    }


@pytest.mark.parametrize("more", [{"run": "/elsewhere"}, {"inode": 5}])
def test_a_run_that_was_moved_or_is_mounted_elsewhere_has_its_state_still(path: Path, more: dict[str, Any]) -> None:
    path.write_text(json.dumps(with_run({"a": GOOD}, path.parent, **more)))
    with opened(path) as state:
        assert set(state.entries) == {"a"}


def test_the_state_of_another_run_is_refused(path: Path) -> None:
    """A run that was copied with its state, or one file for two runs: nothing would be done there."""
    path.write_text(json.dumps(with_run({"a": GOOD}, path.parent, run="/elsewhere", inode=5)))
    with pytest.raises(CannotWrite, match="the state of another run, /elsewhere") as told, opened(path):
        pass
    assert told.value.code == "other-run"


@pytest.mark.parametrize(
    ("course", "labels", "lacks"),
    [
        ("done", [], False),
        ("done", ["verify"], False),
        ("done", ["verify", "exec upload"], True),
        ("failed", ["verify"], True),
        ("running", [], True),
        ("gone", [], True),
    ],
)
def test_what_is_new_is_still_to_be_done(course: Course, labels: list[str], lacks: bool) -> None:
    assert replace(ENTRY, course=course).lacks(labels) == lacks


def test_the_good_one_is_read(path: Path) -> None:
    path.write_text(json.dumps(with_run({"a": GOOD}, path.parent)))
    with opened(path) as state:
        assert state.entries["a"].anchor == Anchor("a", 1)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        "{}",
        '{"ckpttool_watch": 2, "checkpoints": {}}',
        '{"ckpttool_watch": 1}',
        '{"ckpttool_watch": 1, "run": "RUN", "checkpoints": []}',
        '{"ckpttool_watch": 1, "run": "RUN"}',
        *(
            json.dumps({"ckpttool_watch": 1, "run": "RUN", "checkpoints": {"a": {**GOOD, **change}}})
            for change in (
                {"step": "20"},
                {"step": True},
                {"course": "lost"},
                {"anchor": 5},
                {"anchor": {"file": "a"}},
                {"anchor": {"file": 1, "written": 1}},
                {"actions": "verify"},
                {"actions": [1]},
                {"attempts": 1.5},
                {"more": 1},
            )
        ),
        *(
            json.dumps(
                {"ckpttool_watch": 1, "run": "RUN", "checkpoints": {"a": {k: v for k, v in GOOD.items() if k != gone}}}
            )
            for gone in ("step", "anchor", "actions", "course")
        ),
    ],
)
def test_what_is_no_state_is_named_and_not_replaced(path: Path, content: str) -> None:
    content = content.replace("RUN", str(path.parent))
    path.write_text(content)
    with (
        pytest.raises(CannotWrite, match=r"state\.json: this is no state of a watch") as told,
        opened(path),
    ):
        pass
    assert told.value.code == "bad-state"
    assert path.read_text() == content
    path.unlink()
    with opened(path):  # the lock is free
        pass


def test_a_disk_that_is_full_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(path) as state:
        state.put(NAME, ENTRY)
        before = path.read_bytes()

        def full(*_: object) -> None:
            raise OSError(28, os.strerror(28))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CannotWrite, match="No space left"):
            state.change(NAME, course="done")
        assert state.entries == {NAME: ENTRY}
    assert path.read_bytes() == before
    assert sorted(os.listdir(path.parent)) == ["state.json", "state.json.lock"]


def test_where_nothing_may_be_written_another_place_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(CannotWrite, match="a watch keeps its state there") as told,
        State(tmp_path / "no" / "state", tmp_path),
    ):
        pass
    assert "--state FILE" in told.value.hint
