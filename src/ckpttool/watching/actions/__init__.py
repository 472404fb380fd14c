"""Actions on a finished checkpoint, one module a kind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from ckpttool.callbacks import CheckpointCallback, CheckpointEvent, load_callback, works_in
from ckpttool.errors import CkpttoolError, Problem, UsageError
from ckpttool.watching.settings import Settings


class Action(Protocol):
    """Something that is done once with each checkpoint, and again if it was cut short."""

    @property
    def label(self) -> str:
        """What the action is called in messages and in the state: ``exec upload.sh {path}``, ``verify``."""

    def run(self, event: CheckpointEvent) -> str:
        """Do it, and return in a few words what was done; further lines are notes on it.

        Raises :class:`ActionFailed`, or the error of the command that it is.
        """


class ActionFailed(CkpttoolError):
    """An action did not succeed: ``status`` is the code that it ended with itself (negative: the signal)."""

    exit_code = 1

    def __init__(
        self, message: str, *, status: int = 1, hint: str = "", detail: str = "", problems: Iterable[Problem] = ()
    ) -> None:
        super().__init__(message, hint=hint, code="action-failed", problems=problems)
        self.status, self.detail = status, detail
        """``detail`` is what else may help, in lines: the end of a traceback."""


def actions_of(settings: Settings, run: Path) -> tuple[Action, ...]:
    """Return the actions on each checkpoint of a run, in the order in which they are done.

    Whatever can be known to fail does so here, before anything is watched. Raises :class:`UsageError`, and
    :class:`~ckpttool.errors.NotACheckpoint` where ``hf_config`` is not there.
    """
    _check_together(settings)
    actions = tuple(_actions(settings, run))
    seen: set[str] = set()
    for label in (action.label for action in actions):
        if label in seen:
            raise UsageError(f"{label}: twice", hint="What is done is known by this name: give it once.")
        seen.add(label)
    return actions


def _actions(settings: Settings, run: Path) -> Iterator[Action]:
    from ckpttool.watching.actions.calls import Call
    from ckpttool.watching.actions.commands import Exec
    from ckpttool.watching.actions.models import ToHf
    from ckpttool.watching.actions.originals import Migrate, Verify

    if settings.verify:
        yield Verify()
    if settings.migrate:
        yield Migrate()
    if settings.to_hf is not None:
        to_hf = ToHf(settings.to_hf, settings.dtype, settings.lora, settings.hf_config, settings.roles)
        to_hf.check_place(run)
        yield to_hf
    yield from (Call(name, _loaded(name, settings, run)) for name in settings.callbacks)
    yield from (Exec(command, settings.shell) for command in settings.exec)


def _loaded(name: str, settings: Settings, run: Path) -> CheckpointCallback:
    try:
        return load_callback(name, settings.callback_config)
    except UsageError as error:
        if error.code == "no-module" and works_in(run):
            error.hint += " Nothing is imported from the working directory: it lies in the run."
        raise


def _check_together(settings: Settings) -> None:
    """Raise :class:`UsageError` for options of an action that nobody asks for."""
    of_models = {"--dtype": settings.dtype, "--lora": settings.lora, "--hf-config": settings.hf_config}
    for option in (option for option, given in of_models.items() if given is not None and settings.to_hf is None):
        raise UsageError(f"{option} without --to-hf: nothing is converted")
    if settings.shell and not settings.exec:
        raise UsageError("--shell without --exec: no command is run")
