"""A program in a process group of its own, which does not outlive an interruption of ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

GRACE = 10.0
"""Seconds that programs have to end after SIGTERM, before SIGKILL."""

_LOOK = 0.05
_STDERR = 2


class Child(subprocess.Popen[bytes]):
    """A program that has been run: making one returns when it has ended, and ``returncode`` says how.

    Raises :class:`OSError` where the system does not run it. Whatever else is raised meanwhile, by a signal, goes on
    when every process of its group has ended. What it leaves running in the background of itself is left.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str], said: bytes) -> None:
        out = subprocess.DEVNULL if sys.__stderr__ is None else _STDERR
        try:
            with _holding(said) as stdin:
                super().__init__(words, env=environment, stdin=stdin, stdout=out, stderr=out, start_new_session=True)
            self.wait()
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        """End its group, in good time or, after that or another interruption, at once."""
        if getattr(self, "pid", None) is None or self.returncode is not None:
            return
        try:
            self._tell(signal.SIGTERM)
            over = time.monotonic() + GRACE
            while self._is_alive() and time.monotonic() < over:
                time.sleep(_LOOK)
        finally:
            if self._is_alive():
                self._tell(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.wait(1.0)

    def _is_alive(self) -> bool:
        """Tell whether there is anything left of its group."""
        self.poll()
        try:
            os.killpg(self.pid, 0)
        except OSError:  # it is no group yet, or no more, or one of another user's processes
            return self.returncode is None
        return True

    def _tell(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it has not made its group yet
            self.send_signal(number)
        except PermissionError:
            pass


def _holding(said: bytes) -> IO[bytes]:
    """Return a file without a name that holds this, to be read: nobody waits for one who does not read it."""
    made = os.memfd_create("ckpttool-event") if hasattr(os, "memfd_create") else None
    file: IO[bytes] = tempfile.TemporaryFile() if made is None else open(made, "w+b")  # noqa: SIM115, PTH123
    file.write(said)
    file.seek(0)
    return file
