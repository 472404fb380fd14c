"""Retention in a watch: which steps of the run are finished and done with, and what became of the old ones."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import CkpttoolError, Problem
from ckpttool.watching.clock import Clock
from ckpttool.watching.firing import confirmed
from ckpttool.watching.result import Notice, What
from ckpttool.watching.retention import Pruning, Removal, Step, carry_out, clear_removed, plan, protected
from ckpttool.watching.scanning import Candidate, Extent, scan
from ckpttool.watching.settings import Settings
from ckpttool.watching.signs import SETTLED, awaited
from ckpttool.watching.state import State


class Pruner:
    """Deletes the steps that the settings do not keep, or says what it would delete; tells nothing twice."""

    def __init__(self, run: Path, settings: Settings, state: State, labels: Collection[str], clock: Clock) -> None:
        self._run, self._settings, self._state, self._labels, self._clock = run, settings, state, labels, clock
        self._whole: dict[str, Extent] = {}
        self.refused = False
        """Whether something could not be deleted."""
        self._told: dict[str, str] = {}
        self._cleared = False

    def prune(self, since: int) -> Iterator[Notice]:
        """Look at the steps from ``since`` on; earlier ones are neither counted nor deleted."""
        if self._settings.keep_last is None and self._settings.keep_every is None:
            return
        if self._settings.yes and not self._cleared:
            self._cleared = True
            yield from self._finish_earlier()
        pruning = plan(
            self._run, self._steps(since), self._settings.keep_last, self._settings.keep_every, protected(self._run)
        )
        newest = max((step.number for step, _ in pruning.kept if step.finished), default=-1)
        for step, reason in pruning.spared:
            if step.number <= newest:  # a later one is written now
                yield from self._tell_once("kept", step, f"{step.path.name} is old, but kept: {reason}", reason=reason)
        yield from self._delete(pruning) if self._settings.yes else self._show(pruning)

    def _finish_earlier(self) -> Iterator[Notice]:
        freed, problems = clear_removed(self._run)
        if freed or problems:
            message = "what an earlier watch had begun to delete"
            yield Notice(what="pruned", at=self._clock(), message=message, data={"freed": freed}, problems=problems)

    def _show(self, pruning: Pruning) -> Iterator[Notice]:
        for step in pruning.delete:
            message = f"{step.path.name} would be deleted; --yes does it"
            yield from self._tell_once("pruned", step, message, deleted=False)

    def _delete(self, pruning: Pruning) -> Iterator[Notice]:
        for removal in carry_out(self._run, pruning):
            name = removal.step.path.name
            if removal.kept:
                message = f"{name} is old, but kept: {removal.kept}"
                yield from self._tell_once("kept", removal.step, message, reason=removal.kept)
            elif removal.removed:
                yield self._deleted(removal)
            else:
                self.refused = True
                yield from self._tell_once("kept", removal.step, f"{name} is not deleted", *removal.problems)

    def _deleted(self, removal: Removal) -> Notice:
        data = {"step": removal.step.number, "name": removal.step.path.name, "deleted": True, "freed": removal.freed}
        message = f"{removal.step.path.name} is deleted"
        self.refused = self.refused or bool(removal.problems)
        return Notice(what="pruned", at=self._clock(), message=message, data=data, problems=removal.problems)

    def _tell_once(self, what: What, step: Step, message: str, *problems: Problem, **data: Any) -> Iterator[Notice]:
        words = "\n".join((message, *(problem.message for problem in problems)))
        if self._told.get(step.path.name) != words:
            self._told[step.path.name] = words
            body = {"step": step.number, "name": step.path.name, **data}
            yield Notice(what=what, at=self._clock(), message=message, data=body, problems=problems)

    def _steps(self, since: int) -> Iterator[Step]:
        """Yield the steps, each with whether all of its roles are finished, and whether one is to be acted on.

        One that lacks a role which the step before it has is not finished: that role may not have begun.
        """
        seen, before = scan(self._run, since=since), set[str]()
        found = {path: list[Candidate]() for _, path in seen.steps}
        for candidate in seen.candidates:
            found[candidate.step].append(candidate)
        for number, path in seen.steps:
            if number >= since:
                mine = found[path]
                before, lacking = _roles(mine), before - _roles(mine)
                yield Step(
                    number,
                    path,
                    finished=bool(mine) and not lacking and all(map(self._is_finished, mine)),
                    busy=any(map(self._is_busy, mine)),
                    written=max((candidate.extent.newest for candidate in mine), default=0.0),
                )

    def _is_finished(self, candidate: Candidate) -> bool:
        """Tell whether a checkpoint was found whole, or is one that is not acted on and has its sign."""
        entry = self._state.entries.get(candidate.name)
        if entry is not None and entry.is_of(candidate.path):
            return entry.course != "gone"
        newest, now = candidate.extent.newest, self._clock() + self._state.skew
        quiet = now - newest > SETTLED
        missing = awaited(candidate.sign, newest=newest, unchanged=quiet, now=now)
        return not self._is_acted_on(candidate) and not missing and self._is_whole(candidate)

    def _is_whole(self, candidate: Candidate) -> bool:
        """Look into a checkpoint that is not acted on, once for as long as it does not change."""
        if self._whole.get(candidate.name) != candidate.extent:
            try:
                confirmed(candidate.path, signed=candidate.is_signed)
            except (CkpttoolError, OSError):
                return False
            self._whole[candidate.name] = candidate.extent
        return True

    def _is_busy(self, candidate: Candidate) -> bool:
        entry = self._state.entries.get(candidate.name)
        return self._is_acted_on(candidate) and (entry is None or entry.lacks(self._labels))

    def _is_acted_on(self, candidate: Candidate) -> bool:
        return not self._settings.roles or candidate.role in self._settings.roles


def _roles(candidates: list[Candidate]) -> set[str]:
    """Return the roles of a step that a trainer saves; others may be anybody's."""
    return {candidate.role for candidate in candidates} & set(layout.ROLES)
