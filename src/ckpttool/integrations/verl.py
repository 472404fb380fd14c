"""verl's checkpoint callback: acts on each step that verl's PPO trainer has saved.

In verl's configuration::

    trainer.checkpoint_callback_class=ckpttool.integrations.verl.CkpttoolCallback
    +trainer.ckpttool_config=/path/to/settings.toml

or, instead of the second line, ``CKPTTOOL_CONFIG=/path/to/settings.toml`` in the environment of the driver.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.errors import BrokenCheckpoint, NotACheckpoint, UsageError
from ckpttool.integrations.acting import KEEP, LATE, LOG, Acting, hinting, setting
from ckpttool.integrations.background import Worker
from ckpttool.integrations.remaining import do_elsewhere

VARIABLE = "CKPTTOOL_CONFIG"
_NO_ROLES = ("transfer_queue",)


class _Job(NamedTuple):
    """A step to be acted on later; ``is_async`` tells that the training loop is yet to finish its save."""

    owner: CkpttoolCallback
    """Who lives until it is done: its end gives the lock back."""

    step: int
    folder: Path
    is_async: bool
    was_seen: bool
    """Whether any role was there when verl called."""


class CkpttoolCallback:
    """Acts on every role of each step that verl saves, as a file of settings says, as ``ckpttool watch`` does.

    The file is named by ``trainer.ckpttool_config``, or by the variable ``CKPTTOOL_CONFIG``: TOML or JSON with the
    options of ``watch``. It is read, and all that it names is found and made, when the callback is: before verl takes
    any resource. The state is the one that ``ckpttool watch`` has of the run, and it is locked as long as this lives.

    *When.* A save that is over is acted on before training goes on, or, with ``background = true``, in a thread. A save
    with ``async_save=True`` is always acted on in that thread, once verl has given its sign for it: the training loop
    finishes such a save, so that it must not be waited for here. The thread has one step after the other.

    *Failures.* What an action raises, this raises, and verl ends training by it: at once, or from the thread with the
    next save or :meth:`close`. With ``keep-going`` failures are in the log and in the state only, and
    :meth:`close` raises the first.

    *The end.* verl does not tell it. A save of the trainer's last step, unless it is asynchronous, returns when
    everything is done. Otherwise the interpreter does not exit before the thread is through; what it has not begun then
    is done by a child process, as Python starts no thread pools any more, and what fails in that moment, once more.
    Saves that are not finished then are waited for ``patience`` seconds, 60 if the settings say none, all together.
    What goes wrong there is printed: Python has no way to end with another exit code then. Ray ends its processes
    without waiting for any of this. Whatever is cut short, ``ckpttool watch RUN --once --config FILE`` does.
    """

    def __init__(self, config: Any = None) -> None:
        """Read the settings and lock the state of the run; see :class:`~ckpttool.integrations.acting.Acting`."""
        with hinting():
            self._acting = Acting(_run_of(config), _file_of(config))
        self._worker = Worker(_act_later, _tell, _leave)
        self._acting.sleep = self._worker.pause
        weakref.finalize(self, self._acting.close)

    def on_save(
        self, *, trainer: Any = None, global_step: int, checkpoint_dir: str, async_save: bool = False, **_more: Any
    ) -> None:
        """Act on a step, now or later; ``trainer`` is looked at here, and not kept.

        Raises what an action of this or, from the thread, of an earlier step came to, and
        :class:`~ckpttool.errors.NotACheckpoint` for a save of which nothing can be seen on this node.
        """
        with hinting():
            folder = Path(checkpoint_dir)
            self._save(trainer, _Job(self, global_step, folder, async_save, _has_roles(folder)))

    def _save(self, trainer: Any, job: _Job) -> None:
        self._worker.check()
        _check_place(job.folder, self._acting.run)
        waiting = self._worker.items
        if not (waiting or job.is_async or self._acting.settings.background):
            self.act(job)
            return
        if waiting and waiting[0].is_async:
            LOG.warning("step %d: its save is still not finished; those after it wait, too", waiting[0].step)
        self._worker.put(job)
        if _is_last(trainer, job.step) and not any(each.is_async for each in self._worker.items):
            self._worker.drain()

    def close(self) -> None:
        """Do what is left, in this thread, and give the lock back. For programs other than verl, which tells no end.

        Raises what an action came to, or :class:`~ckpttool.errors.BrokenCheckpoint` for saves that were not finished
        within the patience of the settings.
        """
        with hinting(), closing(self._acting) as acting:
            unfinished = acting.finish(job.step for job in self._worker.close())
            for error in (*acting.failures, *unfinished):
                raise error

    def act(self, job: _Job) -> None:
        """Act on a step; a save that is over is waited for only as long as its files may be seen late here."""
        acting = self._acting
        try:
            acting.act(job.step, patience=acting.settings.patience if job.is_async else min(acting.patience, LATE))
        except (BrokenCheckpoint, NotACheckpoint) as error:
            if error in acting.failures or _has_roles(job.folder):
                raise
            raise _removed(job.folder) if job.was_seen else _out_of_sight(job.folder) from error

    def leave(self, steps: Sequence[int]) -> None:
        """Leave steps to a child process."""
        do_elsewhere(self._acting, steps)

    def catch_up(self) -> str:
        """Return the command that does what is left undone."""
        return self._acting.catch_up()


def _act_later(job: _Job) -> None:
    job.owner.act(job)


def _tell(job: _Job, error: BaseException) -> None:
    message = "step %d: %s: %s\nThe next save raises this. To do what is left: %s"
    LOG.error(message, job.step, type(error).__name__, error, job.owner.catch_up())


def _leave(jobs: Sequence[_Job]) -> None:
    jobs[0].owner.leave([job.step for job in jobs])


def _check_place(folder: Path, run: Path) -> None:
    """Raise :class:`UsageError` for a step that lies elsewhere: the state and the actions are those of a run."""
    if os.path.realpath(folder.parent) != os.path.realpath(run):
        raise UsageError(f"{folder}: not below {run}", hint="trainer.default_local_dir is where steps are expected.")


def _file_of(config: Any) -> Path:
    """Return the file of settings, absolute: who looks for it later may be elsewhere."""
    name = setting(config, "trainer", "ckpttool_config") or os.environ.get(VARIABLE)
    if not name:
        raise UsageError(
            "no settings: neither trainer.ckpttool_config nor CKPTTOOL_CONFIG names a file",
            hint="Add +trainer.ckpttool_config=/path/to/settings.toml to verl's command line.",
        )
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"trainer.ckpttool_config: {name!r} is no file", hint="Name a file, .toml or .json.")
    return Path(name).absolute()


def _run_of(config: Any) -> Path:
    name = setting(config, "trainer", "default_local_dir")
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise UsageError(
            "trainer.default_local_dir: not in the configuration that the callback was given",
            hint="It is made by verl, as CkpttoolCallback(config=<all of the configuration>).",
        )
    return Path(name).absolute()


def _is_last(trainer: Any, step: int) -> bool:
    total = getattr(trainer, "total_training_steps", None)
    return isinstance(total, int) and step >= total


def _has_roles(folder: Path) -> bool:
    try:
        return any(path.is_dir() and path.name not in _NO_ROLES for path in folder.iterdir())
    except OSError:
        return False


def _removed(folder: Path) -> NotACheckpoint:
    return NotACheckpoint(f"{folder}: its roles were removed before they were acted on", hint=KEEP, code="gone")


def _out_of_sight(folder: Path) -> NotACheckpoint:
    return NotACheckpoint(
        f"{folder}: no role of this step can be seen on {socket.gethostname()}, where the driver is",
        hint="trainer.default_local_dir has to be on a file system that all nodes share.",
        code="out-of-sight",
    )
