"""Checkpoints for the benchmarks, written by torch itself in one process that plays every rank in turn."""

from __future__ import annotations

import itertools
import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

VALUES = 1 << 25
"""How many random values the tensors of a checkpoint are cut from; the largest record has to be smaller."""


def fsdp_role(path: Path, *, ranks: int = 8, layers: int = 28, hidden: int = 64) -> int:
    """Write FSDP2 shards of a Qwen2-shaped model (12 tensors a layer) and return how many tensors it has."""
    import torch

    shapes = _shapes(layers, hidden)
    _play(path, shapes, ranks, torch.zeros)
    return len(shapes)


def windows(dtype: str) -> Callable[..., Any]:
    """Return what makes a tensor of random values of a shape.

    Every tensor is a window of its own on one stretch of random values, which torch saves as a storage of its own:
    writing is quick, no two pages are alike, and memory does not grow with the checkpoint.
    """
    import torch

    values = torch.empty(VALUES, dtype=getattr(torch, dtype)).normal_(std=0.02)
    buffer = memoryview(values.view(torch.uint8).numpy())
    starts = itertools.count(step=1_000_003)

    def window(*shape: int) -> Any:
        size = math.prod(shape)
        start = next(starts) % (VALUES - size) * values.itemsize
        return torch.frombuffer(buffer, dtype=values.dtype, count=size, offset=start).view(shape)

    return window


RANK, ALPHA = 32, 64


def qwen2_role(path: Path, *, layers: int, dtype: str, ranks: int = 4, lora: bool = False) -> int:
    """Write FSDP2 shards of a Qwen2 of hidden size 2048 with random values, and return how many tensors it has.

    With ``lora`` it is one of PEFT, with adapters on all linear layers.
    """
    shapes = _adapted(qwen2_shapes(layers)) if lora else qwen2_shapes(layers)
    _play(path, shapes, ranks, windows(dtype))
    if lora:
        meta = {"r": RANK, "lora_alpha": ALPHA, "task_type": "CAUSAL_LM"}
        (path / "lora_train_meta.json").write_text(json.dumps(meta))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    }
    (path / "huggingface").mkdir()
    (path / "huggingface" / "config.json").write_text(json.dumps(config, indent=2))
    (path / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": ranks}))
    return len(shapes)


def _play(path: Path, shapes: Mapping[str, tuple[int, ...]], ranks: int, local: Callable[..., Any]) -> None:
    """Play one rank after the other: each saves its chunk of every tensor, of the values that ``local`` gives it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    path.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in shapes.items():
            rows = torch.arange(shape[0]).chunk(ranks)
            held = local(len(rows[rank]) if rank < len(rows) else 0, *shape[1:])
            whole = torch.empty(shape, device="meta")
            state[name] = DTensor.from_local(
                held, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        torch.save(state, path / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()


def _shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1000, hidden)}
    for layer in range(layers):
        for name in ("q_proj", "k_proj", "v_proj"):
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (hidden, hidden)
            shapes[f"model.layers.{layer}.self_attn.{name}.bias"] = (hidden,)
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj", "down_proj"):
            shapes[f"model.layers.{layer}.mlp.{name}.weight"] = (hidden, hidden)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{name}.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,), "model.norm.bias": (hidden,), "lm_head.weight": (1000, hidden)}


def qwen2_shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Qwen2 of hidden size 2048."""
    hidden, grouped, wide, words = 2048, 256, 5632, 32000
    layer = {
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.q_proj.bias": (hidden,),
        "self_attn.k_proj.weight": (grouped, hidden),
        "self_attn.k_proj.bias": (grouped,),
        "self_attn.v_proj.weight": (grouped, hidden),
        "self_attn.v_proj.bias": (grouped,),
        "self_attn.o_proj.weight": (hidden, hidden),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    return {
        "model.embed_tokens.weight": (words, hidden),
        **{f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in layer.items()},
        "model.norm.weight": (hidden,),
        "lm_head.weight": (words, hidden),
    }


def _adapted(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes under the names that PEFT gives them, with a pair of factors for each linear layer."""
    adapted: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        module, _, field = name.rpartition(".")
        if not module.endswith("_proj"):
            adapted[f"base_model.model.{name}"] = shape
            continue
        adapted[f"base_model.model.{module}.base_layer.{field}"] = shape
        if field == "weight":
            adapted[f"base_model.model.{module}.lora_A.default.weight"] = (RANK, shape[1])
            adapted[f"base_model.model.{module}.lora_B.default.weight"] = (shape[0], RANK)
    return adapted


def dcp_metadata(path: Path, *, ranks: int = 1024, chunks: int = 100_000) -> None:
    """Write a ``.metadata`` as a run of many ranks leaves it, with the plans of all of them."""
    from tests import builders

    path.mkdir(parents=True, exist_ok=True)
    builders.synthetic_metadata(path / ".metadata", ranks=ranks, chunks=chunks)


def megatron_role(path: Path, *, files: int = 10_000) -> None:
    """Write a role of verl's layout v1 whose archive has many data files, each with chunks of weights and optimizer."""
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    archive = path / "dist_ckpt"
    archive.mkdir(parents=True)
    storage, state = {}, {}
    for key in ("decoder.layers.mlp.linear_fc1.weight", "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight"):
        chunks = [ChunkStorageMetadata(torch.Size([n]), torch.Size([1])) for n in range(files)]
        state[key] = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), torch.Size([files]), chunks)
        for n in range(files):
            storage[MetadataIndex(key, torch.Size([n]))] = _StorageInfo(f"__{n}_0.distcp", 0, 16)
    state["rng_state/shard_0_1"] = BytesStorageMetadata()
    storage[MetadataIndex("rng_state/shard_0_1")] = _StorageInfo("__0_0.distcp", 0, 16)
    (archive / ".metadata").write_bytes(pickle.dumps(Metadata(state, None, storage)))
    (archive / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    for n in range(files):
        (archive / f"__{n}_0.distcp").write_bytes(bytes(16))


KINDS: Mapping[str, Callable[[Path], object]] = {
    "fsdp": fsdp_role,
    "dcp": dcp_metadata,
    "megatron": megatron_role,
    "bf16": partial(qwen2_role, layers=24, dtype="bfloat16"),
    "bf16, four times the layers": partial(qwen2_role, layers=96, dtype="bfloat16"),
    "fp32": partial(qwen2_role, layers=10, dtype="float32"),
    "bf16 with LoRA": partial(qwen2_role, layers=24, dtype="bfloat16", lora=True),
    "bf16 with LoRA, four times the layers": partial(qwen2_role, layers=96, dtype="bfloat16", lora=True),
}


def write(kind: str, path: Path) -> None:
    """Write one of ``KINDS`` in a process of its own, so that the one that measures stays small."""
    subprocess.run([sys.executable, "-m", "benchmarks.checkpoints", kind, str(path)], check=True)


if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
