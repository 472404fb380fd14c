"""ckpttool: training checkpoints as names, boxes and bytes. Importing it imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpttool.errors import (
    BrokenCheckpoint,
    CannotWrite,
    CkpttoolError,
    NotACheckpoint,
    Refused,
    Unmapped,
    UsageError,
)

if TYPE_CHECKING:
    from ckpttool.callbacks import CheckpointCallback, CheckpointEvent, load_callback
    from ckpttool.inspection import inspect
    from ckpttool.source import open_checkpoint

__version__ = "0.1.0"
__all__ = [
    "BrokenCheckpoint",
    "CannotWrite",
    "CheckpointCallback",
    "CheckpointEvent",
    "CkpttoolError",
    "NotACheckpoint",
    "Refused",
    "Unmapped",
    "UsageError",
    "__version__",
    "inspect",
    "load_callback",
    "open_checkpoint",
]


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for."""
    if name == "inspect":
        from ckpttool.inspection import inspect

        return inspect
    if name == "open_checkpoint":
        from ckpttool.source import open_checkpoint

        return open_checkpoint
    if name in ("CheckpointCallback", "CheckpointEvent", "load_callback"):
        from ckpttool import callbacks

        return getattr(callbacks, name)
    raise AttributeError(f"module 'ckpttool' has no attribute {name!r}")
