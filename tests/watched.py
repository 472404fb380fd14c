"""A trainer and a watch side by side, in one process and in time that is made: the watch's pauses let the trainer on.

Both report to one log, so that it is known what came first: ``signal`` (before it is given), ``finished`` (after that,
with what is in each checkpoint) by the trainer, ``fired`` by the callback with what it found.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpttool.callbacks import CheckpointCallback, CheckpointEvent
from ckpttool.watching import Notice, Settings, Watcher
from tests.trainer import Act, Moment, Step, contents, perform, read_log, report

MINUTE = 60.0


class Recorder(CheckpointCallback):
    """Reports what there is when it is called: the name of a log is its configuration."""

    def on_save(self, event: CheckpointEvent, **kwargs: Any) -> None:
        """Read every byte."""
        report(Path(self.config["log"]), {"what": "fired", **event.as_json(), "files": contents(Path(event.path))})


class Over(BaseException):
    """The trainer has ended, and the watch has looked often enough since."""


@dataclass
class World:
    """A run, time, and a trainer that gets on while the watch pauses. What is written bears the time that it is."""

    run: Path
    log: Path
    now: float = 2_000_000_000.0
    looks: int = 1
    """How often the watch looks between two changes."""
    changes: int = 1
    """How many changes come between two looks."""
    trainer: Iterator[Step] = field(default_factory=lambda: iter(()))
    notices: list[Notice] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        """Let time pass, and the trainer work."""
        self._pauses += 1
        changes = self.changes if self._pauses % self.looks == 0 else 0
        for _ in range(changes):
            self.now += seconds / changes
            self.go_on()
        self.now += 0 if changes else seconds
        self._idle += self._ended
        if self._idle > 4:
            raise Over

    _pauses: int = 0
    _idle: int = 0
    _ended: bool = False

    def go_on(self) -> None:
        """Let the trainer make one change, and tell what there is to tell before it."""
        for step in self.trainer:
            if not isinstance(step, dict):
                self._stamp(step)
                return
            self.hear(step)
        self._ended = True

    def hear(self, moment: Moment) -> None:
        """Note what the trainer tells; a minute passes before what it does later."""
        report(self.log, moment)
        if moment["what"] == "later":
            self.now += MINUTE

    def _stamp(self, path: Path | None) -> None:
        if path is not None:
            os.utime(path, (self.now, self.now))

    def train(self, acts: list[Act]) -> World:
        """Perform acts while nobody watches."""
        self.begin(acts)
        while not self._ended:
            self.now += 1
            self.go_on()
        return self

    def begin(self, acts: list[Act]) -> None:
        """Begin to perform acts; nothing is done before somebody pauses."""
        self.trainer, self._ended, self._idle, self._pauses = perform(self.run, acts), False, 0, 0

    def settings(self, settings: Settings) -> Settings:
        """Settings with the recorder as the first callback, and a look each second."""
        callbacks = ("tests.watched:Recorder", *settings.callbacks)
        return replace(settings, callbacks=callbacks, callback_config={"log": str(self.log)}, interval=1.0)

    def watch(self, acts: list[Act] | None = None, settings: Settings | None = None, **options: Any) -> World:
        """Watch while acts are performed, until the trainer has ended and the watch has looked a few times more."""
        self.begin(acts or [])
        made = self.settings(settings or Settings())
        try:
            with Watcher(self.run, made, clock=lambda: self.now, sleep=self.sleep) as watcher:
                for notice in watcher.watch(**options):
                    self.notices.append(notice)
        except Over:
            pass
        return self

    # What came of it

    @property
    def moments(self) -> list[Moment]:
        """Everything that was reported."""
        return read_log(self.log)

    @property
    def acted(self) -> list[Moment]:
        """What callbacks were told, and found."""
        return [moment for moment in self.moments if moment["what"] == "fired"]

    @property
    def fired(self) -> list[str]:
        """The checkpoints that were acted on, in order."""
        return [moment["name"] for moment in self.acted]

    def told(self, what: str) -> list[Notice]:
        """The notices of one kind."""
        return [notice for notice in self.notices if notice.what == what]

    def check(self) -> list[str]:
        """Hold what was done against what was true, and return the checkpoints that were acted on, in order.

        Each save that was finished was acted on once, after its signal, and what was there was that save and no other.
        """
        check(self.moments)
        return self.fired


def check(moments: list[Moment]) -> None:
    """Hold what was acted on against what was saved."""
    signalled: Counter[str] = Counter()
    finished, fired = defaultdict(list), defaultdict(list)
    for moment in moments:
        if moment["what"] == "signal":
            signalled.update(moment["checkpoints"])
        elif moment["what"] == "finished":
            for name, files in moment["files"].items():
                finished[name].append(files)
        elif moment["what"] == "fired":
            name = moment["name"]
            fired[name].append(moment["files"])
            assert len(fired[name]) <= signalled[name], f"{name} was acted on before its signal"
    assert fired.keys() == finished.keys()
    for name, saves in finished.items():
        assert fired[name] == saves, f"{name}: something else was there, or it was acted on more or less than once"
