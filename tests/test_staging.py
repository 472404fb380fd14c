"""A directory appears complete or not at all, whatever happens meanwhile, and nothing that is not ours is touched."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckpttool import staging, wholefile
from ckpttool.errors import CannotWrite, NotACheckpoint
from ckpttool.staging import clear_stale, staged, write_file


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """What is to be written; its parent is there."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out/model"


def fill(folder: Path, text: str = "new") -> None:
    write_file(folder / "a", text.encode())
    (folder / "sub").mkdir()
    write_file(folder / "sub/b", text.encode())


def attempt(
    target: Path,
    *,
    force: bool = False,
    meanwhile: Callable[[Path], object] = lambda _target: None,
    error: BaseException | None = None,
) -> None:
    """Fill a directory; before it is to appear something happens to its target, or an exception."""
    with staged(target, force=force) as folder:
        fill(folder)
        meanwhile(target)
        if error is not None:
            raise error


def beside(target: Path) -> list[str]:
    return sorted(os.listdir(target.parent))


def content(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


NEW = {"a": "new", "sub/b": "new"}


def made(path: Path, text: str = "old") -> Path:
    """A directory with a file in it."""
    path.mkdir()
    (path / "a").write_text(text)
    return path


# Complete or absent


def test_it_appears_when_it_is_complete(target: Path) -> None:
    with staged(target) as folder:
        fill(folder)
        assert not target.exists()
        assert folder.parent == target.parent
        assert folder.name.startswith("model.partial-")
    assert (beside(target), content(target)) == (["model"], NEW)


def test_parents_are_made(target: Path) -> None:
    attempt(target / "deep/er")
    assert content(target / "deep/er") == NEW


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, NotACheckpoint])
def test_an_exception_leaves_nothing(target: Path, error: type[BaseException]) -> None:
    with pytest.raises(error, match="why"):
        attempt(target, error=error("why"))
    assert beside(target) == []


def test_what_the_system_refuses_is_told_with_its_code(target: Path) -> None:
    with pytest.raises(CannotWrite, match="No space left on device; nothing was left there") as raised:
        attempt(target, error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert (raised.value.code, raised.value.exit_code, str(target) in raised.value.message) == ("ENOSPC", 6, True)
    assert "Free some space" in raised.value.hint
    assert beside(target) == []


def test_a_parent_that_is_a_file_is_told_and_stays(target: Path) -> None:
    target.write_text("a file")
    with pytest.raises(CannotWrite, match="model"):
        attempt(target / "below")
    assert (beside(target), target.read_text()) == (["model"], "a file")


def a_file(path: Path) -> None:
    path.write_text("a file")


def a_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [made, Path.mkdir, a_file, a_link])
def test_a_target_that_appears_meanwhile_stays(target: Path, make: Callable[[Path], object]) -> None:
    with pytest.raises(CannotWrite, match="exists already"):
        attempt(target, meanwhile=make)
    make(target.with_name("same"))
    assert beside(target) == ["model", "same"]
    assert state(target) == state(target.with_name("same"))


def state(path: Path) -> tuple[bool, bool, dict[str, str] | str]:
    if path.is_symlink():
        return True, False, str(path.readlink())
    return False, path.is_dir(), content(path) if path.is_dir() else path.read_text()


def test_a_target_that_is_there_is_told_before_anything_is_written(target: Path) -> None:
    """Not after hours."""
    made(target)
    begun: list[Path] = []
    with pytest.raises(CannotWrite, match="exists already"):
        attempt(target, meanwhile=begun.append)
    assert (beside(target), content(target), begun) == (["model"], {"a": "old"}, [])


# Replacing


def test_force_replaces(target: Path) -> None:
    made(target)
    attempt(target, force=True, meanwhile=lambda there: content(there) == {"a": "old"} or pytest.fail("too early"))
    assert (beside(target), content(target)) == (["model"], NEW)


def test_force_needs_nothing_to_replace(target: Path) -> None:
    attempt(target, force=True)
    assert (beside(target), content(target)) == (["model"], NEW)


def test_force_replaces_what_appears_meanwhile(target: Path) -> None:
    attempt(target, force=True, meanwhile=made)
    assert (beside(target), content(target)) == (["model"], NEW)


def test_an_exception_keeps_what_was_to_be_replaced(target: Path) -> None:
    made(target)
    with pytest.raises(ValueError, match="why"):
        attempt(target, force=True, error=ValueError("why"))
    assert (beside(target), content(target)) == (["model"], {"a": "old"})


@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_what_was_moved_aside_comes_back(target: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """When the second renaming fails."""
    made(target)
    renamed: list[tuple[str, str]] = []
    real = Path.rename

    def rename(source: Path, to: Path) -> Path:
        renamed.append((source.name.partition("-")[0], to.name.partition("-")[0]))
        if len(renamed) == 2:
            raise error
        return real(source, to)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CannotWrite if isinstance(error, OSError) else KeyboardInterrupt):
        attempt(target, force=True)
    assert renamed[:2] == [("model", "model.replaced"), ("model.partial", "model")]
    assert (beside(target), content(target)) == (["model"], {"a": "old"})


