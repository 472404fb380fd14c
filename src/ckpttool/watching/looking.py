"""What one look at a run came to, and whether a second one would tell more."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpttool.watching.scanning import Candidate, Scan
from ckpttool.watching.signs import SETTLED, SLACK


@dataclass(slots=True)
class Look:
    """What one look came to: what was seen, and by name what is not finished, with what it waits for."""

    seen: Scan
    missing: dict[str, str] = field(default_factory=dict)
    fired: bool = False


def second_look(look: Look, now: float, interval: float) -> float:
    """Return after how long a second look may tell that something is finished; 0 where it would tell nothing."""
    missing = [candidate for candidate in look.seen.candidates if candidate.name in look.missing]
    if any(candidate.sign is None for candidate in missing):
        return interval
    settled = any(is_behind(candidate) or _may_be_settled(candidate, now) for candidate in missing)
    return min(SLACK, interval) if settled else 0.0


def is_behind(candidate: Candidate) -> bool:
    """Tell whether the sign of a checkpoint is a little older than its data: what a second look is for."""
    return 0 < _behind(candidate) <= SLACK


def _behind(candidate: Candidate) -> float:
    at = candidate.sign.at if candidate.sign is not None and candidate.is_signed else None
    return candidate.extent.newest - at if at is not None else 0.0


def _may_be_settled(candidate: Candidate, now: float) -> bool:
    """Tell whether nothing was written for long to a checkpoint without a sign, or with one that is older than it."""
    absent = candidate.sign is not None and candidate.sign.absent
    return (absent or _behind(candidate) > 0) and now - candidate.extent.newest > SETTLED
