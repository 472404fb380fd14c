"""What all renderers share: the console, the JSON envelope, errors, numbers in words, progress."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckpttool.errors import CkpttoolError, Problem
from ckpttool.formats.findings import scaled
from ckpttool.formats.findings import size as size  # renderers take it from here
from ckpttool.telling import listening

ENVELOPE_VERSION = 1
PIPED_WIDTH = 120
PATIENCE = 0.5
"""Seconds after which one wants to know what is going on."""

WIDE = 110
"""Columns from which tables show everything."""

_TRAILING = re.compile(r"(?<! ) +\n")  # looked for once a run of spaces, however long it is


def console(file: TextIO | None = None, color: str = "auto") -> Console:
    """Return a console for data (stdout by default) that never cuts a line short when it is piped."""
    file = file or sys.stdout
    piped = not file.isatty()
    width = PIPED_WIDTH if piped and "COLUMNS" not in os.environ else None
    return Console(
        file=cast(TextIO, _Trimmed(file)) if piped else file,
        width=width,
        highlight=False,
        soft_wrap=False,
        force_terminal=True if color == "always" else None,
        no_color=True if color == "never" else None,
        color_system=None if color == "never" else "auto",
    )


class _Trimmed(io.TextIOBase):
    """A pipe without the spaces that tables leave at the end of lines."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the pipe."""
        return self._file.encoding

    def write(self, text: str) -> int:
        """Write text, trimmed line by line."""
        return self._file.write(_TRAILING.sub("\n", text))

    def flush(self) -> None:
        """Flush the pipe."""
        self._file.flush()


def envelope(command: str, *, ok: bool, data: Any, problems: Iterable[Problem], lines: bool = True) -> str:
    """Return the JSON object that a command prints with ``--json``, in many lines or in one."""
    body = {
        "ckpttool": ENVELOPE_VERSION,
        "command": command,
        "ok": ok,
        "data": data,
        "problems": [asdict(problem) for problem in problems],
    }
    return json.dumps(body, indent=2 if lines else None, ensure_ascii=True)


def show_error(error: CkpttoolError, out: Console) -> None:
    """Print one line of fact, every reason, and one line of hint."""
    out.print(Text("error: ", "bold red") + Text(clean(near(error.message))), soft_wrap=True)
    print_each([_unless_said_again(*pair) for pair in zip_longest(error.problems, error.problems[1:])], out)
    if error.table is not None:
        table = new_table(*error.table.columns)
        for row in error.table.rows:
            table.add_row(*map(clean, row))
        out.print(Padding(table, (0, 0, 0, 2), expand=False))
    if error.hint:
        out.print(Text("hint:  ", "bold") + Text(clean(near(error.hint), lines=True)), soft_wrap=True)


def _unless_said_again(problem: Problem, following: Problem | None) -> Problem:
    """Leave out a hint that the next one has as well: it is said once, below the last of them."""
    return replace(problem, hint="") if following is not None and following.hint == problem.hint else problem


def near(text: str) -> str:
    """Write paths in a text as one types them here: relative where they lie below the working directory."""
    here = _here()
    return re.sub(rf"(?<![\w./-]){re.escape(here)}/(?![-/])", "", text) if len(here) > 1 else text


