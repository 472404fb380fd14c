"""``migrate --mode hardlink`` on an archive of ten thousand files, against ``cp -al`` done as often."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.measure import run
from ckpttool.migration import Options
from ckpttool.migration.plan import plan_role
from ckpttool.migration.steps import execute

LINKING, WHOLE = 1.5, 4.0


def measure(role: Path, ckpttool: str, runs: int) -> bool:
    """Print both ratios and return whether their limits hold. The trees are taken away between the runs, untimed."""
    plan = plan_role(role, Options())
    trees = [tree.path for tree in plan.trees]
    linking, whole = [], []
    for _ in range(runs + 1):
        copies = sum(
            run(["cp", "-al", str(role / "dist_ckpt"), str(role / f"copy-{n}")]).wall for n in range(len(trees))
        )
        _take_away(role, [f"copy-{n}" for n in range(len(trees))])
        linking.append(_timed(lambda: execute(role, plan.steps)) / copies)
        _take_away(role, ["model", "optimizer", "extra", "ckpt_contents.json"])
        whole.append(run([ckpttool, "migrate", str(role), "--no-progress"]).wall / copies)
        _take_away(role, ["model", "optimizer", "extra", "ckpt_contents.json"])
    ratios = {
        "linking": (statistics.median(linking[1:]), LINKING),
        "whole command": (statistics.median(whole[1:]), WHOLE),
    }
    for name, (ratio, limit) in ratios.items():
        word = "ok" if ratio <= limit else "OVER"
        print(
            f"migrate, 10,000 files, {name:<13} against {len(trees)} x cp -al: "
            f"ratio {ratio:.2f}   limit {limit}  {word}"
        )
    return all(ratio <= limit for ratio, limit in ratios.values())


def _timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _take_away(role: Path, names: list[str]) -> None:
    for name in names:
        if (role / name).is_dir():
            shutil.rmtree(role / name)
        elif (role / name).exists():
            (role / name).unlink()
