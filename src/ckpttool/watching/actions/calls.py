"""``--callback``: an object of the user's, told of a checkpoint."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

from ckpttool.callbacks import CheckpointCallback, CheckpointEvent, said, tell, theirs
from ckpttool.errors import CkpttoolError
from ckpttool.watching.actions import ActionFailed


@dataclass(frozen=True, slots=True)
class Call:
    """A callback, by the name that it was given with."""

    name: str
    callback: CheckpointCallback

    @property
    def label(self) -> str:
        """What the action is called."""
        return f"callback {self.name}"

    def run(self, event: CheckpointEvent) -> str:
        """Call ``on_save``; raises :class:`ActionFailed` from what it raises, but lets an interruption through.

        A callback that ends the program with 0 is done.
        """
        try:
            tell(self.callback, event)
        except SystemExit as end:
            if end.code not in (None, 0):
                status = end.code if isinstance(end.code, int) else 1
                message = (
                    f"{self.label}: ended with code {status}" if status == end.code else f"{self.label}: {end.code}"
                )
                raise ActionFailed(message, status=status, detail=_trace(end)) from end
        except Exception as error:
            status = error.exit_code if isinstance(error, CkpttoolError) else 1
            hint = error.hint if isinstance(error, CkpttoolError) else ""
            message = f"{self.label}: {said(error)}"
            raise ActionFailed(message, status=status, hint=hint, detail=_trace(error)) from error
        return f"{self.label}: done"


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, theirs(error))).rstrip()
