"""Actions on a finished checkpoint, one module a kind."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import CkpttoolError
from ckpttool.watching.settings import Settings


class Action(Protocol):
    """Something that is done once with each checkpoint, and again if it was cut short."""

    @property
    def label(self) -> str:
        """What the action is called in messages and in the state: ``exec upload.sh {path}``, ``verify``."""

    def run(self, event: CheckpointEvent) -> str:
        """Do it, and return in a few words what was done.

        Raises :class:`ActionFailed`, or the error of the command that it is.
        """


class ActionFailed(CkpttoolError):
    """An action did not succeed: ``status`` is the code that it ended with itself (negative: the signal)."""

    exit_code = 1

    def __init__(self, message: str, *, status: int = 1, hint: str = "", detail: str = "") -> None:
        super().__init__(message, hint=hint, code="action-failed")
        self.status, self.detail = status, detail
        """``detail`` is what else may help, in lines: the end of a traceback."""


class Shell:
    """A command line for the shell."""

    def __init__(self, command: str) -> None:
        self.command, self.label = command, f"exec {command}"

    def run(self, event: CheckpointEvent) -> str:
        """Run it."""
        words = self.command.format(path=event.path, step=event.step, role=event.role, kind=event.kind)
        status = subprocess.run(["/bin/sh", "-c", words], check=False).returncode  # noqa: S603
        if status:
            raise ActionFailed(f"{self.label}: ended with code {status}", status=status)
        return self.label


def actions_of(settings: Settings, _run: Path) -> tuple[Action, ...]:
    """Return what is to be done."""
    return tuple(Shell(command) for command in settings.exec)
