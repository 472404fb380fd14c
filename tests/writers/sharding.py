"""Sharding a transformers model layer by layer."""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def shard(model: Any, mesh: DeviceMesh, *layers: type[Any]) -> Any:
    """Layers first (also those of the classes given), then the rest: the order of every FSDP2 recipe."""
    for module in model.modules():
        if type(module).__name__.endswith("DecoderLayer") or isinstance(module, layers):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)
