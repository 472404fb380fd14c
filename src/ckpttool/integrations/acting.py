"""Acts on steps that a trainer has saved, and tells of it in the log."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, cast

from ckpttool.errors import BrokenCheckpoint, CannotWrite, CkpttoolError, NotACheckpoint, Problem, UsageError
from ckpttool.watching import Notice, Settings, Watcher
from ckpttool.watching.settingsfile import read_settings

LOG = logging.getLogger("ckpttool.integrations")

LATE = 60.0
"""Seconds by which files that other nodes have written are seen late here, as network file systems cache names."""

KEEP = "Let the trainer keep more of them, or have it wait: background = false."

_LEVELS = {"acting": logging.DEBUG, "failed": logging.ERROR, "gone": logging.ERROR, "incomplete": logging.WARNING}


class Acting:
    """Acts on steps of a run, one at a time, as a file of settings says; the state is the same as of ``watch``.

    It holds the lock on the state from its construction until :meth:`close`.
    """

    def __init__(self, run: Path, file: Path) -> None:
        """Check the settings and make what they name; the directory of the run is made where there is none.

        Raises :class:`UsageError` for settings, and :class:`CannotWrite` where a watch has the state already.
        """
        self.run, self.file = run, file
        self.sleep: Callable[[float], None] = time.sleep
        """How to wait, in seconds; also called before each action, with 0."""
        self.settings = read_settings(file)
        _check(self.settings, file)
        self._watcher = Watcher(run, self.settings, sleep=lambda seconds: self.sleep(seconds))
        try:
            run.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CannotWrite(f"{run}: {error.strerror}", hint="It has to be on this node, too.") from error
        self._watcher.__enter__()
        self._is_open = True

    def close(self) -> None:
        """Give the lock back; nothing can be done any more. To be called once or more."""
        if self._is_open:
            self._is_open = False
            self._watcher.__exit__()

    @property
    def failures(self) -> list[CkpttoolError]:
        """What actions that failed came to."""
        return self._watcher.failures

    @property
    def patience(self) -> float:
        """Seconds to wait for a save where nobody may be left to finish it."""
        return LATE if self.settings.patience is None else self.settings.patience

    def act(self, step: int, *, patience: float | None) -> None:
        """Act on every role of a step, when it is finished; it is waited for as long as ``patience`` says.

        Raises what the first action that failed came to, now or before, unless the settings say to keep going;
        :class:`BrokenCheckpoint` or :class:`NotACheckpoint` for a step that was not finished in time.
        """
        self._check_failures()
        if not self._is_open:
            raise UsageError(f"{self.run}: step {step} comes after the end: the callback is closed already")
        told: list[Notice] = []
        notices = cast("Generator[Notice, None, None]", self._watcher.act_on(step, patience=patience))
        try:
            with closing(notices):
                for notice in notices:
                    self._tell(notice)
                    told.append(notice)
        except BrokenCheckpoint as error:
            error.problems += tuple(_named(one) for one in told if one.what == "incomplete")
            raise
        self._check_failures()
        if not self.settings.keep_going:
            _check_gone(told)

    def _tell(self, notice: Notice) -> None:
        tell(notice)
        if notice.what == "acting":
            self.sleep(0)  # a worker leaves here what it had better not begin

    def _check_failures(self) -> None:
        if self.failures and not self.settings.keep_going:
            raise self.failures[0]

    def finish(self, steps: Iterable[int]) -> list[CkpttoolError]:
        """Act on what is left at the end of training, and return what was not finished within :attr:`patience`.

        It is waited for no longer than that, all steps together: who finishes a save may have ended, too.
        """
        until, unfinished = time.monotonic() + self.patience, list[CkpttoolError]()
        for step in steps:
            try:
                self.act(step, patience=max(0.0, until - time.monotonic()))
            except (BrokenCheckpoint, NotACheckpoint) as error:
                if error in self.failures:
                    raise
                unfinished.append(error)
        return unfinished

    def catch_up(self) -> str:
        """Return the command that does what is left undone."""
        return catch_up(self.run, self.file)


def catch_up(run: Path, file: Path) -> str:
    """Return the command that acts on what is left of a run."""
    return shlex.join(["ckpttool", "watch", str(run), "--once", "--config", str(file)])


def _named(notice: Notice) -> Problem:
    reasons = "; ".join(problem.message for problem in notice.problems)
    return Problem(code="unfinished", message=f"{notice.data['name']}: {reasons}", path=str(notice.data["name"]))


def _check_gone(told: Iterable[Notice]) -> None:
    """Raise :class:`NotACheckpoint` where something was removed before all was done with it."""
    for notice in told:
        if notice.what == "gone":
            raise NotACheckpoint(notice.message, hint=KEEP, code="gone")


def tell(notice: Notice) -> None:
    """Write to the log what happened, with its reasons and the end of a traceback."""
    more = [problem.message for problem in notice.problems if problem.message != notice.message]
    level = _LEVELS.get(notice.what, logging.INFO)
    LOG.log(level, "%s", "\n  ".join([notice.message, *more, *notice.detail.splitlines()]))


@contextmanager
def hinting() -> Iterator[None]:
    """Have errors show their hints where others print them: as notes, or before Python 3.11 in the log."""
    try:
        yield
    except CkpttoolError as error:
        note: Callable[[str], None] = getattr(error, "add_note", LOG.error)
        if error.hint and error.hint not in getattr(error, "__notes__", ()):
            note(error.hint)
        raise


def setting(config: Any, *names: str) -> Any:
    """Return a value of nested configuration, mappings or objects; ``None`` where there is none."""
    for name in names:
        try:
            config = config[name] if hasattr(config, "keys") else getattr(config, name)
        except (KeyError, AttributeError):  # also those of OmegaConf, for keys that its structure lacks
            return None
    return config


def _check(settings: Settings, file: Path) -> None:
    """Refuse settings by which nothing would be done."""
    actions = (settings.exec, settings.callbacks, settings.verify, settings.migrate, settings.to_hf)
    if not any((*actions, settings.keep_last, settings.keep_every)):
        raise UsageError(f"{file}: names nothing to do", hint='Name an action: exec = "upload.sh {path}", for example.')
