"""``verify`` of large and of small records against a plain loop of ``zlib.crc32``, and against ``sha256sum``.

All read the same files from the page cache. The loop reads into one buffer and checks nothing else: no command that
finds the records, compares checksums and looks at the structure can be faster on one thread.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.bars import print_bar
from benchmarks.checkpoints import write
from benchmarks.measure import median_run, run, take_away

FREE_GB = 3
SLOWER, PART_OF_SHA256, PEAK_MIB = 1.5, 0.75, 80.0
ASIDE = 0.25
"""Seconds that are taken off: the start of the command, which does not grow with the checkpoint."""

LOOP = """
import sys, zlib
buffer = memoryview(bytearray(1 << 20))
for path in sys.argv[1:]:
    with open(path, "rb", buffering=0) as file:
        crc = 0
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
"""


def measure(folder: Path, ckpttool: str, runs: int) -> bool:
    """Print one line a bar; return whether all are kept."""
    role = folder / "verified"
    write("bf16", role)
    files = sorted(map(str, role.glob("*.pt")))
    size = sum(Path(file).stat().st_size for file in files)
    ours = [ckpttool, "verify", str(role), "--threads", "1", "--no-progress"]
    commands = (ours, [sys.executable, "-c", LOOP, *files], ["sha256sum", *files])
    for command in commands:
        run(command)
    rounds = [[run(command) for command in commands] for _ in range(runs)]
    take_away(role)
    crc = statistics.median((a.wall - ASIDE) / b.wall for a, b, _ in rounds)
    sha = statistics.median(a.wall / c.wall for a, _, c in rounds)
    peak = max(a.peak for a, _, _ in rounds)
    middle = median_run([a for a, _, _ in rounds])
    title = f"verify, {size / 1e9:.1f} GB on one thread"
    print(f"  {'ours':<12} {middle.wall:7.2f} s {middle.peak:6.0f} MiB, {size / middle.wall / 1e9:.2f} GB/s")
    bars = (
        ("time against a loop of zlib.crc32", f"ratio {crc:.2f}", f"{SLOWER}", crc <= SLOWER),
        ("time against sha256sum", f"ratio {sha:.2f}", f"{PART_OF_SHA256}", sha <= PART_OF_SHA256),
        ("memory", f"{peak:.0f} MiB", f"{PEAK_MIB:.0f}", peak <= PEAK_MIB),
    )
    for name, value, limit, kept in bars:
        print_bar(f"{title}, {name}", value, limit, kept)
    return all(kept for *_, kept in bars)
