"""``python -m benchmarks``: the commands against their bars. Exit 1 when one is not kept."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks import checkpoints, converting, differing, linking, merging, verifying
from benchmarks.measure import TYPER, compare, require_room, run

COMPLETION = {
    "_CKPTTOOL_COMPLETE": "complete_bash",
    "COMP_WORDS": "ckpttool inspect --",
    "COMP_CWORD": "2",
}
METADATA_SECONDS, METADATA_MIB = 5.0, 500


def start(_: Path, ckpttool: str, runs: int) -> bool:
    """Measure what is paid before a command does anything."""
    results = [
        compare("ckpttool --help", [ckpttool, "--help"], TYPER, 3.5, runs=runs),
        compare("completion", [ckpttool], TYPER, 3.0, runs=runs, environment=COMPLETION),
    ]
    print("\n".join(map(str, results)))
    return all(result.kept for result in results)


def inspect(folder: Path, ckpttool: str, runs: int) -> bool:
    """Measure ``inspect`` on many tensors, and on the ``.metadata`` of many ranks."""
    role, archive = folder / "role", folder / "archive"
    checkpoints.write("fsdp", role)
    checkpoints.write("dcp", archive)
    result = compare("inspect, 8 ranks x 340 tensors", [ckpttool, "inspect", str(role)], TYPER, 5.0, runs=runs)
    print(result)
    big = min((run([ckpttool, "inspect", str(archive)]) for _ in range(3)), key=lambda r: r.wall)
    kept = big.wall < METADATA_SECONDS and big.peak < METADATA_MIB
    print(
        f"inspect, .metadata of 1,024 ranks and 100,000 chunks: {big.wall:.2f} s (limit {METADATA_SECONDS:.0f}), "
        f"{big.peak:.0f} MiB (limit {METADATA_MIB})  {'ok' if kept else 'OVER'}"
    )
    return result.kept and kept


def merge(folder: Path, ckpttool: str, runs: int) -> bool:
    """Measure ``merge-fsdp``: half the runs, each of which writes gigabytes."""
    return merging.measure(folder, ckpttool, max(runs // 2, 5))


def convert(folder: Path, ckpttool: str, runs: int) -> bool:
    """Measure ``to-hf``: half the runs, as they write gigabytes too."""
    return converting.measure(folder, ckpttool, max(runs // 2, 5))


def diff(folder: Path, ckpttool: str, runs: int) -> bool:
    """Measure ``diff`` of equal and of different models."""
    return differing.measure(folder, ckpttool, max(runs // 2, 5))


def verify(folder: Path, ckpttool: str, runs: int) -> bool:
    """Measure ``verify`` of shards, without and with a list of hashes."""
    return verifying.measure(folder, ckpttool, max(runs // 2, 5))


def migrate(folder: Path, ckpttool: str, runs: int) -> bool:
    """Measure ``migrate`` on an archive of many files."""
    role = folder / "global_step_1" / "actor"
    checkpoints.write("megatron", role)
    return linking.measure(role, ckpttool, max(runs // 2, 3))


PARTS: Mapping[str, Callable[[Path, str, int], bool]] = {
    "start": start,
    "inspect": inspect,
    "merge": merge,
    "convert": convert,
    "diff": diff,
    "verify": verify,
    "migrate": migrate,  # last, as it plans in this process: one started later would report its memory as its own
}
ROOM: Mapping[str, int] = {
    "merge": merging.FREE_GB,
    "convert": converting.FREE_GB,
    "diff": differing.FREE_GB,
    "verify": verifying.FREE_GB,
}


def main() -> int:
    """Measure and print one line a bar."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="counted runs of each command (5 or more)")
    parser.add_argument("--only", choices=PARTS, help="measure one part only")
    parser.add_argument("--folder", type=Path, default=tempfile.gettempdir(), help="where to write the checkpoints")
    options = parser.parse_args()
    if not options.folder.is_dir():
        parser.error(f"{options.folder} is not a folder")
    names = [options.only] if options.only else list(PARTS)
    for name in ROOM.keys() & names:
        require_room(name, options.folder, ROOM[name])
    ckpttool = str(Path(sys.executable).with_name("ckpttool"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        kept = [PARTS[name](Path(folder), ckpttool, options.runs) for name in names]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
