"""Saving as verl's FSDP checkpoint manager does, and the oracle beside it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from tests.writers.ranks import make_directory
from tests.writers.side_files import write_side_files

State = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A model in the middle of its training."""

    model: Any
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler


def train(model: Any) -> Training:
    """One real AdamW step on made-up gradients: moments exist, no forward pass is needed."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, _warm_up)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() * 0.1
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return Training(model, optimizer, scheduler)


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 10)


def save_role(role: Path, training: Training, state: State, *, version: int = 2) -> None:
    """Write this rank's three files; rank 0 adds what exists once."""
    save_model(role, state, version=version)
    tail = f"world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt"
    torch.save(training.optimizer.state_dict(), role / f"optim_{tail}")
    extra = {"lr_scheduler": training.scheduler.state_dict(), "rng": random_states()}
    torch.save(extra, role / f"extra_state_{tail}")
    if dist.get_rank() == 0:
        write_side_files(role / "huggingface", training.model.config)


def save_model(role: Path, state: State, *, version: int = 2) -> None:
    """The weights alone, with no word of what model they belong to."""
    make_directory(role)
    torch.save(state, role / f"model_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
    if dist.get_rank() == 0:
        write_fsdp_config(role, version, dist.get_world_size())


def random_states() -> State:
    """The RNG states under verl's names; NumPy's and Python's need a permissive unpickler."""
    return {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "random": random.getstate(),
    }


def write_fsdp_config(role: Path, version: int, world: int) -> None:
    """The file by which a role directory says how it was sharded."""
    config = {"FSDP_version": version, "world_size": world}
    (role / "fsdp_config.json").write_text(json.dumps(config, indent=4))


def save_expected(role: Path, state: State) -> None:
    """Gather every tensor with torch itself; the result lies beside the role, never inside."""
    save_tensors(role, {name: full(value) for name, value in state.items()})


def save_tensors(role: Path, whole: State) -> None:
    """`expected/ROLE.safetensors`, by rank 0; the others wait for it."""
    if dist.get_rank() == 0:
        folder = role.parent / "expected"
        folder.mkdir(exist_ok=True)
        tensors = {name: value.contiguous().clone() for name, value in whole.items()}
        save_file(tensors, folder / f"{role.name}.safetensors")
    dist.barrier()


def full(value: torch.Tensor) -> torch.Tensor:
    """Collective: every rank must ask for the tensors in the same order."""
    return value.full_tensor() if isinstance(value, DTensor) else value
