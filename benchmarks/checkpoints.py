"""Checkpoints for the benchmarks, written by torch itself in one process that plays every rank in turn."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path


def fsdp_role(path: Path, *, ranks: int = 8, layers: int = 28, hidden: int = 64) -> int:
    """Write FSDP2 shards of a Qwen2-shaped model (12 tensors a layer) and return how many tensors it has."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    path.mkdir(parents=True, exist_ok=True)
    shapes = _shapes(layers, hidden)
    for rank in range(ranks):
        dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("fsdp",))
        state = {}
        for name, shape in shapes.items():
            rows = torch.arange(shape[0]).chunk(ranks)
            local = torch.zeros(len(rows[rank]) if rank < len(rows) else 0, *shape[1:])
            whole = torch.empty(shape, device="meta")
            state[name] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        torch.save(state, path / f"model_world_size_{ranks}_rank_{rank}.pt")
        dist.destroy_process_group()
    return len(shapes)


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


if __name__ == "__main__":  # a process of its own, so that the one that measures stays small
    fsdp_role(Path(sys.argv[1]))
    dcp_metadata(Path(sys.argv[2]))
    megatron_role(Path(sys.argv[3]))
