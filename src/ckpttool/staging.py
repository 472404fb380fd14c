"""A directory that appears complete or not at all.

It is filled under the name ``NAME.partial-<random>`` beside its own, synced and renamed. Whoever fills it holds a lock
on it, so that what a killed run left behind can be told from what another run is busy with, and is cleared. What
``force`` replaces waits under ``NAME.replaced-<random>`` until the new directory is in; it comes back if that fails.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpttool.errors import CannotWrite, NotACheckpoint, Problem

NO_SPACE = "no-space"
PARTIAL, REPLACED = ".partial-", ".replaced-"
ATTEMPTS = 100


@contextmanager
def staged(target: Path, *, force: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, which gets the name ``target`` when the block ends without an exception.

    Raises :class:`CannotWrite` when the system refuses, or when ``target`` exists and is not to be replaced.
    """
    folder, lock = None, -1
    check_target(target, force=force, replaceable=True)
    try:
        if not os.path.isdir(target.parent):  # noqa: PTH112 - a closed one is not there
            target.parent.mkdir(parents=True, exist_ok=True)
        clear_stale(target)
        folder, lock = _made(target)
        folder.chmod((folder.stat().st_mode & stat.S_ISGID) | (0o777 & ~_umask()))
        yield folder
        for path, _, _ in os.walk(folder):
            sync(Path(path))
        _move_in(folder, target, force=force)
    except OSError as error:
        raise cannot(target, error) from error
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)


def _made(target: Path) -> tuple[Path, int]:
    """Make a folder beside a target, and lock it. Until it is locked, another run takes it for a dead one's."""
    for _ in range(ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=f"{target.name}{PARTIAL}", dir=target.parent))
        try:
            lock = os.open(folder, os.O_RDONLY)
            if take(lock) and is_at(lock, folder):
                return folder, lock
            os.close(lock)
        except FileNotFoundError:  # cleared away before it was open
            continue
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    raise cleared(target)


def cleared(target: Path) -> CannotWrite:
    """Return the error for a place where whatever is made is taken away before it can be locked."""
    return CannotWrite(f"{target}: other runs clear away what is made for it", hint="Wait until they have ended.")


def _lock(path: Path) -> int:
    """Open a directory and lock it where the file system has locks; the lock ends with the process."""
    handle = os.open(path, os.O_RDONLY)
    take(handle)
    return handle


