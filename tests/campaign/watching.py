"""What a process does besides computing, by Python's audit events, and how much memory it takes."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from ckpttool import unpickle
from ckpttool.export import writing

ACTING = (
    *("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.putenv", "os.kill"),
    *(
        "pty.",
        "subprocess.",
        "socket.",
        "ctypes.",
        "webbrowser.",
        "urllib.",
        "http.",
        "ftplib.",
        "smtplib.",
        "sqlite3.",
    ),
    *("pickle.", "marshal.", "exec", "compile", "import", "code.", "function.", "builtins.input", "sys.settrace"),
)
"""What no command may do, whatever it reads; those that end with a dot are all of that kind."""

WRITING = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


class Acted(RuntimeError):
    """Raised where it happens, so that it does not."""


class Watch:
    """Counts as done what was begun; install it once, it cannot be taken away."""

    def __init__(self) -> None:
        self.room: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._look)

    @contextlib.contextmanager
    def over(self, room: Path) -> Iterator[list[str]]:
        """What happens meanwhile that may not: writing is allowed in this directory, and nothing that acts."""
        self.room, self.seen = room, []
        try:
            yield self.seen
        finally:
            self.room = None

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.room is None:
            return
        if _acts(event) and not _is_own(event, sys._getframe(1)):
            self._stop(f"{event} {arguments[:1]!r:.200}")
        if event == "open" and _writes(arguments):
            self._within(event, arguments[:1])
        elif event in WRITING:
            self._within(event, arguments[: 2 if event in ("os.rename", "os.link", "os.symlink") else 1])

    def _within(self, event: str, paths: tuple[Any, ...]) -> None:
        named = [os.fsdecode(path) for path in paths if isinstance(path, str | bytes | os.PathLike)]
        outside = [path for path in named if Path(path).is_absolute() and not Path(path).is_relative_to(str(self.room))]
        if outside:
            self._stop(f"{event} {outside}")

    def _stop(self, what: str) -> None:
        self.seen.append(what)
        raise Acted(what)


@cache
def _acts(event: str) -> bool:
    return any(event == name or (name.endswith(".") and event.startswith(name)) for name in ACTING)


def _is_own(event: str, caller: FrameType) -> bool:
    """Before elements are written the C library is asked to give memory back."""
    return (
        event.startswith("ctypes.") and writing.__file__ in _files(caller) and unpickle.__file__ not in _files(caller)
    )


def _files(caller: FrameType | None) -> Iterator[str]:
    while caller is not None:
        yield caller.f_code.co_filename
        caller = caller.f_back


def _writes(arguments: tuple[Any, ...]) -> bool:
    _, mode, flags = arguments
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def held() -> int:
    """Bytes of addresses that this process has."""
    said = Path("/proc/self/statm")
    return int(said.read_text().split()[0]) * resource.getpagesize() if said.is_file() else 0


def peak() -> int:
    """Bytes that this process has held at most since `forget`, or ever."""
    said = Path("/proc/self/status")
    if not said.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return int(said.read_text().partition("VmHWM:")[2].split()[0]) << 10


def forget() -> None:
    """Begin the measurement of `peak` anew, where the system can."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
