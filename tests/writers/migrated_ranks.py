"""Load migrated roles as verl's manager does, on the ranks that wrote them: `python -m tests.writers migrated OUT`.

`OUT/{dense,bridge,moe}/{v1,hardlink,symlink,copy}` are role directories; `OUT/loaded-RANK.json` says what differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

from tests.writers.megatron_cpu import CpuAsCuda, Parallel, Training, prepare_rank
from tests.writers.megatron_models import dense_model, moe_model
from tests.writers.megatron_ranks import trained
from tests.writers.megatron_save import State, extra_part, model_part

TREES = {"model": "model/dist_ckpt", "optimizer": "optimizer/dist_ckpt", "extra": "extra/dist_ckpt"}
PARTS = {"dense": tuple(TREES), "bridge": ("optimizer", "extra"), "moe": tuple(TREES)}


def write_all(out: Path) -> None:
    """Compare every migrated role with the one of v1 that it was."""
    prepare_rank()
    told: dict[str, list[str]] = {}
    for hf, parallel, names in (
        (dense_model(), Parallel(tp=2, pp=2), ("dense", "bridge")),
        (moe_model(), Parallel(tp=2, ep=2), ("moe",)),
    ):
        training = trained(hf, parallel)
        for name in names:
            told |= compared(out / name, PARTS[name], training)
    (out / f"loaded-{dist.get_rank()}.json").write_text(json.dumps(told))


def compared(home: Path, parts: tuple[str, ...], training: Training) -> dict[str, list[str]]:
    """The names of what is not equal, for each migrated role and part."""
    told = {}
    for part in parts:
        oracle = dict(flattened(load(home / "v1/dist_ckpt", part, training)))
        check_oracle(part, oracle)
        for role in sorted(path for path in home.iterdir() if path.name != "v1"):
            found = dict(flattened(load(role / TREES[part], part, training)))
            wrong = [key for key in oracle.keys() | found.keys() if not same(oracle.get(key), found.get(key))]
            told[f"{home.name}/{role.name}/{part}"] = wrong
    return told


def load(archive: Path, part: str, training: Training) -> State:
    """One tree, with the state dict that verl hands to it; what is in memory is wiped first."""
    metadata = dist_checkpointing.load_content_metadata(str(archive))
    wanted = asked(part, training, metadata)
    with torch.no_grad():
        for piece in nested_values(wanted):
            if isinstance(piece, ShardedTensor) and piece.data is not None:
                piece.data.zero_()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), group)
    with CpuAsCuda():
        loaded: State = dist_checkpointing.load(wanted, str(archive), sharded_strategy=strategy)
    return deepcopy(loaded)


def asked(part: str, training: Training, metadata: State) -> State:
    if part == "model":
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.zero_()
        return model_part(training, metadata)
    if part == "extra":
        return extra_part()
    with CpuAsCuda():
        model = model_part(training, metadata)
        optimizer = training.optimizer.sharded_state_dict(model, is_loading=True, metadata=metadata)
    return {"optimizer": optimizer, "lr_scheduler": {}}


def check_oracle(part: str, loaded: State) -> None:
    """The comparison would mean nothing if the v1 archive itself gave nothing."""
    tensors = [value for value in loaded.values() if isinstance(value, torch.Tensor)]
    if part != "extra":
        assert any(bool(tensor.any()) for tensor in tensors)
    if part == "optimizer":
        assert loaded["lr_scheduler.num_steps"] == 1
    if part == "extra":
        assert any(key.endswith("torch_rng_state") for key in loaded)


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf with its place."""
    if isinstance(value, dict):
        children = [(str(key), child) for key, child in value.items()]
    elif isinstance(value, list | tuple):
        children = [(str(at), child) for at, child in enumerate(value)]
    else:
        yield name, value
        return
    for key, child in children:
        yield from flattened(child, f"{name}.{key}".lstrip("."))


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and np.array_equal(left, right)
    return type(left) is type(right) and (left == right or left is right or bytes_of(left) == bytes_of(right))


def bytes_of(value: Any) -> Any:
    """Megatron's extra states are in-memory files."""
    return value.getvalue() if hasattr(value, "getvalue") else value
