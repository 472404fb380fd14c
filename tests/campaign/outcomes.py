"""What a campaign has seen: how often things came to what, and everything that may not be."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Outcome(NamedTuple):
    """One trial: what was tried (words to count by), what it came to (an exit code, a state), what was wrong."""

    what: tuple[str, ...]
    came_to: str
    wrong: tuple[str, ...] = ()
    repeat: str = ""
    """How to see it again: a seed, a command line."""


@dataclass
class Outcomes:
    """Counts of all trials, and the outcomes that may not be."""

    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    faults: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one trial, and keep it when something was wrong."""
        self.counts.update([(*outcome.what, outcome.came_to)])
        if outcome.wrong:
            self.faults.append(outcome)

    def extend(self, other: Outcomes) -> None:
        """Add all that another campaign has seen."""
        self.counts.update(other.counts)
        self.faults.extend(other.faults)

    @property
    def trials(self) -> int:
        """How many there were."""
        return self.counts.total()

    def __str__(self) -> str:
        """A line a count, then a paragraph a fault."""
        lines = [f"{count:6} {', '.join(words)}" for words, count in sorted(self.counts.items())]
        for fault in self.faults:
            lines += ["", f"WRONG {', '.join(fault.what)}, {fault.came_to}", *(f"  {line}" for line in fault.wrong)]
            lines += [f"  again: {fault.repeat}"] * bool(fault.repeat)
        return "\n".join([*lines, "", f"{self.trials} trials, {len(self.faults)} faults"])
