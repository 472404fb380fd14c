"""The steps of a migration as data, and their execution. Paths are relative to the role directory.

Execution makes no decisions. Nothing here opens a checkpoint file for writing: files are linked, copied to new names,
moved as whole directories, or lose a name that the plan has shown to be one of several.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, CannotWrite
from ckpttool.migration.spare import require_spare
from ckpttool.migration.trees import condition

COPY_AT_ONCE = 1 << 30


@dataclass(frozen=True, slots=True)
class MakeDirectory:
    """Make a directory; one that is there already is fine. It gets the mode of the one that it is ``like``."""

    path: str
    like: str = ""


@dataclass(frozen=True, slots=True)
class LinkFiles:
    """Give files a second name in another directory (hard links)."""

    source: str
    target: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CopyFiles:
    """Copy files under the same names into another directory."""

    source: str
    target: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LinkDirectory:
    """Make a relative symbolic link; ``to`` is told from where the link is moved to later."""

    path: str
    to: str


@dataclass(frozen=True, slots=True)
class Move:
    """Rename a directory or a link inside the role to a name that is free, or a file over another one."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Sync:
    """Make the entries of a directory durable."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveEmpty:
    """Remove an empty directory, or nothing when it is not there."""

    path: str


@dataclass(frozen=True, slots=True)
class RequireWhole:
    """Stop unless a tree that was built is what its source is now."""

    path: str
    source: str


@dataclass(frozen=True, slots=True)
class RequireSpare:
    """Stop unless all bytes that lie aside in the staging directory are elsewhere in the role too."""


@dataclass(frozen=True, slots=True)
class RemoveNames:
    """Remove the staging directory with the names in it, once more only if their bytes are elsewhere too."""

    path: str


@dataclass(frozen=True, slots=True)
class RemoveLink:
    """Remove a symbolic link."""

    path: str


@dataclass(frozen=True, slots=True)
class WriteFile:
    """Write a small new file and make it durable."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class RemoveFile:
    """Remove one file of ours."""

    path: str


Step = (
    MakeDirectory
    | LinkFiles
    | CopyFiles
    | LinkDirectory
    | Move
    | Sync
    | RemoveEmpty
    | RequireWhole
    | RequireSpare
    | RemoveNames
    | RemoveLink
    | WriteFile
    | RemoveFile
)


class LinkRefused(CannotWrite):
    """The system refused a hard or symbolic link; which file and why is in the message."""


class SourceChanged(BrokenCheckpoint):
    """Somebody wrote to the source of a tree while that was built."""

    def __init__(self, role: Path, source: str) -> None:
        super().__init__(
            f"{role}: {source} changed while it was linked or copied; no tree was made of it",
            hint="Is a training run saving here? Wait until it is done, then run the same command again.",
            code="changed-meanwhile",
        )


def execute(role: Path, steps: tuple[Step, ...], progress: Callable[[int], None] = lambda _bytes: None) -> None:
    """Carry out the steps in order. ``progress`` is told bytes as they are copied.

    Raises :class:`LinkRefused` when a link is refused, :class:`~ckpttool.migration.spare.OnlyCopy` before the last copy
    of some bytes would be deleted, :class:`SourceChanged` before a tree would be of two saves, :class:`CannotWrite` for
    everything else that fails.
    """
    for step in steps:
        try:
            _one(role, step, progress)
        except OSError as error:
            raise _failed(role, step, error) from error


def _failed(role: Path, step: Step, error: OSError) -> CannotWrite:
    name = Path(os.fsdecode(error.filename or "")).name
    where = f"{step.source}/{name}".rstrip("/") if isinstance(step, _FILES) else getattr(step, "path", "") or name
    text = f"{role}: {where}: {error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotWrite(text, hint="Make room: bytes, or inodes (df -i). The same command finishes this one.")
    if isinstance(step, LinkFiles):
        return LinkRefused(
            f"{text}: the hard link was refused",
            hint="Use --mode symlink or --mode copy, or let --fallback symlink (or copy) decide.",
            code="link-refused",
        )
    if isinstance(step, LinkDirectory):
        return LinkRefused(
            f"{text}: the symbolic link was refused", hint="Use --mode copy, or --fallback copy.", code="link-refused"
        )
    safe = "Nothing of layout v1 was changed; the same command finishes this one, --undo takes it back."
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return CannotWrite(text, hint=f"You may not write there: run as the owner. {safe}" if denied else safe)


_FILES = (LinkFiles, CopyFiles)


