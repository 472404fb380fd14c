"""What counts as done: every action once with every checkpoint, also one that is added later."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import NotACheckpoint
from ckpttool.watching import Notice, Settings, Watcher
from tests import builders
from tests.conftest import Call


@pytest.fixture
def run(tmp_path: Path, data: Path) -> Path:
    return builders.run_directory(tmp_path / "run", {"actor": data / "fsdp" / "torch2.13-fsdp2"}, (10, 20, 30))


Go = Callable[..., list[Notice]]


@pytest.fixture
def go(run: Path) -> Go:
    def watch(**settings: Any) -> list[Notice]:
        with Watcher(run, Settings(**settings), sleep=lambda _seconds: None) as watcher:
            return list(watcher.watch(once=True))

    return watch


def acts(notices: list[Notice]) -> list[tuple[int, str]]:
    return [(n.event.step, n.data["action"]) for n in notices if n.what == "acted" and n.event is not None]


def test_an_action_that_is_added_is_done_with_what_is_there_and_nothing_is_repeated(go: Go) -> None:
    assert acts(go()) == []
    assert acts(go(exec=("true",))) == [(step, "exec true") for step in (10, 20, 30)]
    notices = go(exec=("true", "true 2"))
    assert acts(notices) == [(step, "exec true 2") for step in (10, 20, 30)]
    assert (notices[0].data["done_before"], notices[0].data["due_again"]) == (0, 3)
    assert {n.event.attempt for n in notices if n.event is not None} == {1}
    assert acts(go(exec=("true 2",))) == []


def test_nothing_is_deleted_on_which_an_action_was_not_done_yet(run: Path, go: Go) -> None:
    """A look at what retention would do comes first, often, and has no action."""
    go(keep_last=1)
    go(exec=("false",), keep_last=1, yes=True, keep_going=True)
    assert len([path for path in run.iterdir() if path.is_dir()]) == 3
    assert acts(go(exec=("true",), keep_last=1, yes=True)) == [(step, "exec true") for step in (10, 20, 30)]
    assert [path.name for path in run.iterdir() if path.is_dir()] == ["global_step_30"]


def test_another_dtype_is_another_model(run: Path, go: Go) -> None:
    go(to_hf=f"{run.parent}/{{step}}", dtype="fp32")
    with pytest.raises(AssertionError):
        assert acts(go(to_hf=f"{run.parent}/{{step}}", dtype="fp32"))
    notices = go(to_hf=f"{run.parent}/{{step}}", dtype="bf16")
    (failed,) = [n for n in notices if n.what == "failed"]
    assert "exists already" in failed.message


def test_every_try_is_an_attempt(tmp_path: Path, go: Go) -> None:
    log = tmp_path / "log"
    command = (
        f'echo $CKPTTOOL_STEP $CKPTTOOL_ATTEMPT >> {log}; test "$CKPTTOOL_STEP" -gt 10 || test $CKPTTOOL_ATTEMPT = 3'
    )
    notices = go(exec=(command, f"echo $CKPTTOOL_STEP $CKPTTOOL_ATTEMPT next >> {log}"), shell=True, retries=2)
    assert log.read_text().splitlines() == [
        "10 1",
        "10 2",
        "10 3",
        "10 1 next",
        "20 1",
        "20 1 next",
        "30 1",
        "30 1 next",
    ]
    left = [(n.data["attempts_left"], n.problems[0].hint) for n in notices if n.what == "failed"]
    assert left == [(2, "It is tried again in 1 s."), (1, "It is tried again in 2 s.")]


def test_a_failure_names_the_checkpoint_and_the_code(ckpttool: Callable[..., Call], run: Path) -> None:
    call = ckpttool("watch", run, "--once", "--exec", "sh -c 'exit 3'", "--color", "never")
    assert call.code == 1
    assert "! global_step_10/actor: exec sh -c 'exit 3': ended with code 3\n" in call.out
    assert call.out.splitlines()[-1] == (
        "stopped: an action failed; 0 checkpoints done; 1 failed, which the next watch tries again"
    )


def test_programs_get_the_end_and_errors_in_a_line_each(ckpttool: Callable[..., Call], run: Path) -> None:
    call = ckpttool("watch", run, "--once", "--json", "--exec", "sh -c 'exit 3'")
    lines = [json.loads(line) for line in call.out.splitlines()]
    assert [line["data"]["event"] for line in lines] == ["watching", "finished", "acting", "failed", "stopped"]
    assert [line["ok"] for line in lines] == [True, True, True, False, False]
    assert lines[-1]["data"]["failed"] == 1
    assert Path(lines[0]["data"]["state"]).is_absolute()
    (line,) = ckpttool("watch", run / "none", "--json").out.splitlines()
    assert json.loads(line)["problems"][0]["message"].endswith("no such directory")


def test_a_run_copied_with_its_state_is_not_taken_for_done(go: Go, run: Path, ckpttool: Callable[..., Call]) -> None:
    go(exec=("true",))
    copy = run.rename(run.with_name("moved"))
    assert ckpttool("watch", copy, "--once", "--exec", "true").out.startswith(f"watching {copy}: exec true; 3 ")
    shutil.copytree(copy, run.with_name("copied"))
    call = ckpttool("watch", run.with_name("copied"), "--once", "--exec", "true")
    assert call.code == 6
    assert f"the state of another run, {run}" in call.err


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (["--role", "critc"], "no step has a role critc yet; there is actor"),
        (["--role", "actor"], ""),
    ],
)
def test_what_may_not_be_meant_is_said_first(
    ckpttool: Callable[..., Call], run: Path, words: list[str], note: str
) -> None:
    call = ckpttool("watch", run, "--once", "--exec", "true", *words)
    assert call.code == 0
    assert (note in call.out) if note else ("no step has" not in call.out)


def test_a_directory_without_steps_is_said_to_have_none(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    assert "no step is here yet" in ckpttool("watch", tmp_path, "--once").out


def test_the_directory_above_runs_is_none(ckpttool: Callable[..., Call], run: Path) -> None:
    call = ckpttool("watch", run.parent, "--once")
    assert call.code == 3
    assert "no run, but 1 run below it" in call.err
    assert f"ckpttool watch {run}\n" in call.err


def test_a_tracker_that_says_something_else_is_told(ckpttool: Callable[..., Call], run: Path) -> None:
    tracker = run / "latest_checkpointed_iteration.txt"
    for said, told in (("rubbish", "holds 'rubbish', not a step"), ("5", "says 5")):
        tracker.write_text(said)
        call = ckpttool("watch", run, "--once")
        assert f"global_step_10/actor waits for {tracker.name}, which {told} (and 2 more)" in call.out


def test_what_was_removed_while_actions_ran_is_told(run: Path, go: Go) -> None:
    notices = go(exec=(f"rm -r {run}/global_step_{{step}}",))
    notes = [n.problems[0] for n in notices if n.what == "done"]
    assert [(note.code, note.severity, note.path) for note in notes] == [
        ("gone", "note", f"global_step_{step}/actor") for step in (10, 20, 30)
    ]
    assert all(n.ok for n in notices if n.what == "done")


def test_a_file_that_is_added_to_a_failed_checkpoint_does_not_make_it_another_save(run: Path, go: Go) -> None:
    go(exec=("false",), keep_going=True)
    (run / "global_step_10/actor/a.safetensors").write_bytes(b"")
    fired = [n.event for n in go(exec=("true",)) if n.what == "finished" and n.event is not None]
    assert [(event.step, event.attempt, event.rewritten) for event in fired] == [(s, 2, False) for s in (10, 20, 30)]


def test_a_run_that_is_out_of_reach_for_a_while_is_waited_for(run: Path) -> None:
    away, slept = run.with_name("away"), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            run.rename(away)
        if len(slept) == 4:
            away.rename(run)

    settings = Settings(state=str(run.with_name("state.json")), exec=("true",))
    with Watcher(run, settings, clock=lambda: time.time() + sum(slept), sleep=sleep) as watcher:
        notices = list(watcher.watch(timeout=200))
    assert len(slept) > 4
    assert notices[-1].message == "stopped: nothing was finished for 200 s"
    run.rename(away)
    slept.clear()
    with Watcher(away, settings, sleep=lambda seconds: slept.append(seconds)) as watcher:
        looks = watcher.watch()
        next(looks)
        away.rename(run)
        with pytest.raises(NotACheckpoint, match="No such file"):
            list(looks)
    assert len(slept) == 20


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
def test_what_its_trainer_removes_is_not_acted_on(run: Path, go: Go, kind: str) -> None:
    """File by file, in any order: what is left of shards when those of the model are gone has no fault."""
    for path in (run / "global_step_20/actor").glob("*.pt"):
        for other in ("optim", "extra_state"):
            shutil.copyfile(path, path.with_name(path.name.replace("model", other)))
    for path in (run / "global_step_20/actor").glob(f"{kind}_*.pt"):
        path.unlink()
    os.utime(run / "latest_checkpointed_iteration.txt")
    fired = [n.event.step for n in go(exec=("true",)) if n.what == "finished" and n.event is not None]
    assert fired == ([10, 30] if kind == "model" else [10, 20, 30])
