"""What a watch has done: a small file beside the steps, so that a restart neither repeats nor misses anything.

It is replaced as a whole, before an action begins and after it is done. An action that is not recorded as done when
the watch is killed is done again: at least once, never not at all. Whoever has the state open holds a lock on the file
``NAME.lock`` beside it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any, Literal, get_args

from ckpttool.errors import BrokenCheckpoint, CannotWrite, NotACheckpoint
from ckpttool.formats.jsonfile import read_object
from ckpttool.staging import take
from ckpttool.watching.scanning import Anchor, is_rewritten
from ckpttool.wholefile import write_whole

NAME = ".ckpttool-watch.json"
SCHEMA = 1

Course = Literal["running", "failed", "done", "gone"]

_KINDS = {"step": int, "role": str, "attempts": int, "actions": list, "at": float}
"""What values of the file have to be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What was done with a checkpoint: ``actions`` are those done, by label; ``anchor`` tells which save it is.

    ``attempts`` counts how often it was begun, ``at`` is when that changed last (seconds since 1970), ``status`` the
    code of the action that failed.
    """

    step: int
    role: str
    course: Course
    anchor: Anchor | None
    actions: tuple[str, ...] = ()
    attempts: int = 1
    at: float = 0.0
    status: int | None = None

    def lacks(self, labels: Collection[str]) -> bool:
        """Tell whether something is still to be done with it: an action that failed, was cut short, or is new."""
        return self.course != "done" or not set(labels) <= set(self.actions)

    def is_of(self, path: Path) -> bool:
        """Tell whether what lies there is the save that this tells of, and not one that was saved anew since."""
        return self.anchor is None or not is_rewritten(path, self.anchor)


class State:
    """The state of a run's watch, read and locked from :meth:`__enter__` to :meth:`__exit__`."""

    def __init__(self, path: Path, run: Path) -> None:
        self.path, self._run = path, run
        self.entries: dict[str, Entry] = {}
        self._lines: dict[str, tuple[Entry, str]] = {}
        self._lock = -1
        self.skew = 0.0
        """Seconds by which the clock of the file system is ahead of this machine's."""

    def __enter__(self) -> State:
        """Lock and read it; raises :class:`CannotWrite` where another watch has it, or where it is none."""
        self._lock = _locked(self.path)
        try:
            self.skew = _skew(self._lock)
            self.entries = _read(self.path, self._run)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._release()

    def _release(self) -> None:
        with suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a process that was forked meanwhile would go on to hold it
        with suppress(OSError):  # it is closed all the same, and nothing was written there
            os.close(self._lock)
        self._lock = -1

    def put(self, name: str, entry: Entry) -> None:
        """Record what was done with a checkpoint; it is on disk when this returns. Raises :class:`CannotWrite`."""
        before = self.entries.get(name)
        self.entries[name] = entry
        try:
            write_whole(self.path, self._written(), force=True)
        except BaseException:
            if before is None:
                del self.entries[name]
            else:
                self.entries[name] = before
            raise

    def _written(self) -> bytes:
        """Return what the file holds: a line for each checkpoint, made once as long as it stays as it is."""
        for name, entry in self.entries.items():
            if name not in self._lines or self._lines[name][0] is not entry:
                self._lines[name] = entry, f"{json.dumps(name)}: {json.dumps(asdict(entry))}"
        head = json.dumps({"ckpttool_watch": SCHEMA, "run": str(self._run), "inode": self._run.stat().st_ino})
        lines = ",\n".join(self._lines[name][1] for name in sorted(self.entries))
        return f'{head[:-1]}, "checkpoints": {{\n{lines}\n}}}}\n'.encode()

    def change(self, name: str, **changes: Any) -> None:
        """Record what is new about a checkpoint."""
        self.put(name, replace(self.entries[name], **changes))


def _locked(path: Path) -> int:
    lock = path.with_name(f"{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise CannotWrite(
            f"{lock}: {error.strerror}; a watch keeps its state there", hint="Name a file elsewhere: --state FILE."
        ) from error
    if take(handle):
        return handle
    os.close(handle)
    raise CannotWrite(
        f"{path}: another watch is at work with this state",
        hint="Wait for it, or end it. A watch with other actions may have a state of its own: --state FILE, or "
        'state = "FILE" in the file of options.',
        code="busy",
    )


def _skew(lock: int) -> float:
    """Return how far the clock is ahead by which files are dated: on a remote file system, that of the server."""
    try:
        os.utime(lock)
        return os.fstat(lock).st_mtime - time.time()
    except OSError:
        return 0.0


def _read(path: Path, run: Path) -> dict[str, Entry]:
    if not os.path.lexists(path):
        return {}
    try:
        if path.is_symlink():  # it would be replaced, and not the file that it leads to
            raise BrokenCheckpoint("a symbolic link")
        content = read_object(path)
        if content.get("ckpttool_watch") != SCHEMA:
            raise BrokenCheckpoint(f"{path.name}: not the state of a watch of schema {SCHEMA}")
        if content["run"] != str(run) and content["inode"] != run.stat().st_ino:  # neither moved nor mounted elsewhere
            raise CannotWrite(
                f"{path}: this is the state of another run, {content['run']}",
                hint="Each run has a state of its own: --state FILE. Of a copy of a run, remove the copied state: then "
                "every checkpoint is acted on as if it were new.",
                code="other-run",
            )
        return {name: _entry(name, value) for name, value in content["checkpoints"].items()}
    except (BrokenCheckpoint, NotACheckpoint, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CannotWrite(
            f"{path}: this is no state of a watch: {error}",
            hint="Name another file with --state. Without it, every checkpoint is acted on as if it were new.",
            code="bad-state",
        ) from error


def _entry(name: str, value: Mapping[str, Any]) -> Entry:
    whole = all(type(value[key]) is kind for key, kind in _KINDS.items()) and value["course"] in get_args(Course)
    if not whole or not all(isinstance(label, str) for label in value["actions"]) or not _is_below(name):
        raise ValueError(f"checkpoint {name!r}")
    return Entry(**{**value, "anchor": _anchor(value["anchor"]), "actions": tuple(value["actions"])})


def _anchor(value: Mapping[str, Any] | None) -> Anchor | None:
    if value is None:
        return None
    if type(value["file"]) is not str or type(value["written"]) is not int or not _is_below(value["file"]):
        raise ValueError("an anchor")
    return Anchor(**value)


def _is_below(name: str) -> bool:
    """Tell whether a file system may have this path below a directory."""
    try:
        raw = os.fsencode(name)
    except UnicodeEncodeError:
        return False
    path = PurePath(name)
    return bool(path.parts) and b"\0" not in raw and not path.is_absolute() and ".." not in path.parts
