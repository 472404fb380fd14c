"""Threads that each do the next piece of work, and that all stop when one of them fails or somebody presses Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

Mine = TypeVar("Mine")
Task = TypeVar("Task")
Result = TypeVar("Result")

Progress = Callable[[int], None]
Ready = Callable[[int | None], Progress]


class Stopped(BaseException):
    """Another thread has failed: nobody waits for what this one does."""


class Crew(Generic[Mine]):
    """``threads`` threads; each has something of its own that ``begin`` makes and returns with how to close it."""

    def __init__(self, threads: int, begin: Callable[[], tuple[Mine, Callable[[], None]]], progress: Progress) -> None:
        self._threads, self._begin, self._progress = threads, begin, progress
        self._lock, self._stop, self._local = threading.Lock(), threading.Event(), threading.local()

    def run(self, work: Callable[[Mine, Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """Do all tasks and yield what came of them, in their order; raises what one of them raises."""
        with ExitStack() as closing, ThreadPoolExecutor(self._threads) as pool:
            futures = [pool.submit(self._do, work, task, closing) for task in tasks]
            with self._stopping(pool):
                wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if not future.cancelled() and not isinstance(future.exception(), Stopped):
                future.result()
        yield from (future.result() for future in futures)

    def _do(self, work: Callable[[Mine, Task], Result], task: Task, closing: ExitStack) -> Result:
        return work(self._mine(closing), task)

    @contextmanager
    def _stopping(self, pool: ThreadPoolExecutor) -> Iterator[None]:
        try:
            yield
        finally:
            self._stop.set()
            pool.shutdown(cancel_futures=True)

    def _mine(self, closing: ExitStack) -> Mine:
        if not hasattr(self._local, "mine"):
            self._local.mine, close = self._begin()
            with self._lock:
                closing.callback(close)
        mine: Mine = self._local.mine
        return mine

    def advance(self, count: int) -> None:
        """Tell that so many bytes more are done; raises :class:`Stopped` where that is no longer of use."""
        if self._stop.is_set():
            raise Stopped
        with self._lock:
            self._progress(count)
