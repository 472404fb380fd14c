"""A watch with an action, pins and retention, killed at its calls and on disks that fail: see `acting.py`.

By hand, `python -m tests.campaign killed` has it among the others.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tests.campaign import killed
from tests.campaign.acting import STEPS, Following, following
from tests.campaign.children import End
from tests.campaign.killed import Ground, at_moment, at_step, duration, failing, steps_of, unreadable


@pytest.fixture(scope="module")
def subject() -> Iterator[Following]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield following(Path(name))


@pytest.fixture
def ground(subject: Following) -> Iterator[Ground]:
    folder = Path(tempfile.mkdtemp(dir=subject.role.parent))
    ground = Ground(folder)
    yield ground
    shutil.rmtree(folder)
    assert ground.outcomes.trials
    assert not ground.outcomes.faults, str(ground.outcomes)


def test_killed_at_its_calls(subject: Following, ground: Ground) -> None:
    """Whatever was not recorded as done is done by the next run, and nothing else; it removes what was left."""
    steps = steps_of(ground, subject)
    assert len(steps) > 100
    for name, step in list(steps.items())[::4]:
        at_step(ground, subject, name, step, is_before=True)
    at_step(ground, subject, *list(steps.items())[-1], is_before=False)


def test_killed_and_stopped_at_random_moments(subject: Following, ground: Ground) -> None:
    rng, seconds = random.Random(7), duration(ground, subject)
    for part in range(9):
        at_moment(ground, subject, seconds * (part + rng.random()) / 9)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        at_moment(ground, subject, rng.uniform(killed.STARTED, seconds), number)
    assert "exit -9" in {words[-1] for words in ground.outcomes.counts}


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "from then on"])
def test_an_error_at_its_calls(subject: Following, ground: Ground, *, lasting: bool) -> None:
    codes = cycle([errno.ENOSPC, errno.EIO, errno.EACCES])
    calls = list(enumerate(ground.happens(subject), 1))[1 :: 9 if lasting else 4]
    ended = {failing(ground, subject, at, label, next(codes), lasting=lasting).code for at, label in calls}
    assert {6} <= ended <= {0, 1, 6}


def test_a_checkpoint_that_cannot_be_read(subject: Following, ground: Ground) -> None:
    """It is told, and the next run acts on it."""
    for at, label in list(enumerate(killed.reads_of(ground, subject), 1))[::16]:
        assert unreadable(ground, subject, at, label).code in (0, 1, 6)


def test_what_is_wrong_is_found(subject: Following, tmp_path: Path) -> None:
    """A judge that sees nothing would have let all of the above pass."""
    here, fine, killed_ = tmp_path / "here", End(0, ""), End(-9, "")
    subject.arrange(here)
    assert list(subject.wrong(here, killed_)) == []
    assert [what.partition(":")[0] for what in subject.wrong(here, fine)] == ["it does not say what is done"]
    shutil.rmtree(here / "run" / f"global_step_{STEPS[0]}")
    assert list(subject.wrong(here, killed_)) == ["step 10 is gone"]
    (here / "log").write_text("begin 10 1\nend 10 1\nbegin 20 1\nlost 20 1 x\n")
    (here / "run" / f"global_step_{STEPS[1]}" / "actor" / "model_world_size_2_rank_0.pt").unlink()
    (here / "stray").touch()
    assert [what.partition(":")[0] for what in subject.wrong(here, killed_)] == [
        "step 20 is neither whole nor gone",
        "an action did not find a file",
        "files beside the run",
    ]
    (here / "run" / ".ckpttool-pins").mkdir()
    assert subject.left(here) == [".ckpttool-pins"]
