"""What `watch` is asked for: which checkpoints, how long, what happens when an action fails, and how it ends."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.callbacks import CheckpointCallback, CheckpointEvent
from ckpttool.errors import BrokenCheckpoint, CannotWrite, NotACheckpoint
from ckpttool.watching import Settings, Watcher
from ckpttool.wholefile import write_whole
from tests.conftest import Call
from tests.killing import watch_killed, watch_once
from tests.producers import PRODUCERS
from tests.trainer import Act, contents, later, read_log, remove
from tests.watched import World, check

Ckpttool = Callable[..., Call]


class Failing(CheckpointCallback):
    """Fails as often as the file of its name says, on the step that it says."""

    def on_save(self, event: CheckpointEvent, **kwargs: Any) -> None:
        """Count down."""
        file = Path(self.config["log"]).with_suffix(".fail")
        step, left = map(int, file.read_text().split())
        if event.step == step and left:
            file.write_text(f"{step} {left - 1}")
            raise ValueError(f"no room for step {step}")


FAILING = ("tests.test_watch_options:Failing",)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run in which nothing is yet."""
    (tmp_path / "run").mkdir()
    return World(tmp_path / "run", tmp_path / "log")


@pytest.fixture
def save(data: Path) -> Callable[[int], list[Act]]:
    """The acts of a trainer of two roles."""
    shards = [data / "fsdp/torch2.13-fsdp2", data / "fsdp/torch2.6-fsdp2"]
    return lambda step: PRODUCERS["verl"](step, {"actor": shards[step // 10 % 2], "critic": shards[0]})


Save = Callable[[int], list[Act]]


@pytest.fixture
def trained(world: World, save: Save) -> World:
    """A run of three finished steps."""
    return world.train([*save(10), *save(20), *save(30), later()])


@pytest.fixture
def words(world: World) -> list[str]:
    """A command line that records in the log of the world."""
    command = [sys.executable, "-S", "-m", "tests.recording", str(world.log)]
    return ["watch", str(world.run), "--once", "--exec", shlex.join(command)]


# Which


def test_since_and_roles_choose(ckpttool: Ckpttool, trained: World, words: list[str]) -> None:
    assert ckpttool(*words, "--since", "20", "--role", "actor").code == 0
    assert trained.fired == ["global_step_20/actor", "global_step_30/actor"]
    assert ckpttool(*words, "--role", "critic", "--role", "none").code == 0
    assert trained.fired[2:] == ["global_step_10/critic", "global_step_20/critic", "global_step_30/critic"]
    assert ckpttool(*words).code == 0
    assert trained.fired[5:] == ["global_step_10/actor"]
    check([moment for moment in trained.moments if moment["what"] != "began"])


def test_steps_are_numbers(ckpttool: Ckpttool, world: World, save: Save, words: list[str]) -> None:
    """As names, 100 comes before 20, and 20 before 3."""
    world.train([*save(3), *save(20), *save(100), later()])
    assert ckpttool(*words, "--role", "actor").code == 0
    assert [moment["step"] for moment in world.acted] == [3, 20, 100]


def test_once_says_what_is_not_finished(ckpttool: Ckpttool, world: World, save: Save, words: list[str]) -> None:
    world.train([*save(10), *save(20)[:-2]])
    call = ckpttool(*words, "--json")
    assert call.code == 0
    assert world.fired == ["global_step_10/actor", "global_step_10/critic"]
    events = [json.loads(line)["data"] for line in call.out.splitlines()]
    (stopped,) = [event for event in events if event["event"] == "stopped"]
    assert [entry["checkpoint"] for entry in stopped["unfinished"]] == ["global_step_20/actor", "global_step_20/critic"]
    assert all("latest_checkpointed_iteration.txt" in entry["waits_for"] for entry in stopped["unfinished"])


def test_where_nothing_is_yet_there_is_nothing_to_do(ckpttool: Ckpttool, world: World, words: list[str]) -> None:
    assert ckpttool(*words).code == 0
    assert world.moments == []


# How long


def test_it_ends_when_nothing_was_finished_for_so_long(world: World, save: Save) -> None:
    """What is finished meanwhile begins the time anew."""
    world.watch([*save(10), *save(20)], timeout=100.0)
    assert world.told("stopped") == []  # a save takes less than that, and the watch was ended after the trainer
    world.watch(save(30)[:-3] * 4, timeout=60.0)
    (stopped,) = world.told("stopped")
    assert stopped.data["reason"] == "nothing was finished for 60 s"
    last = max(notice.at for notice in world.told("watching"))
    assert 60 <= stopped.at - last < 63


# What fails


def test_an_action_that_fails_ends_the_watch(ckpttool: Ckpttool, trained: World, words: list[str]) -> None:
    """With the code of the action; the next watch tries it again, and goes on from there."""
    fail = trained.log.with_suffix(".fail")
    fail.write_text("7")
    call = ckpttool(*words)
    assert call.code == 1
    assert "ended with code 7" in call.err + call.out
    assert trained.fired == ["global_step_10/actor"]
    fail.unlink()
    assert ckpttool(*words).code == 0
    assert trained.fired[1:] == [f"global_step_{step}/{role}" for step in (10, 20, 30) for role in ("actor", "critic")]
    assert [moment["attempt"] for moment in trained.acted] == [1, 2, 1, 1, 1, 1, 1]


def test_it_goes_on_if_asked_and_tells_in_the_end(trained: World) -> None:
    """What failed for good is not tried again before the next watch."""
    trained.log.with_suffix(".fail").write_text("20 99")
    settings = Settings(callbacks=FAILING, keep_going=True)
    trained.watch([later(), later(), later()], settings)
    assert len(trained.fired) == 6
    failed = [notice.event.name for notice in trained.told("failed") if notice.event]
    assert failed == ["global_step_20/actor", "global_step_20/critic"]
    assert all(notice.data["status"] == 1 for notice in trained.told("failed"))
    trained.log.with_suffix(".fail").write_text("20 1")
    trained.watch(settings=settings, once=True)
    trained.watch(settings=settings, once=True)
    assert len(trained.fired) == 6  # the recorder had succeeded
    assert len(trained.told("failed")) == 3
    check(trained.moments)
    assert {entry["course"] for entry in state_of(trained).values()} == {"done"}


def state_of(world: World) -> dict[str, Any]:
    value = json.loads((world.run / ".ckpttool-watch.json").read_text())["checkpoints"]
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(("retries", "fails", "well"), [(0, 1, False), (1, 1, True), (3, 3, True), (2, 3, False)])
def test_retries_are_further_attempts(trained: World, retries: int, fails: int, well: bool) -> None:
    trained.log.with_suffix(".fail").write_text(f"10 {fails}")
    begun = trained.now
    trained.watch(settings=Settings(callbacks=FAILING, retries=retries, roles=("actor",)), once=True)
    assert len(trained.told("failed")) == min(fails, retries + 1)
    assert trained.fired == [f"global_step_{step}/actor" for step in ([10, 20, 30] if well else [10])]
    pauses = [2.0**n for n in range(min(fails, retries))]
    assert trained.now - begun == pytest.approx(sum(pauses))


def test_actions_that_are_done_are_not_done_again(trained: World) -> None:
    """The recorder comes before the one that fails: it has its turn once."""
    trained.log.with_suffix(".fail").write_text("10 3")
    for _ in range(4):
        trained.watch(settings=Settings(callbacks=FAILING, roles=("actor",)), once=True)
    assert trained.fired == ["global_step_10/actor", "global_step_20/actor", "global_step_30/actor"]
    assert [notice.event.attempt for notice in trained.told("done") if notice.event] == [4, 1, 1]


# What is removed


def test_a_checkpoint_that_its_trainer_removes_is_told_of(trained: World) -> None:
    trained.log.with_suffix(".fail").write_text("10 1")
    trained.watch(settings=Settings(callbacks=FAILING), once=True)
    trained.train([remove("global_step_10/actor"), remove("global_step_30")])
    trained.watch(settings=Settings(callbacks=FAILING), once=True)
    (gone,) = trained.told("gone")
    assert gone.problems[0].path == "global_step_10/actor"
    assert state_of(trained)["global_step_10/actor"]["course"] == "gone"
    assert trained.fired[1:] == ["global_step_10/critic", "global_step_20/actor", "global_step_20/critic"]


# One step, for a callback


def test_one_step_is_acted_on_when_it_is_asked_for(trained: World) -> None:
    settings = trained.settings(Settings())
    with Watcher(trained.run, settings, clock=lambda: trained.now, sleep=trained.sleep) as watcher:
        assert [notice.what for notice in watcher.act_on(20, patience=None)][-1] == "done"
        assert list(watcher.act_on(20, patience=None)) == []
        with pytest.raises(NotACheckpoint, match="no step 40"):
            list(watcher.act_on(40, patience=0.0))
    assert trained.fired == ["global_step_20/actor", "global_step_20/critic"]


def test_one_step_is_waited_for_as_long_as_there_is_patience(world: World, save: Save) -> None:
    world.train(save(10))
    world.begin(save(20))
    with Watcher(world.run, world.settings(Settings()), clock=lambda: world.now, sleep=world.sleep) as watcher:
        with pytest.raises(BrokenCheckpoint, match="step 20 is not finished") as caught:
            list(watcher.act_on(20, patience=5.0))
        assert "waits for latest_checkpointed_iteration.txt" in caught.value.problems[0].message
        list(watcher.act_on(20, patience=None))
    assert world.fired == ["global_step_20/actor", "global_step_20/critic"]


# Killed


def test_killed_at_any_call_it_misses_nothing_and_repeats_what_it_has_not_recorded(tmp_path: Path, data: Path) -> None:
    """At each change of the file system in turn; the next watch does the rest, and clears what is left."""
    acts = PRODUCERS["verl"](10, {"actor": data / "fsdp/torch2.13-fsdp2"})
    at = 0
    while True:
        at += 1
        (tmp_path / str(at)).mkdir()
        run, log = tmp_path / str(at) / "run", tmp_path / str(at) / "log"
        run.mkdir()
        World(run, log).train(acts)
        truth = contents(run / "global_step_10/actor")
        killed = watch_killed(run, log, at)
        before = read_log(log)
        watch_once(str(run), str(log))
        fired = [moment for moment in read_log(log) if moment["what"] == "fired"]
        assert 1 <= len(fired) <= 2, at
        assert all(moment["files"] == truth for moment in fired)
        assert [moment["attempt"] for moment in fired] in ([1], [2], [1, 2]), at
        names = {path.name for path in run.iterdir()}
        assert names == {
            *("global_step_10", "latest_checkpointed_iteration.txt"),
            *(".ckpttool-watch.json", ".ckpttool-watch.json.lock"),
        }, at
        watch_once(str(run), str(log))
        assert len(read_log(log)) == len(before) + len(fired) - sum(m["what"] == "fired" for m in before)
        if not killed:
            break
    assert at > 20


# A disk that is full


def test_a_state_that_cannot_be_written_at_some_moment_costs_a_repetition_at_most(
    trained: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An action that is done and cannot be recorded is done again; nothing else is."""
    left = [0]

    def written(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            raise CannotWrite("state: no space left on device")
        return write_whole(*arguments, **options)

    monkeypatch.setattr("ckpttool.watching.state.write_whole", written)
    for at in range(1, 100):
        left[0] = at
        trained.log.unlink(missing_ok=True)
        (trained.run / ".ckpttool-watch.json").unlink(missing_ok=True)
        try:
            trained.watch(once=True)
        except CannotWrite:
            trained.watch(once=True)
        else:
            break
        assert len(set(trained.fired)) == 6
        assert len(trained.fired) == (7 if at % 3 == 2 else 6)
    assert at == 6 * 3 + 1


def test_a_state_that_cannot_be_written_ends_it_before_anything_is_done(
    ckpttool: Ckpttool, trained: World, words: list[str], disk: Callable[[str], Path]
) -> None:
    file = disk("size=16k") / "state.json"
    filler = file.with_name("filler")
    with filler.open("wb", buffering=0) as full:
        while True:
            try:
                full.write(bytes(512))
            except OSError:
                break
    call = ckpttool(*words, "--state", file)
    assert call.code == 6
    assert "state.json" in call.err
    assert trained.fired == []
    filler.unlink()
    assert ckpttool(*words, "--state", file).code == 0
    assert len(trained.fired) == 6
    assert {path.name for path in file.parent.iterdir()} == {"state.json", "state.json.lock"}