def _one(role: Path, step: Step, progress: Callable[[int], None]) -> None:  # noqa: C901 - one line a step
    match step:
        case MakeDirectory(path, like):
            _make_directory(role / path, role / like if like else None)
        case LinkFiles(source, target, names):
            _link(role / source, role / target, names)
        case CopyFiles(source, target, names):
            for name in names:
                _copy(role, f"{source}/{name}", role / target / name, progress)
        case LinkDirectory(path, to):
            os.symlink(to, role / path, target_is_directory=True)  # noqa: PTH211
        case Move(source, target):
            os.rename(role / source, role / target)  # noqa: PTH104
        case Sync(path):
            _sync(role / path)
        case RemoveEmpty(path):
            if (role / path).is_dir():
                os.rmdir(role / path)  # noqa: PTH106
        case RequireWhole(path, source):
            if condition(role, path, source) != "whole":
                raise SourceChanged(role, f"{source}/")
        case RequireSpare():
            require_spare(role)
        case RemoveNames(path):
            require_spare(role)
            remove_names(role / path)
        case RemoveLink(path) | RemoveFile(path):
            os.unlink(role / path)  # noqa: PTH108
        case WriteFile(path, text):
            _write(role / path, text)


def _make_directory(path: Path, like: Path | None) -> None:
    if not path.is_dir():
        os.mkdir(path)  # noqa: PTH102 - one system call, visible as such
    if like is not None:
        os.chmod(path, like.stat().st_mode & 0o7777 | 0o700)  # noqa: PTH101


def _link(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Link by directory handles: with ten thousand files, walking the path each time is what costs."""
    with _directory(source) as from_, _directory(target) as to:
        for name in names:
            os.link(name, name, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=True)


@contextmanager
def _directory(path: Path) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield handle
    finally:
        os.close(handle)


def _copy(role: Path, source: str, target: Path, progress: Callable[[int], None]) -> None:
    """Copy inside the kernel where it can, which shares blocks on file systems that are able to."""
    reading = os.open(role / source, os.O_RDONLY)
    try:
        info = os.fstat(reading)
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, info.st_mode & 0o777)
        try:
            if not _copy_bytes(reading, writing, info.st_size, progress):
                raise SourceChanged(role, source)
            os.fchmod(writing, info.st_mode & 0o7777)
            os.utime(writing, ns=(info.st_atime_ns, info.st_mtime_ns))
            os.fsync(writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def _copy_bytes(reading: int, writing: int, size: int, progress: Callable[[int], None]) -> bool:
    """Copy so many bytes; ``False`` where there are fewer now."""
    done = 0
    in_kernel = hasattr(os, "copy_file_range")
    while done < size:
        moved = 0
        if in_kernel:
            try:
                moved = os.copy_file_range(reading, writing, min(size - done, COPY_AT_ONCE))
            except OSError as error:
                if error.errno not in _NOT_IN_KERNEL:
                    raise
            in_kernel = moved > 0
        if not moved:
            block = os.pread(reading, 8 << 20, done)
            if not block:
                return False
            moved = os.pwrite(writing, block, done)
            os.lseek(reading, done + moved, os.SEEK_SET)
            os.lseek(writing, done + moved, os.SEEK_SET)
        done += moved
        progress(moved)
    return True


_NOT_IN_KERNEL = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def _sync(path: Path) -> None:
    with _directory(path) as handle:
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _NOT_IN_KERNEL:  # some network file systems cannot sync a directory
                raise


def _write(path: Path, text: str) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        data = memoryview(text.encode())
        while data:
            data = data[os.write(handle, data) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_names(path: Path) -> None:
    """Remove a directory with the names in it; links to directories are removed, not followed."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    for folder, _, _ in os.walk(path, followlinks=False):
        if not os.access(folder, os.W_OK):  # the owner may make it so
            os.chmod(folder, 0o700)  # noqa: PTH101
    for folder, below, files in os.walk(path, topdown=False, followlinks=False):
        for name in files:
            os.unlink(Path(folder, name))  # noqa: PTH108
        for name in below:
            child = Path(folder, name)
            if child.is_symlink():
                os.unlink(child)  # noqa: PTH108
            else:
                os.rmdir(child)  # noqa: PTH106
    if path.is_dir():
        os.rmdir(path)  # noqa: PTH106


@contextmanager
def locked(role: Path) -> Iterator[None]:
    """Hold a role directory for this process alone; the lock ends with the process, however it ends.

    Raises :class:`CannotWrite` when another process holds it. File systems without locks go unlocked.
    """
    handle = os.open(role, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CannotWrite(
                f"{role}: another migration is at work here", hint="Wait until it has ended.", code="busy"
            ) from error
        except OSError:
            pass  # no locks on this file system: the renames still exclude each other
        yield
    finally:
        os.close(handle)
