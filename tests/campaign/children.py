"""A command line in a child process whose calls of the system are watched, slowed, failed, or its last.

Imports no heavy library: it is forked often. Counted is what changes the file system or reads a file at or below
``root``, and every step of a migration; hooks are told of each of these before it is done, and after it.
"""

from __future__ import annotations

import builtins
import io
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import safetensors.numpy  # noqa: F401 - children find loaded what every command loads

from ckpttool import cli, converting, merging  # noqa: F401
from ckpttool.migration import steps
from ckpttool.render import terminal  # noqa: F401
from tests import killing
from tests.killing import CALLS

Kind = Literal["write", "read", "step"]

READS = ("pread", "preadv", "read")
WRITES = (*CALLS, "close")
"""What changes a file system; of ``open`` only what creates, of ``close`` only what ends the writing of a file."""

LONGEST = 60.0
"""Seconds after which a child is killed, which is a fault."""

HUNG = 124

_TEMPORARY = re.compile(r"(\.partial-|\.replaced-|\.ckpttool-(?:pins|removing)/[^/ ]*-)\w{8}")


@dataclass(frozen=True)
class Event:
    """A call (or step): its name, where below the root, and the how-manieth of its kind it is, from 1 on."""

    kind: Kind
    call: str
    where: str
    number: int
    file: str | None = None
    """The path that an error would name: the system knows none of a file that is open."""

    @property
    def label(self) -> str:
        """What is done, without what chance named."""
        return f"{self.call} {_TEMPORARY.sub(lambda found: found[1] + '*', self.where)}"


class Hook:
    """Is told of what happens in the child. It travels there: hooks are data."""

    def before(self, event: Event) -> None:
        """Told before it is done; what is raised is raised instead."""

    def after(self, event: Event) -> None:
        """Told after it was done."""


@dataclass
class Log(Hook):
    """Writes the labels of everything of a kind to a file."""

    path: str
    kind: Kind = "write"

    def before(self, event: Event) -> None:
        if event.kind == self.kind:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(f"{event.label}\n")


@dataclass
class Die(Hook):
    """SIGKILL right before or right after something with this label, when it comes for the nth time."""

    label: str
    nth: int = 1
    is_before: bool = True

    def before(self, event: Event) -> None:
        if self.is_before:
            self._count(event)

    def after(self, event: Event) -> None:
        if not self.is_before:
            self._count(event)

    def _count(self, event: Event) -> None:
        self.nth -= event.label == self.label
        if not self.nth:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Fail(Hook):
    """One call fails with an error of the system, or everything does from then on."""

    at: int
    code: int
    lasting: bool = False
    kind: Kind = "write"

    def before(self, event: Event) -> None:
        if event.call != "close":
            self._fail(event)

    def after(self, event: Event) -> None:
        if event.call == "close":  # it is closed all the same
            self._fail(event)

    def _fail(self, event: Event) -> None:
        if event.kind == self.kind and (event.number == self.at or (self.lasting and event.number > self.at)):
            raise OSError(self.code, os.strerror(self.code), event.file)


@dataclass
class Slow(Hook):
    """Everything of a kind takes its time."""

    seconds: float
    kind: Kind = "write"

    def before(self, event: Event) -> None:
        if event.kind == self.kind:
            time.sleep(self.seconds)


@dataclass
class Pause(Hook):
    """Before a call of a number the child says so, and waits until it is told to go on."""

    at: int
    told: Connection
    go: Connection
    kind: Kind = "read"

    def before(self, event: Event) -> None:
        if event.kind == self.kind and event.number == self.at:
            self.told.send(event.label)
            self.go.recv()


@dataclass(frozen=True)
class Habits:
    """How the child's system behaves: bytes that one call writes at most, seconds between signals that say nothing."""

    most: int | None = None
    tick: float | None = None
    band: int = 8192
    """Bytes that the tool moves at once, in place of 8 MiB: small files then have many."""


USUAL = Habits()


@dataclass(frozen=True)
class End:
    """How a child ended: its exit code (negative: the signal), and what it printed."""

    code: int
    text: str


@dataclass
class Child:
    """A command that runs."""

    process: Any
    out: Path

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send it a signal, unless it comes to its end in that very moment."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def end(self) -> End:
        """Wait for its end."""
        self.process.join(LONGEST)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        return End(HUNG if code is None else code, self.out.read_text(errors="backslashreplace"))


_CONTEXT = multiprocessing.get_context("forkserver")


def start(
    arguments: Sequence[object], root: Path, out: Path, hooks: Sequence[Hook] = (), habits: Habits = USUAL
) -> Child:
    """Start a command line. When this returns, Python and its modules are up, and the command begins."""
    here, there = _CONTEXT.Pipe(duplex=False)
    job = ([str(word) for word in arguments], str(root), str(out), list(hooks), habits, there)
    process = _CONTEXT.Process(target=_run, args=job)
    killing.start(process)
    there.close()
    assert here.poll(LONGEST)
    here.recv()
    here.close()
    return Child(process, out)


def run(arguments: Sequence[object], root: Path, out: Path, hooks: Sequence[Hook] = (), habits: Habits = USUAL) -> End:
    """Run a command line to its end."""
    return start(arguments, root, out, hooks, habits).end()


def _run(arguments: list[str], root: str, out: str, hooks: list[Hook], habits: Habits, began: Connection) -> None:
    """Be the console script."""
    handle = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.argv = ["ckpttool", *arguments]
    _behave(habits)
    _watch(_Watcher(f"{root}/", hooks))
    began.send(None)
    began.close()
    cli.entry()