def take(handle: int) -> bool:
    """Lock what is open; ``False`` where another process has locked it. Without locks, nothing is cleared."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_at(handle: int, path: Path) -> bool:
    """Tell whether what is open has its name still."""
    try:
        return os.path.samestat(os.fstat(handle), path.lstat())
    except FileNotFoundError:
        return False


_NO_ROOM = "Free some space, or choose another place with -o."


def cannot(target: Path, error: OSError, no_room: str = _NO_ROOM) -> CannotWrite:
    """Return the error for what the system refused; ``no_room`` is the hint where there was no space."""
    code = errno.errorcode.get(error.errno or 0, "")
    hint = no_room if code in ("ENOSPC", "EDQUOT") else ""
    return CannotWrite(f"{target}: {error.strerror or error}; nothing was left there", hint=hint, code=code)


def check_target(target: Path, *, force: bool, replaceable: bool) -> None:
    """Raise :class:`CannotWrite` for a target that exists, unless ``force`` replaces it.

    ``replaceable`` tells whether what is there is of the kind that is written: nothing else is ever replaced.
    """
    if not os.path.lexists(target):
        return
    here = Path.cwd()
    if target.resolve() in (here, *here.parents):
        raise CannotWrite(f"{target}: is the working directory, or lies around it", hint="Name another directory.")
    if not replaceable:
        what = "exists already" if not force else "no directory of the kind that is written here"
        raise CannotWrite(
            f"{target}: {what}, so --force does not replace it" if force else f"{target}: {what}, and is no model",
            hint="Name another directory, or move it away yourself.",
        )
    if not force:
        raise CannotWrite(f"{target}: exists already", hint="Name another directory, or replace it with --force.")


def check_outside(target: Path, sources: Iterable[Path]) -> None:
    """Raise :class:`CannotWrite` for a target that lies in a source or around one."""
    real = Path(os.path.realpath(target))
    for source in (Path(os.path.realpath(source)) for source in sources):
        if real == source or source in real.parents:
            raise CannotWrite(f"{target}: lies in the checkpoint that is read", hint="Choose a place outside of it.")
        if real in source.parents:
            raise CannotWrite(f"{target}: the checkpoint that is read lies in it", hint="Choose another place.")


def check_space(target: Path, needed: int) -> None:
    """Raise :class:`CannotWrite` where one may not write, or where ``needed`` bytes are not free."""
    there = _above(target)
    if not os.access(there, os.W_OK | os.X_OK):
        raise CannotWrite(f"{there}: no permission to write there", hint="Choose another place with -o.")
    free = free_space(target)
    if needed > free:
        raise CannotWrite(
            f"{there}: {needed:,} bytes are needed, {free:,} are free",
            hint="Choose a place on another disk with -o.",
            code=NO_SPACE,
        )


def space_problems(target: Path, needed: int, *, dry_run: bool) -> tuple[Problem, ...]:
    """Raise as :func:`check_space` does; in a dry run, which shows the plan all the same, return it as a problem."""
    try:
        check_space(target, needed)
    except CannotWrite as error:
        if not dry_run or error.code != NO_SPACE:
            raise
        return (Problem(code=error.code, message=error.message, hint=error.hint),)
    return ()


def free_space(target: Path) -> int:
    """Return the bytes that are free where a target will lie."""
    return shutil.disk_usage(_above(target)).free


def _above(target: Path) -> Path:
    """Return the nearest directory above a target that is there."""
    return next(folder for folder in Path(os.path.realpath(target)).parents if os.path.isdir(folder))  # noqa: PTH112


def clear_stale(target: Path) -> list[str]:
    """Remove what killed runs left beside a target, and give a directory back that one had moved aside."""
    mine = re.compile(rf"{re.escape(target.name)}({re.escape(PARTIAL)}|{re.escape(REPLACED)})[a-z0-9_]{{8}}")
    try:
        names = sorted(filter(mine.fullmatch, os.listdir(target.parent)))
    except OSError:
        return []
    return [name for name in names if _clear(target, name)]


def _clear(target: Path, name: str) -> bool:
    """Clear one; ``False`` where another run is busy with it, it is not ours to touch, or it is gone."""
    path, handle = target.parent / name, -1
    if path.is_symlink() or not path.is_dir():
        return False
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if name.startswith(target.name + REPLACED) and not os.path.lexists(target):
            path.rename(target)
        else:
            shutil.rmtree(path)
    except OSError:
        return False
    finally:
        if handle >= 0:
            os.close(handle)
    return True


def _move_in(folder: Path, target: Path, *, force: bool) -> None:
    """Give the folder its name; what has it already is moved aside, and comes back when anything fails.

    Once the new one is in, the old one gets the name of what a killed run leaves, and is removed.
    """
    aside = target.with_name(target.name + REPLACED + folder.name[-8:])
    lock, new = -1, folder.stat()
    try:
        if os.path.lexists(target):
            if not force:
                raise _made_meanwhile(target)
            lock = _lock(target)
            target.rename(aside)
        _rename_in(folder, target)
        sync(target.parent)
        if lock >= 0:
            aside.rename(folder)
    except BaseException:
        _move_back(folder, aside, target, new)
        raise
    finally:
        if lock >= 0:
            os.close(lock)


def _rename_in(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise _made_meanwhile(target) from error
        raise


def _made_meanwhile(target: Path) -> CannotWrite:
    return CannotWrite(f"{target}: exists already; it was made meanwhile", hint="Name another directory.")


def _move_back(folder: Path, aside: Path, target: Path, new: os.stat_result) -> None:
    """Undo what was done: what is where tells how far it came, for a signal may arrive between any two lines.

    Where the old one has been given up already, the new one stays; so does what another run has put there meanwhile,
    which has replaced the old one then.
    """
    if not os.path.lexists(folder) and os.path.lexists(target) and os.path.samestat(target.lstat(), new):
        target.rename(folder)
    if os.path.lexists(aside):
        if os.path.lexists(target):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(target)


def sync(path: Path) -> None:
    """Make the names in a directory durable, where its file system can."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_file(path: Path, content: bytes) -> None:
    """Write a small file, durably, with the mode that the umask leaves."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fill(handle, content)
    finally:
        os.close(handle)


def fill(handle: int, content: bytes) -> None:
    """Write a small file that is open, durably."""
    view = memoryview(content)
    while view:
        view = view[os.write(handle, view) :]
    os.fsync(handle)


def copy_file(source: Path, target: Path) -> None:
    """Copy the bytes of a file, durably, to one with the mode that the umask leaves.

    Raises :class:`NotACheckpoint` when the source cannot be read.
    """
    try:
        reading = os.open(source, os.O_RDONLY)
    except OSError as error:
        raise NotACheckpoint(f"{source}: {error.strerror}", code="unreadable") from error
    writing = -1
    try:
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        while part := _read(reading, source):
            while part:
                part = part[os.write(writing, part) :]
        os.fsync(writing)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def _read(handle: int, source: Path) -> memoryview:
    try:
        return memoryview(os.read(handle, 1 << 20))
    except OSError as error:
        raise NotACheckpoint(f"{source}: {error.strerror}", code="unreadable") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
