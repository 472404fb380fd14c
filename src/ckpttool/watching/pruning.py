"""Retention: not yet."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ckpttool.watching.result import Notice
from ckpttool.watching.settings import Settings
from ckpttool.watching.state import State


class Pruner:
    """Deletes steps that are not to be kept."""

    def __init__(self, run: Path, settings: Settings, state: State, clock: object) -> None:
        self._run, self._settings, self._state, self._clock = run, settings, state, clock

    def prune(self, since: int) -> Iterator[Notice]:
        """Delete them, or say what would be deleted."""
        yield from ()