@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "I/O error"), KeyboardInterrupt()])
def test_a_name_that_is_not_durable_is_taken_back(
    target: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, old: bool
) -> None:
    """When the sync after the last renaming fails: what is told is true."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink() == target.parent:
            raise error
        real(handle)

    if old:
        made(target)
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CannotWrite if isinstance(error, OSError) else KeyboardInterrupt):
        attempt(target, force=True)
    assert beside(target) == (["model"] if old else [])
    assert not old or content(target) == {"a": "old"}


def test_what_somebody_else_made_is_never_taken(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When what is being filled vanishes at the last moment, and its name is there."""
    real = os.fsync

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        real(handle)
        if path.parent == target.parent and path.is_dir() and not target.exists():
            path.rename(path.with_name("elsewhere"))
            made(target)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CannotWrite):
        attempt(target)
    assert content(target) == {"a": "old"}


def removed_in_part(monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None) -> None:
    """From now on, whoever removes a directory is stopped after the first file: killed, or with an exception."""

    def rmtree(path: Path, **_options: object) -> None:
        (Path(path) / "a").unlink(missing_ok=True)
        if error is not None:
            raise error

    monkeypatch.setattr(shutil, "rmtree", rmtree)


def test_an_interruption_while_the_old_is_removed_leaves_the_new(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is complete, and half of the old one is not."""
    made(target)
    (target / "b").write_text("old")
    with monkeypatch.context() as patch:
        removed_in_part(patch, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            attempt(target, force=True)
    assert content(target) == NEW


# What was left behind


def holder(target: Path) -> subprocess.Popen[str]:
    """A process that is busy with a target."""
    script = (
        "import sys\nfrom pathlib import Path\nfrom ckpttool.staging import staged\n"
        "with staged(Path(sys.argv[1])) as folder:\n    print(folder.name, flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, str(target)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def busy(target: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Such a process, and the name of its directory."""
    with holder(target) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_what_a_killed_run_left_is_cleared(target: Path, busy: tuple[subprocess.Popen[str], str]) -> None:
    process, name = busy
    process.kill()
    process.wait()
    assert beside(target) == [name]
    with staged(target) as folder:
        assert beside(target) == [folder.name] != [name]
        fill(folder)
    assert beside(target) == ["model"]


def test_what_another_run_is_busy_with_is_left(target: Path, busy: tuple[subprocess.Popen[str], str]) -> None:
    """Whoever ends first has the name."""
    process, name = busy
    assert clear_stale(target) == []
    attempt(target)
    assert beside(target) == ["model", name]
    _, told = process.communicate("")
    assert "exists already; it was made meanwhile" in told
    assert (process.returncode, beside(target), content(target)) == (1, ["model"], NEW)


def test_what_was_left_is_named(target: Path) -> None:
    for name in (
        "model.partial-abcd1234",
        "model.partial-zzzz_999",
        "other.partial-abcd1234",
        "model-2.partial-abcd1234",
    ):
        made(target.with_name(name))
    assert clear_stale(target) == ["model.partial-abcd1234", "model.partial-zzzz_999"]
    assert beside(target) == ["model-2.partial-abcd1234", "other.partial-abcd1234"]


def test_what_a_killed_run_moved_aside_comes_back(target: Path) -> None:
    made(target.with_name("model.replaced-abcd1234"))
    made(target.with_name("model.partial-abcd1234"), "new but not in place")
    assert clear_stale(target) == ["model.partial-abcd1234", "model.replaced-abcd1234"]
    assert (beside(target), content(target)) == (["model"], {"a": "old"})


def test_what_was_moved_aside_goes_when_there_is_something_new(target: Path) -> None:
    made(target, "new")
    made(target.with_name("model.replaced-abcd1234"))
    assert clear_stale(target) == ["model.replaced-abcd1234"]
    assert (beside(target), content(target)) == (["model"], {"a": "new"})


def test_half_of_what_was_replaced_never_comes_back(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is killed while it removes the old directory; then the new one is moved to its final place."""
    made(target)
    with monkeypatch.context() as patch:
        removed_in_part(patch, None)
        attempt(target, force=True)
    target.rename(target.with_name("final"))
    clear_stale(target)
    assert beside(target) == ["final"]


def test_links_and_files_of_such_names_are_left(target: Path, tmp_path: Path) -> None:
    precious = made(tmp_path / "precious")
    for name in ("model.partial-abcd1234", "model.replaced-abcd1234"):
        target.with_name(name).symlink_to(precious)
    for name in ("model.partial-abcd5678", "model.replaced-abcd5678"):
        target.with_name(name).write_text("a file")
    before = beside(target)
    assert clear_stale(target) == []
    assert (beside(target), content(precious)) == (before, {"a": "old"})


@pytest.mark.parametrize(
    "name", ["model.partial-step-100", "model.replaced-by-hand", "model.partial-2", "model.partial-"]
)
def test_directories_that_nobody_here_has_named_are_left(target: Path, name: str) -> None:
    """A run draws eight letters; a user may have written such a name himself."""
    made(target.with_name(name), "mine")
    attempt(target)
    assert beside(target) == sorted(["model", name])
    assert content(target.with_name(name)) == {"a": "mine"}


def test_a_name_may_hold_what_marks_other_names(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run that was killed had moved aside is found again."""
    mine = made(target.with_name("m.partial-x"))
    calls: list[Path] = []
    real = Path.rename

    def killed(source: Path, to: Path) -> None:
        if not calls:
            real(source, to)
        calls.append(to)
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(SystemExit):
            attempt(mine, force=True)
    assert not mine.exists()
    clear_stale(mine)
    assert (beside(mine), content(mine)) == (["m.partial-x"], {"a": "old"})


def test_an_absent_parent_has_nothing_stale(tmp_path: Path) -> None:
    assert clear_stale(tmp_path / "no/model") == []


def test_what_vanishes_meanwhile_is_no_fault(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run clears at the same time."""
    made(target.with_name("model.partial-abcd1234"))
    real = os.open

    def vanishing(path: Path, *arguments: int) -> int:
        if "partial-abcd1234" in str(path) and Path(path).exists():
            shutil.move(path, target.parent.parent / "elsewhere")
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", vanishing)
    assert clear_stale(target) == []


@pytest.mark.parametrize("when", ["aside", "in", "given up"])
def test_a_signal_between_two_renames(target: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """It arrives when the system has done something, and the program does not know it yet."""
    made(target)
    rename = Path.rename

    def stopped(path: Path, new: Path) -> Path:
        done = rename(path, new)
        names = ("aside", "given up") if ".replaced-" in f"{path.name} {new.name}" else ("in",)
        if when in names and (when == "given up") == (".replaced-" in path.name):
            monkeypatch.undo()
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(Path, "rename", stopped)
    with pytest.raises(KeyboardInterrupt):
        attempt(target, force=True)
    assert beside(target) == [target.name]
    assert content(target) == (NEW if when == "given up" else content(made(target.with_name("like"))))


def test_a_clean_up_that_comes_before_the_lock(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run finds the new folder while nobody holds it: it is cleared, and another one made."""
    cleared: list[str] = []
    mkdtemp = tempfile.mkdtemp

    def made_and_found(**options: str) -> str:
        folder = mkdtemp(**options)
        if not cleared:
            cleared.extend(clear_stale(target))
        return str(folder)

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_found)
    attempt(target)
    assert len(cleared) == 1
    assert (beside(target), content(target)) == ([target.name], NEW)


def test_a_clean_up_that_is_at_work(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run has locked the new folder in order to remove it: it is not written into."""
    locked: list[tuple[int, str]] = []
    mkdtemp = tempfile.mkdtemp

    def made_and_locked(**options: str) -> str:
        folder = str(mkdtemp(**options))
        if not locked:
            locked.append((os.open(folder, os.O_RDONLY), folder))
            fcntl.flock(locked[0][0], fcntl.LOCK_EX)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", made_and_locked)
    attempt(target)
    ((handle, folder),) = locked
    assert os.listdir(folder) == []
    os.close(handle)
    assert clear_stale(target) == [Path(folder).name]
    assert (beside(target), content(target)) == ([target.name], NEW)


def test_another_run_that_is_quicker_by_a_moment(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its directory appears between the look at the target and the rename."""
    rename = Path.rename

    def late(path: Path, new: Path) -> Path:
        if new == target:
            made(target)
        return rename(path, new)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(CannotWrite, match="exists already; it was made meanwhile"):
        attempt(target)
    assert beside(target) == [target.name]
    assert content(target) != NEW


def test_another_run_that_takes_the_name_of_what_was_moved_aside(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one was to be replaced, and has been, by that run: nothing of it is left for a later one to clear."""
    made(target)
    rename = Path.rename

    def moved(path: Path, new: Path) -> Path:
        done = rename(path, new)
        if new.name.startswith(f"{target.name}.replaced-"):
            made(target, "theirs")
        return done

    monkeypatch.setattr(Path, "rename", moved)
    with pytest.raises(CannotWrite, match="made meanwhile"):
        attempt(target, force=True)
    assert beside(target) == [target.name]
    assert content(target) == {"a": "theirs"}


def test_a_clean_up_that_comes_before_the_lock_of_a_file(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a directory: what was cleared is made again."""
    cleared: list[Path] = []
    take = staging.take

    def late(handle: int) -> bool:
        if not cleared:
            cleared.append(next(target.parent.iterdir()))
            cleared[0].unlink()
        return take(handle)

    monkeypatch.setattr(wholefile, "take", late)
    wholefile.write_whole(target, b"new")
    assert len(cleared) == 1
    assert (beside(target), target.read_bytes()) == ([target.name], b"new")
