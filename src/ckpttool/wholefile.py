"""A single file that appears complete or not at all, as :mod:`ckpttool.staging` has it for a directory."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ckpttool.errors import CannotWrite
from ckpttool.staging import ATTEMPTS, PARTIAL, cannot, cleared, fill, is_at, sync, take


def write_whole(target: Path, content: bytes, *, force: bool = False) -> None:
    """Write a file that appears complete or not at all, with the mode that the umask leaves.

    It is filled under the name ``NAME.partial-<random>``; what a killed run left there is removed. ``force`` replaces
    the file that is there: whether it may be replaced, :func:`check_file` tells. Raises :class:`CannotWrite`.
    """
    handle = -1
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _clear_files(target)
        partial, handle = _made_file(target)
        fill(handle, content)
        _give_name(partial, target, force=force)
        _sync_name(target)
    except OSError as error:
        raise cannot(target, error, "Free some space, or choose another place.") from error
    finally:
        if handle >= 0:
            with suppress(OSError):
                partial.unlink()
            with suppress(OSError):  # what was written is on disk, or else an error is raised already
                os.close(handle)


def _made_file(target: Path) -> tuple[Path, int]:
    """Make a file beside a target, and lock it; as a directory is."""
    for _ in range(ATTEMPTS):
        partial = target.with_name(f"{target.name}{PARTIAL}{secrets.token_hex(4)}")
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        if take(handle) and is_at(handle, partial):
            return partial, handle
        os.close(handle)
    raise cleared(target)


def _sync_name(target: Path) -> None:
    try:
        sync(target.parent)
    except OSError as error:
        raise CannotWrite(f"{target}: written, but its name may not outlast a crash: {error.strerror}") from error


def _clear_files(target: Path) -> None:
    """Remove the files that killed runs left beside a target; those that another run fills stay."""
    mine = re.compile(rf"{re.escape(target.name + PARTIAL)}[a-f0-9]{{8}}")
    for name in filter(mine.fullmatch, os.listdir(target.parent)):
        with suppress(OSError):
            handle = os.open(target.parent / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(handle).st_mode):
                    (target.parent / name).unlink()
            finally:
                os.close(handle)


def _give_name(partial: Path, target: Path, *, force: bool) -> None:
    """Move a file to its name; without ``force``, one that appeared there meanwhile stays."""
    if force:
        partial.replace(target)
        return
    try:
        os.link(partial, target)
    except FileExistsError as error:
        raise CannotWrite(f"{target}: exists already", hint="Name another file, or replace it with --force.") from error
    except OSError:  # a file system without hard links
        if os.path.lexists(target):
            raise
        partial.rename(target)


def check_file(target: Path, beginning: bytes, *, force: bool) -> None:
    """Raise :class:`CannotWrite` for a file that exists, unless ``force`` replaces one that begins in this way."""
    if not os.path.lexists(target):
        return
    if not force:
        raise CannotWrite(f"{target}: exists already", hint="Name another file, or replace it with --force.")
    if not stat.S_ISREG(target.lstat().st_mode) or not _begins(target, beginning):
        raise CannotWrite(
            f"{target}: no file of the kind that is written here, so --force does not replace it",
            hint="Name another file, or move it away yourself.",
        )


def _begins(path: Path, beginning: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(beginning)) == beginning
    except OSError as error:
        raise CannotWrite(f"{path}: {error.strerror}", hint="Name another file.") from error
