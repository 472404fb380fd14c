"""Second names (hard links) for the files of a checkpoint, which hold them while actions read.

A pin lies in ``RUN/.ckpttool-pins/<step>-<random>/<step>/<role>``: whatever the trainer deletes meanwhile, the bytes
stay, and cost nothing. The folder with the random name belongs to one pin. A file beside it is locked as long as that
is held, so that the pins of a killed process can be told from those of a living one; NFS locks files, not directories.
What is written into a file of the checkpoint is written into the pin.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath

from ckpttool.errors import BrokenCheckpoint, CannotWrite, NotACheckpoint
from ckpttool.layout import step_of
from ckpttool.staging import ATTEMPTS, cleared, is_at, take
from ckpttool.watching.linking import Linking, Vanished
from ckpttool.watching.removing import remove

PINS = ".ckpttool-pins"
_LOCK = ".lock"
_LEAVE_OUT = "Run without --pin, or as the owner of the files, with RUN on the file system that holds them."


@contextmanager
def pinned(run: Path, checkpoint: Path) -> Iterator[Path]:
    """Yield a directory that has the files of a checkpoint below ``run``, until the block ends however it ends.

    It has the names of the checkpoint and of its step, and the files that lie in the step beside it. A directory in it
    that the checkpoint has by a link lies in it too. Pipes, sockets and devices are left out.

    What was deleted before is not seen: only a look at the directory that is yielded tells whether it is whole. Raises
    :class:`NotACheckpoint` (``gone``) when something was deleted meanwhile, :class:`BrokenCheckpoint`
    (``changed-meanwhile``) when it was saved anew, :class:`CannotWrite` when the system refuses a link. Nothing is left
    then.
    """
    where = checkpoint.relative_to(run)
    step = _step_in(where)
    if not where.name:
        raise CannotWrite(f"{run}: the run itself cannot be pinned", hint="Run without --pin.", code="link-refused")
    folder, lock = _made(run, run / PINS / step.name)
    try:
        yield _filled(run, folder, where, step)
    finally:
        _end(folder, lock)


def _step_in(where: PurePath) -> PurePath:
    """Return the part of a checkpoint's path that is its step; the first directory where none is numbered."""
    around = [where, *where.parents][-2::-1] or [where]
    return next((path for path in around if step_of(path.name) is not None), around[0])


def _made(run: Path, target: Path) -> tuple[Path, int]:
    """Make the folder of a pin, with the rights of the run; a neighbour's end may take the directory around it."""
    try:
        rights = stat.S_IMODE(run.stat().st_mode) | stat.S_IRWXU
    except OSError as error:
        raise NotACheckpoint(f"{run}: {error.strerror}", code="gone") from error
    for _ in range(ATTEMPTS):
        folder = target.with_name(f"{target.name}-{secrets.token_hex(4)}")
        try:
            _make_place(target.parent)
            lock = _make_folder(folder, rights)
        except FileNotFoundError:
            continue
        except OSError as error:
            with suppress(OSError):
                target.parent.rmdir()
            text = f"{target.parent}: {error.strerror}; nothing can be pinned"
            raise CannotWrite(text, hint="Run without --pin.") from error
        if lock is not None:
            return folder, lock
    raise cleared(target)


