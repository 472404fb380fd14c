"""``diff`` of two models of 1.3 GB: equal ones against ``cmp``, all different ones against the usual way in torch.

Both sides lie in the page cache. The usual way takes tensor after tensor from both files and computes the same measures
in float64, as one writes it down; its result is held against ours before anything is counted.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.bars import print_bar
from benchmarks.measure import compare, median_run, require_room, run, take_away

FREE_GB = 12
AGAINST_CMP, FASTER_THAN_TORCH, PART_OF_TORCH_PEAK, PEAK_MIB, GROWTH = 2.0, 2.0, 0.35, 150.0, 1.1
"""Bars; torch's way is given the best case, a tensor at a time, and still holds a dozen copies of the largest one."""

TENSORS, ROWS = 20, 4096
DTYPES = ("float32", "bfloat16")


def measure(folder: Path, ckpttool: str, runs: int) -> bool:
    """Print one line a bar; return whether all are kept."""
    require_room("diff", folder, FREE_GB)
    kept = [_case(folder / f"diff-{dtype}", dtype, ckpttool, runs) for dtype in DTYPES]
    return all(kept)


def _case(folder: Path, dtype: str, ckpttool: str, runs: int) -> bool:
    one, same, other = (str(folder / name) for name in ("one.safetensors", "same.safetensors", "other.safetensors"))
    _module("write", str(folder), dtype, str(TENSORS))
    run(["sync", one, same, other])
    command = [ckpttool, "diff", one, same, "--json", "--threads", "1"]
    equal = compare(f"diff, equal {dtype}", command, ["cmp", one, same], AGAINST_CMP, runs=runs)
    print(equal)
    torch = [sys.executable, "-m", "benchmarks.differing", "torch", one, other]
    _check(ckpttool, one, other, torch)
    ours = ["sh", "-c", '"$@" --threads 1 --json; test $? -eq 1', "sh", ckpttool, "diff", one, other]
    faster = compare(f"diff, all different {dtype}", ours, torch, 1 / FASTER_THAN_TORCH, runs=runs)
    print(faster)
    part = faster.ours.peak / faster.theirs.peak
    print_bar(
        f"diff {dtype}, memory against torch", f"ratio {part:.2f}", f"{PART_OF_TORCH_PEAK}", part <= PART_OF_TORCH_PEAK
    )
    take_away(folder)
    _module("write", str(folder), dtype, str(3 * TENSORS))
    peak = median_run([run(ours)]).peak
    take_away(folder)
    growth = peak / faster.ours.peak
    kept = peak <= PEAK_MIB and growth <= GROWTH
    print_bar(
        f"diff {dtype}, memory at three times the tensors", f"{peak:.0f} MiB, ratio {growth:.2f}", f"{GROWTH}", kept
    )
    return equal.kept and faster.kept and part <= PART_OF_TORCH_PEAK and kept


def _module(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "benchmarks.differing", *arguments], check=True)


def _check(ckpttool: str, one: str, other: str, torch: list[str]) -> None:
    """Raise ``RuntimeError`` where the usual way comes to other measures."""
    ours = subprocess.run([ckpttool, "diff", one, other, "--json"], capture_output=True, check=False).stdout
    theirs = json.loads(subprocess.run(torch, capture_output=True, check=True).stdout)
    for tensor in json.loads(ours)["data"]["tensors"]:
        for name, value in theirs[tensor["name"]].items():
            if not math.isclose(tensor["metrics"][name], value, rel_tol=1e-9):
                raise RuntimeError(f"{tensor['name']}: {name} is {tensor['metrics'][name]}, torch says {value}")


def write(folder: Path, dtype: str, tensors: int) -> None:
    """Write a model, the same again, and one of which nearly every element is another."""
    import torch
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(0)
    kind = getattr(torch, dtype)
    names = [f"model.layers.{n}.mlp.up_proj.weight" for n in range(tensors)]
    model = {name: torch.randn(ROWS, ROWS, generator=chance).to(kind) for name in names}
    folder.mkdir()
    save_file(model, folder / "one.safetensors")
    save_file(model, folder / "same.safetensors")
    for name, tensor in model.items():
        model[name] = (tensor + tensor * torch.randn(tensor.shape, generator=chance) * 0.01).to(kind)
    save_file(model, folder / "other.safetensors")


def torch_way(one: str, other: str) -> dict[str, dict[str, Any]]:
    """Return the measures of every tensor, as one computes them with torch."""
    from safetensors import safe_open

    found = {}
    with safe_open(one, framework="pt") as left, safe_open(other, framework="pt") as right:
        for name in left.keys():  # noqa: SIM118 - no mapping
            a, b = left.get_tensor(name), right.get_tensor(name)
            x, y = a.double().reshape(-1), b.double().reshape(-1)
            apart = y - x
            found[name] = {
                "changed": int((a != b).sum()),
                "max_abs": float(apart.abs().max()),
                "mean_abs": float(apart.abs().mean()),
                "rel_l2": float(apart.norm() / x.norm()),
                "cosine": float(x.dot(y) / x.norm() / y.norm()),
            }
    return found


if __name__ == "__main__":  # a process of its own: the measured one
    if sys.argv[1] == "write":
        write(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
    else:
        print(json.dumps(torch_way(*sys.argv[2:])))
