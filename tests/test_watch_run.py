"""`ckpttool watch` as a process, beside a trainer that is one, with programs as actions."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.builders import ROOT
from tests.producers import PRODUCERS
from tests.trainer import DEADLINE, Act, Moment, crash, cut, read_log, remove, tell, text, until
from tests.watched import check

PAUSE = 0.001


@dataclass
class Stage:
    """A run, and the processes that work in it."""

    run: Path
    log: Path
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def train(self, acts: list[Act]) -> subprocess.Popen[str]:
        """Start a trainer."""
        script = self.log.with_name(f"script-{len(self.started)}.json")
        orders = {"run": str(self.run), "log": str(self.log), "acts": acts, "pause": PAUSE}
        script.write_text(json.dumps(orders))
        return self._start("-m", "tests.trainer", str(script))

    def watch(self, *options: object, waits: Path | None = None) -> subprocess.Popen[str]:
        """Start a watch that records."""
        words = [str(self.run), "--interval", "0.05s", "--exec", self.recording(waits), *map(str, options)]
        return self._start("-m", "ckpttool", "watch", *words)

    def recording(self, waits: Path | None = None) -> str:
        """The command that records what there is."""
        words = [sys.executable, "-S", "-m", "tests.recording", str(self.log), *([str(waits)] if waits else [])]
        return shlex.join(words)

    def _start(self, *words: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_hear_control_c,
        )
        self.started.append(process)
        return process

    @property
    def moments(self) -> list[Moment]:
        """What was reported until now."""
        return read_log(self.log)

    def all(self, what: str) -> list[Moment]:
        """What was reported of one kind."""
        return [moment for moment in self.moments if moment["what"] == what]

    def wait(self, true: Callable[[], object]) -> None:
        """Wait until something is true, for as long as a slow machine may take."""
        ends = time.monotonic() + DEADLINE
        while not true():
            assert time.monotonic() < ends, self.moments
            time.sleep(0.01)

    def wait_for(self, what: str, count: int = 1) -> None:
        """Wait until something was reported so often."""
        self.wait(lambda: len(self.all(what)) >= count)


def _hear_control_c() -> None:
    """Tests that a shell has begun in the background have it ignored, and hand that down."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    """An empty run; whatever was started is ended."""
    (tmp_path / "run").mkdir()
    stage = Stage(tmp_path / "run", tmp_path / "log")
    yield stage
    for process in stage.started:
        process.kill()
        process.communicate()


@pytest.fixture
def save(data: Path) -> Callable[[int], list[Act]]:
    """The acts of a trainer with one small role."""
    shards = (data / "fsdp/torch2.13-fsdp2", data / "fsdp/torch2.6-fsdp2")
    return lambda step: PRODUCERS["verl"](step, {"actor": shards[step // 10 % 2]})


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The code, output and errors of a process that comes to its end."""
    out, err = process.communicate(timeout=DEADLINE)
    return process.returncode, out, err


Save = Callable[[int], list[Act]]


@pytest.mark.parametrize("producer", ["verl", "verl-v2-async", "megatron-lm"])
def test_beside_a_trainer(stage: Stage, producer: str, lives: list[dict[str, Path]]) -> None:
    """A life that ends half way, and one after it that begins with the same step."""
    saves = PRODUCERS[producer]
    watch = stage.watch("--json")
    code, _, err = ended(stage.train([*saves(10, lives[0]), cut(saves(20, lives[0]), 12), crash()]))
    assert (code, err) == (-signal.SIGKILL, "")
    code, _, err = ended(stage.train([*saves(20, lives[1]), *saves(30, lives[0])]))
    assert (code, err) == (0, "")
    stage.wait_for("fired", 3 * len(lives[0]))
    stage.wait(lambda: state_of(stage.run).count("done") == 3 * len(lives[0]))
    watch.terminate()
    code, out, err = ended(watch)
    assert code == 143, err
    check(stage.moments)
    events = [json.loads(line) for line in out.splitlines()]
    assert {event["ckpttool"] for event in events} == {1}
    assert {event["command"] for event in events} == {"watch"}
    acted = [event["data"]["checkpoint"]["name"] for event in events if event["data"]["event"] == "acting"]
    assert acted == [moment["name"] for moment in stage.all("fired")]


