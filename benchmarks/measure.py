"""Time whole commands against each other: A B A B ..., medians, and the ratio pair by pair."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TYPER = (sys.executable, "-c", "import typer")
"""The yardstick for start-up: what any Typer program pays before its first line."""


@dataclass(frozen=True, slots=True)
class Run:
    """One process: wall and CPU seconds, peak memory in MiB (``ru_maxrss``)."""

    wall: float
    cpu: float
    peak: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """Medians of two commands and of their ratio, with the limit that it has to keep."""

    name: str
    ours: Run
    theirs: Run
    ratio: float
    limit: float

    @property
    def kept(self) -> bool:
        """Whether the limit holds."""
        return self.ratio <= self.limit

    def __str__(self) -> str:
        word = "ok" if self.kept else "OVER"
        return (
            f"{self.name:<34} {self.ours.wall * 1000:7.0f} ms {self.ours.peak:6.0f} MiB"
            f"   yardstick {self.theirs.wall * 1000:6.0f} ms   ratio {self.ratio:5.2f}   limit {self.limit}  {word}"
        )


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Run:
    """Run a command with its output thrown away; raises ``RuntimeError`` when it fails."""
    start = time.perf_counter()
    nowhere = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0), (os.POSIX_SPAWN_DUP2, 1, 2)]
    pid = os.posix_spawnp(command[0], list(command), {**os.environ, **(environment or {})}, file_actions=nowhere)
    _, status, usage = os.wait4(pid, 0)
    wall = time.perf_counter() - start
    if os.waitstatus_to_exitcode(status):
        raise RuntimeError(f"{' '.join(command)} ended with {os.waitstatus_to_exitcode(status)}")
    return Run(wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def compare(
    name: str,
    ours: Sequence[str],
    theirs: Sequence[str],
    limit: float,
    *,
    runs: int = 9,
    environment: Mapping[str, str] | None = None,
) -> Ratio:
    """Run two commands in turn, after one warm-up each, and return their medians."""
    run(ours, environment), run(theirs)
    pairs = [(run(ours, environment), run(theirs)) for _ in range(runs)]
    ratio = statistics.median(a.wall / b.wall for a, b in pairs)
    return Ratio(name, median_run([a for a, _ in pairs]), median_run([b for _, b in pairs]), ratio, limit)


def median_run(runs: Sequence[Run]) -> Run:
    """Return the medians of what was measured, each on its own."""
    return Run(
        statistics.median(r.wall for r in runs),
        statistics.median(r.cpu for r in runs),
        statistics.median(r.peak for r in runs),
    )


def take_away(folder: Path) -> int:
    """Remove a folder and return how many bytes its files had, once the file system is done with them."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    shutil.rmtree(folder)
    parent = os.open(folder.parent, os.O_RDONLY)
    try:
        os.fsync(parent)  # or freeing the blocks would be part of the next command's own fsync
    finally:
        os.close(parent)
    return size


def require_room(part: str, folder: Path, needed: int) -> None:
    """End the program with a message when a folder has too few GB free for the checkpoints of a part."""
    free = shutil.disk_usage(folder).free / 1e9
    if free < needed:
        sys.exit(f"{part}: {folder} has {free:.0f} GB free, {needed} are needed; name another with --folder")