def _make_place(path: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(path)  # noqa: PTH102 - what pathlib asks beside that may be another one's directory, gone by then
    if path.is_symlink():
        raise OSError(errno.ELOOP, "is a symbolic link", str(path))


def _make_folder(folder: Path, rights: int) -> int | None:
    """Make the folder of a pin and return the handle that holds it; ``None`` where another process takes it away.

    Its lock is held before it has its name: nobody ever sees that of a living process free.
    """
    new = folder.with_name(f"new-{secrets.token_hex(4)}")
    lock = os.open(_lock_of(new), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    held = False
    try:
        if take(lock):
            os.rename(_lock_of(new), _lock_of(folder))  # noqa: PTH104
            os.mkdir(folder)  # noqa: PTH102
            os.chmod(folder, rights)  # noqa: PTH101
            held = True
    finally:
        if not held:
            for path in (folder, new):
                _remove_pin(path)
            _close(lock)
    return lock if held else None


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + _LOCK)


def _end(folder: Path, lock: int) -> bool:
    """Remove a pin whose lock is held, and give that up; ``False`` where something stays."""
    done = _remove_pin(folder)
    _close(lock)
    with suppress(OSError):
        folder.parent.rmdir()
    return done


def _close(lock: int) -> None:
    """Give a lock up; the file is closed whatever the system says of it, and nothing was written there."""
    with suppress(OSError):
        os.close(lock)


def _remove_pin(folder: Path) -> bool:
    if remove(folder).problems:
        return False
    with suppress(OSError):
        _lock_of(folder).unlink()
    return True


def _filled(run: Path, folder: Path, where: PurePath, step: PurePath) -> Path:
    """Give the folder of a pin its links, and return the checkpoint in it."""
    below = where.relative_to(step)
    source, target = run / step, folder / step.name
    work = Linking(avoid=(run / PINS, *Path(os.path.realpath(run / where)).parents))
    try:
        for name in below.parts:
            work.link_files(source, target)
            source, target = source / name, target / name
        work.link_tree(source, target)
        changed = work.changed()
    except Vanished as error:
        raise _gone(run / where, error.path) from error
    except OSError as error:
        raise _refused(run / where, error) from error
    if changed is not None:
        raise BrokenCheckpoint(
            f"{run / where}: {os.path.relpath(changed, run / where)} was written anew while it was pinned",
            hint="Does a run save here still? It is tried again when that is finished.",
            code="changed-meanwhile",
        )
    return target


def _gone(checkpoint: Path, lost: str) -> NotACheckpoint:
    which = "" if lost == str(checkpoint) else f" ({os.path.relpath(lost, checkpoint)} is gone)"
    return NotACheckpoint(
        f"{checkpoint}: deleted while it was pinned{which}",
        hint="The trainer's own retention was faster: let it keep more, or look more often with --interval.",
        code="gone",
    )


def _refused(checkpoint: Path, error: OSError) -> CannotWrite | NotACheckpoint:
    """Return the error for what the system did not do; links name two files, the first of which is the checkpoint's."""
    path = error.filename if isinstance(error.filename, str) else str(checkpoint)
    code = errno.errorcode.get(error.errno or 0, str(error.errno))
    text = f"{path}: {error.strerror} ({code})"
    if error.errno == errno.EACCES and PINS not in Path(path).parts:
        return NotACheckpoint(text, hint="Run as the user who trained, or ask for read access.", code="unreadable")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CannotWrite(text, hint="Make room: bytes, or inodes (df -i); or run without --pin.", code=code)
    why = {
        errno.EXDEV: "it lies on another file system, and cannot be pinned",
        errno.EMLINK: "it has as many names as a file can have, and cannot be pinned",
    }.get(error.errno or 0, "it cannot be pinned")
    return CannotWrite(f"{text}: {why}", hint=_LEAVE_OUT, code="link-refused")


def is_pinned(run: Path, step_name: str) -> bool:
    """Tell whether a process that lives holds a pin on a step of the run, this one or another.

    Where the file system has no locks, a pin counts as held as long as it is there.
    """
    mine = re.compile(rf"{re.escape(step_name)}-[0-9a-f]{{8}}")
    return any(_is_held(run / PINS / name) for name in _names(run) if mine.fullmatch(name))


def clear_pins(run: Path) -> list[str]:
    """Remove the pins of processes that were killed, and return their names; those of living ones stay."""
    names = [name for name in _names(run) if re.fullmatch(r".+-[0-9a-f]{8}", name)]
    found = [name for name in names if _clear(run / PINS / name)]
    if not (run / PINS).is_symlink():
        with suppress(OSError):
            (run / PINS).rmdir()
    return found


def _names(run: Path) -> list[str]:
    """Return the names of all pins, also of those of which there is a lock only."""
    try:
        return [] if (run / PINS).is_symlink() else sorted({n.removesuffix(_LOCK) for n in os.listdir(run / PINS)})
    except OSError:
        return []


def _is_held(folder: Path) -> bool:
    handle = _locked(folder, os.O_RDWR)
    if handle is not None:
        os.close(handle)
    return handle is None and os.path.lexists(_lock_of(folder))


def _clear(folder: Path) -> bool:
    handle = _locked(folder, os.O_RDWR | os.O_CREAT)
    return handle is not None and _end(folder, handle)


def _locked(folder: Path, flags: int) -> int | None:
    """Lock a pin for a look or for its removal; ``None`` where it is held, or nobody can tell."""
    try:
        handle = _opened(_lock_of(folder), flags)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(handle).st_mode) and is_at(handle, _lock_of(folder)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _opened(lock: Path, flags: int) -> int:
    """Open a lock, to be written where one may: NFS locks no others."""
    safe = os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(lock, flags | safe, 0o666)
    except OSError:
        return os.open(lock, os.O_RDONLY | safe)
