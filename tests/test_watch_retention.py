"""Retention deletes what is old and nothing that anybody needs; what it deletes is gone whole, or is there whole."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpttool.errors import UsageError
from ckpttool.layout import step_of
from ckpttool.watching import protection, removing, retention
from ckpttool.watching.pins import PINS, pinned
from ckpttool.watching.removing import remove
from ckpttool.watching.retention import (
    REMOVING,
    Pruning,
    Removal,
    Step,
    carry_out,
    clear_removed,
    plan,
    protected,
)
from tests.killing import prune_killed

RUN = Path("run")
TRACKER = "latest_checkpointed_iteration.txt"
MOST = 300


def weigh(path: Path) -> int:
    """Return the bytes on disk that the removal of a directory would free; what cannot be looked at has none."""
    pending, size, seen = [path], 0, dict[tuple[int, int], int]()
    while pending:
        with suppress(OSError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    pending.append(Path(entry))
                else:
                    size += _last_name(entry, seen)
    return size


def _last_name(entry: os.DirEntry[str], seen: dict[tuple[int, int], int]) -> int:
    """Return the bytes of a file when all of its names have been seen; those of several are counted."""
    try:
        info = entry.stat(follow_symlinks=False)
    except OSError:
        return 0
    names = 1
    if info.st_nlink > 1:
        names = seen[info.st_dev, info.st_ino] = seen.get((info.st_dev, info.st_ino), 0) + 1
    return info.st_blocks * 512 if names == info.st_nlink else 0


def step(number: int, *, finished: bool = True, busy: bool = False, run: Path = RUN, name: str = "") -> Step:
    return Step(number, run / (name or f"global_step_{number}"), finished, busy)


def numbers(steps: Iterable[Step]) -> list[int]:
    return [step.number for step in steps]


def reasons(pruning: Pruning) -> dict[int, str]:
    return {step.number: reason for step, reason in pruning.kept}


# The plan


def test_the_newest_are_kept() -> None:
    found = plan(RUN, [step(number) for number in (30, 10, 50, 20, 40)], 2, None, {})
    assert numbers(found.delete) == [10, 20, 30]
    assert reasons(found) == {40: "one of the newest 2", 50: "one of the newest 2"}
    assert found.spared == ()


def test_what_was_written_last_is_kept_by_training_that_went_back() -> None:
    """It left steps with higher numbers: these are no reason to delete what it saves now."""
    left = [Step(number, RUN / f"checkpoint-{number}", True, False, float(number)) for number in (100, 200, 300, 400)]
    back = [Step(number, RUN / f"checkpoint-{number}", True, False, 1000.0 + number) for number in (110, 120, 130)]
    found = plan(RUN, [*left, *back], 2, None, {})
    assert numbers(found.delete) == [100, 110, 200]
    assert reasons(found) == dict.fromkeys((120, 130, 300, 400), "one of the newest 2")


def test_every_so_many_are_kept() -> None:
    found = plan(RUN, [step(number) for number in range(10, 101, 10)], 1, 30, {})
    assert numbers(found.delete) == [10, 20, 40, 50, 70, 80]
    assert reasons(found) == {**dict.fromkeys((30, 60, 90), "a multiple of 30"), 100: "the newest that is finished"}


def test_every_so_many_alone_keeps_the_newest_too() -> None:
    found = plan(RUN, [step(number) for number in (10, 20, 25)], None, 20, {})
    assert (numbers(found.delete), reasons(found)) == (
        [10],
        {20: "a multiple of 20", 25: "the newest that is finished"},
    )


def test_without_a_number_nothing_is_deleted() -> None:
    assert plan(RUN, [step(1), step(2)], None, None, {}).delete == ()


def test_steps_are_ordered_by_number_not_by_name() -> None:
    assert numbers(plan(RUN, [step(9), step(100), step(20)], 1, None, {}).delete) == [9, 20]


def test_unfinished_ones_are_neither_deleted_nor_counted() -> None:
    found = plan(RUN, [step(1), step(2, finished=False), step(3), step(4, finished=False)], 1, None, {})
    assert (numbers(found.delete), reasons(found)[2], reasons(found)[4]) == ([1], "not finished", "not finished")


def test_what_stands_against_it_is_told() -> None:
    """It is not counted as one of the newest: those come on top of it."""
    found = plan(RUN, [step(1), step(2, busy=True), step(3), step(4), step(5)], 1, None, {1: "pinned", 5: "pinned"})
    assert numbers(found.delete) == [3, 4]
    assert [(step.number, why) for step, why in found.spared] == [(1, "pinned"), (2, "an action on it is not done")]


@pytest.mark.parametrize(
    "other",
    [
        Step(1, RUN / "release", True, False),
        Step(1, RUN / "global_step_2", True, False),
        Step(1, RUN / "deep/global_step_1", True, False),
        Step(1, RUN, True, False),
    ],
)
def test_only_step_directories_of_the_run_are_deleted(other: Step) -> None:
    found = plan(RUN, [other, step(9)], 1, None, {})
    assert (found.delete, dict(found.kept)[other]) == ((), "no step directory of the run")


@pytest.mark.parametrize(("last", "every"), [(0, None), (-1, None), (None, 0), (3, -5), (0, 0)])
def test_numbers_below_one_are_refused(last: int | None, every: int | None) -> None:
    with pytest.raises(UsageError, match="numbers from 1"):
        plan(RUN, [step(1)], last, every, {})


@given(
    steps=st.lists(
        st.builds(
            step,
            st.integers(0, 40),
            finished=st.booleans(),
            busy=st.booleans(),
            name=st.sampled_from(["", "release", "tmp_step_3", "global_step_7"]),
        ),
        max_size=12,
    ),
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 12),
    against=st.dictionaries(st.integers(0, 40), st.just("named")),
)
def test_no_plan_deletes_what_is_needed(
    steps: list[Step], last: int | None, every: int | None, against: dict[int, str]
) -> None:
    found = plan(RUN, steps, last, every, against)
    finished = sorted(one.number for one in steps if one.finished)
    for one in found.delete:
        assert one.finished
        assert not one.busy
        assert one.number not in against
        assert every is None or one.number % every
        assert sum(number > one.number for number in finished) >= (last or 1)
        assert one.path == RUN / f"global_step_{one.number}"
        assert (last, every) != (None, None)
    everything = [*found.delete, *(one for one, _ in found.kept)]
    assert sorted(everything, key=repr) == sorted(steps, key=repr)
    assert all(why for _, why in found.kept)
    assert set(found.spared) <= set(found.kept)
    assert list(found.delete) == sorted(found.delete, key=lambda one: one.number)


@given(
    finished=st.sets(st.integers(0, 60), max_size=12),
    last=st.none() | st.integers(1, 5),
    every=st.none() | st.integers(1, 12),
)
def test_every_plan_deletes_what_is_old(finished: set[int], last: int | None, every: int | None) -> None:
    """All of it, where nothing stands against it: a plan that keeps everything would pass the test above."""
    found = plan(RUN, map(step, finished), last, every, {})
    old = sorted(finished)[: -(last or 1)] if (last, every) != (None, None) else []
    assert numbers(found.delete) == [number for number in old if every is None or number % every]


# What protects a step


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of verl with five steps of two roles, and everything that is no step."""
    run = tmp_path / "run"
    for number in range(10, 60, 10):
        for role in ("actor", "critic"):
            (run / f"global_step_{number}" / role).mkdir(parents=True)
            (run / f"global_step_{number}" / role / "model_world_size_1_rank_0.pt").write_bytes(b"w" * 5000)
        (run / f"global_step_{number}/data.pt").write_bytes(b"d")
    (run / TRACKER).write_text("50")
    (run / "release").mkdir()
    (run / "tmp_step_60").mkdir()
    (run / "logs").write_text("text")
    return run


