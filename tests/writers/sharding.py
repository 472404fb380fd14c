"""Sharding a transformers model layer by layer."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def shard(model: Any, mesh: DeviceMesh) -> Any:
    """Layers first, then the rest: the order of every FSDP2 recipe."""
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)
