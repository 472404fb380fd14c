"""A thread that works in the background of training, and that the interpreter waits for when training ends."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")

_SLICE = 0.2
"""Seconds after which a pause looks whether training has ended."""


class Ending(BaseException):
    """Training ends while something is waited for: what is left is somebody else's. No action is to catch it."""


class Worker(Generic[Item]):
    """One thread that does what it is handed, in order; there is none while there is nothing to do.

    What ``work`` raises is told to ``failed``, and ends the thread: nothing more is done until :meth:`check` has raised
    it. The thread is no daemon, so that the interpreter waits for it. What is left when the main thread has ended is
    given to ``leave``, in the thread: from then on Python starts no thread pools, which converters and uploads need,
    and in some versions no threads.
    """

    def __init__(
        self,
        work: Callable[[Item], None],
        failed: Callable[[Item, BaseException], None],
        leave: Callable[[Sequence[Item]], None],
    ) -> None:
        self._work, self._failed, self._leave = work, failed, leave
        self._items: deque[Item] = deque()
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def items(self) -> tuple[Item, ...]:
        """What is not done yet; the first is being done, or has failed."""
        with self._lock:
            return tuple(self._items)

    def put(self, item: Item) -> None:
        """Have something done."""
        with self._lock:
            self._items.append(item)
            if self._thread is None and self._failure is None:
                self._thread = threading.Thread(target=self._run, name="ckpttool", daemon=False)
                self._thread.start()

    def check(self) -> None:
        """Raise what an item came to, once."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def drain(self) -> None:
        """Wait until everything is done, and :meth:`check`."""
        while (thread := self._thread) is not None:
            thread.join()
        self.check()

    def close(self) -> tuple[Item, ...]:
        """End the thread after the item at hand, or in the next pause, and return what is left; may raise as above."""
        self._closing.set()
        try:
            self.drain()
        finally:
            self._closing.clear()
        left = self.items
        self._items.clear()
        return left

    def pause(self, seconds: float) -> None:
        """Sleep; in the thread of the worker, raises :class:`Ending` as soon as it is to end."""
        if threading.current_thread() is not self._thread:
            time.sleep(seconds)
            return
        until = time.monotonic() + seconds
        while not self._is_ending and (left := until - time.monotonic()) > 0:
            self._closing.wait(min(left, _SLICE))
        if self._is_ending:
            raise Ending

    @property
    def _is_ending(self) -> bool:
        return self._closing.is_set() or _has_main_ended()

    def _run(self) -> None:
        while self._next():
            try:
                self._work(self._items[0])
            except BaseException as error:  # noqa: BLE001 - it is raised where the work was handed over
                self._keep(self._items[0], error)
            else:
                with self._lock:
                    self._items.popleft()
        if _has_main_ended() and self._failure is None and (left := self.items):
            self._leave(left)

    def _next(self) -> bool:
        """Tell whether there is more to do; if not, the thread is no more as soon as anyone can see."""
        with self._lock:
            more = bool(self._items) and self._failure is None and not self._is_ending
            if not more:
                self._thread = None
            return more

    def _keep(self, item: Item, error: BaseException) -> None:
        """Keep an error to be raised; what fails because training ends is left over instead."""
        if not isinstance(error, Ending) and not _has_main_ended():
            self._failed(item, error)
            with self._lock:
                self._failure = error


def _has_main_ended() -> bool:
    return not threading.main_thread().is_alive()
