"""A program in a process group of its own, which does not outlive an interruption of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

GRACE = 10.0
"""Seconds that programs have to end after SIGTERM, before SIGKILL."""

_LOOK = 0.1
_ENDED = "ZX"
_STDERR = 2


def run(words: Sequence[str], environment: Mapping[str, str], said: bytes) -> int:
    """Run a program with this on its standard input, and return its code when it has ended (negative: the signal).

    Raises :class:`OSError` where the system does not run it. Whatever else is raised meanwhile, by a signal, goes on
    when every process of its group has ended. What it leaves running in the background of itself is left.
    """
    child = _Child(words, environment, said)
    try:
        child.start()
        return child.process().wait()
    except BaseException:
        child.end()
        raise


class _Child(threading.Thread):
    """Starts a program; in a thread, because signals are handled in the main one alone.

    There, one that arrives while the system starts a program is handled before anyone knows the program's number.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], said: bytes) -> None:
        super().__init__(name="ckpttool-start", daemon=True)
        self._words, self._environment, self._said = words, environment, said
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Start it, or keep why it cannot be."""
        out = subprocess.DEVNULL if sys.__stderr__ is None else _STDERR
        try:
            with _holding(self._said) as stdin:
                self._process = subprocess.Popen(  # noqa: S603 - the user names it
                    self._words, env=self._environment, stdin=stdin, stdout=out, stderr=out, start_new_session=True
                )
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error
        finally:
            self._over.set()

    def process(self) -> subprocess.Popen[bytes]:
        """Return what has been started; raises what has kept it from that."""
        self._over.wait()
        if self._process is None:
            assert self._error is not None
            raise self._error
        return self._process

    def end(self) -> None:
        """End the group of the program: in good time or, after that or another interruption, at once."""
        self._over.wait(GRACE if self.is_alive() else _LOOK)
        if self._process is not None and self._process.returncode is None:
            _end(self._process)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        _tell(process, signal.SIGTERM)
        over = time.monotonic() + GRACE
        while _is_alive(process) and time.monotonic() < over:
            time.sleep(_LOOK)
    finally:
        if _is_alive(process):
            _tell(process, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether there is anything left of its group that runs."""
    if process.poll() is None:
        return True
    try:
        os.killpg(process.pid, 0)
    except OSError:  # it is no more, or one of another user's processes
        return False
    return _runs(process.pid)


def _tell(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _runs(group: int) -> bool:
    """Tell whether a process of a group has not ended: those that nobody has waited for keep it, as in a container."""
    files = [Path(folder, "stat") for folder in Path("/proc").glob("[0-9]*")]
    return not files or any(state not in _ENDED and found == group for state, found in map(_state, files))


def _state(stat: Path) -> tuple[str, int]:
    """Return the state of a process and its group, by what Linux says of it."""
    try:
        state, _, group = stat.read_text(errors="replace").rpartition(")")[2].split()[:3]
    except (OSError, ValueError):  # it is gone
        return "", 0
    return state, int(group)


def _holding(said: bytes) -> IO[bytes]:
    """Return a file without a name that holds this, to be read: nobody waits for one who does not read it."""
    made = os.memfd_create("ckpttool-event") if hasattr(os, "memfd_create") else None
    file: IO[bytes] = tempfile.TemporaryFile() if made is None else open(made, "w+b")  # noqa: SIM115, PTH123
    file.write(said)
    file.seek(0)
    return file
