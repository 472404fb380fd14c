"""Small modules whose sizes divide by nothing, for meshes that cut them twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from tests.writers.ranks import seed_everything

PLAN: dict[str, Any] = {
    "tokens": RowwiseParallel(),
    "places": ColwiseParallel(),
    "columns_13": ColwiseParallel(),
    "columns_10": ColwiseParallel(),
    "columns_7": ColwiseParallel(),
    "columns_6": ColwiseParallel(),
    "rows_13": RowwiseParallel(),
    "rows_6": RowwiseParallel(),
    "rows_10": RowwiseParallel(),
}


class Parts(nn.Module):  # type: ignore[misc]
    """Modules under their names; `fully_shard` takes no bare container."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def uneven() -> Parts:
    """Linear layers with and without a bias, embeddings, and a norm that tensor parallelism leaves whole.

    The number in a name is the size that tensor parallelism cuts.
    """
    seed_everything()
    layers = {
        "tokens": nn.Embedding(13, 10),
        "places": nn.Embedding(9, 7),
        "columns_13": nn.Linear(10, 13),
        "columns_10": nn.Linear(13, 10, bias=False),
        "columns_7": nn.Linear(10, 7),
        "columns_6": nn.Linear(7, 6, bias=False),
        "rows_13": nn.Linear(13, 10),
        "rows_10": nn.Linear(10, 7, bias=False),
        "norm": nn.LayerNorm(7),
    }
    return Parts(layers)


def starved() -> Parts:
    """Six columns for four ranks of tensor parallelism: the last has none."""
    seed_everything()
    return Parts({"rows_6": nn.Linear(6, 5), "rows_10": nn.Linear(10, 5, bias=False)})


class Deep(nn.Module):  # type: ignore[misc]
    """Parameters that eight ranks can share evenly along their last dimension only, and one that they cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 13)
        self.stack = nn.Parameter(torch.randn(3, 5, 24))
        self.long = nn.Parameter(torch.randn(13, 7))


def deep() -> nn.Module:
    """The module with the same values on every rank."""
    seed_everything()
    return Deep()
