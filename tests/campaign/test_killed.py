"""Commands that write, killed at every named step and at random moments, on disks that fail: see `killed.py`."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from tests.campaign import killed
from tests.campaign.children import End, Habits, run
from tests.campaign.killed import STEPS, WITH_FORCE, Ground, at_moment, at_step, duration, failing, steps_of, unreadable
from tests.campaign.outcomes import Outcomes
from tests.campaign.subjects import Export, Subject, said

EXPORTS = ("merge-fsdp", "to-hf", "merge-fsdp --force", "to-hf --force")
MIGRATIONS = (
    *("migrate --mode hardlink", "migrate --mode symlink", "migrate --mode copy"),
    *("migrate --remove-v1", "migrate --undo"),
)
EVERY = pytest.mark.parametrize("name", [*EXPORTS, *MIGRATIONS])
MAKING = pytest.mark.parametrize("name", EXPORTS)


@pytest.fixture(scope="module")
def subjects() -> Iterator[dict[str, Subject]]:
    """Every command that writes, in memory where there is some."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        _, making, migrating = killed.grounds(Path(name))
        yield {subject.name: subject for subject in (*making, *migrating)}


@pytest.fixture
def subject(subjects: dict[str, Subject], name: str) -> Subject:
    return subjects[name]


@pytest.fixture
def ground(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A place below the one where the sources are."""
    folder = Path(tempfile.mkdtemp(dir=above(subject)))
    ground = Ground(folder)
    yield ground
    shutil.rmtree(folder)
    assert ground.outcomes.trials
    assert not ground.outcomes.faults, str(ground.outcomes)


def above(subject: Subject) -> Path:
    """The directory of everything."""
    made = subject.source if isinstance(subject, Export) else vars(subject)["v1"]
    return next(folder for folder in made.parents if (folder / "trials").is_dir())


def exits(outcomes: Outcomes) -> set[str]:
    return {words[-1] for words in outcomes.counts}


@pytest.mark.parametrize("name", [*EXPORTS, *MIGRATIONS[3:]])
def test_killed_at_every_named_step(subject: Subject, ground: Ground) -> None:
    """Of bands, the second, one in the middle and the last."""
    steps = steps_of(ground, subject)
    if isinstance(subject, Export):
        bands = [name for name in steps if name.startswith("band ")]
        assert len(bands) > 2
        assert steps.keys() - bands == STEPS.keys() - (set() if subject.old is not None else WITH_FORCE)
        steps = {name: steps[name] for name in steps if name not in bands[1:-1] or name == bands[len(bands) // 2]}
    for name, step in steps.items():
        at_step(ground, subject, name, step, is_before=True)
    at_step(ground, subject, *list(steps.items())[-1], is_before=False)


@EVERY
def test_killed_at_random_moments(subject: Subject, ground: Ground) -> None:
    """A hundred and more, over all commands."""
    rng, seconds = random.Random(7), duration(ground, subject)
    for part in range(12):  # some in each twelfth, that of the start and that of the end too
        at_moment(ground, subject, seconds * (part + rng.random()) / 12)
    assert "exit -9" in exits(ground.outcomes)


@EVERY
def test_stopped_at_random_moments(subject: Subject, ground: Ground) -> None:
    rng, seconds = random.Random(8), duration(ground, subject)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        at_moment(ground, subject, rng.uniform(killed.STARTED, seconds), number)


@EVERY
def test_an_error_at_every_call_that_writes(subject: Subject, ground: Ground) -> None:
    """Each call meets one of the errors, in turn; what replaces or removes has most of its calls in common."""
    codes, ended = cycle([errno.ENOSPC, errno.EIO, errno.EACCES]), set()
    calls = list(enumerate(ground.happens(subject), 1))
    if subject.name not in ("merge-fsdp", "to-hf", *MIGRATIONS[:3]):
        calls = calls[1::3]
    for at, label in calls:
        ended.add(failing(ground, subject, at, label, next(codes)).code)
    assert 6 in ended


@EVERY
def test_errors_that_last(subject: Subject, ground: Ground) -> None:
    """A disk that is full, or read-only, from a call on: not even what is there can be taken away."""
    codes = cycle([errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
    for at, label in list(enumerate(ground.happens(subject), 1))[::8]:
        failing(ground, subject, at, label, next(codes), lasting=True)


@EVERY
def test_a_source_that_cannot_be_read(subject: Subject, ground: Ground) -> None:
    """A device that fails at some reads, the first and the last among them."""
    labels = list(enumerate(killed.reads_of(ground, subject), 1))
    assert len(labels) > 10
    ends = [unreadable(ground, subject, *read).code for read in [*labels[:3], *labels[3::60], *labels[-2:]]]
    assert {3, 4} & set(ends)


@pytest.mark.parametrize("name", ["merge-fsdp", "to-hf --force", "migrate --mode copy"])
@pytest.mark.parametrize("habits", [Habits(most=100), Habits(tick=0.0005)], ids=["short writes", "signals"])
def test_writes_that_are_cut_short_or_interrupted(subject: Subject, ground: Ground, habits: Habits) -> None:
    """The system may write less than it is asked to, and may be interrupted in everything."""
    for _ in range(3):
        assert ground.play(subject, "cut short", codes={0}, habits=habits).code == 0


@pytest.fixture
def small_disk(disk: Callable[[str], Path]) -> Path:
    """A file system of 64 KiB and 24 names."""
    return disk("size=64k,nr_inodes=24")


@pytest.mark.parametrize("name", ["merge-fsdp", "to-hf", "migrate --mode copy", "migrate --mode hardlink"])
@pytest.mark.parametrize("names", [0, 4, 8, 12, 16, 20])
def test_a_disk_without_names_left(subject: Subject, small_disk: Path, names: int, tmp_path: Path) -> None:
    """Room for bytes, none for files (inodes): after so many that somebody else has made."""
    here = small_disk / "here"
    here.mkdir()
    words = subject.arrange(here / "of it")
    for at in range(names):
        try:
            (small_disk / f"{at}").touch()
        except OSError:
            break
    end = run(words, here, tmp_path / "text")
    found = [*subject.wrong(here / "of it", end), *(subject.left(here / "of it") if end.code else [])]
    assert found == []
    for other in small_disk.glob("[0-9]*"):
        other.unlink()


def test_what_is_wrong_is_found(subjects: dict[str, Subject], tmp_path: Path) -> None:
    """A judge that sees nothing would have let all of the above pass."""
    fine, killed_ = End(0, ""), End(-9, "")
    export, role = subjects["merge-fsdp --force"], subjects["migrate --mode copy"]
    assert isinstance(export, Export)
    export.arrange(tmp_path / "a")
    assert list(export.wrong(tmp_path / "a", fine)) == ["it says that all is done, and the output is old"]
    (tmp_path / "a" / "stray").touch()
    (tmp_path / "a" / "out" / "config.json").write_text("half")
    assert [what.split(":")[0] for what in export.wrong(tmp_path / "a", killed_)] == [
        "the output is neither complete nor absent",
        "files beside the output",
    ]
    shutil.rmtree(tmp_path / "a" / "out")
    assert "what was to be replaced is gone, and nothing is in its place" in export.wrong(tmp_path / "a", killed_)
    role.arrange(tmp_path / "b")
    assert list(role.wrong(tmp_path / "b", fine)) == ["it says that all is done, and it is not"]
    next((tmp_path / "b").rglob("*.distcp")).unlink()
    assert list(role.wrong(tmp_path / "b", killed_)) == ["files of layout v1 are gone", "the source was changed"]
    assert len(list(said(End(70, "Traceback"), {0, 6}, tmp_path))) == 3
