"""The state of a watch: what is kept, that it is replaced as a whole, and that two watches do not share it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CannotWrite
from ckpttool.watching.scanning import Anchor
from ckpttool.watching.state import Entry, State

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


def test_what_is_put_is_there_for_the_next(path: Path) -> None:
    with State(path) as state:
        assert state.entries == {}
        state.put(NAME, ENTRY)
        state.put("checkpoint-5", Entry(step=5, role="", course="done", anchor=None))
        state.change(NAME, course="done", status=None)
    with State(path) as state:
        assert state.entries == {
            NAME: Entry(**{**{f: getattr(ENTRY, f) for f in ENTRY.__slots__}, "course": "done", "status": None}),
            "checkpoint-5": Entry(step=5, role="", course="done", anchor=None),
        }


def test_it_is_on_disk_before_the_next_thing_happens(path: Path) -> None:
    with State(path) as state:
        state.put(NAME, ENTRY)
        said = json.loads(path.read_text())
    assert said["ckpttool_watch"] == 1
    assert said["checkpoints"][NAME]["actions"] == ["verify"]


def test_a_second_watch_is_kept_out_until_the_first_ends(path: Path) -> None:
    with State(path), pytest.raises(CannotWrite, match="another watch is at work") as told, State(path):
        pass
    assert told.value.code == "busy"
    with State(path):
        pass


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


def test_the_good_one_is_read(path: Path) -> None:
    path.write_text(json.dumps({"ckpttool_watch": 1, "checkpoints": {"a": GOOD}}))
    with State(path) as state:
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
        '{"ckpttool_watch": 1, "checkpoints": []}',
        *(
            json.dumps({"ckpttool_watch": 1, "checkpoints": {"a": {**GOOD, **change}}})
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
            json.dumps({"ckpttool_watch": 1, "checkpoints": {"a": {k: v for k, v in GOOD.items() if k != gone}}})
            for gone in ("step", "anchor", "actions", "course")
        ),
    ],
)
def test_what_is_no_state_is_named_and_not_replaced(path: Path, content: str) -> None:
    path.write_text(content)
    with pytest.raises(CannotWrite, match=r"state\.json: this is no state of a watch") as told, State(path):
        pass
    assert told.value.code == "bad-state"
    assert path.read_text() == content
    path.unlink()
    with State(path):  # the lock is free
        pass


def test_a_disk_that_is_full_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with State(path) as state:
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
    with pytest.raises(CannotWrite, match="a watch keeps its state there") as told, State(tmp_path / "no" / "state"):
        pass
    assert "--state FILE" in told.value.hint
