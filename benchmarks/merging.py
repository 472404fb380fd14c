"""``merge-fsdp`` of more than 2 GB against a copy of the shards, and against the usual way in torch.

All commands end with their output on disk (``fsync``). Nothing is dropped from the page cache between the runs and each
command is warmed up once, so that all of them alike read shards that the cache holds. What a run wrote is taken away
before the next one starts, untimed. The shards hold random values and are written by torch itself.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Limits, Measured, print_bar
from benchmarks.checkpoints import write
from benchmarks.measure import Run, require_room, run, take_away

FREE_GB = 25
"""What has to be free. The largest checkpoint and what is merged from it take 18 GB together."""
FASTER_THAN_TORCH, PART_OF_TORCH_PEAK = 4.0, 0.1
FUSED_FASTER = 2.0
"""With adapters both sides multiply the same matrices, which takes the same time."""
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
    larger, out = folder / "larger", folder / "merged"
    _shards("bf16, four times the layers", larger)
    peak = run(SAME.ours(ckpttool, larger, out)).peak
    read, _ = take_away(larger), take_away(out)
    growth = peak / statistics.median(r.peak for r in same.ours)
    kept = growth <= GROWTH
    print_bar(f"{SAME.title}, memory at {read / 1e9:.1f} GB", f"{peak:.0f} MiB, ratio {growth:.2f}", f"{GROWTH}", kept)
    return same_kept and cast_kept and kept


def _case(case: Case, folder: Path, ckpttool: str, runs: int) -> tuple[Measured, bool]:
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
    limits = Limits(case.limit, FASTER_THAN_TORCH, PART_OF_TORCH_PEAK, PEAK_MIB)
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
    out.mkdir()
    save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    with (out / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())


if __name__ == "__main__":  # a process of its own: the measured one
    torch_way(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