def _behave(habits: Habits) -> None:
    vars(os)["fsync"] = lambda _handle: None  # there are thousands of runs: what is synced is counted only
    for module in [module for name, module in sys.modules.items() if name.startswith("ckpttool.")]:
        if hasattr(module, "BAND"):
            vars(module)["BAND"] = habits.band
    if habits.most is not None:
        _write_little(habits.most)
    if habits.tick is not None:
        signal.signal(signal.SIGALRM, lambda _number, _frame: None)
        signal.setitimer(signal.ITIMER_REAL, habits.tick, habits.tick)


def _write_little(most: int) -> None:
    write, pwrite, copy = os.write, os.pwrite, os.copy_file_range

    def little(source: int, target: int, count: int, *where: int) -> int:
        return copy(source, target, min(count, most), *where)

    vars(os)["write"] = lambda handle, data: write(handle, memoryview(data)[:most])
    vars(os)["pwrite"] = lambda handle, data, at: pwrite(handle, memoryview(data)[:most], at)
    vars(os)["copy_file_range"] = little


class _Watcher:
    """Counts what happens below a directory, and tells hooks of it."""

    def __init__(self, root: str, hooks: Sequence[Hook]) -> None:
        self._root, self._hooks = root, hooks  # the root ends with a slash
        self._done: dict[Kind, int] = {"write": 0, "read": 0, "step": 0}
        self._lock, self._mine = threading.Lock(), threading.local()

    def do(self, kind: Kind, call: str, where: str, act: Callable[[], Any], file: str | None = None) -> Any:
        """Do something, and tell of it unless it is a hook that does it."""
        if getattr(self._mine, "telling", False) or not f"{where}/".startswith(self._root):
            return act()
        with self._lock:
            self._done[kind] += 1
            event = Event(kind, call, f"{where}/".replace(self._root, "").rstrip("/"), self._done[kind], file)
        self._tell("before", event)
        value = act()
        self._tell("after", event)
        return value

    def _tell(self, when: str, event: Event) -> None:
        self._mine.telling = True
        try:
            for hook in self._hooks:
                getattr(hook, when)(event)
        finally:
            self._mine.telling = False


def _watch(watcher: _Watcher) -> None:
    """Put the watcher between Python and the system."""
    for name in WRITES:
        _wrap(os, name, watcher, "write")
    for name in READS:
        _wrap(os, name, watcher, "read")
    _wrap(os, "open", watcher, "read")
    opened = io.open

    def open_file(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        def act() -> Any:
            return opened(file, mode, *more, **options)

        is_path = isinstance(file, str | os.PathLike)
        name = os.fspath(file) if is_path else ""
        return watcher.do("read", "open", name, act, name) if is_path and "r" in mode else act()

    vars(io)["open"] = vars(builtins)["open"] = open_file
    once = vars(steps)["_one"]
    vars(steps)["_one"] = lambda role, step, progress: watcher.do(
        "step", type(step).__name__, f"{role}/{_of_step(step)}", lambda: once(role, step, progress)
    )


def _of_step(step: Any) -> str:
    return str(getattr(step, "path", "") or getattr(step, "target", ""))


def _wrap(module: Any, name: str, watcher: _Watcher, kind: Kind) -> None:
    real = getattr(module, name)

    def wrapped(*arguments: Any, **options: Any) -> Any:
        def act() -> Any:
            return real(*arguments, **options)

        if _is_other(name, kind, arguments):
            return act()
        file = None if isinstance(arguments[0], int) else os.fsdecode(arguments[0])
        return watcher.do(kind, name, _where(name, arguments, options), act, file)

    setattr(module, name, wrapped)


def _is_other(name: str, kind: Kind, arguments: Sequence[Any]) -> bool:
    """Whether a call is not of this kind after all."""
    if name == "open":
        return (kind == "write") is not bool(arguments[1] & os.O_CREAT)
    return name == "close" and not _is_written(arguments[0])


def _is_written(handle: int) -> bool:
    import fcntl

    try:
        return fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False


def _where(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> str:
    """The path that a call is about; two where it has two."""
    if name == "copy_file_range":
        return _path(arguments[1], None)
    first = _path(arguments[0], options.get("dir_fd", options.get("src_dir_fd")))
    if name in ("rename", "replace", "link"):
        return f"{first} -> {_path(arguments[1], options.get('dst_dir_fd'))}"
    return _path(arguments[1], options.get("dir_fd")) if name == "symlink" else first


def _path(what: Any, folder: int | None) -> str:
    if isinstance(what, int):
        return str(Path(f"/proc/self/fd/{what}").readlink())
    path = os.fsdecode(what)
    return path if folder is None else f"{_path(folder, None)}/{path}"


@dataclass
class Held:
    """A child that stops at a call until it is let go."""

    child: Child
    told: Connection
    go: Connection

    def reached(self) -> str | None:
        """Wait until it stands at the call, and return its label; ``None`` where it ended before."""
        if not self.told.poll(LONGEST):
            return None
        try:
            return str(self.told.recv())
        except EOFError:
            return None

    def end(self) -> End:
        """Let it go, and wait for its end."""
        with suppress(OSError):  # it may have ended
            self.go.send(None)
        return self.child.end()


def held(arguments: Sequence[object], root: Path, out: Path, at: int, kind: Kind, habits: Habits = USUAL) -> Held:
    """Start a command line that is to stop before the call of a number."""
    told, tells = _CONTEXT.Pipe(duplex=False)
    waits, go = _CONTEXT.Pipe(duplex=False)
    child = start(arguments, root, out, [Pause(at, tells, waits, kind)], habits)
    tells.close()
    waits.close()
    return Held(child, told, go)
