"""What a command that writes a model is held to: a copy of the same files, and the usual way in torch."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from benchmarks.measure import Run, median_run


@dataclass(frozen=True, slots=True)
class Limits:
    """Time against the copy at most, torch's time against ours at least, memory against torch's and MiB at most.

    ``aside`` are seconds that are taken off ours against the copy.
    """

    slower: float
    faster: float
    part: float
    peak: float
    aside: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """Counted runs of the three commands, round by round."""

    ours: list[Run]
    copy: list[Run]
    torch: list[Run]

    @property
    def peak(self) -> float:
        """MiB of the run of ours that needed most."""
        return max(r.peak for r in self.ours)

    def print_runs(self, copy: str) -> None:
        """Print the medians of all three commands."""
        for name, every in (("ours", self.ours), (copy, self.copy), ("torch", self.torch)):
            middle = median_run(every)
            print(f"  {name:<12} {middle.wall:7.2f} s {middle.peak:6.0f} MiB")

    def print_bars(self, title: str, copy: str, limits: Limits) -> bool:
        """Print one line a bar and return whether all are kept."""
        slower = statistics.median((a.wall - limits.aside) / b.wall for a, b in zip(self.ours, self.copy, strict=True))
        faster = statistics.median(b.wall / a.wall for a, b in zip(self.ours, self.torch, strict=True))
        part = self.peak / statistics.median(r.peak for r in self.torch)
        bars = (
            (f"time against {copy}", f"ratio {slower:.2f}", f"{limits.slower}", slower <= limits.slower),
            ("torch's time against ours", f"ratio {faster:.2f}", f"{limits.faster} or more", faster >= limits.faster),
            ("memory against torch", f"ratio {part:.2f}", f"{limits.part}", part <= limits.part),
            ("memory", f"{self.peak:.0f} MiB", f"{limits.peak:.0f}", self.peak <= limits.peak),
        )
        for name, value, limit, kept in bars:
            print_bar(f"{title}, {name}", value, limit, kept)
        return all(kept for *_, kept in bars)


def print_bar(name: str, value: str, limit: str, kept: bool) -> None:
    """Print what was measured beside its limit."""
    print(f"{name:<54} {value:>20}   limit {limit}  {'ok' if kept else 'OVER'}", flush=True)