def steps_of(run: Path) -> list[Step]:
    found = [(step_of(name), name) for name in os.listdir(run)]
    return [step(number, run=run, name=name) for number, name in found if number is not None]


def left(run: Path) -> list[int]:
    return sorted(one.number for one in steps_of(run))


def prune(run: Path, last: int = 1) -> list[Removal]:
    return list(carry_out(run, plan(run, steps_of(run), last, None, protected(run))))


OTHERS = {"latest_checkpointed_iteration.txt", "logs", "release", "tmp_step_60"}


def test_old_steps_go_and_nothing_else(run: Path) -> None:
    assert {one.step.number: (one.removed, one.problems) for one in prune(run, 2)} == dict.fromkeys(
        (10, 20, 30), (True, ())
    )
    assert (left(run), set(os.listdir(run)) - {"global_step_40", "global_step_50"}) == ([40, 50], OTHERS)
    assert len(list((run / "global_step_40").rglob("*.pt"))) == 3


def test_nothing_stands_against_old_steps(run: Path) -> None:
    assert protected(run) == {50: f"{TRACKER} names it"}


def test_the_step_of_the_tracker_is_kept(run: Path) -> None:
    """A run that was set back."""
    (run / TRACKER).write_text("20\n")
    prune(run)
    assert left(run) == [20, 50]


