"""The watch itself: look, act on what is finished, prune, wait, look again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint, Problem, Refused
from ckpttool.watching.actions import actions_of
from ckpttool.watching.beginning import check_run, doubts
from ckpttool.watching.clock import Clock, Sleep
from ckpttool.watching.firing import Firing
from ckpttool.watching.looking import Look, is_behind, second_look
from ckpttool.watching.pins import clear_pins
from ckpttool.watching.pruning import Pruner
from ckpttool.watching.result import Notice, Status, What
from ckpttool.watching.scanning import Candidate, Extent, Scan, is_changed, is_gone, scan
from ckpttool.watching.settings import Settings
from ckpttool.watching.signs import awaited
from ckpttool.watching.state import NAME, State
from ckpttool.watching.waiting import Outlook

PATIENCE = 20
"""Looks in a row at which the run may be out of reach: ten minutes, as they usually come."""

Waiting = Callable[[Status], None]


class Watcher:
    """Follows a run, from :meth:`__enter__`, which locks its state, to :meth:`__exit__`."""

    def __init__(
        self,
        run: Path,
        settings: Settings,
        *,
        clock: Clock = time.time,
        sleep: Sleep = time.sleep,
    ) -> None:
        """Check everything that can be checked before there is a checkpoint; raises :class:`UsageError`."""
        self._run = Path(os.path.abspath(run))  # noqa: PTH100 - resolve() would follow links
        self._settings, self._clock, self._sleep = settings, clock, sleep
        self._state = State(_place(settings, self._run), self._run)
        self._actions = actions_of(settings, self._run)
        self._firing = Firing(self._run, self._actions, settings, self._state, clock=clock, sleep=sleep)
        self._labels = [action.label for action in self._actions]
        self._pruner = Pruner(self._run, settings, self._state, self._labels, clock)
        self._outlook = Outlook()
        self._told: dict[str, Extent] = {}
        self._given_up: set[str] = set()
        self._lost = 0

    def __enter__(self) -> Watcher:
        """Lock and read the state; raises :class:`~ckpttool.errors.CannotWrite` where another watch has it."""
        self._state.__enter__()
        clear_pins(self._run)
        return self

    def __exit__(self, *error: object) -> None:
        self._state.__exit__(*error)

    @property
    def failures(self) -> list[CkpttoolError]:
        """What actions that failed came to, in the end."""
        return self._firing.failures

    @property
    def exit_code(self) -> int:
        """0, or 1 where an action failed, or something could not be deleted."""
        return 1 if self.failures or self._pruner.refused else 0

    def watch(
        self,
        *,
        once: bool = False,
        timeout: float | None = None,
        since: int = 0,
        waiting: Waiting = lambda _status: None,
    ) -> Iterator[Notice]:
        """Act on every checkpoint of the run, in the order of steps, when it is finished; tell of everything.

        It ends after one look if ``once`` is set (after a second one where no sign is known), when nothing was finished
        for ``timeout`` seconds, or when an action fails, unless the settings say to keep going. ``waiting`` is told
        where things stand before each pause. Raises :class:`NotACheckpoint` for what cannot be a run.
        """
        check_run(self._run)
        yield self._begun()
        yield from self._gone()
        quiet_since, looks = self._clock(), 0
        while True:
            look, looks = (yield from self._look(since=since, final=once)), looks + 1
            if self.failures and not self._settings.keep_going:
                yield self._stopped("an action failed", look)
                return
            yield from self._pruner.prune(since)
            quiet_since = self._clock() if look.fired else quiet_since
            status = self._outlook.look(look.seen.candidates, look.missing, self._clock())
            pause = second_look(look, self._clock(), self._settings.interval) if once else self._settings.interval
            if once and (looks > 1 or not pause):
                yield self._stopped("that was one look", look)
                return
            if timeout is not None and self._clock() - quiet_since >= timeout:
                yield self._stopped(f"nothing was finished for {timeout:g} s", look)
                return
            waiting(status)
            self._sleep(pause)

    def act_on(self, step: int, *, patience: float | None) -> Iterator[Notice]:
        """Act on every checkpoint of one step when it is finished, and return; an action that fails ends it.

        It is waited for up to ``patience`` seconds (``None``: for ever). Raises :class:`BrokenCheckpoint` where it is
        not finished by then, and :class:`NotACheckpoint` where there is no such step.
        """
        begun = self._clock()
        while True:
            look = yield from self._look(since=step, only=step, final=False)
            if self.failures and not self._settings.keep_going:
                return
            self._outlook.look(look.seen.candidates, look.missing, self._clock())
            if not look.missing and (look.seen.candidates or self._has_entry(step)):
                yield from self._pruner.prune(0)
                return
            left = self._settings.interval if patience is None else begun + patience - self._clock()
            if left <= 0:
                raise self._not_finished(step, look)
            self._sleep(min(self._settings.interval, left))

    def _look(self, *, since: int, only: int | None = None, final: bool) -> Generator[Notice, None, Look]:
        """Look once, and act on what is finished."""
        try:
            seen = scan(self._run, roles=self._settings.roles, since=since, only=only, known=self._known())
        except OSError as error:
            return self._out_of_reach(error, final=final)
        look, self._lost = Look(seen), 0
        for candidate in look.seen.candidates:
            why = awaited(
                candidate.sign,
                newest=candidate.extent.newest,
                unchanged=self._outlook.unchanged(candidate),
                now=self._clock() + self._state.skew,
                anew=self._saved_anew(candidate),
            )
            if not why:
                why = yield from self._fire(candidate, final=final)
                look.fired = look.fired or not why
            if why:
                look.missing[candidate.name] = why
            if why and is_behind(candidate) and not self._outlook.unchanged(candidate):
                break  # the next look tells, and later steps come after it
            if self.failures and not self._settings.keep_going:
                break
        return look

    def _out_of_reach(self, error: OSError, *, final: bool) -> Look:
        """Put up with a run that cannot be looked at for a while: a file system that is away comes back."""
        self._lost += 1
        if final or self._lost > PATIENCE:
            raise NotACheckpoint(f"{self._run}: {error.strerror}", code="unreadable") from error
        return Look(Scan(), {str(self._run): f"it to be there again: {error.strerror}"})

    def _known(self) -> set[str]:
        """Return the names of checkpoints on which nothing is to be done any more, unless they are saved anew."""
        entries = self._state.entries.items()
        return {
            name
            for name, entry in entries
            if (name in self._given_up or not entry.lacks(self._labels)) and entry.is_of(self._run / name)
        }

    def _saved_anew(self, candidate: Candidate) -> float | None:
        """Return when another save of what was finished before was written, in seconds; ``None`` for the same one."""
        entry = self._state.entries.get(candidate.name)
        if entry is None or entry.is_of(candidate.path):
            return None
        return candidate.extent.newest if candidate.anchor is None else candidate.anchor.written / 1e9

    def _fire(self, candidate: Candidate, *, final: bool) -> Generator[Notice, None, str]:
        """Act on a checkpoint whose sign is given; return what it waits for where it is not whole after all."""
        failed = len(self.failures)
        if is_changed(candidate):  # an action on an earlier step may have taken hours since the look
            return "a second look: something was written since the first"
        try:
            yield from self._firing.fire(candidate)
        except (BrokenCheckpoint, Refused, NotACheckpoint) as error:
            if is_gone(candidate.path):
                yield self._notice("gone", f"{candidate.name} was removed before anything was done with it", error)
                return ""
            again = self._told.get(candidate.name) == candidate.extent
            if not again and (final or self._outlook.unchanged(candidate)):
                self._told[candidate.name] = candidate.extent
                message = f"{candidate.name}: its trainer calls it finished, but it is not whole"
                yield self._notice("incomplete", message, error, name=candidate.name)
            return "its files, of which some are missing or broken"
        if len(self.failures) > failed:
            self._given_up.add(candidate.name)
        self._outlook.finished(candidate)
        return ""

    def _begun(self) -> Notice:
        done = {name: entry for name, entry in self._state.entries.items() if entry.course == "done"}
        lacking = [name for name, entry in done.items() if entry.lacks(self._labels)]
        data = {
            "run": str(self._run),
            "state": str(self._state.path),
            "actions": self._labels,
            "done_before": len(done) - len(lacking),
            "due_again": sum(not is_gone(self._run / name) for name in lacking),
        }
        self._outlook.last = max(self._state.entries, key=lambda name: self._state.entries[name].at, default=None)
        problems = doubts(self._run, self._settings.roles)
        message = f"watching {self._run}"
        return Notice(what="watching", at=self._clock(), message=message, data=data, problems=problems)

    def _gone(self) -> Iterator[Notice]:
        """Tell of checkpoints that were removed before all that was to be done with them was done."""
        for name, entry in list(self._state.entries.items()):
            if entry.course in ("running", "failed") and is_gone(self._run / name):
                self._state.change(name, course="gone", at=self._clock())
                message = f"{name} was removed before all actions on it were done"
                hint = "--pin keeps a checkpoint while actions on it run."
                problem = Problem(code="gone", message=message, path=name, hint=hint)
                yield Notice(what="gone", at=self._clock(), message=message, problems=(problem,))

    def _stopped(self, why: str, look: Look) -> Notice:
        waiting = [{"checkpoint": name, "waits_for": what} for name, what in look.missing.items()]
        done = sum(not entry.lacks(self._labels) for entry in self._state.entries.values())
        data = {
            "reason": why,
            "done": self._firing.done,
            "done_before": done - self._firing.done,
            "failed": len(self.failures),
            "unfinished": waiting,
        }
        problems = tuple(Problem(code=error.code, message=error.message, hint=error.hint) for error in self.failures)
        return Notice(what="stopped", at=self._clock(), message=f"stopped: {why}", data=data, problems=problems)

    def interrupted(self, by: str) -> Notice:
        """Return the last notice of a watch that a signal ends."""
        return self._stopped(f"by {by}", Look(Scan()))

    def _notice(self, what: What, message: str, error: CkpttoolError, *, name: str = "") -> Notice:
        problems = error.problems or (Problem(code=error.code, message=error.message, path=name, hint=error.hint),)
        return Notice(what=what, at=self._clock(), message=message, problems=problems, data={"name": name})

    def _has_entry(self, step: int) -> bool:
        return any(entry.step == step for entry in self._state.entries.values())

    def _not_finished(self, step: int, look: Look) -> CkpttoolError:
        if not any(number == step for number, _ in look.seen.steps):
            return NotACheckpoint(
                f"{self._run}: no step {step} here",
                hint="Training and the process that calls this need a common file system.",
            )
        problems = [
            Problem(code="unfinished", message=f"{name} waits for {why}", path=name)
            for name, why in look.missing.items()
        ]
        return BrokenCheckpoint(f"{self._run}: step {step} is not finished", problems=problems, code="unfinished")


def _place(settings: Settings, run: Path) -> Path:
    return run / NAME if settings.state is None else Path(os.path.abspath(settings.state))  # noqa: PTH100
