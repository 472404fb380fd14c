"""``to-hf`` of more than 1 GB against a copy of the archive, and against the usual way in torch.

As in ``benchmarks.merging`` all commands end with their output on disk, read files that the page cache holds, and are
warmed up once; what a run wrote is taken away before the next one starts, untimed. What ours wrote is compared with
what torch wrote, tensor by tensor, before anything is counted.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks import megatron
from benchmarks.bars import Limits, Measured, print_bar
from benchmarks.measure import Run, require_room, run, take_away
from benchmarks.merging import CAT

FREE_GB = 12
"""What has to be free: an archive and two models converted from it."""
UNLESS_FULL = '"$@"; test $? = 0 -o $? = 6'
"""A plan that would not fit on the disk ends with 6, and is a plan all the same."""
LIMITS = Limits(slower=2.0, faster=3.0, part=0.2, peak=200.0)
DRY_RUNS = 3
GROWTH = 1.1
COPY = "cat and sync"


@dataclass(frozen=True, slots=True)
class Case:
    """An archive of one kind and how the printed lines call it."""

    kind: str
    title: str


WHOLE = (Case("real", "to-hf, Qwen2 of two ranks"), Case("moe", "to-hf, 20,000 records"))
LARGER = Case("larger", "to-hf, Qwen2 of two ranks")
DRY = Case("gptoss120b", "to-hf --dry-run, gpt-oss-120b")


def measure(folder: Path, ckpttool: str, runs: int) -> bool:
    """Print seconds and memory of all commands and one line a bar; return whether all bars are kept."""
    require_room("convert", folder, FREE_GB)
    real, *others = [_case(case, folder, ckpttool, runs) for case in WHOLE]
    grows = _growth(real[0], folder, ckpttool)
    return all([real[1], *(kept for _, kept in others), grows, _dry_run(DRY, folder, ckpttool)])


def _growth(less: float, folder: Path, ckpttool: str) -> bool:
    """Hold the memory that four times the layers take against ``less``, in MiB."""
    role, out = folder / LARGER.kind, folder / "converted"
    megatron.write(LARGER.kind, role)
    peak = run([ckpttool, "to-hf", str(role), "-o", str(out), "--no-progress"]).peak
    read, _ = take_away(role), take_away(out)
    growth = peak / less
    title = f"{LARGER.title}, memory at {read / 1e9:.1f} GB"
    print_bar(title, f"{peak:.0f} MiB, ratio {growth:.2f}", f"{GROWTH}", growth <= GROWTH)
    return growth <= GROWTH


def _case(case: Case, folder: Path, ckpttool: str, runs: int) -> tuple[float, bool]:
    """Measure a case; return the peak memory of ours, in MiB, and whether all bars are kept."""
    role, out = folder / case.kind, folder / "converted"
    megatron.write(case.kind, role)
    files = sorted(map(str, role.glob("dist_ckpt/*.distcp")))
    run(["sync", *files])  # or the kernel would write them out while the first commands run
    commands = {
        "ours": [ckpttool, "to-hf", str(role), "-o", str(out), "--no-progress"],
        COPY: ["sh", "-c", CAT, "sh", str(out), *files],
        "torch": [sys.executable, "-m", "benchmarks.usual", "convert", str(role), str(out)],
    }
    written = _compare(commands["ours"], commands["torch"], out)
    run(commands[COPY])
    take_away(out)
    done: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            done[name].append(run(command))
            take_away(out)
    print(f"{case.title}: {take_away(role) / 1e9:.1f} GB in {len(files)} files, {written / 1e9:.1f} GB converted")
    measured = Measured(*done.values())
    measured.print_runs(COPY)
    peak = statistics.median(r.peak for r in measured.ours)
    return peak, measured.print_bars(case.title, COPY, LIMITS)


def _compare(ours: list[str], theirs: list[str], out: Path) -> int:
    """Run both, raise ``RuntimeError`` when they do not write the same, and return how many bytes torch writes."""
    run(ours)
    first = out.rename(out.with_name("first"))
    run(theirs)
    written, expected = (sum(p.stat().st_size for p in f.glob("*.safetensors")) for f in (first, out))
    if abs(written - expected) > 1 << 20:  # what headers may add
        raise RuntimeError(f"{' '.join(ours)} wrote {written:,} bytes, torch {expected:,}")
    run([sys.executable, "-m", "benchmarks.usual", "same", str(first), str(out)])
    take_away(first)
    take_away(out)
    return expected


def _dry_run(case: Case, folder: Path, ckpttool: str) -> bool:
    """Its data files are all holes: nothing but their number, names and lengths is true."""
    role, out = folder / case.kind, folder / "converted"
    megatron.write(case.kind, role)
    command = [ckpttool, "to-hf", str(role), "-o", str(out), "--dry-run", "--no-progress"]
    done = [run(["sh", "-c", UNLESS_FULL, "sh", *command]) for _ in range(DRY_RUNS)]
    if out.exists():
        raise RuntimeError(f"{case.title} wrote {out}")
    peak = max(r.peak for r in done)
    print(f"{case.title}: {take_away(role) / 1e9:.1f} GB")
    print(f"  {'ours':<12} {statistics.median(r.wall for r in done):7.2f} s {peak:6.0f} MiB")
    print_bar(f"{case.title}, memory", f"{peak:.0f} MiB", f"{LIMITS.peak:.0f}", peak <= LIMITS.peak)
    return peak <= LIMITS.peak
