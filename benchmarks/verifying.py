"""``verify`` of shards against plain loops of ``zlib.crc32``, alone and with ``hashlib.sha256``, over the same files.

All read from the page cache. The loops read into one buffer and do nothing else: no command that also starts, finds
the records and looks at the structure can be faster on one thread.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.bars import print_bar
from benchmarks.checkpoints import write
from benchmarks.measure import Run, median_run, run, take_away

FREE_GB = 3
AGAINST_CRC, AGAINST_BOTH, IN_PARALLEL, PEAK_MIB, LEAST_GB_A_SECOND = 2.0, 1.25, 0.9, 80.0, 1.0

LOOP = """
import hashlib, sys, zlib
buffer = memoryview(bytearray(1 << 20))
for path in sys.argv[2:]:
    with open(path, "rb", buffering=0) as file:
        crc, sha256 = 0, hashlib.sha256()
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
            if sys.argv[1] == "both":
                sha256.update(buffer[:count])
"""


def measure(folder: Path, ckpttool: str, runs: int) -> bool:
    """Print one line a bar; return whether all are kept."""
    role = folder / "verified"
    write("bf16", role)
    files = sorted(map(str, role.glob("*.pt")))
    size = sum(Path(file).stat().st_size for file in files)
    ours = [ckpttool, "verify", str(role), "--no-progress", "--threads"]
    loops = {kind: [sys.executable, "-c", LOOP, kind, *files] for kind in ("crc", "both")}
    checked = _rounds([[*ours, "1"], loops["crc"]], runs)
    run([*ours, "1", "--write-integrity"])
    hashed = _rounds([[*ours, "1"], loops["both"], [*ours, "2"]], runs)
    take_away(role)
    title = f"verify, {size / 1e9:.1f} GB"
    middle = median_run([first for first, *_ in checked])
    speed = size / middle.wall / 1e9
    peak = max(one.peak for one in (*(a for a, _ in checked), *(one for a, _, c in hashed for one in (a, c))))
    crc = statistics.median(a.wall / b.wall for a, b in checked)
    sha = statistics.median(a.wall / b.wall for a, b, _ in hashed)
    two = statistics.median(c.wall / a.wall for a, _, c in hashed)
    bars = (
        ("checksums, one thread", f"{speed:.2f} GB/s", f"{LEAST_GB_A_SECOND} or more", speed >= LEAST_GB_A_SECOND),
        ("time against a loop of zlib.crc32", f"ratio {crc:.2f}", f"{AGAINST_CRC}", crc <= AGAINST_CRC),
        ("and hashes, against loops of both", f"ratio {sha:.2f}", f"{AGAINST_BOTH}", sha <= AGAINST_BOTH),
        ("and hashes, two threads against one", f"ratio {two:.2f}", f"{IN_PARALLEL}", two <= IN_PARALLEL),
        ("memory", f"{peak:.0f} MiB", f"{PEAK_MIB:.0f}", peak <= PEAK_MIB),
    )
    for name, value, limit, kept in bars:
        print_bar(f"{title}, {name}", value, limit, kept)
    return all(kept for *_, kept in bars)


def _rounds(commands: list[list[str]], runs: int) -> list[list[Run]]:
    """Run commands in turn, after one warm-up each."""
    for command in commands:
        run(command)
    return [[run(command) for command in commands] for _ in range(runs)]
