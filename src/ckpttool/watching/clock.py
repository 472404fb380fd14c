"""Time, as an argument: tests have one of their own."""

from __future__ import annotations

from collections.abc import Callable

Clock = Callable[[], float]
"""Tells the time, in seconds since 1970."""

Sleep = Callable[[float], None]
"""Waits for so many seconds."""
