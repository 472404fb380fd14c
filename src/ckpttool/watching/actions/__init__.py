"""Actions on a finished checkpoint, one module a kind."""

from __future__ import annotations

from typing import Protocol

from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import CkpttoolError


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
