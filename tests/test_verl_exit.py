"""What verl's callback still has to do when training ends: in real interpreters that end in every way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Call
from tests.test_verl_callback import SECONDS, Site, names, state_of
from tests.verl_stub import ROLES

LONG = {"interval": "10m", "patience": None}
"""Settings by which a save that is not finished yet is looked at again when training ends."""

ROOT = Path(__file__).parent.parent
ENDS = {"return": 0, "exit": 5, "raise": 1}
"""Ways in which the main thread ends, and the exit codes that they have without a callback."""

Run = Callable[..., Call]


class Driver(Site):
    """A site whose trainer is a process of its own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *steps: int, end: str = "return", **told: Any) -> subprocess.Popen[str]:
        places = {"gate": str(self.folder / "begun"), "hold": str(self.folder / "hold")}
        given: dict[str, Any] = {"config": self.config, "steps": steps, "end": end, "roles": ROLES, **places}
        given |= {"async_save": False, "finalised": False, **told}
        Path(given["hold"]).touch()
        command = [sys.executable, "-m", "tests.verl_stub", json.dumps(given)]
        process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE, start_new_session=True)
        self.processes.append(process)
        return process

    def train(self, *steps: int, **told: Any) -> tuple[int, str]:
        """Exit code and error output of a trainer that came to its end."""
        process = self.start(*steps, **told)
        _, err = process.communicate(timeout=SECONDS)
        return process.returncode, err

    def call(self, **settings: Any) -> None:
        """Let the action be a callback in Python, too."""
        config = {name: str(self.folder / f"call-{name}") for name in ("log", "begun", "hold")}
        self.settle(callback="tests.verl_stub:Actions", **{"callback-config": config, **settings})


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(tmp_path)
    yield driver
    for process in driver.processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("end", ENDS)
def test_all_is_done_before_the_interpreter_is_gone(driver: Driver, end: str) -> None:
    """One action is running when the main thread ends, others have not begun."""
    driver.settle(background=True)
    code, err = driver.train(1, 2, 3, end=end)
    assert driver.noted() == names(1, 2, 3)
    assert code == ENDS[end]
    assert "training has ended; what is left of steps 1, 2, 3 of" in err
    assert ("training has crashed" in err) == (end == "raise")


def test_threads_of_a_pool_serve_to_the_end(driver: Driver) -> None:
    """Python starts none of them when its main thread has ended; converters and uploads need them."""
    driver.call(background=True)
    _, err = driver.train(1, 2)
    lines = [line.split() for line in driver.noted("call-log")]
    assert [name for name, _ in lines] == driver.noted() == names(1, 2)
    assert len({process for _, process in lines[1:]} - {lines[0][1]}) == 1  # a child did what was left
    assert state_of(driver) == dict.fromkeys(names(1, 2), "done")
    assert "Error" not in err


def test_an_action_that_fails_as_training_ends_is_tried_again(driver: Driver) -> None:
    driver.call(background=True)
    _, err = driver.train(1, gate=str(driver.folder / "call-begun"), hold=str(driver.folder / "call-hold"))
    assert "cannot schedule new futures" in err
    assert [line.split()[0] for line in driver.noted("call-log")] == names(1)


def test_what_was_finished_late_is_acted_on(driver: Driver) -> None:
    driver.settle(**LONG)
    (driver.folder / "begun").touch()
    driver.train(1, 2, async_save=True, finalised=True, roles={"actor": "v2", "critic": "v1"})
    assert driver.noted() == names(1, 2)


def test_what_was_never_finished_does_not_keep_the_interpreter(driver: Driver) -> None:
    """Nobody is left to finish it; the default would be to wait as long as training lasts."""
    driver.settle(**{**LONG, "patience": "1s"})
    (driver.folder / "begun").touch()
    code, err = driver.train(1, async_save=True, roles={"actor": "v2"})
    assert code == 0
    assert "step 1 is not finished" in err
    assert f"ckpttool watch {driver.run} --once --config {driver.file}" in err
    assert driver.noted() == []


def test_a_failure_at_the_end_is_printed_and_caught_up(driver: Driver, ckpttool: Run) -> None:
    driver.settle(background=True)
    driver.touch("fail")
    code, err = driver.train(1, 2)
    assert code == 0  # Python has no way to say so
    assert "ended with code 7" in err
    assert f"ckpttool watch {driver.run} --once --config {driver.file}" in err
    driver.remove("fail")
    assert ckpttool("watch", driver.run, "--once", "--config", driver.file).code == 0
    assert driver.noted() == names(1, 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_driver_that_is_killed_is_caught_up(driver: Driver, ckpttool: Run, background: bool) -> None:
    driver.call(background=background)
    driver.touch("call-hold")
    process = driver.start(1)
    state = driver.run / ".ckpttool-watch.json"
    driver.wait(lambda: state.exists() and "running" in state.read_text())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=SECONDS)
    driver.remove("call-hold")
    driver.remove("hold")
    assert driver.noted("call-log") == []
    assert ckpttool("watch", driver.run, "--once", "--config", driver.file).code == 0
    assert [line.split()[0] for line in driver.noted("call-log")] == driver.noted() == names(1)


def test_ctrl_c_ends_what_is_left(driver: Driver, ckpttool: Run) -> None:
    driver.call(background=True)
    process = driver.start(1, 2, gate=str(driver.folder / "gate"), roles={"actor": "fsdp"})
    driver.wait(lambda: driver.noted("begun") != [])  # the program, after the callback
    driver.touch("call-hold")
    driver.touch("gate")
    driver.wait(lambda: driver.run.exists() and state_of(driver).get("global_step_2/actor") == "running")
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert "training has ended; what is left of step 2 of" in err
    assert f"To do what is left: ckpttool watch {driver.run} --once --config {driver.file}" in err
    driver.remove("call-hold")
    assert ckpttool("watch", driver.run, "--once", "--config", driver.file).code == 0
    assert driver.noted() == ["global_step_1/actor", "global_step_2/actor"]
