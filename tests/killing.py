"""A migration in a process that ends at one of its file-system calls. Imports no heavy library: it is forked often."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpttool.migration import Options, migrate

CALLS = (
    "chmod",
    "copy_file_range",
    "fchmod",
    "fsync",
    "link",
    "mkdir",
    "open",
    "pwrite",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "utime",
    "write",
)
"""What changes a file system; of ``open`` only what creates."""

KILLED = 9
PIECE = 1000

_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.killing"])


def killed(role: Path, options: dict[str, Any], at: int, *, before: bool) -> bool:
    """Run in a child that ends right after (or right before) the call of this number; tell whether it came so far."""
    child = _SERVER.Process(target=_run, args=(str(role), options, at, before))
    child.start()
    child.join()
    assert child.exitcode in (0, KILLED)
    return child.exitcode == KILLED


def _run(role: str, options: dict[str, Any], at: int, before: bool) -> None:
    code = 70
    try:
        _end_at(at, before=before)
        migrate(Path(role), Options(**options))
        code = 0
    finally:
        os._exit(code)


def _end_at(at: int, *, before: bool) -> None:
    done = 0

    def counted(call: Callable[..., Any], *, opening: bool) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            counts = not opening or bool(arguments[1] & os.O_CREAT)
            done += counts
            if before and counts and done == at:
                os._exit(KILLED)
            result = call(*arguments, **options)
            if counts and done == at:
                os._exit(KILLED)
            return result

        return wrapped

    tamed = {"fsync": _without_waiting, "copy_file_range": _in_pieces(os.copy_file_range)}
    for name in CALLS:
        setattr(os, name, counted(tamed.get(name, getattr(os, name)), opening=name == "open"))


def _without_waiting(_handle: int) -> None:
    """There are thousands of kills: what is synced is counted only."""


def _in_pieces(copy: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    """A large file is copied by many calls; a small one here too, so that there is half a file to find."""
    return lambda reading, writing, count: copy(reading, writing, min(count, PIECE))