def clean(text: str, *, lines: bool = False) -> str:
    """Escape what could move the cursor or colour the terminal: names come from untrusted files."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or (lines and c == "\n") else c.encode("unicode_escape").decode() for c in text)


def shown_path(path: str) -> str:
    """Return a path relative to the working directory when it lies below it."""
    here = _here()
    return os.path.relpath(path, here) if here and Path(path).is_relative_to(here) else path


def _here() -> str:
    """Return the working directory; nothing where it is gone."""
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def typed_path(path: str) -> str:
    """Return a path as one types it behind a command: nothing that looks like an option."""
    shown = shown_path(path)
    return f"./{shown}" if shown.startswith("-") else shown


def number(count: int) -> str:
    """Write a count of parameters: ``1.54 B``; small ones in full."""
    return f"{count:,}" if count < 1_000_000 else scaled(count / 1000, ("M", "B", "T"))


def plural(count: int, noun: str) -> str:
    """Write a count with its noun: ``1 tensor``, ``1,155 tensors``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def age(modified: float) -> str:
    """Write how long ago a file was changed."""
    seconds = max(0.0, time.time() - modified)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def new_grid() -> Table:
    """Return an empty table of names and what they are."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="cyan")
    facts.add_column(overflow="fold")
    return facts


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """Return an empty table with these columns."""
    made = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="cyan")
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


MOST_PROBLEMS = 1000
"""Problems of one kind that people are shown; programs are given all of them."""

FOLDED_LONGEST = 100_000
"""Characters from which on a message is not folded into columns: for a million names that takes half a minute."""


def show_problems(problems: Sequence[Problem], out: Console) -> None:
    """Print problems, faults before notes."""
    faults = sum(problem.severity == "error" for problem in problems)
    notes = len(problems) - faults
    counts = [f"{n} {word}{'s' * (n > 1)}" for n, word in ((faults, "problem"), (notes, "note")) if n]
    out.print()
    out.print(Text(" and ".join(counts).capitalize(), "bold"))
    print_each(sorted(problems, key=lambda p: p.severity != "error"), out, indent=2)


def print_each(problems: Iterable[Problem], out: Console, *, indent: int = 0) -> None:
    """Print problems one by one: a thousand of a kind, and how many more there are."""
    shown: Counter[str] = Counter()
    for problem in problems:
        shown[problem.code] += 1
        if shown[problem.code] > MOST_PROBLEMS:
            continue
        if len(problem.message) < FOLDED_LONGEST:
            out.print(Padding(show_problem(problem), (0, 0, 0, indent), expand=False))
        else:
            _print_plain(problem, out, " " * indent)
    for code, count in shown.items():
        if count > MOST_PROBLEMS:
            more = f"and {count - MOST_PROBLEMS:,} more of the kind {code} (--json lists every one)"
            out.print(Text(" " * indent + more))


def _print_plain(problem: Problem, out: Console, before: str) -> None:
    """Print a problem in lines that nobody has folded."""
    out.file.write(f"{before}{'!' if problem.severity == 'error' else '-'} {_said(problem)}\n")
    if problem.hint:
        out.file.write(f"{before}  {clean(near(problem.hint))}\n")


def show_problem(problem: Problem) -> Table:
    """Return one problem with its hint."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    mark = Text("!", "bold red") if problem.severity == "error" else Text("-", "yellow")
    grid.add_row(mark, Text(_said(problem)))
    if problem.hint:
        grid.add_row("", Text(clean(near(problem.hint)), "dim"))
    return grid


def _said(problem: Problem) -> str:
    where = "" if not problem.path or problem.path in problem.message else f"{problem.path}: "
    return clean(near(where + problem.message))


def show_next(lines: Iterable[tuple[str, str]], out: Console) -> None:
    """Print what to type next: why, then a line that can be pasted as it stands."""
    out.print()
    out.print(Text("Next", "bold"))
    for why, command in lines:
        out.print(Text(f"  # {clean(why)}", "dim"), soft_wrap=True)
        out.print(Text(f"  {clean(command)}"), soft_wrap=True)


@contextmanager
def watching(out: Console, *, shown: bool = True) -> Iterator[None]:
    """Show on a terminal what is being looked at, when that takes longer than a moment."""
    started = last = time.monotonic()

    def show(what: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - started > PATIENCE and now - last > 0.1:
            last = now
            out.file.write(f"\r\x1b[Klooking at {clean(what)[: out.width - 12]}")
            out.file.flush()

    if not (shown and out.is_terminal):
        yield
        return
    with listening(show):
        try:
            yield
        finally:
            if last > started:
                out.file.write("\r\x1b[K")
                out.file.flush()


Advance = Callable[[int], None]


@contextmanager
def progress(what: str, out: Console, *, shown: bool) -> Iterator[Callable[[int | None], Advance]]:
    """Yield a function that takes the bytes to come, where known, and returns what each part of them is told to.

    It shows bytes, rate and time left: in a line that moves on a terminal, one now and then elsewhere.
    """
    every = 0.2 if out.is_terminal else 30.0
    drawn = False

    def start(total: int | None) -> Advance:
        done, started, last = 0, time.monotonic(), time.monotonic()

        def advance(count: int) -> None:
            nonlocal done, last, drawn
            done += count
            now = time.monotonic()
            if shown and now - last >= every:
                last, drawn = now, True
                line = _progress_line(what, done, total, done / max(now - started, 1e-9))
                out.file.write(f"\r\x1b[K{line[: out.width - 1]}" if out.is_terminal else f"{line}\n")
                out.file.flush()

        return advance

    try:
        yield start
    finally:
        if drawn and out.is_terminal:
            out.file.write("\r\x1b[K")
            out.file.flush()


def _progress_line(what: str, done: int, total: int | None, rate: float) -> str:
    if not total:
        return f"{what} {size(done)}, {size(rate)}/s"
    left = max(total - done, 0) / max(rate, 1.0)
    share = f"{min(done / total, 1.0):4.0%}"
    return f"{share}  {what} {size(done)} of {size(total)}, {size(rate)}/s, {duration(left)} left"


def duration(seconds: float) -> str:
    """Write a time span: ``80 ms``, ``1.8 s``, ``42 s``, ``3 min 20 s``, ``1 h 5 min``."""
    if seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


def demo_heading(what: str, command: str) -> Text:
    """Return the heading of a scene and the command line that runs next."""
    return Text(f"\n# {what}\n", "bold magenta") + Text(f"$ {clean(command)}\n", "bold")


def demo_end(root: str) -> Text:
    """Return the last words of the demo."""
    return Text(f"\nThe checkpoints stay in {clean(root)}; try more on them: ckpttool inspect --help\n")
