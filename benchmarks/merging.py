"""``merge-fsdp`` of more than 2 GB against a copy of the shards, and against the usual way in torch.

All commands end with their output on disk (``fsync``). Nothing is dropped from the page cache between the runs and each
command is warmed up once, so that all of them alike read shards that the cache holds. What a run wrote is taken away
before the next one starts, untimed. The shards hold random values and are written by torch itself.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.bars import Limits, Measured, print_bar
from benchmarks.checkpoints import ALPHA, RANK, write
from benchmarks.measure import Run, require_room, run, take_away

FREE_GB = 25
"""What has to be free. The largest checkpoint and what is merged from it take 18 GB together."""
FASTER_THAN_TORCH, PART_OF_TORCH_PEAK = 4.0, 0.1
FUSED_FASTER = 2.0
"""With adapters both sides multiply the same matrices, which takes the same time."""
FUSED_GROWTH = 1.15
"""A layer of a PEFT model has twice the tensors, and what grows with the model is the index of them."""
PEAK_MIB, GROWTH = 150.0, 1.1

CAT = 'out=$1; shift; mkdir "$out" && cat "$@" >"$out/all" && sync "$out/all"'
COPY = 'out=$1; shift; mkdir "$out" && cp "$@" "$out" && sync "$out"/*'


@dataclass(frozen=True, slots=True)
class Case:
    """Shards of one kind, the dtype they are merged to, and the copy of them that ours is held against."""

    kind: str
    dtype: str | None
    copy: str
    script: str
    limit: float
    lora: bool = False
    faster: float = FASTER_THAN_TORCH

    @property
    def title(self) -> str:
        """How the printed lines begin."""
        return f"merge-fsdp, {self.kind}{f' to {self.dtype}' if self.dtype else ''}"

    def ours(self, ckpttool: str, role: Path, out: Path) -> list[str]:
        """Return the command that is measured."""
        dtype = ["--dtype", self.dtype] if self.dtype else []
        lora = ["--lora", "fuse"] if self.lora else []
        return [ckpttool, "merge-fsdp", str(role), "-o", str(out), *lora, *dtype, "--no-progress"]


SAME = Case("bf16", None, "cat and sync", CAT, 1.5)
CAST = Case("fp32", "bf16", "cp and sync", COPY, 2.0)
FUSED = Case("bf16 with LoRA", None, "cat and sync", CAT, 1.5, lora=True, faster=FUSED_FASTER)


def measure(folder: Path, ckpttool: str, runs: int) -> bool:
    """Print seconds and memory of all commands and one line a bar; return whether all bars are kept."""
    require_room("merge", folder, FREE_GB)
    same, same_kept = _case(SAME, folder, ckpttool, runs)
    _, cast_kept = _case(CAST, folder, ckpttool, runs)
    fused_kept = _fused(folder, ckpttool, runs)
    larger, out = folder / "larger", folder / "merged"
    _shards("bf16, four times the layers", larger)
    peak = run(SAME.ours(ckpttool, larger, out)).peak
    read, _ = take_away(larger), take_away(out)
    growth = peak / statistics.median(r.peak for r in same.ours)
    kept = growth <= GROWTH
    print_bar(f"{SAME.title}, memory at {read / 1e9:.1f} GB", f"{peak:.0f} MiB, ratio {growth:.2f}", f"{GROWTH}", kept)
    return same_kept and cast_kept and fused_kept and kept


def _fused(folder: Path, ckpttool: str, runs: int) -> bool:
    """Fuse adapters into the same model, and measure the memory at four times the layers.

    Time is held against the copy without what the products of matrices take, which no copy has to compute.
    """
    products = _products()
    print(f"matrix products of {FUSED.kind}: {products:.2f} s, taken off the time against {FUSED.copy}")
    measured, kept = _case(FUSED, folder, ckpttool, runs, aside=products)
    larger, out = folder / "larger", folder / "merged"
    _shards(f"{FUSED.kind}, four times the layers", larger)
    peak = run(FUSED.ours(ckpttool, larger, out)).peak
    read, _ = take_away(larger), take_away(out)
    growth = peak / statistics.median(r.peak for r in measured.ours)
    told = f"{peak:.0f} MiB, ratio {growth:.2f}"
    print_bar(f"{FUSED.title}, memory at {read / 1e9:.1f} GB", told, f"{FUSED_GROWTH}", growth <= FUSED_GROWTH)
    return kept and growth <= FUSED_GROWTH


def _products() -> float:
    """Return the seconds that the products of all adapters take, by one thread, in parts that stay in the cache."""
    script = "from benchmarks.products import seconds; print(seconds())"
    one = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, env=one)
    return float(done.stdout)


def _case(case: Case, folder: Path, ckpttool: str, runs: int, aside: float = 0.0) -> tuple[Measured, bool]:
    role, out = folder / case.kind, folder / "merged"
    shards = _shards(case.kind, role)
    commands = {
        "ours": case.ours(ckpttool, role, out),
        case.copy: ["sh", "-c", case.script, "sh", str(out), *shards],
        "torch": [sys.executable, "-m", "benchmarks.merging", case.dtype or "", str(out), *shards],
    }
    done: dict[str, list[Run]] = {name: [] for name in commands}
    written = {}
    for _ in range(runs + 1):
        for name, command in commands.items():
            done[name].append(run(command))
            written[name] = take_away(out)
    if abs(written["ours"] - written["torch"]) > 1 << 20:  # what headers and other files may add
        raise RuntimeError(f"{case.title} wrote {written['ours']:,} bytes, torch {written['torch']:,}")
    print(
        f"{case.title}: {take_away(role) / 1e9:.1f} GB in {len(shards)} shards, {written['torch'] / 1e9:.1f} GB merged"
    )
    measured = Measured(*(every[1:] for every in done.values()))
    measured.print_runs(case.copy)
    limits = Limits(case.limit, case.faster, PART_OF_TORCH_PEAK, PEAK_MIB, aside)
    return measured, measured.print_bars(case.title, case.copy, limits)


def _shards(kind: str, role: Path) -> list[str]:
    write(kind, role)
    shards = sorted(map(str, role.glob("*.pt")))
    run(["sync", *shards])  # or the kernel would write them out while the first commands run
    return shards


def torch_way(dtype: str, out: Path, shards: list[str]) -> None:
    """Merge as one does with torch: load all ranks, concatenate each tensor, save, here with a ``fsync`` at the end."""
    import torch
    import torch.distributed.tensor
    from safetensors.torch import save_file

    ranks = [torch.load(shard, map_location="cpu", weights_only=True) for shard in shards]
    merged = {}
    with torch.no_grad():
        for name in list(ranks[0]):
            tensor = torch.cat([rank.pop(name).to_local() for rank in ranks], dim=0)
            merged[name] = tensor.to(torch.bfloat16) if dtype == "bf16" else tensor
        _fuse(merged)
    out.mkdir()
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    with (out / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def _fuse(state: dict[str, Any]) -> None:
    """Add the product of each pair of factors to its weight, as PEFT does on a CPU: in float32, then rounded twice."""
    for name in [name for name in state if ".lora_A." in name]:
        down = state.pop(name)
        up = state.pop(name.replace(".lora_A.", ".lora_B."))
        delta = (up.float() @ down.float()) * (ALPHA / RANK)
        state[name.replace(".lora_A.default.", ".base_layer.")] += delta.to(up.dtype)
    for name in list(state):
        state[name.removeprefix("base_model.model.").replace(".base_layer.", ".")] = state.pop(name)


if __name__ == "__main__":  # a process of its own: the measured one
    torch_way(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