def test_the_step_of_skyrls_tracker_is_kept(run: Path) -> None:
    (run / TRACKER).rename(run / "latest_ckpt_global_step.txt")
    (run / "latest_ckpt_global_step.txt").write_text("30")
    prune(run)
    assert left(run) == [30, 50]


@pytest.mark.parametrize("content", [b"", b"fifty", b"-1", "٣".encode(), b"5" * 100, b"\xff\xfe", b"10 20", b"1e2"])
def test_a_tracker_that_cannot_be_understood_keeps_everything(run: Path, content: bytes) -> None:
    (run / TRACKER).write_bytes(content)
    assert protected(run).keys() == {10, 20, 30, 40, 50}
    assert all(reason.startswith(f"{TRACKER} holds ") for reason in protected(run).values())
    found = plan(run, steps_of(run), 1, None, protected(run))
    assert (numbers(one for one, _ in found.spared), prune(run), left(run)) == (
        [10, 20, 30, 40],
        [],
        [10, 20, 30, 40, 50],
    )


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("nowhere")])
def test_a_tracker_that_cannot_be_read_keeps_everything(run: Path, make: Callable[[Path], None]) -> None:
    (run / TRACKER).unlink()
    make(run / TRACKER)
    assert protected(run) == dict.fromkeys((10, 20, 30, 40, 50), f"{TRACKER} cannot be read")


def test_release_and_a_step_that_is_not_there_are_understood(run: Path) -> None:
    for said in ("release", "70"):
        (run / TRACKER).write_text(said)
        assert protected(run) == {}


def test_a_run_without_a_tracker(run: Path) -> None:
    (run / TRACKER).unlink()
    prune(run, 3)
    assert left(run) == [30, 40, 50]


def test_links_and_deepspeeds_file_protect_what_they_name(run: Path) -> None:
    (run / "latest").write_text("global_step_10\n")
    (run / "best").symlink_to("global_step_20/actor")
    (run / "out").symlink_to("/")
    assert protected(run) == {
        10: "latest names it",
        20: "best leads to it",
        50: f"{TRACKER} names it",
    }


def test_a_step_that_is_a_link_is_kept_as_is_where_it_leads(run: Path, tmp_path: Path) -> None:
    shutil.move(run / "global_step_10", tmp_path / "elsewhere")
    (run / "global_step_10").symlink_to(tmp_path / "elsewhere")
    (run / "global_step_15").symlink_to("global_step_20")
    prune(run)
    assert left(run) == [10, 15, 20, 50]
    assert len(list((tmp_path / "elsewhere").rglob("*.pt"))) == 3


def test_a_file_with_the_name_of_a_step_is_kept(run: Path) -> None:
    (run / "global_step_5").write_text("a file")
    assert protected(run)[5] == "no directory"


def test_a_mark_keeps_a_step(run: Path) -> None:
    (run / "global_step_20/.ckpttool-keep").touch()
    (run / "global_step_30/.ckpttool-keep").symlink_to("nowhere")
    assert protected(run) == {
        20: ".ckpttool-keep lies in it",
        30: ".ckpttool-keep lies in it",
        50: f"{TRACKER} names it",
    }


def test_a_pin_keeps_a_step(run: Path) -> None:
    with pinned(run, run / "global_step_20/critic"):
        assert protected(run)[20] == "pinned"
        prune(run)
        assert left(run) == [20, 50]
    prune(run)
    assert left(run) == [50]


