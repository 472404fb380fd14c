"""What one call of the command line shares: how results and errors are shown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpttool.errors import CkpttoolError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(slots=True)
class Session:
    """The state of one call. Commands set it first, so that errors come out the way results do."""

    command: str = ""
    json: bool = False
    by_line: bool = False
    debug: bool = False
    color: str = "auto"
    when_stopped: str = ""
    run: Callable[[list[str]], int] | None = None

    def begin(self, command: str, *, json: bool, color: str, by_line: bool = False) -> None:
        """Say which command runs and how it shall speak; ``by_line`` is JSON of which every object is a line."""
        self.command, self.json, self.color, self.by_line = command, json, color, by_line

    @property
    def out(self) -> Console:
        """The console for results."""
        from ckpttool.render import terminal

        return terminal.console(sys.stdout, self.color)

    @property
    def err(self) -> Console:
        """The console for progress, notes and errors."""
        from ckpttool.render import terminal

        return terminal.console(sys.stderr, self.color)

    def stopped(self, code: int) -> int:
        """Say what a command that was stopped by a signal leaves behind, and return the exit code."""
        if self.when_stopped:
            sys.stderr.write(f"\n{self.when_stopped}\n")
        return code

    def fail(self, error: CkpttoolError) -> int:
        """Show an error and return its exit code."""
        from ckpttool.render import terminal

        if self.json:
            from ckpttool.errors import Problem

            first = Problem(code=error.code, message=error.message, hint=error.hint)
            problems, lines = (first, *error.problems), not self.by_line
            body = terminal.envelope(self.command, ok=False, data=error.data, problems=problems, lines=lines)
            sys.stdout.write(f"{body}\n")
        terminal.show_error(error, self.err)
        return error.exit_code
