"""``python -m benchmarks``: start-up, ``inspect`` and ``migrate`` against their bars. Exit 1 when one is not kept."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import linking
from benchmarks.measure import TYPER, compare, run

COMPLETION = {
    "_CKPTTOOL_COMPLETE": "complete_bash",
    "COMP_WORDS": "ckpttool inspect --",
    "COMP_CWORD": "2",
}
METADATA_SECONDS, METADATA_MIB = 5.0, 500


def main() -> int:
    """Measure and print one line a bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each command (5 or more)")
    runs = parser.parse_args().runs
    ckpttool = str(Path(sys.executable).with_name("ckpttool"))
    with tempfile.TemporaryDirectory() as folder:
        role, archive, v1 = Path(folder, "role"), Path(folder, "archive"), Path(folder, "global_step_1", "actor")
        subprocess.run([sys.executable, "-m", "benchmarks.checkpoints", str(role), str(archive), str(v1)], check=True)
        inspect = [ckpttool, "inspect"]
        results = [
            compare("ckpttool --help", [ckpttool, "--help"], TYPER, 3.5, runs=runs),
            compare("completion", [ckpttool], TYPER, 3.0, runs=runs, environment=COMPLETION),
            compare("inspect, 8 ranks x 340 tensors", [*inspect, str(role)], TYPER, 5.0, runs=runs),
        ]
        print("\n".join(map(str, results)))
        big = min((run([*inspect, str(archive)]) for _ in range(3)), key=lambda r: r.wall)
        linked = linking.measure(v1, ckpttool, max(runs // 2, 3))
    kept = big.wall < METADATA_SECONDS and big.peak < METADATA_MIB
    print(
        f"inspect, .metadata of 1,024 ranks and 100,000 chunks: {big.wall:.2f} s (limit {METADATA_SECONDS:.0f}), "
        f"{big.peak:.0f} MiB (limit {METADATA_MIB})  {'ok' if kept else 'OVER'}"
    )
    return 0 if kept and linked and all(result.kept for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
