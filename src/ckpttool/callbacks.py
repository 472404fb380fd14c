"""What other programs implement and call: an event of a training run, and a callback that acts on it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEvent:
    """A checkpoint that is finished: whole by the signal of the program that wrote it, and by its structure.

    ``run`` is the directory of the run, ``name`` the path of the checkpoint below it (``global_step_20/actor``), both
    without links resolved. ``path`` is where actions read: the checkpoint itself, or a tree of hard links to its files
    that the trainer's retention cannot pull away; ``original`` is the checkpoint in either case. ``role`` is empty
    where a step has no roles, ``kind`` the word that ``inspect`` has for it (``fsdp``, ``torch_dist``). ``attempt``
    counts from 1: a higher one was begun before, and failed or was killed, so that what it writes may be there
    already. ``rewritten`` tells that the trainer has saved this step anew since actions were done on it.
    """

    run: str
    name: str
    path: str
    original: str
    step: int
    role: str = ""
    kind: str = ""
    attempt: int = 1
    rewritten: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


class CheckpointCallback:
    """A callback that does nothing. Override what you need, and take ``**kwargs``: more may be told one day."""

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def on_save(self, event: CheckpointEvent, **kwargs: Any) -> None:
        """Act on a checkpoint that is finished; whatever is raised is a failure of the action."""


def search_here(run: Path) -> None:
    """Make the working directory importable."""
