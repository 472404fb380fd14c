"""`watch` beside every program that trains: each checkpoint once, when it is finished and not before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import pytest

from tests.builders import truncate
from tests.producers import KINDS, PRODUCERS, Sources
from tests.trainer import Act, cut, later, perform, together
from tests.watched import World

OUT_OF_ORDER = ("verl-v2-async", "megatron-lm", "nemo-rl", "torchtitan", "transformers")
SIGNED = tuple(name for name in PRODUCERS if name not in ("unknown", "verl-v2-async"))
"""Those with a signal; that of a role of verl's layout v2 is the same for both of its trainers."""


class Saves(Protocol):
    """The acts of saving a step, from the checkpoints of one life of the trainer or another."""

    def __call__(self, step: int, life: int = 0) -> list[Act]: ...


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A run in which nothing is yet."""
    (tmp_path / "run").mkdir()
    return World(tmp_path / "run", tmp_path / "log")


@pytest.fixture
def save(producer: str, lives: list[Sources]) -> Saves:
    def acts(step: int, life: int = 0) -> list[Act]:
        return PRODUCERS[producer](step, lives[life])

    return acts


def of_all(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("producer", names or tuple(PRODUCERS))


@of_all()
def test_each_step_is_acted_on_once_when_it_is_finished(world: World, save: Saves, producer: str) -> None:
    """The watch looks after each change of a file."""
    names = world.watch([*save(10), *save(20, 1)]).check()
    assert [moment["step"] for moment in world.acted] == [10] * (len(names) // 2) + [20] * (len(names) // 2)
    assert {moment["kind"] for moment in world.acted} == {KINDS[producer]}
    assert [notice.event.name for notice in world.told("done") if notice.event] == names
    assert not [notice for notice in world.notices if not notice.ok]


@of_all(*SIGNED)
def test_a_quiet_period_is_no_signal(world: World, save: Saves) -> None:
    """A slow disk, a debugger, a rank that waits: the watch looks several times between any two changes."""
    world.looks = 3
    world.watch([*save(10), *save(20, 1)]).check()


@of_all()
def test_what_was_there_before_comes_first_and_a_restart_repeats_nothing(world: World, save: Saves) -> None:
    names = world.train([*save(10), *save(20, 1), later()]).watch(once=True).check()
    assert names == sorted(names)
    world.watch(once=True).check()
    world.watch(save(30)).check()
    assert len(world.fired) == len(names) * 3 // 2


@of_all(*SIGNED)
@pytest.mark.parametrize("part", [0.3, 0.95])
def test_a_crash_half_way_is_not_acted_on_before_the_step_is_saved_again(
    world: World, save: Saves, part: float
) -> None:
    """The second life writes over what the first one left, other contents under the same names."""
    world.changes = 2
    first = save(20)
    crashed = cut(first, int(changes_before_the_signal(world, first) * part))
    world.watch([*save(10), crashed, later(), *save(20, 1)]).check()


@of_all(*SIGNED)
def test_a_crashed_save_stays_what_it_is_when_training_goes_past_it(world: World, save: Saves) -> None:
    """Begun again from an earlier step, with another number of steps between two saves: the tracker says more."""
    world.changes = 6
    crashed = cut(save(20), int(changes_before_the_signal(world, save(20)) * 0.8))
    world.watch([*save(10), crashed, later(), *save(30, 1), later(), *save(40)]).check()
    world.watch([later() for _ in range(20)]).check()


@of_all(*SIGNED)
def test_half_of_two_saves_is_nothing_when_training_goes_past_it(world: World, save: Saves) -> None:
    """The trainer died when it saved a step anew; its tracker said a later step all the time, and says more later."""
    world.changes = 6
    crashed = cut(save(20, 1), int(changes_before_the_signal(world, save(20, 1)) * 0.5))
    world.watch([*save(10), *save(20), *save(30), later(), crashed, later(), *save(40)]).check()
    world.watch([later() for _ in range(20)]).check()


@of_all()
def test_a_step_that_is_saved_again_in_place_is_acted_on_again(world: World, save: Saves) -> None:
    """Training was begun again from an earlier step."""
    names = world.watch([*save(10), *save(20), later(), *save(20, 1)]).check()
    assert [moment["name"] for moment in world.acted if moment["rewritten"]] == names[2 * len(names) // 3 :]


@of_all(*SIGNED)
@pytest.mark.parametrize("changes", [2, 7])
def test_a_step_that_is_saved_twice_in_a_row_is_acted_on_whole(world: World, save: Saves, changes: int) -> None:
    """As at the end of training: the second save begins a second after the first one's signal, over its files.

    That it has begun is seen by data: of small files that come first nobody knows who wrote them.
    """
    world.changes = changes
    world.watch([*save(10), *save(20), *save(20, 1)])
    truths: dict[str, list[dict[str, str]]] = {}
    for moment in world.moments:
        for name, files in moment["files"].items() if moment["what"] == "finished" else ():
            truths.setdefault(name, []).append(data_in(files))
    for moment in world.acted:
        assert data_in(moment["files"]) in truths[moment["name"]]
    last = {moment["name"]: data_in(moment["files"]) for moment in world.acted}
    assert last == {name: saves[-1] for name, saves in truths.items()}


@of_all(*SIGNED)
def test_a_second_save_that_dies_right_after_the_first_is_not_acted_on(world: World, save: Saves) -> None:
    """What is half of each is hardly newer than the signal, and is looked at for minutes."""
    world.train([*save(10), *save(20)]).watch(once=True)
    world.now, world.changes = world.now - 1, 500
    crashed = cut(save(20, 1), int(changes_before_the_signal(world, save(20, 1)) * 0.8))
    world.watch([crashed]).check()


def data_in(files: dict[str, str]) -> dict[str, str]:
    """What is no small file of a model or a trainer."""
    return {name: content for name, content in files.items() if not name.endswith((".json", ".jinja"))}


@of_all(*SIGNED)
def test_a_step_that_is_saved_again_while_nobody_watches_is_acted_on_again(world: World, save: Saves) -> None:
    world.watch([*save(10), *save(20)]).check()
    world.train([later(), *save(20, 1), later()]).watch(once=True).check()
    world.watch(once=True).check()


@of_all()
def test_a_signal_alone_is_not_enough(world: World, save: Saves) -> None:
    """Of a file of another node only a half can be seen yet, as on a file system that lags behind."""
    world.train([*save(10), *save(20, 1), later()])
    late = max((path for path in world.run.glob("*20/**/*") if "optim" not in str(path)), key=size_of)
    content, written = late.read_bytes(), late.stat().st_mtime
    truncate(late)
    os.utime(late, (written, written))
    world.watch(once=True)
    (incomplete,) = world.told("incomplete")
    assert late.is_relative_to(world.run / str(incomplete.data["name"]))
    assert incomplete.data["name"] not in world.fired
    late.write_bytes(content)
    os.utime(late, (written, written))
    world.watch(once=True).check()


def size_of(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


@of_all(*OUT_OF_ORDER)
def test_saves_that_overlap_end_in_any_order(world: World, save: Saves) -> None:
    """An asynchronous save of step 10 takes longer than that of step 20."""
    world.watch([together([*slow(save(10))], save(20, 1))]).check()
    steps = [moment["step"] for moment in world.acted]
    assert steps.index(20) < len(steps) - 1 - steps[::-1].index(10)


def slow(acts: list[Act]) -> list[Act]:
    """Each file in many small pieces."""
    return [{**act, "pieces": 60} if act["act"] == "write" else act for act in acts]


def changes_before_the_signal(world: World, acts: list[Act]) -> int:
    """How many changes a script makes before it comes to its signal; it is performed elsewhere to know."""
    elsewhere = world.run.with_name("elsewhere")
    elsewhere.mkdir()
    steps = list(perform(elsewhere, acts))
    return next(at for at, step in enumerate(steps) if isinstance(step, dict) and step["what"] == "signal")
