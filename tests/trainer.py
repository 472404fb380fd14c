"""A trainer that trains nothing: it writes checkpoints slowly, as an act after the other says, and tells what it does.

An act is data, so that a script of acts can be handed to a process (``python -m tests.trainer SCRIPT.json``) or be
performed step by step in a test: ``perform`` yields after each change of the file system (the file that it wrote, or
``None``), and at each moment that is told. It imports nothing but the standard library: it is started often.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Act = dict[str, Any]
Moment = dict[str, Any]
Step = Path | Moment | None

PIECES = 2
DEADLINE = 120.0


# Acts


def write(path: str, source: Path, *, pieces: int = PIECES, last: Moment | None = None) -> Act:
    """Copy a file in pieces: there is an empty one first. ``last`` is told right before the last piece."""
    return {"act": "write", "path": path, "source": str(source), "pieces": pieces, "last": last}


def text(path: str, content: str, *, last: Moment | None = None) -> Act:
    """Write a small file as ``open(path, "w")`` does, which empties it first."""
    return {"act": "text", "path": path, "text": content, "last": last}


def move(source: str, target: str, *, last: Moment | None = None) -> Act:
    """Rename, over a file that is there; a directory that is there is renamed first, and deleted after."""
    return {"act": "move", "source": source, "path": target, "last": last}


def remove(path: str, *, entries: int | None = None) -> Act:
    """Delete a tree, entry by entry; of ``entries`` only so many."""
    return {"act": "remove", "path": path, "entries": entries}


def together(*scripts: list[Act]) -> Act:
    """Perform scripts at the same time: one change of each in turn."""
    return {"act": "together", "scripts": list(scripts)}


def cut(acts: list[Act], changes: int) -> Act:
    """Perform the first changes of a script, and leave it at that: what a process that dies half way leaves."""
    return {"act": "cut", "acts": acts, "changes": changes}


def crash() -> Act:
    """End as nobody can prevent it. In a test that performs the acts itself nothing happens: use `cut`."""
    return {"act": "crash"}


def tell(what: str, **more: Any) -> Act:
    """Report a moment; with ``names``, what these directories hold at it."""
    return {"act": "tell", "moment": {"what": what, **more}}


def until(path: Path) -> Act:
    """Wait for a file that somebody else makes."""
    return {"act": "until", "path": str(path)}


def later() -> Act:
    """Tell ``later``, and wait until the file system's clock has moved on: what is written then is newer."""
    return {"act": "later"}


# Performing


def perform(run: Path, acts: Iterable[Act]) -> Iterator[Step]:
    """Perform acts in a run directory; yields after each change, and each moment that is told."""
    for act in acts:
        yield from _perform(run, act)


def _perform(run: Path, act: Act) -> Iterator[Step]:
    match act["act"]:
        case "write" | "text":
            return _write(run / act["path"], act)
        case "move":
            return _move(run / act["source"], run / act["path"], act["last"])
        case "remove":
            return islice(_remove(run / act["path"]), act["entries"])
        case "together":
            return _in_turn([perform(run, script) for script in act["scripts"]])
        case "cut":
            return islice(perform(run, act["acts"]), act["changes"])
        case "until":
            return _until(Path(act["path"]))
        case "later":
            return _wait_for_the_clock(run)
        case what:
            return iter([_with_contents(run, act["moment"]) if what == "tell" else {"what": what}])


def _move(source: Path, target: Path, last: Moment | None) -> Iterator[Step]:
    old = target.with_name(f"old_{target.name}")
    if target.is_dir():
        target.rename(old)
        yield None
    yield from _told(last)
    source.replace(target)
    yield None
    yield from _remove(old) if old.exists() else ()


def _until(path: Path) -> Iterator[None]:
    while not path.exists():
        yield None


def _told(moment: Moment | None) -> Iterator[Moment]:
    if moment is not None:
        yield moment


def _write(path: Path, act: Act) -> Iterator[Step]:
    content = act["text"].encode() if act["act"] == "text" else Path(act["source"]).read_bytes()
    pieces = _cut_up(content, act.get("pieces", 1))
    if not path.parent.is_dir():
        path.parent.mkdir(parents=True)
        yield None
    with path.open("wb", buffering=0) as file:
        yield path
        for at, piece in enumerate(pieces, 1):
            if at == len(pieces):
                yield from _told(act["last"])
            file.write(piece)
            yield path


def _cut_up(content: bytes, pieces: int) -> list[bytes]:
    size = max(1, -(-len(content) // pieces))
    return [content[at : at + size] for at in range(0, len(content), size)] or [b""]


def _remove(path: Path) -> Iterator[None]:
    """Remove as `shutil.rmtree` does, with somebody else's processes in between."""
    for folder, folders, files in os.walk(path, topdown=False):
        for name in files:
            (Path(folder) / name).unlink(missing_ok=True)
            yield None
        for name in folders:
            shutil.rmtree(Path(folder) / name, ignore_errors=True)
    shutil.rmtree(path, ignore_errors=True)
    yield None


def _in_turn(scripts: list[Iterator[Step]]) -> Iterator[Step]:
    while scripts:
        for script in list(scripts):
            try:
                yield next(script)
            except StopIteration:
                scripts.remove(script)


def _wait_for_the_clock(run: Path) -> Iterator[Step]:
    """Time stamps of files move in steps of some milliseconds."""
    yield {"what": "later"}
    probe = run.parent / ".clock"
    probe.touch()
    first = probe.stat().st_mtime_ns
    while probe.stat().st_mtime_ns == first:
        probe.touch()
    probe.unlink()
    yield None


# What is there


def _with_contents(run: Path, moment: Moment) -> Moment:
    names = moment.get("names", ())
    return {**moment, "files": {name: contents(run / name) for name in names}} if names else moment


def contents(folder: Path) -> dict[str, str]:
    """Path below a directory to size and hash, of every file in it; a file that vanishes is not there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        try:
            data = path.read_bytes()
        except (IsADirectoryError, FileNotFoundError):
            continue
        found[path.relative_to(folder).as_posix()] = f"{len(data)} {hashlib.sha256(data).hexdigest()[:16]}"
    return found


def report(log: Path, moment: Moment) -> None:
    """Add a moment to a file, as a line of JSON; lines of several processes are in the order of what they tell."""
    with log.open("ab", buffering=0) as file:
        file.write(json.dumps(moment).encode() + b"\n")


def read_log(log: Path) -> list[Moment]:
    """The moments that were reported until now."""
    lines = log.read_bytes().split(b"\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in lines]


# As a process


def main(script: str) -> int:
    """Perform a script, with a pause after each change; moments are reported to its log."""
    orders = json.loads(Path(script).read_text())
    ends = time.monotonic() + DEADLINE
    for moment in perform(Path(orders["run"]), orders["acts"]):
        if isinstance(moment, dict):
            report(Path(orders["log"]), moment)
            if moment["what"] == "crash":
                os.kill(os.getpid(), signal.SIGKILL)
        elif time.monotonic() > ends:
            raise TimeoutError(f"not done after {DEADLINE:g} s")
        else:
            time.sleep(orders["pause"])
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
