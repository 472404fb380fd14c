"""Around the staging of a directory: modes, durability, and what is refused before anything is written."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpttool.errors import CannotWrite
from ckpttool.staging import check_outside, check_space, check_target, copy_file, staged, write_file

ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """What is to be written; its parent is there."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out/model"


def fill(folder: Path) -> None:
    write_file(folder / "a", b"new")
    (folder / "sub").mkdir()
    write_file(folder / "sub/b", b"new")


# Modes and durability


@pytest.fixture(params=[0o022, 0o077, 0o002])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_follow_the_umask(target: Path, umask: int) -> None:
    (target.parent / "source").write_text("x")
    (target.parent / "source").chmod(0o640)
    below = target / "in"
    with staged(below) as folder:
        fill(folder)
        copy_file(target.parent / "source", folder / "copied")
    assert [mode(path) for path in (target, below, below / "sub")] == [0o777 & ~umask] * 3
    assert [mode(path) for path in (below / "a", below / "sub/b", below / "copied")] == [0o666 & ~umask] * 3
    assert os.umask(umask) == umask


def test_everything_is_synced_before_it_has_its_name(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files, and the directories that hold their names."""
    (target.parent / "source").write_text("x")
    synced: list[tuple[str, bool]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, target.exists()))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with staged(target) as folder:
        fill(folder)
        copy_file(target.parent / "source", folder / "sub/c")
    assert [name for name, _ in synced if len(name) == 1] == ["a", "b", "c"]
    assert {name for name, there in synced if not there} == {"a", "b", "c", "sub", folder.name}
    assert synced[-1] == ("out", True)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_systems_that_cannot_sync_directories_will_do(
    target: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Some that lie on other machines; `migrate` bears with them too."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    with staged(target) as folder:
        fill(folder)
    assert sorted(os.listdir(target)) == ["a", "sub"]


# Before anything is written


def test_what_exists_is_replaced_only_when_asked_and_of_the_kind(target: Path) -> None:
    check_target(target, force=False, replaceable=False)
    for make in (Path.mkdir, Path.touch, lambda path: path.symlink_to("nowhere")):
        make(target)
        with pytest.raises(CannotWrite, match="exists already") as raised:
            check_target(target, force=False, replaceable=True)
        assert "--force" in raised.value.hint
        with pytest.raises(CannotWrite, match="--force does not replace it"):
            check_target(target, force=True, replaceable=False)
        check_target(target, force=True, replaceable=True)
        target.rename(target.with_name("aside"))
        target.with_name("aside").rmdir() if target.with_name("aside").is_dir() else target.with_name("aside").unlink()


def test_a_target_lies_outside_of_its_sources(tmp_path: Path) -> None:
    """Whichever way one gets there."""
    source = tmp_path / "run/actor"
    source.mkdir(parents=True)
    (tmp_path / "way").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path / "run")
    other = tmp_path / "elsewhere"
    for inside in ("run/actor", "run/actor/hf", "way/hf/deep", "way", "up/actor/hf", "run/other/../actor/hf"):
        with pytest.raises(CannotWrite, match="lies in the checkpoint that is read"):
            check_outside(tmp_path / inside, [other, source])
        with pytest.raises(CannotWrite, match="lies in the checkpoint that is read"):
            check_outside(tmp_path / inside, [other, tmp_path / "way"])
    for around in ("run", "up", "."):
        with pytest.raises(CannotWrite, match="the checkpoint that is read lies in it"):
            check_outside(tmp_path / around, [other, tmp_path / "way"])
    for outside in ("run/actor_hf", "up/actor-2", "hf", "run/actor/../hf"):
        check_outside(tmp_path / outside, [other, source, tmp_path / "way"])


def test_space_is_asked_for_where_the_parents_will_be(target: Path) -> None:
    free = shutil.disk_usage(target.parent).free
    check_space(target / "a/b", free // 2)
    with pytest.raises(CannotWrite, match="bytes are needed") as raised:
        check_space(target / "a/b", free * 2)
    assert (raised.value.code, raised.value.message.partition(":")[0]) == ("no-space", str(target.parent))


_AS_NOBODY = """
import os, sys
from pathlib import Path
from ckpttool.errors import CannotWrite
from ckpttool.staging import check_space, staged
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    check_space(Path(sys.argv[1]), 1)
    with staged(Path(sys.argv[1])) as folder:
        (folder / "a").write_text("new")
except CannotWrite as error:
    print(error.message)
"""


def as_nobody(target: Path) -> str:
    command = [sys.executable, "-c", _AS_NOBODY, str(target)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@ROOT_ONLY
@pytest.mark.parametrize("below", ["model", "there/model", "there/deep/er/model"])
def test_a_closed_directory_is_told(open_folder: Path, below: str) -> None:
    """Whether one sees what lies in it or not."""
    (open_folder / "closed/there").mkdir(parents=True)
    for closed in (0o755, 0o700):
        (open_folder / "closed").chmod(closed)
        assert "ermission" in as_nobody(open_folder / "closed" / below)


@ROOT_ONLY
def test_what_somebody_else_left_is_left(open_folder: Path) -> None:
    """In a directory that everyone writes to."""
    open_folder.chmod(0o1777)
    foreign = open_folder / "model.partial-abcd1234"
    foreign.mkdir()
    (foreign / "a").write_text("old")
    foreign.chmod(0o700)
    assert as_nobody(open_folder / "model") == ""
    assert [(open_folder / name / "a").read_text() for name in ("model", foreign.name)] == ["new", "old"]
