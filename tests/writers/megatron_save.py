"""Saving as verl's Megatron checkpoint manager does: the parts, the two layouts, the manifest."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from tests.writers.megatron_cpu import CpuAsCuda, Training
from tests.writers.ranks import make_directory

State = dict[str, Any]

FULLY_RESHARDABLE = "fully_reshardable"
DP_RESHARDABLE = "dp_reshardable"


def content_metadata(sharding: str | None) -> State:
    """What verl tells Megatron about the form of the archive (and Megatron stores)."""
    found: State = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if sharding is not None:
        found["distrib_optim_sharding_type"] = sharding
    if sharding == FULLY_RESHARDABLE:
        found["distrib_optim_fully_reshardable_mem_efficient"] = False
    return found


def model_part(training: Training, metadata: State) -> State:
    """`model` is only the key of the dictionary: on disk the names start at `decoder.`."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    options = {**metadata, "dp_cp_group": group}
    return {"model": training.model.sharded_state_dict(metadata=options)}


def optimizer_part(training: Training, metadata: State) -> State:
    """The optimizer with its learning-rate scheduler."""
    with CpuAsCuda():
        optimizer = training.optimizer.sharded_state_dict(model_part(training, metadata), metadata=metadata)
    return {"optimizer": optimizer, "lr_scheduler": training.scheduler.state_dict()}


def extra_part() -> State:
    """The RNG states: one object for each place in the pipeline x tensor grid."""
    states = {
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    tp = parallel_state.get_tensor_model_parallel_world_size()
    place = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return {"rng_state": ShardedObject("rng_state", [states], (pp, tp), place, replica)}


def save_archive(path: Path, state: State, metadata: State) -> None:
    """One `torch_dist` directory; the data-parallel ranks share the writing."""
    make_directory(path)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group)
    dist_checkpointing.save(state, str(path), sharded_strategy=strategy, content_metadata=metadata)


def write_transformer_config(path: Path, training: Training) -> None:
    """Lossy, as verl's: what JSON cannot say is left out, dtypes become their names."""
    found = {field.name: getattr(training.config, field.name) for field in fields(training.config)}
    kept = {name: value for name, value in found.items() if not callable(value)}
    path.write_text(json.dumps(kept, indent=2, default=str))


@dataclass(frozen=True)
class Contents:
    """What one save of layout v2 holds; see the matrix of verl's manager."""

    has_bridge: bool
    use_dist_checkpointing: bool
    save_contents: tuple[str, ...] = ("model", "optimizer", "extra")
    arch: str = "Qwen2ForCausalLM"
    step: int = 10

    @property
    def hf_model(self) -> bool:
        """Weights in Hugging Face form."""
        return "hf_model" in self.save_contents or not self.use_dist_checkpointing

    @property
    def sharded_model(self) -> bool:
        """Weights as Megatron shards."""
        return "model" in self.save_contents and self.use_dist_checkpointing


def write_manifest(role: Path, contents: Contents) -> None:
    """`ckpt_contents.json`, through a temporary file: its presence says the save is whole."""
    partial = role / "ckpt_contents.json.tmp"
    with partial.open("w") as stream:
        json.dump(_manifest(contents), stream, indent=2, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(role / "ckpt_contents.json")


def _manifest(contents: Contents) -> State:
    return {
        "schema_version": 2,
        "framework": "megatron",
        "role": "actor",
        "arch": contents.arch,
        "global_step": contents.step,
        "world_size": dist.get_world_size(),
        "backend": {
            "has_bridge": contents.has_bridge,
            "use_dist_checkpointing": contents.use_dist_checkpointing,
            "peft": False,
        },
        "save_contents": list(contents.save_contents),
        "contents": _entries(contents),
        "directories": _directories(contents),
        "saved_any_dist_ckpt": True,
    }


def _sharded(path: str, **more: str) -> State:
    return {"path": path, "format": "megatron_dist_checkpoint", **more}


def _huggingface(**more: Any) -> State:
    return {"path": "model/huggingface", "format": "huggingface", **more}


def _entries(contents: Contents) -> State:
    found: State = {}
    if contents.hf_model:
        found |= _huggingface_entries(contents)
    if contents.sharded_model:
        found["model"] = _sharded("model/dist_ckpt", backend="dist_checkpointing")
    found["optimizer"] = _sharded("optimizer/dist_ckpt")
    found["lr_scheduler"] = _sharded("optimizer/dist_ckpt", key="lr_scheduler")
    found["rng_state"] = _sharded("extra/dist_ckpt", key="rng_state")
    found["transformer_config"] = {"path": "transformer_config.json", "format": "json"}
    return found


def _huggingface_entries(contents: Contents) -> State:
    """The note is a list here: a stray comma in verl makes it a tuple."""
    note = "HF export alongside Megatron model shards under model/dist_ckpt/"
    found = {
        "model": _huggingface(backend="mbridge"),
        "hf_config": _huggingface(note="config.json, tokenizer, and optional generation_config.json"),
        "tokenizer": _huggingface(),
    }
    if "hf_model" in contents.save_contents:
        found["hf_model"] = _huggingface(note=[note])
    return found


def _directories(contents: Contents) -> State:
    found = {
        "optimizer/dist_ckpt": "Megatron shards of the optimizer and lr_scheduler.",
        "extra/dist_ckpt": "Megatron shards of rng_state.",
    }
    if contents.hf_model:
        found["model/huggingface"] = "Hugging Face weights, config.json and tokenizer."
    if contents.sharded_model:
        found["model/dist_ckpt"] = "Megatron shards of the model weights."
    return found
