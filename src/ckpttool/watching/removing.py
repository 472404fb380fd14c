"""Removes a directory for good: no link is followed, no other file system entered, one refusal stops nothing else."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import Problem

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Removed:
    """What a removal came to: ``freed`` are bytes on disk of files whose last name went; what stays has a problem.

    The path of a problem is told from the directory in which the removed one lay.
    """

    freed: int = 0
    problems: tuple[Problem, ...] = ()


@dataclass(slots=True)
class _Folder:
    """A directory that is open, and the names of those in it that are still to be removed."""

    handle: int
    where: str
    below: list[str]


@dataclass(slots=True)
class _Removal:
    device: int
    freed: int = 0
    problems: list[Problem] = field(default_factory=list)


def remove(path: Path) -> Removed:
    """Remove a directory with all that lies in it; what vanishes meanwhile is as good.

    Names are looked up in directories that are open, so that none which is swapped for a link leads elsewhere. A path
    that is a link or a file itself loses its name.
    """
    try:
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        return Removed(problems=() if error.errno == errno.ENOENT else (refusal(path.name, error),))
    try:
        work = _Removal(os.fstat(parent).st_dev)
        _remove_all(work, parent, path.name)
    finally:
        os.close(parent)
    return Removed(work.freed, tuple(work.problems))


def _remove_all(work: _Removal, parent: int, name: str) -> None:
    """Go down by handles and come back up, without recursion: how deep it is, the file system says."""
    stack = [_Folder(parent, "", [name])]
    try:
        while stack[-1].below:
            top = stack[-1]
            child = _opened(work, top, top.below.pop())
            stack += () if child is None else (child,)
            while len(stack) > 1 and not stack[-1].below:
                done = stack.pop()
                os.close(done.handle)
                _remove_empty(work, stack[-1], done.where)
    finally:
        for folder in stack[1:]:
            os.close(folder.handle)


def _opened(work: _Removal, above: _Folder, name: str) -> _Folder | None:
    """Open a directory and remove the files in it; ``None`` where there is nothing further to do."""
    where = f"{above.where}/{name}".lstrip("/")
    try:
        handle = os.open(name, _DIRECTORY, dir_fd=above.handle)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            _remove_file(work, above.handle, name, where)
        elif error.errno != errno.ENOENT:
            work.problems.append(refusal(where, error))
        return None
    try:
        return _Folder(handle, where, _remove_files(work, handle, where))
    except OSError as error:
        work.problems.append(refusal(where, error))
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


def _remove_files(work: _Removal, handle: int, where: str) -> list[str]:
    """Remove what is no directory, and return the names of those that are."""
    info = os.fstat(handle)
    if info.st_dev != work.device:
        raise OSError(errno.EBUSY, "another file system is mounted there")
    if info.st_mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(OSError):  # the owner may make it so
            os.fchmod(handle, stat.S_IMODE(info.st_mode) | stat.S_IRWXU)
    with os.scandir(handle) as entries:
        names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_folder in names:
        if not is_folder:
            _remove_file(work, handle, name, f"{where}/{name}")
    return [name for name, is_folder in names if is_folder]


def _remove_file(work: _Removal, handle: int, name: str, where: str) -> None:
    try:
        info = os.stat(name, dir_fd=handle, follow_symlinks=False)
        os.unlink(name, dir_fd=handle)
    except FileNotFoundError:
        return
    except OSError as error:
        work.problems.append(refusal(where, error))
        return
    work.freed += info.st_blocks * 512 if info.st_nlink == 1 else 0


def _remove_empty(work: _Removal, above: _Folder, where: str) -> None:
    try:
        os.rmdir(where.rpartition("/")[2], dir_fd=above.handle)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not work.problems:  # what stays in it is told
            work.problems.append(refusal(where, error))


def refusal(where: str, error: OSError, *, said: str = "", do: str = "Remove") -> Problem:
    """Return the problem of something that the system does not let us ``do``; ``said`` goes before its reason."""
    code = errno.errorcode.get(error.errno or 0, "")
    return Problem(
        code="not-removed",
        message=f"{where}: {said}{error.strerror or error} ({code})",
        path=where,
        hint=f"{do} it as its owner." if error.errno in (errno.EACCES, errno.EPERM) else "",
    )