@pytest.mark.parametrize("place", ["", "actor", "actor/my disk"])
def test_a_mount_point_keeps_a_step(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Also one of the same file system, which no number of a device tells."""
    run = run.rename(tmp_path / "my run")
    where = str(run / "global_step_20" / place).rstrip("/").replace(" ", "\\040")
    (tmp_path / "mounts").write_text(f"22 1 8:1 / / rw - ext4 /dev/a rw\n23 22 8:1 /x {where} rw - ext4 /dev/a rw\n")
    monkeypatch.setattr(protection, "MOUNTS", tmp_path / "mounts")
    assert protected(run) == {20: "a file system is mounted there", 50: f"{TRACKER} names it"}


def test_what_is_mounted_in_a_step_is_not_emptied(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("precious")
    place = run / "global_step_20/actor"
    command = ["mount", "--bind", str(tmp_path / "precious"), str(place)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        prune(run)
        assert (left(run), os.listdir(tmp_path / "precious")) == ([20, 50], ["file"])
    finally:
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A run of transformers' Trainer: each step has the record of its moment, and the best model changes."""
    run = tmp_path / "out"
    for number, best in ((100, 100), (200, 200), (300, 200), (400, 200)):
        folder = run / f"checkpoint-{number}"
        folder.mkdir(parents=True)
        record = {"best_model_checkpoint": f"/somewhere/else/out/checkpoint-{best}", "global_step": number}
        (folder / "trainer_state.json").write_text(json.dumps(record))
    return run


def hf_steps(run: Path) -> list[Step]:
    return [step(number, run=run, name=f"checkpoint-{number}") for number in (100, 200, 300, 400)]


def test_the_best_model_of_the_newest_record_is_kept(trainer: Path) -> None:
    assert protected(trainer) == {200: "the best model, says checkpoint-400/trainer_state.json"}
    list(carry_out(trainer, plan(trainer, hf_steps(trainer), 1, None, protected(trainer))))
    assert left(trainer) == [200, 400]


def test_the_record_of_the_run_counts_too(trainer: Path) -> None:
    (trainer / "trainer_state.json").write_text('{"best_model_checkpoint": "C:\\\\out\\\\checkpoint-100\\\\"}')
    assert protected(trainer).keys() == {100, 200}


def test_the_record_of_training_that_went_back_counts_too(trainer: Path) -> None:
    """It says what it found best since; that of the last step says what was best before."""
    back = trainer / "checkpoint-110"
    back.mkdir()
    (back / "trainer_state.json").write_text('{"best_model_checkpoint": "out/checkpoint-110"}')
    os.utime(back / "trainer_state.json", (4e9, 4e9))
    assert protected(trainer).keys() == {110, 200}


def test_a_step_without_a_record_is_not_finished_and_the_one_before_counts(trainer: Path) -> None:
    (trainer / "checkpoint-400/trainer_state.json").unlink()
    assert protected(trainer) == {200: "the best model, says checkpoint-300/trainer_state.json"}


def test_what_is_named_is_looked_up_once_for_all_steps(trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has thousands of steps: each would look at all of them."""
    looks: list[str] = []
    is_symlink = Path.is_symlink

    def look(path: Path) -> bool:
        looks.append(path.name)
        return is_symlink(path)

    monkeypatch.setattr(Path, "is_symlink", look)
    protected(trainer)
    assert {looks.count(f"checkpoint-{number}") for number in (100, 200, 300, 400)} == {1}


def test_no_best_model(trainer: Path) -> None:
    (trainer / "checkpoint-400/trainer_state.json").write_text('{"best_model_checkpoint": null}')
    assert protected(trainer) == {}


@pytest.mark.parametrize(
    "content", ["", '{"best_model_checkpoint"', "[]", '{"best_model_checkpoint": 5}', "[" * 100_000]
)
def test_a_record_that_cannot_be_understood_keeps_everything(trainer: Path, content: str) -> None:
    (trainer / "checkpoint-400/trainer_state.json").write_text(content)
    assert protected(trainer).keys() == {100, 200, 300, 400}
    assert all("checkpoint-400/trainer_state.json" in reason for reason in protected(trainer).values())


# Carrying it out


def act(run: Path, change: Callable[[], object]) -> dict[int, Removal]:
    """Plan, then let something happen, then carry it out."""
    found = plan(run, steps_of(run), 1, None, protected(run))
    assert numbers(found.delete) == [10, 20, 30, 40]
    change()
    return {one.step.number: one for one in carry_out(run, found)}


def test_the_tracker_is_read_once_more(run: Path) -> None:
    done = act(run, lambda: (run / TRACKER).write_text("30"))
    assert (left(run), done[30].removed, done[30].kept) == ([30, 50], False, f"{TRACKER} names it")


def test_a_tracker_that_is_being_written_stops_it(run: Path) -> None:
    done = act(run, lambda: (run / TRACKER).write_text(""))
    assert (left(run), {one.removed for one in done.values()}) == ([10, 20, 30, 40, 50], {False})


def test_all_is_looked_at_before_each_rename(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, done = os.rename, []

    def noted(source: Path, target: Path) -> None:
        rename(source, target)
        done.append(source)
        (run / TRACKER).write_text("30")
        if len(done) == 1:
            (run / "best").symlink_to("global_step_20")

    monkeypatch.setattr(os, "rename", noted)
    act(run, lambda: None)
    assert left(run) == [20, 30, 50]


def test_a_pin_that_is_made_meanwhile_keeps_a_step(run: Path) -> None:
    with pinned(run, run / "global_step_20/actor"):
        pass
    pins = []

    def pin() -> None:
        pins.append(pinned(run, run / "global_step_20/actor"))
        pins[0].__enter__()

    done = act(run, pin)
    assert (left(run), done[20].kept) == ([20, 50], "pinned")
    pins[0].__exit__(None, None, None)


def test_a_mark_and_a_link_that_are_made_meanwhile_count(run: Path) -> None:
    def mark() -> None:
        (run / "global_step_20/.ckpttool-keep").touch()
        (run / "best").symlink_to("global_step_30")

    act(run, mark)
    assert left(run) == [20, 30, 50]


def test_a_step_that_vanished_meanwhile_is_fine(run: Path) -> None:
    done = act(run, lambda: shutil.rmtree(run / "global_step_20"))
    assert (left(run), done[20].removed, done[20].freed, done[20].problems) == ([50], True, 0, ())


def test_a_step_that_became_a_link_meanwhile_is_kept(run: Path, tmp_path: Path) -> None:
    def swap() -> None:
        shutil.move(run / "global_step_20", tmp_path / "precious")
        (run / "global_step_20").symlink_to(tmp_path / "precious")

    assert act(run, swap)[20].kept == "a symbolic link"
    assert len(list((tmp_path / "precious").rglob("*.pt"))) == 3


def test_all_have_lost_their_names_before_the_first_file_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting takes long; meanwhile a trainer may save one of them anew."""
    seen = []

    def noted(path: Path) -> removing.Removed:
        seen.append(left(run))
        (run / "global_step_30").mkdir(exist_ok=True)
        return remove(path)

    monkeypatch.setattr(retention, "remove", noted)
    act(run, lambda: None)
    assert (seen[0], left(run)) == ([50], [30, 50])


def test_links_in_a_step_are_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("precious")
    (run / "global_step_10/actor/there").symlink_to(tmp_path / "precious")
    (run / "global_step_10/actor/file").symlink_to(tmp_path / "precious/file")
    os.mkfifo(run / "global_step_10/pipe")
    prune(run)
    assert (left(run), (tmp_path / "precious/file").read_text()) == ([50], "precious")


def test_a_directory_that_may_not_be_written_goes_all_the_same(run: Path) -> None:
    (run / "global_step_10/actor").chmod(0o500)
    assert (prune(run)[0].problems, left(run), os.path.lexists(run / REMOVING)) == ((), [50], False)


def blocks(*paths: Path) -> int:
    return sum(path.lstat().st_blocks * 512 for path in paths)


def test_what_was_freed_is_told(run: Path) -> None:
    """A file with two names in the step counts once, one with another name elsewhere not at all."""
    step = run / "global_step_10"
    os.link(step / "actor/model_world_size_1_rank_0.pt", step / "again")
    os.link(step / "critic/model_world_size_1_rank_0.pt", run / "kept.pt")
    expected = blocks(step / "again", step / "data.pt")
    assert expected > 0
    assert (weigh(step), prune(run)[0].freed) == (expected, expected)


def test_what_two_steps_share_is_freed_by_the_second(run: Path) -> None:
    (run / "global_step_20/data.pt").unlink()
    os.link(run / "global_step_10/data.pt", run / "global_step_20/data.pt")
    weights = blocks(*(run / "global_step_10").rglob("model*"))
    shared = blocks(run / "global_step_10/data.pt")
    assert [one.freed for one in prune(run)[:2]] == [weights, weights + shared]


def test_what_is_refused_is_told_and_the_others_go(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def refuse(source: Path, target: Path) -> None:
        if source.name in ("global_step_20", "global_step_30"):
            number = errno.EBUSY if source.name == "global_step_20" else errno.EACCES
            raise OSError(number, os.strerror(number), str(source), None, str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    done = {one.step.number: one for one in prune(run)}
    assert left(run) == [20, 30, 50]
    assert [done[number].removed for number in (10, 20, 30, 40)] == [True, False, False, True]
    assert [(problem.path, problem.message[-7:]) for problem in done[20].problems] == [("global_step_20", "(EBUSY)")]
    assert [problem.hint for problem in done[30].problems] == ["Delete it as its owner."]
    assert not os.path.lexists(run / REMOVING)


def test_a_file_that_stays_is_told_and_goes_next_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = os.unlink

    def refuse(path: str, *, dir_fd: int) -> None:
        if path == "data.pt":
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)
        unlink(path, dir_fd=dir_fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refuse)
        done = prune(run)
    assert (left(run), [one.removed for one in done]) == ([50], [True] * 4)
    assert [problem.path.endswith("/data.pt") for one in done for problem in one.problems] == [True] * 4
    assert len(os.listdir(run / REMOVING)) == 4
    assert (clear_removed(run)[1], os.path.lexists(run / REMOVING)) == ((), False)


def test_names_that_may_not_last_are_told_before_a_file_goes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(retention, "sync", refuse)
        done = prune(run)
        assert clear_removed(run)[1] != ()
    assert [[problem.message[-5:] for problem in one.problems] for one in done] == [["(EIO)"]] * 4
    assert len(list((run / REMOVING).rglob("*.pt"))) == 12
    assert (clear_removed(run)[1], left(run)) == ((), [50])


_AS_NOBODY = """
import os, sys
from pathlib import Path
from ckpttool.watching.retention import Step, carry_out, plan, protected
run = Path(sys.argv[1])
os.setgroups([]); os.setgid(65534); os.setuid(65534)
steps = [Step(number, run / f"global_step_{number}", True, False) for number in (10, 20, 30)]
for one in carry_out(run, plan(run, steps, 1, None, protected(run))):
    sys.stdout.write(f"{one.step.number} {one.removed} {[problem.message for problem in one.problems]}\\n")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_step_of_another_user(open_folder: Path) -> None:
    """It stays whole, for its directory may not be moved; the others go."""
    run = open_folder / "run"
    for number in (10, 20, 30):
        (run / f"global_step_{number}/actor").mkdir(parents=True)
        (run / f"global_step_{number}/actor/a").write_text("a")
    for path in (run, *run.rglob("*")):
        os.chown(path, 65534, 65534)
    for path in (run / "global_step_10", *(run / "global_step_10").rglob("*")):
        os.chown(path, 0, 0)
        path.chmod(0o755)
    (run / "global_step_20/actor").chmod(0o500)
    command = [sys.executable, "-c", _AS_NOBODY, str(run)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", timeout=60).stdout
    assert said == "10 False ['global_step_10: not deleted: Permission denied (EACCES)']\n20 True []\n"
    assert (left(run), (run / "global_step_10/actor/a").read_text()) == ([10, 30], "a")


# What a killed one left


def test_what_is_not_ours_stays(run: Path, tmp_path: Path) -> None:
    """Links are no reason to delete where they lead."""
    for name in ("notes", "notes-12345678", "global_step_10", "global_step_10-1234567", "global_step_10-1234567g"):
        (run / REMOVING / name).mkdir(parents=True)
    (run / REMOVING / "global_step_10-1234abcd").mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("precious")
    (run / REMOVING / "global_step_20-1234abcd").symlink_to(tmp_path / "precious")
    assert clear_removed(run)[1] == ()
    assert len(os.listdir(run / REMOVING)) == 5
    assert os.listdir(tmp_path / "precious") == ["file"]


def test_a_link_with_that_name_is_not_followed(run: Path, tmp_path: Path) -> None:
    (tmp_path / "precious/global_step_10-1234abcd").mkdir(parents=True)
    (run / REMOVING).symlink_to(tmp_path / "precious")
    assert clear_removed(run) == (0, ())
    done = prune(run)
    assert (left(run), [one.problems[0].code for one in done]) == ([10, 20, 30, 40, 50], ["not-removed"] * 4)
    assert os.listdir(tmp_path / "precious") == ["global_step_10-1234abcd"]


def test_what_a_killed_one_left_counts_as_freed(run: Path) -> None:
    (run / REMOVING).mkdir()
    expected = weigh(run / "global_step_10")
    (run / "global_step_10").rename(run / REMOVING / "global_step_10-1234abcd")
    assert clear_removed(run) == (expected, ())
    assert not os.path.lexists(run / REMOVING)


def test_a_run_that_is_not_there(tmp_path: Path) -> None:
    assert (protected(tmp_path / "none"), clear_removed(tmp_path / "none")) == ({}, (0, ()))
    assert list(carry_out(tmp_path / "none", Pruning((), ()))) == []


def test_another_process_takes_the_empty_place_away(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename, tried = os.rename, []

    def taken(source: Path, target: Path) -> None:
        tried.append(source)
        if len(tried) in (1, 2):
            target.parent.rmdir()
        rename(source, target)

    monkeypatch.setattr(os, "rename", taken)
    assert ([one.problems for one in prune(run)], left(run)) == ([()] * 4, [50])


def whole(run: Path) -> dict[str, int]:
    """How many files each step has, under its name."""
    return {one.path.name: len([path for path in one.path.rglob("*") if path.is_file()]) for one in steps_of(run)}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
def test_killed_at_every_call(tmp_path: Path, before: bool) -> None:
    """A step has all of its files or no name; the next run ends it."""
    at, ends = 0, 0
    while not ends and at < MOST:
        at += 1
        run = tmp_path / str(at)
        for number in (1, 2, 3):
            (run / f"global_step_{number}/actor").mkdir(parents=True)
            for name in ("a", "actor/b"):
                (run / f"global_step_{number}" / name).write_text("x")
        (run / REMOVING / "global_step_0-1234abcd/actor").mkdir(parents=True)
        (run / REMOVING / "global_step_0-1234abcd/a").write_text("x")
        ends += not prune_killed(run, steps_of(run), at, before=before)
        assert set(whole(run).values()) == {2}
        assert "global_step_3" in whole(run)
        assert prune_killed(run, steps_of(run), MOST, before=False) is False
        clear_removed(run)
        assert (whole(run), os.listdir(run)) == ({"global_step_3": 2}, ["global_step_3"])
    assert 20 < at < MOST


# Removing


def test_depth_is_no_matter(tmp_path: Path) -> None:
    """It is deeper than Python calls itself."""
    here = os.getcwd()  # noqa: PTH109
    (tmp_path / "deep").mkdir()
    os.chdir(tmp_path / "deep")
    for _ in range(sys.getrecursionlimit() // 2):
        os.mkdir("d")  # noqa: PTH102
        os.chdir("d")
    os.chdir(here)
    problems = remove(tmp_path / "deep").problems
    assert (problems, os.listdir(tmp_path)) == ((), [])


def test_what_is_not_there_is_removed(tmp_path: Path) -> None:
    assert remove(tmp_path / "none") == remove(tmp_path / "none/none") == removing.Removed()


def test_another_file_system_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system tells no mount points, the number of the device does."""
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/file").write_text("precious")
    stat = os.fstat

    def elsewhere(handle: int) -> os.stat_result:
        info = stat(handle)
        if os.path.samestat(info, (tmp_path / "a/b").stat()):
            return os.stat_result((*info[:2], info.st_dev + 1, *info[3:]))
        return info

    monkeypatch.setattr(os, "fstat", elsewhere)
    problems = remove(tmp_path / "a").problems
    assert [(problem.path, problem.code) for problem in problems] == [("a/b", "not-removed")]
    assert "another file system is mounted there" in problems[0].message
    assert (tmp_path / "a/b/file").read_text() == "precious"
    assert not os.path.lexists(tmp_path / PINS)
