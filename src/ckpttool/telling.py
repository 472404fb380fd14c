"""Let whoever waits know what is being looked at, without the readers knowing who that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str], None]

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(what: str) -> None:
    """Say what is looked at now; costs nothing when nobody listens."""
    listener = _listener.get()
    if listener is not None:
        listener(what)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Hear what is told while the block runs."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
