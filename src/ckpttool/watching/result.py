"""What ``watch`` tells: one notice for everything that happens, and where it stands while it waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import Problem

What = Literal[
    "watching",  # it begins
    "finished",  # a checkpoint is: actions follow
    "acting",  # an action begins
    "acted",  # an action is done
    "failed",  # an attempt at an action did not succeed
    "done",  # all actions on a checkpoint are
    "incomplete",  # its trainer calls it finished, its structure does not
    "gone",  # it was removed before all actions on it were done
    "pruned",  # a step was deleted by retention, or would be
    "kept",  # a step was not deleted although it is old, and why
    "stopped",  # it ends
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """Something that happened: in words for people, with ``data`` (values that JSON has) for programs.

    ``at`` is in seconds since 1970. A notice with a problem that is an error tells of something that went wrong.
    """

    what: What
    at: float
    message: str
    event: CheckpointEvent | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing went wrong."""
        return all(problem.severity != "error" for problem in self.problems)

    def as_json(self) -> dict[str, Any]:
        """Return plain data; problems are reported beside it, in the envelope."""
        event = None if self.event is None else self.event.as_json()
        more = {"detail": self.detail} if self.detail else {}
        return {"event": self.what, "at": self.at, "message": self.message, "checkpoint": event, **self.data, **more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a watch stands while it waits.

    ``last`` is the checkpoint that was acted on last, ``expected`` the step that comes next if steps come as they did,
    ``due`` when it should be there (seconds since 1970). ``growing`` is the checkpoint that is written now, ``bytes``
    what of it is there and ``rate`` what comes a second; ``awaited`` says what it waits for.
    """

    last: str | None = None
    expected: int | None = None
    due: float | None = None
    growing: str | None = None
    bytes: int = 0
    rate: float | None = None
    awaited: str = ""
