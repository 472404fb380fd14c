"""Which steps of a run are deleted, as data, and their deletion: by one rename, then file by file.

A step that is deleted waits in ``RUN/.ckpttool-removing/<step>-<random>``: a process that is killed leaves the whole
step where it was or nothing under its name, and the next one finishes.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpttool.errors import Problem, UsageError
from ckpttool.layout import step_of
from ckpttool.staging import ATTEMPTS, sync
from ckpttool.watching.protection import Protection, listed
from ckpttool.watching.removing import refusal, remove

REMOVING = ".ckpttool-removing"


@dataclass(frozen=True, slots=True)
class Step:
    """A step directory of a run, ``path`` being its name in ``run``.

    It is ``finished`` if all of its roles are, whichever are acted on, and ``busy`` if an action on one of them is due,
    runs or failed. ``written`` is when its data were written last (seconds since 1970).
    """

    number: int
    path: Path
    finished: bool
    busy: bool
    written: float = 0.0


@dataclass(frozen=True, slots=True)
class Pruning:
    """What is deleted, oldest first, and what is kept and why. ``spared`` would go if nothing stood against it."""

    delete: tuple[Step, ...]
    kept: tuple[tuple[Step, str], ...]
    spared: tuple[tuple[Step, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """What became of a step that was to be deleted.

    ``freed`` are bytes on disk of files whose last name went. ``kept`` says why it was kept after all; with a problem
    it is where it was, or (``removed``) has lost its name but not all of its files.
    """

    step: Step
    removed: bool
    freed: int = 0
    kept: str = ""
    problems: tuple[Problem, ...] = ()


def plan(
    run: Path, steps: Iterable[Step], keep_last: int | None, keep_every: int | None, protected: Mapping[int, str]
) -> Pruning:
    """Decide what is deleted; looks at nothing.

    Kept are the newest ``keep_last`` of the finished steps (the newest one if that is ``None``) by their numbers, and
    as many by when they were written: training that went back saves below the steps that it left. Kept, too, are
    finished ones that ``keep_every`` divides, and whatever is protected, busy, unfinished or no step directory of
    ``run``. Without either number, that is all. Raises :class:`UsageError` for numbers below 1.
    """
    if any(number is not None and number < 1 for number in (keep_last, keep_every)):
        raise UsageError("what is kept is told by numbers from 1", hint="--keep-last 3, --keep-every 100")
    ordered = sorted(steps, key=lambda step: (step.number, step.path.name))
    finished = [step for step in ordered if step.finished]
    orders = (finished, sorted(finished, key=lambda step: step.written))
    newest = {step.number for order in orders for step in order[-(keep_last or 1) :]}
    delete, kept, spared = [], [], []
    for step in ordered:
        wanted = _wanted(step, newest, keep_last, keep_every)
        against = _against(run, step, protected)
        if wanted or against:
            kept.append((step, wanted or against))
            spared += [] if wanted else [(step, against)]
        else:
            delete.append(step)
    return Pruning(tuple(delete), tuple(kept), tuple(spared))


def _wanted(step: Step, newest: set[int], keep_last: int | None, keep_every: int | None) -> str:
    """Say why a finished step is one that is to be kept."""
    if not step.finished:
        return ""
    if keep_last is None and keep_every is None:
        return "nothing says what is to be deleted"
    if step.number in newest:
        return (
            f"one of the newest {keep_last}"
            if keep_last is not None and keep_last > 1
            else "the newest that is finished"
        )
    return f"a multiple of {keep_every}" if keep_every is not None and step.number % keep_every == 0 else ""


def _against(run: Path, step: Step, protected: Mapping[int, str]) -> str:
    """Say what stands against deleting a step."""
    if step.path.parent != run or step_of(step.path.name) != step.number:
        return "no step directory of the run"
    if not step.finished:
        return "not finished"
    return protected.get(step.number, "") or ("an action on it is not done" if step.busy else "")


def protected(run: Path) -> dict[int, str]:
    """Return the steps of a run that are not to be deleted, each with the reason.

    Where the tracker, or the record of the best model, cannot be understood, that is all of them.
    """
    names = [name for name in listed(run) if step_of(name) is not None]
    now = Protection(run)
    reasons = ((step_of(name), now.reason(name)) for name in names)
    return {number: reason for number, reason in reasons if number is not None and reason}


def carry_out(run: Path, pruning: Pruning) -> Iterator[Removal]:
    """Delete the steps of a plan, telling of each when it is gone, or why it is not.

    All get their new names first, each after one more look at what protects it; a step that vanished meanwhile is gone,
    too. What the system refuses is a problem of that step, and the others go on.
    """
    now = Protection(run)
    outcomes = [(step, _set_aside(run, step, now)) for step in pruning.delete]
    problems = _settle(run) if any(isinstance(outcome, Path) for _, outcome in outcomes) else ()
    for step, outcome in outcomes:
        if isinstance(outcome, Removal):
            yield outcome
        elif problems:
            yield Removal(step, True, problems=problems)
        else:
            done = remove(outcome)
            yield Removal(step, True, done.freed, problems=done.problems)
    _end(run)


def _set_aside(run: Path, step: Step, now: Protection) -> Path | Removal:
    reason = now.reason(step.path.name, again=True)
    if reason and os.path.lexists(step.path):
        return Removal(step, False, kept=reason)
    return _renamed(run, step)


def _settle(run: Path) -> tuple[Problem, ...]:
    """Make the new names durable before a file goes: no crash brings back a step that lacks some."""
    try:
        sync(run)
        sync(run / REMOVING)
    except OSError as error:
        return (_problem(REMOVING, error),)
    return ()


def _renamed(run: Path, step: Step) -> Path | Removal:
    """Give a step its name among what is removed; another process may take the directory of these away, if empty."""
    aside = run / REMOVING / f"{step.path.name}-{secrets.token_hex(4)}"
    try:
        for _ in range(ATTEMPTS):
            _make_place(run)
            try:
                os.rename(step.path, aside)  # noqa: PTH104 - one system call, visible as such
            except FileNotFoundError:
                if not os.path.lexists(step.path):
                    return Removal(step, True)
                continue
            return aside
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    except OSError as error:
        return Removal(step, False, problems=(_problem(step.path.name, error),))


def _make_place(run: Path) -> None:
    with suppress(FileExistsError):
        os.mkdir(run / REMOVING)  # noqa: PTH102
    if (run / REMOVING).is_symlink():
        raise OSError(errno.ELOOP, f"{REMOVING} is a symbolic link")


def _problem(name: str, error: OSError) -> Problem:
    return refusal(name, error, said="not deleted: ", do="Delete")


def clear_removed(run: Path) -> tuple[int, tuple[Problem, ...]]:
    """Finish what killed processes have begun to delete; return the bytes that were freed, and what stays and why."""
    names = [name for name in listed(run / REMOVING) if _is_ours(name)]
    if not names or (run / REMOVING).is_symlink():
        _end(run)
        return 0, ()
    if problems := _settle(run):
        return 0, problems
    done = [remove(run / REMOVING / name) for name in names]
    _end(run)
    return sum(one.freed for one in done), tuple(problem for one in done for problem in one.problems)


def _is_ours(name: str) -> bool:
    match = re.fullmatch(r"(.+)-[0-9a-f]{8}", name)
    return match is not None and step_of(match[1]) is not None


def _end(run: Path) -> None:
    with suppress(OSError):
        os.rmdir(run / REMOVING)  # noqa: PTH106
