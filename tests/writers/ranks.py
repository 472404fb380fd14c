"""A gloo world of forked CPU ranks: the libraries are imported once, before the fork."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing

WORLD = 4
SEED = 20

Job = Callable[[Path], None]


def run_ranks(job: Job, out: Path, world: int = WORLD) -> None:
    """Run `job(out)` on each of `world` ranks; the first that fails ends the others and is raised."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _enter, args=(job, out, world, f"file://{folder}/store"), nprocs=world, start_method="fork"
        )


def _enter(rank: int, job: Job, out: Path, world: int, store: str) -> None:
    """A file as the meeting point: no port that another process could take meanwhile."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    job(out)
    dist.barrier()
    dist.destroy_process_group()


def seed_everything() -> None:
    """The same start on every rank and for every variant: all hold the same values."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def make_directory(path: Path) -> Path:
    """Create it on rank 0 and return once every rank can see it."""
    if dist.get_rank() == 0:
        path.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return path
