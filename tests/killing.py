"""A command in a process that ends at one of its file-system calls. Imports no heavy library: it is forked often."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

from ckpttool import converting, merging
from ckpttool.converting import convert
from ckpttool.merging import merge
from ckpttool.migration import Options, migrate
from ckpttool.watching import Settings, Watcher
from ckpttool.watching.pins import pinned
from ckpttool.watching.retention import Step, carry_out, clear_removed, plan, protected

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
_SERVER.set_forkserver_preload(["tests.killing", "tests.watched", "tests.campaign.children"])


def killed(role: Path, options: dict[str, Any], at: int, *, before: bool) -> bool:
    """Migrate in a child that ends right after (or right before) the call of this number; tell whether it got there."""
    return ended(_migrate, (str(role), options), at, before=before)


def merge_killed(role: Path, output: Path, options: dict[str, Any], at: int, *, before: bool) -> bool:
    """The same for a merge."""
    return ended(_merge, (str(role), str(output), options), at, before=before)


def convert_killed(role: Path, output: Path, options: dict[str, Any], at: int, *, before: bool) -> bool:
    """The same for a conversion."""
    return ended(_convert, (str(role), str(output), options), at, before=before)


def pin_killed(run: Path, name: str, at: int, *, before: bool) -> bool:
    """The same for a pin that is made and ends."""
    return ended(_pin, (str(run), name), at, before=before)


def prune_killed(run: Path, steps: list[Step], at: int, *, before: bool) -> bool:
    """The same for the deletion of all steps but the newest, and the end of one that was begun before."""
    return ended(_prune, (str(run), steps), at, before=before)


def watch_killed(run: Path, log: Path, at: int) -> bool:
    """The same for a watch that looks once, pins and records."""
    return ended(watch_once, (str(run), str(log)), at, before=False)


def ended(job: Callable[..., None], arguments: tuple[Any, ...], at: int, *, before: bool) -> bool:
    """Run a job (a function of a module) in a child that ends at its call of this number, or comes to its end."""
    child = _SERVER.Process(target=_run, args=(job, arguments, at, before))
    start(child)
    child.join()
    assert child.exitcode in (0, KILLED)
    return child.exitcode == KILLED


def start(child: BaseProcess) -> None:
    """Start a child that has no need of the main module: it would import all of pytest first, once a child."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        child.start()
    finally:
        sys.modules["__main__"] = main


def _migrate(role: str, options: dict[str, Any]) -> None:
    migrate(Path(role), Options(**options))


def _merge(role: str, output: str, options: dict[str, Any]) -> None:
    merge(Path(role), Path(output), merging.Options(**options))


def _convert(role: str, output: str, options: dict[str, Any]) -> None:
    convert(Path(role), Path(output), converting.Options(**options))


def _pin(run: str, name: str) -> None:
    with pinned(Path(run), Path(run, name)):
        pass


def _prune(run: str, steps: list[Step]) -> None:
    clear_removed(Path(run))
    for _ in carry_out(Path(run), plan(Path(run), steps, 1, None, protected(Path(run)))):
        pass


def watch_once(run: str, log: str) -> None:
    """Watch a run whose checkpoints are finished, with a recorder that is told of a log."""
    settings = Settings(callbacks=("tests.watched:Recorder",), callback_config={"log": log}, pin=True)
    with Watcher(Path(run), settings) as watcher:
        for _ in watcher.watch(once=True):
            pass


def _run(job: Callable[..., None], arguments: tuple[Any, ...], at: int, before: bool) -> None:
    code = 70
    try:
        _end_at(at, before=before)
        job(*arguments)
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
            mine = counts and done == at
            try:
                return call(*arguments, **options)
            finally:  # a call that fails is an end as good as any
                if mine:
                    os._exit(KILLED)

        return wrapped

    tamed = {"fsync": _without_waiting, "copy_file_range": _in_pieces(os.copy_file_range)}
    for name in CALLS:
        setattr(os, name, counted(tamed.get(name, getattr(os, name)), opening=name == "open"))


def _without_waiting(_handle: int) -> None:
    """There are thousands of kills: what is synced is counted only."""


def _in_pieces(copy: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    """A large file is copied by many calls; a small one here too, so that there is half a file to find."""
    return lambda reading, writing, count: copy(reading, writing, min(count, PIECE))
