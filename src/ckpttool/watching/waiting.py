"""Where a watch stands while it waits: what grows, how fast, and what is expected next."""

from __future__ import annotations

from collections.abc import Collection

from ckpttool.watching.result import Status
from ckpttool.watching.scanning import Candidate, Extent


class Outlook:
    """Remembers what was seen at the last look, and when steps were finished."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[Extent, float]] = {}
        self._finished: dict[int, float] = {}
        self.last: str | None = None

    def unchanged(self, candidate: Candidate) -> bool:
        """Tell whether a checkpoint is as it was at the last look; ``False`` for one that was not there then."""
        seen = self._seen.get(candidate.name)
        return seen is not None and seen[0] == candidate.extent

    def finished(self, candidate: Candidate) -> None:
        """Take note of a checkpoint that is finished."""
        self._finished[candidate.number] = candidate.extent.newest
        self.last = candidate.name

    def look(self, candidates: Collection[Candidate], awaited: dict[str, str], now: float) -> Status:
        """Return where things stand, and remember it. ``awaited`` says by name what unfinished ones wait for."""
        growing = max(
            (c for c in candidates if c.name in awaited and c.extent.files),
            key=lambda c: c.extent.changed,
            default=None,
        )
        expected, due = self._next()
        status = Status(
            last=self.last,
            expected=growing.number if growing is not None else expected,
            due=due if growing is None else None,
            growing=growing.name if growing is not None else None,
            bytes=growing.extent.bytes if growing is not None else 0,
            rate=self._rate(growing, now) if growing is not None else None,
            awaited=awaited[growing.name] if growing is not None else "",
        )
        self._seen = {c.name: (c.extent, now) for c in candidates}
        return status

    def _rate(self, candidate: Candidate, now: float) -> float | None:
        seen = self._seen.get(candidate.name)
        if seen is None or now <= seen[1] or candidate.extent.bytes < seen[0].bytes:
            return None
        return (candidate.extent.bytes - seen[0].bytes) / (now - seen[1])

    def _next(self) -> tuple[int | None, float | None]:
        """Return the step that comes next and when, if it comes as the last one came after the one before."""
        if len(self._finished) < 2:
            return None, None
        before, last = sorted(self._finished)[-2:]
        return 2 * last - before, 2 * self._finished[last] - self._finished[before]
