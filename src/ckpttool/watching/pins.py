"""Pins: not yet; a checkpoint is acted on where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def pinned(_run: Path, checkpoint: Path) -> Iterator[Path]:
    """Yield where actions read a checkpoint."""
    yield checkpoint


def clear_pins(_run: Path) -> None:
    """Remove what killed watches left."""
