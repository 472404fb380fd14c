"""Problems found while reading a checkpoint, and the words for them that formats share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpttool.errors import CkpttoolError, Problem

OTHER_NODES = "A multi-node run leaves each node's files on its own disk: copy them all into this directory."


SHOWN = 8
"""Names that a line has at most, where nobody asks for all of them."""


@dataclass(slots=True)
class Findings:
    """Problems of one checkpoint, gathered so that a thousand tensors of one kind make one line of ``most`` names."""

    problems: list[Problem] = field(default_factory=list)
    most: int = SHOWN
    grouped: dict[tuple[str, str], tuple[dict[str, None], set[int]]] = field(
        default_factory=lambda: defaultdict(lambda: ({}, set()))
    )

    def of(self, error: CkpttoolError, path: str) -> None:
        """Record an error as a problem of one file."""
        self.problems.append(Problem(code=error.code, message=error.message, hint=error.hint, path=path))

    def group(self, code: str, message: str, name: str, rank: int | None = None) -> None:
        """Record that this is so of one more tensor, on one more rank."""
        names, seen = self.grouped[code, message]
        names[name] = None
        if rank is not None:
            seen.add(rank)

    def all(self) -> tuple[Problem, ...]:
        """Return everything found."""
        lines = [
            Problem(code=code, message=f"{f'rank {ranges(seen)}: ' if seen else ''}{text}: {listing(names, self.most)}")
            for (code, text), (names, seen) in self.grouped.items()
        ]
        return (*self.problems, *lines)


def listing(names: Iterable[object], most: int = SHOWN) -> str:
    """Join names for a message; past ``most`` say how many more there are."""
    shown = [str(name) for name in names]
    more = len(shown) - most
    return ", ".join(shown[:most]) + (f" and {more:,} more" if more > 0 else "")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Write a number with its noun: ``1 shard``, ``4 shards``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or noun + 's'}"


def size(count: float) -> str:
    """Write bytes in decimal units: ``1.23 GB``."""
    return f"{count:.0f} B" if count < 1000 else scaled(count, ("KB", "MB", "GB", "TB", "PB"))


def scaled(count: float, units: Sequence[str]) -> str:
    """Write a number above 1,000 with three digits or more: ``units`` are those for thousands, millions and so on."""
    for unit in units:
        count /= 1000
        if count < 999.5 or unit == units[-1]:
            break
    return f"{count:.3g} {unit}" if count < 999.5 else f"{count:,.0f} {unit}"


def ranges(ranks: Iterable[int]) -> str:
    """Write sorted ranks as people do: ``0, 3-5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
