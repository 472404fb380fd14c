"""Everything that can go wrong, and whose problem it is.

An error is one line of fact that names the path and the thing, one line of hint with the next command,
and an exit code. A :class:`Problem` is the same as data: what a command found and reports without stopping.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Severity = Literal["error", "note"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One finding: ``code`` is stable for programs, ``message`` is for people.

    ``path`` is relative to the inspected directory ("" is the directory itself). A ``note`` is worth knowing
    and makes nothing incomplete.
    """

    code: str
    message: str
    path: str = ""
    hint: str = ""
    severity: Severity = "error"


@dataclass(frozen=True, slots=True)
class Table:
    """What an error has to show in rows and columns."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


class CkpttoolError(Exception):
    """Base of every error that a user may see. Exit code 70 means that the fault is ours."""

    exit_code: ClassVar[int] = 70

    table: Table | None = None
    """Shown to people below the message."""

    data: Any = None
    """The same for programs, as values that JSON has."""

    def __init__(self, message: str, *, hint: str = "", code: str = "", problems: Iterable[Problem] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code or type(self).__name__
        self.problems = tuple(problems)

    def __str__(self) -> str:
        """Return the message, and every reason in a line of its own."""
        return "\n".join([self.message, *(f"  {problem.message}" for problem in self.problems)])


class UsageError(CkpttoolError):
    """The command line asks for something that makes no sense, or leaves a choice open that is the user's."""

    exit_code = 2


class NotACheckpoint(CkpttoolError):
    """Nothing there, not readable, or nothing that we recognise."""

    exit_code = 3


class BrokenCheckpoint(CkpttoolError):
    """A checkpoint, but damaged, unfinished, or holding what we refuse to guess about."""

    exit_code = 4


class Unmapped(CkpttoolError):
    """Sound, but there is no rule that says where its tensors go."""

    exit_code = 5


class CannotWrite(CkpttoolError):
    """The destination exists, is full, is busy, or may not be written."""

    exit_code = 6


class Refused(CkpttoolError):
    """Opening it the usual way would run code; nothing was run."""

    exit_code = 7
