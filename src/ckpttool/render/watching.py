"""What ``watch`` tells: a line for everything that happens, and one that moves while it waits."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from ckpttool.render.terminal import clean, duration, envelope, near, plural, print_each, size
from ckpttool.watching.result import Notice, Status, What

EVERY = 600.0
"""Seconds between two lines that say where things stand, without a terminal."""

_STYLES: Mapping[What, str] = {
    "finished": "bold",
    "failed": "bold red",
    "incomplete": "bold yellow",
    "gone": "bold yellow",
    "done": "green",
    "stopped": "bold",
}
_QUIET: frozenset[What] = frozenset({"failed", "incomplete", "gone"})
_INNER: frozenset[What] = frozenset({"acting", "acted", "failed", "done"})


class Display:
    """Shows notices on ``out`` as they come, and on ``err`` where things stand. It is a context: lines are erased."""

    def __init__(self, out: Console, err: Console, *, json: bool, quiet: bool, progress: bool) -> None:
        self._out, self._err = out, err
        self._json, self._quiet, self._progress = json, quiet, progress
        self._drawn, self._last = False, time.monotonic()
        self._day = ""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_error: object) -> None:
        self._erase()

    def tell(self, notice: Notice) -> None:
        """Print a notice at once."""
        if self._json:
            line = envelope("watch", ok=notice.ok, data=notice.as_json(), problems=notice.problems, lines=False)
            self._out.file.write(f"{line}\n")
        elif notice.what == "acting":
            self._draw(f"running {notice.data['action']} on {notice.event.name if notice.event else ''}")
        elif not self._quiet or notice.what in _QUIET or not notice.ok:
            self._erase()
            self._print(notice)
        self._out.file.flush()

    def _print(self, notice: Notice) -> None:
        at = self._at(notice)
        inner = "! " if notice.what == "failed" else "  " if notice.what in _INNER else ""
        style = _STYLES.get(notice.what, "")
        words = clean(near(_message(notice)))
        self._out.print(Text.assemble((at, "dim"), (f"{inner}{words}", style)), soft_wrap=True)
        if notice.what == "stopped":  # its problems were told when they came
            return
        told = [problem for problem in notice.problems if problem.message != notice.message]
        print_each(told, self._out, indent=len(at) + 2)
        for hint in {problem.hint for problem in notice.problems if problem.message == notice.message and problem.hint}:
            self._out.print(Text(f"{' ' * (len(at) + 2)}{clean(hint, lines=True)}", "dim"), soft_wrap=True)
        for line in notice.detail.splitlines():
            self._out.print(Text(f"{' ' * (len(at) + 2)}{clean(line)}", "dim"), soft_wrap=True)

    def _at(self, notice: Notice) -> str:
        """Return the time of day, and the day where that is another one: a watch runs for weeks."""
        if notice.what in ("watching", "stopped"):
            return ""
        then = time.localtime(notice.at)
        day, self._day = self._day, time.strftime("%Y-%m-%d", then)
        if day != self._day:
            self._out.print(Text(self._day, "dim"))
        return time.strftime("%H:%M:%S  ", then)

    def when_stopped(self, notice: Notice) -> str:
        """Return what is to be said when a signal comes before the next notice."""
        if notice.what != "acting" or notice.event is None:
            return "stopped"
        return f"stopped; {notice.data['action']} on {notice.event.name} was cut short: the next watch does it again"

    def wait(self, status: Status) -> None:
        """Show where things stand: in a line that moves on a terminal, one now and then elsewhere."""
        now = time.monotonic()
        if not self._progress or (not self._err.is_terminal and now - self._last < EVERY):
            return
        self._last = now
        line = status_line(status, time.time())
        if self._err.is_terminal:
            self._draw(line)
        else:
            self._err.file.write(f"{clean(line)}\n")
            self._err.file.flush()

    def _draw(self, line: str) -> None:
        """Show what goes on in a line that the next one erases; nothing without a terminal."""
        if self._progress and self._err.is_terminal:
            self._drawn = True
            self._err.file.write(f"\r\x1b[K{clean(near(line))[: self._err.width - 1]}")
            self._err.file.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._err.file.write("\r\x1b[K")
            self._err.file.flush()
            self._drawn = False


def _message(notice: Notice) -> str:
    data = notice.data
    if notice.what == "watching":
        return f"watching {data['run']}: {', '.join(data['actions']) or 'no action'}{_before(data)}"
    if notice.what == "finished":
        return f"{notice.message}, {size(data['bytes'])} in {plural(data['files'], 'file')}{_again(notice)}"
    if notice.what == "acted":
        return f"{notice.message} in {duration(data['seconds'])}"
    if notice.what == "done":
        return f"done in {duration(data['seconds'])}"
    if notice.what == "pruned" and data.get("freed"):
        return f"{notice.message}: {size(data['freed'])} freed"
    if notice.what == "stopped":
        return f"{notice.message}; {_counts(data)}"
    return notice.message


def _before(data: Mapping[str, Any]) -> str:
    done = f"; {plural(data['done_before'], 'checkpoint')} done before" if data["done_before"] else ""
    again = f"; of {plural(data['due_again'], 'other')}, some of it is still to be done" if data["due_again"] else ""
    return done + again


def _again(notice: Notice) -> str:
    event = notice.event
    if event is None:
        return ""
    if event.rewritten:
        return " (saved anew)"
    return f" (attempt {event.attempt})" if event.attempt > 1 else ""


def _counts(data: Mapping[str, Any]) -> str:
    before = f", {data['done_before']:,} before" if data["done_before"] else ""
    words = [f"{plural(data['done'], 'checkpoint')} done{before}"]
    if data["failed"]:
        words.append(f"{data['failed']:,} failed, which the next watch tries again")
    if data["unfinished"]:
        first = data["unfinished"][0]
        more = f" (and {len(data['unfinished']) - 1:,} more)" if len(data["unfinished"]) > 1 else ""
        words.append(f"{first['checkpoint']} waits for {first['waits_for']}{more}")
    return "; ".join(words)


def status_line(status: Status, now: float) -> str:
    """Say in one line what came last, what is expected, and how far it is."""
    words = [f"last {status.last}" if status.last else "nothing yet"]
    if status.growing is not None:
        rate = f", {size(status.rate)}/s" if status.rate else ""
        words.append(f"{status.growing}: {size(status.bytes)}{rate}, waits for {status.awaited}")
    elif status.expected is not None:
        due = status.due - now if status.due is not None else 0.0
        when = f" in about {duration(due)}" if due > 1 else f" was due {duration(-due)} ago" if due < -60 else " is due"
        words.append(f"next step {status.expected}{when}")
    return "waiting: " + "; ".join(words)
