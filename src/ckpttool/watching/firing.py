"""Act on one finished checkpoint: confirm it by its structure, pin it if asked, run what is not done yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint, Problem
from ckpttool.inspection import Inspection, inspect
from ckpttool.watching.actions import Action, ActionFailed
from ckpttool.watching.clock import Clock, Sleep
from ckpttool.watching.pins import pinned
from ckpttool.watching.result import Notice, What
from ckpttool.watching.scanning import Candidate, is_gone
from ckpttool.watching.settings import Settings
from ckpttool.watching.state import Entry, State

LONGEST_WAIT = 60.0
"""Seconds between two attempts at an action, at most: they begin at one and double."""


class Unfinished(BrokenCheckpoint):
    """A checkpoint that its trainer calls finished and whose structure does not bear it out; ``problems`` say why."""


def confirmed(path: Path, *, signed: bool) -> Inspection:
    """Return what ``inspect`` says of a checkpoint that is whole.

    What is not opened is as whole as its sign says, and so is a Megatron role that was saved without weights: of other
    kinds, what has none is being removed. Raises :class:`Unfinished` with the faults,
    :class:`NotACheckpoint` for one that is gone and :class:`~ckpttool.errors.Refused`.
    """
    found = inspect(path)
    saved_without = found.state == "no weights" and found.manifest is not None
    if not found.faults and (found.state == "complete" or (signed and (found.state == "not opened" or saved_without))):
        return found
    raise Unfinished(f"{path}: {found.title}, {found.state}", problems=found.faults, code="unfinished")


class Firing:
    """Acts on checkpoints, one after the other, and records it: how many are ``done``, what ``failures`` there were."""

    def __init__(
        self, run: Path, actions: Sequence[Action], settings: Settings, state: State, *, clock: Clock, sleep: Sleep
    ) -> None:
        self.failures: list[CkpttoolError] = []
        self.done = 0
        self._noted: set[str] = set()
        self._run, self._actions, self._settings, self._state = run, actions, settings, state
        self._clock, self._sleep = clock, sleep

    def fire(self, candidate: Candidate) -> Iterator[Notice]:
        """Run what is to be run on a checkpoint. Raises what :func:`confirmed` raises, before anything was done."""
        found = confirmed(candidate.path, signed=candidate.is_signed)
        with ExitStack() as stack:
            path = candidate.path
            if self._settings.pin:
                path = stack.enter_context(pinned(self._run, path))
                confirmed(path, signed=candidate.is_signed)  # the trainer may have begun to remove it
            event = self._begin(candidate, found, path)
            sign = candidate.sign.what if candidate.sign and candidate.is_signed else "nothing changes any more"
            data = {"sign": sign, "bytes": candidate.extent.bytes, "files": candidate.extent.files}
            yield self._notice("finished", f"{event.name} is finished: {sign}", event, data=data)
            begun = self._clock()
            for action in self._actions:
                if action.label not in self._state.entries[event.name].actions:
                    yield from self._act(action, event)
                    if self._state.entries[event.name].course == "failed":
                        return
            self._state.change(event.name, course="done", at=self._clock(), status=None)
            self.done += 1
            data = {"seconds": self._clock() - begun}
            yield self._notice("done", f"{event.name} is done", event, data=data, problems=_if_gone(event))

    def _begin(self, candidate: Candidate, found: Inspection, path: Path) -> CheckpointEvent:
        """Record that actions begin, and return what they are told."""
        before = self._state.entries.get(candidate.name)
        same = before is not None and before.is_of(candidate.path)
        begun = before.attempts if before is not None and same and before.course != "done" else 0
        entry = Entry(
            step=candidate.number,
            role=candidate.role,
            course="running",
            anchor=candidate.anchor,
            actions=before.actions if before is not None and same else (),
            attempts=begun + 1,
            at=self._clock(),
        )
        self._state.put(candidate.name, entry)
        return CheckpointEvent(
            run=str(self._run),
            name=candidate.name,
            path=str(path),
            original=str(candidate.path),
            step=candidate.number,
            role=candidate.role,
            kind=found.kind,
            attempt=entry.attempts,
            rewritten=before is not None and not same,
        )

    def _act(self, action: Action, event: CheckpointEvent) -> Iterator[Notice]:
        """Run one action until it succeeds or was tried often enough."""
        first, most = event.attempt, self._settings.retries
        for left in range(most, -1, -1):
            event, begun = replace(event, attempt=first + most - left), self._clock()
            yield self._notice("acting", action.label, event, data={"action": action.label})
            try:
                outcome = action.run(event)
            except (CkpttoolError, OSError) as error:
                failure = _failure(action, error, event)
                wait = min(LONGEST_WAIT, 2.0 ** (most - left))
                if not left:
                    self.failures.append(failure)
                    status = status_of(failure)
                    self._state.change(event.name, course="failed", at=self._clock(), status=status)
                yield self._failed(action, failure, event, left, wait)
                if left:
                    self._sleep(wait)
                continue
            done = (*self._state.entries[event.name].actions, action.label)
            self._state.change(event.name, actions=done, at=self._clock())
            message, *notes = outcome.splitlines() or [action.label]
            data = {"action": action.label, "outcome": message, "notes": notes, "seconds": self._clock() - begun}
            yield self._notice("acted", message, event, data=data, detail=self._new(notes))
            return

    def _new(self, notes: Sequence[str]) -> str:
        """Return those of some notes that were not told of another checkpoint."""
        new = [note for note in notes if note not in self._noted]
        self._noted.update(new)
        return "\n".join(new)

    def _failed(self, action: Action, failure: CkpttoolError, event: CheckpointEvent, left: int, wait: float) -> Notice:
        data = {"action": action.label, "status": status_of(failure), "attempts_left": left}
        hint = f"It is tried again in {wait:.0f} s." if left else failure.hint
        problem = Problem(code=failure.code, message=failure.message, path=event.name, hint=hint)
        detail = failure.detail if isinstance(failure, ActionFailed) else ""
        problems = (problem, *failure.problems)
        return self._notice("failed", failure.message, event, data=data, problems=problems, detail=detail)

    def _notice(
        self,
        what: What,
        message: str,
        event: CheckpointEvent,
        *,
        data: dict[str, object] | None = None,
        problems: tuple[Problem, ...] = (),
        detail: str = "",
    ) -> Notice:
        return Notice(
            what=what,
            at=self._clock(),
            message=message,
            event=event,
            data=data or {},
            problems=problems,
            detail=detail,
        )


def _if_gone(event: CheckpointEvent) -> tuple[Problem, ...]:
    """Return a note on a checkpoint that was removed while actions on it ran: what they read may not have been all."""
    if event.path != event.original or not is_gone(Path(event.path)):
        return ()
    message = f"{event.name} was removed while actions on it ran"
    hint = "If no action did that, they may not have seen all of it: --pin keeps it while they run."
    return (Problem(code="gone", message=message, path=event.name, hint=hint, severity="note"),)


def status_of(error: CkpttoolError) -> int:
    """Return the code that an action ended with: a program's own, or that of the command that it is."""
    return error.status if isinstance(error, ActionFailed) else error.exit_code


def _failure(action: Action, error: CkpttoolError | OSError, event: CheckpointEvent) -> CkpttoolError:
    """Return what an action came to: on which checkpoint, and whether the trainer has removed that meanwhile."""
    failure = error if isinstance(error, CkpttoolError) else NotACheckpoint(str(error))
    by = "" if failure.message.startswith(action.label) else f"{action.label}: "
    failure.message = f"{event.name}: {by}{failure.message}"
    if is_gone(Path(event.path)):
        failure.hint = f"{event.name} was removed meanwhile: --pin keeps it while actions run. {failure.hint}".rstrip()
    return failure