def state_of(run: Path) -> list[str]:
    """How far each checkpoint is, as the state has it."""
    file = run / ".ckpttool-watch.json"
    return [entry["course"] for entry in json.loads(file.read_text())["checkpoints"].values()] if file.exists() else []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_watch_and_its_program(stage: Stage, save: Save, number: int, code: int) -> None:
    """What was cut short is done again, and told that it is a second attempt."""
    never = stage.run / "never"
    ended(stage.train(save(10)))
    watch = stage.watch(waits=never)
    stage.wait_for("began")
    watch.send_signal(number)
    assert ended(watch)[0] == code
    (began,) = stage.all("began")
    with pytest.raises(ProcessLookupError):
        os.kill(began["pid"], 0)
    assert stage.all("fired") == []
    assert state_of(stage.run) == ["running"]
    assert ended(stage.watch("--once"))[0] == 0
    assert [(moment["attempt"], moment["rewritten"]) for moment in stage.all("fired")] == [(2, False)]
    check(stage.moments)


def test_a_watch_that_waits_ends_at_once(stage: Stage) -> None:
    watch = stage.watch()
    assert watch.stdout is not None
    assert watch.stdout.readline().startswith("watching")
    watch.terminate()
    assert ended(watch)[0] == 143
    assert [path.name for path in stage.run.iterdir() if "lock" not in path.name] == []


def test_a_second_watch_with_the_same_state_is_refused(stage: Stage, save: Save, tmp_path: Path) -> None:
    ended(stage.train(save(10)))
    go = tmp_path / "go"
    first = stage.watch("--once", waits=go)
    stage.wait_for("began")
    code, _, err = ended(stage.watch("--once"))
    assert code == 6
    assert "another watch is at work" in err
    code, _, err = ended(stage.watch("--once", "--state", tmp_path / "other.json"))
    assert (code, err) == (0, "")
    go.touch()
    assert ended(first)[0] == 0
    assert len(stage.all("fired")) == 2


@pytest.mark.parametrize("pin", [True, False])
def test_a_pin_holds_what_the_trainer_deletes_meanwhile(stage: Stage, save: Save, tmp_path: Path, pin: bool) -> None:
    acting, pruned = tmp_path / "acting", tmp_path / "pruned"
    pruning = [until(acting), remove("global_step_10/actor"), tell("pruned"), text("../pruned", "x")]
    trainer = stage.train([*save(10), *pruning])
    watch = stage.watch("--once", *(["--pin"] if pin else []), waits=pruned)
    stage.wait_for("finished")
    stage.wait(lambda: stage.all("began") or watch.poll() is not None)
    if not stage.all("began"):  # it has looked before the signal was given
        watch = stage.watch("--once", *(["--pin"] if pin else []), waits=pruned)
        stage.wait_for("began")
    acting.touch()
    assert ended(trainer)[0] == 0
    assert ended(watch)[0] == 0
    (fired,), (finished,) = stage.all("fired"), stage.all("finished")
    assert fired["files"] == (finished["files"]["global_step_10/actor"] if pin else {})
    assert (fired["path"] != fired["original"]) == pin
    assert not (stage.run / ".ckpttool-pins").exists()


def test_killed_at_any_moment_it_misses_nothing(stage: Stage, save: Save) -> None:
    """By SIGKILL, while it starts, looks, acts, writes its state; what was done and recorded is not done again."""
    trainer = stage.train([act for step in range(10, 90, 10) for act in save(step)])
    kills = 0
    while len({moment["name"] for moment in stage.all("fired")}) < 8:
        watch = stage.watch()
        kills += 1
        try:
            watch.wait(0.25 + 0.11 * (kills % 7))
        except subprocess.TimeoutExpired:
            watch.kill()
        watch.communicate()
        assert watch.returncode == -signal.SIGKILL
        assert kills < 100
    assert ended(trainer)[0] == 0
    assert ended(stage.watch("--once"))[0] == 0
    assert state_of(stage.run) == ["done"] * 8
    truth = {name: files for moment in stage.all("finished") for name, files in moment["files"].items()}
    attempts: dict[str, list[int]] = {}
    for moment in stage.all("fired"):
        assert moment["files"] == truth[moment["name"]]
        attempts.setdefault(moment["name"], []).append(moment["attempt"])
    assert all(len(numbers) == len(set(numbers)) for numbers in attempts.values())
    fired = len(stage.all("fired"))
    assert ended(stage.watch("--once"))[0] == 0
    assert len(stage.all("fired")) == fired
