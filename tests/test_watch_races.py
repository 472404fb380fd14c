"""`watch` while the trainer gets on: at each thing that the watch looks at, something else is there already."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.watching import Settings
from tests.producers import PRODUCERS
from tests.trainer import Act, Moment, later, remove
from tests.watched import World

LOOKS = ("listdir", "scandir", "stat", "lstat", "open")


class Racing(World):
    """A world whose trainer does not wait for the watch to pause: it makes a change before every so many looks."""

    every: int = 1
    rests: bool = True
    """A trainer that begins again takes so long that the watch has looked at everything meanwhile."""
    _count: int = 0
    _busy: bool = False
    _resting: int = 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the operating system that lets the trainer on before it is called."""

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self._look()
            return call(*arguments, **options)

        return wrapped

    def _look(self) -> None:
        if self._busy or self._resting:
            return
        self._count += 1
        if self._count % self.every == 0:
            self.now += 0.1
            self.go_on()

    def sleep(self, seconds: float) -> None:
        """The watch has come to a pause."""
        self._resting = max(0, self._resting - 1)
        super().sleep(seconds)

    def hear(self, moment: Moment) -> None:
        """The trainer begins again."""
        super().hear(moment)
        if self.rests and moment["what"] == "later":
            self._resting = 3

    def go_on(self) -> None:
        """The trainer's own looks are no reason to go on."""
        if self._resting:
            return
        self._busy = True
        try:
            super().go_on()
        finally:
            self._busy = False


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Racing]:
    """A run in which nothing is yet, of a trainer that gets on at each look."""
    (tmp_path / "run").mkdir()
    world = Racing(tmp_path / "run", tmp_path / "log")
    with monkeypatch.context() as patch:
        for name in LOOKS:
            patch.setattr(os, name, world.around(getattr(os, name)))
        patch.setattr(io, "open", world.around(io.open))
        yield world


OF_ALL = pytest.mark.parametrize(
    "producer", ["verl", "verl-v1", "verl-v2-async", "megatron-lm", "nemo-rl", "torchtitan", "transformers"]
)
Lives = list[dict[str, Path]]


@OF_ALL
@pytest.mark.parametrize("every", [1, 4])
def test_nothing_is_acted_on_too_early(world: Racing, producer: str, lives: Lives, every: int) -> None:
    """Between the look at a signal and that at the data, data and signal are written on."""
    world.every = every
    save = PRODUCERS[producer]
    world.watch([*save(10, lives[0]), *save(20, lives[1]), *save(30, lives[0])]).check()
    assert not [notice for notice in world.notices if not notice.ok and notice.what != "incomplete"]


@OF_ALL
@pytest.mark.parametrize("every", [1, 3])
def test_half_of_two_saves_is_never_acted_on(world: Racing, producer: str, lives: Lives, every: int) -> None:
    """The old signal is there until the end."""
    world.every = every
    save = PRODUCERS[producer]
    world.watch([*save(10, lives[0]), later(), *save(10, lives[1])]).check()


@OF_ALL
@pytest.mark.parametrize("every", [1, 10])
def test_a_save_over_one_that_is_acted_on_is_acted_on_in_the_end(
    world: Racing, producer: str, lives: Lives, every: int
) -> None:
    """An action that runs when the second save begins may see some of it, but it is not the last one."""
    world.every, world.rests = every, False
    save = PRODUCERS[producer]
    world.watch([*save(10, lives[0]), later(), *save(10, lives[1])])
    truth = {name: files for m in world.moments if m["what"] == "finished" for name, files in m["files"].items()}
    found = {moment["name"]: moment["files"] for moment in world.acted}
    assert found == truth


@OF_ALL
@pytest.mark.parametrize("every", [1, 5, 20])
def test_what_is_pinned_is_whole_whatever_the_trainer_deletes(
    world: Racing, producer: str, lives: Lives, every: int
) -> None:
    """The trainer keeps its last step only: what is deleted before it is pinned is not acted on."""
    world.every = every
    save = PRODUCERS[producer]
    world.watch(
        [
            *save(10, lives[0]),
            *(act for step in (20, 30) for act in [*save(step, lives[0]), *pruned(producer, step - 10, lives[0])]),
        ],
        Settings(pin=True, roles=tuple(filter(None, lives[0]))),
    )
    truth = {name: files for m in world.moments if m["what"] == "finished" for name, files in m["files"].items()}
    for moment in world.acted:
        assert moment["files"] == truth[moment["name"]]
    assert {name for name in truth if "30" in name} <= set(world.fired)
    assert len(set(world.fired)) == len(world.fired)
    assert not (world.run / ".ckpttool-pins").exists()


@OF_ALL
@pytest.mark.parametrize("every", [2, 9])
def test_retention_deletes_nothing_that_is_written_or_yet_to_be_acted_on(
    world: Racing, producer: str, lives: Lives, every: int
) -> None:
    """Every step is acted on whole, and the newest stays; the trainer does not lose a directory that it writes to."""
    world.every = every
    save = PRODUCERS[producer]
    acts = [act for step in (10, 20, 30, 40) for act in save(step, lives[step // 10 % 2])]
    names = world.watch(acts, Settings(keep_last=1, yes=True)).check()
    world.watch(once=True, settings=Settings(keep_last=1, yes=True))
    assert [name for name in names if (world.run / name).exists()] == [name for name in names if "40" in name]
    assert not any(path.name.startswith(".ckpttool-rem") for path in world.run.iterdir())


def pruned(producer: str, step: int, roles: dict[str, Path]) -> list[Act]:
    """What the trainer does to a step that it keeps no longer: verl deletes roles, others the step."""
    folder = {
        "megatron-lm": f"iter_{step:07d}",
        "nemo-rl": f"step_{step}",
        "torchtitan": f"step-{step}",
        "transformers": f"checkpoint-{step}",
    }.get(producer, f"global_step_{step}")
    return [remove(f"{folder}/{role}") for role in roles] if producer.startswith("verl") else [remove(folder)]
