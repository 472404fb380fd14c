"""Write every FSDP checkpoint of a world of four: `python -m tests.writers fsdp OUT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.writers import fsdp1, fsdp_families, fsdp_models
from tests.writers.accelerate_bins import write_bins, write_local
from tests.writers.fsdp_logits import save_logits
from tests.writers.fsdp_save import (
    Training,
    random_states,
    save_expected,
    save_role,
    train,
    write_fsdp_config,
)
from tests.writers.placed import write_random
from tests.writers.ranks import WORLD
from tests.writers.sharding import shard
from tests.writers.side_files import write_side_files


def write_all(out: Path) -> None:
    """Every variant, one after the other, in the same four processes."""
    line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    write_models(out, line, square)
    write_tensor_parallel(out / "fsdp-tp")
    write_lora(out, line)
    write_fsdp1(out / "fsdp1", line)
    write_fsdp1(out / "fsdp1-hsdp", square)
    write_fsdp1(out / "fsdp1-shardedtensor", None)
    write_single(out / "single")
    write_dcp(out, line)
    write_bins(out / "accelerate-bins", line)
    write_local(out / "accelerate-local")
    write_random(out / "random-4", line)
    write_random(out / "random-2x2", square)


def write_models(out: Path, line: DeviceMesh, square: DeviceMesh) -> None:
    """What `fully_shard` alone makes of models that can answer."""
    tied = fsdp_models.plain_policy(tie_word_embeddings=True).to(torch.bfloat16)
    for name, model, mesh in (
        ("fsdp2", fsdp_models.policy(), line),
        ("hsdp", fsdp_models.policy(), square),
        ("critic", fsdp_models.critic(), line),
        ("tied-bf16", tied, line),
        ("llama", fsdp_families.llama(), line),
        ("qwen3-moe", fsdp_families.qwen3_moe(), line),
        ("gemma4", fsdp_families.gemma4(), line),
    ):
        save_logits(out / name, write_fsdp2(out / name, model, mesh).model)


def write_fsdp2(role: Path, model: Any, mesh: DeviceMesh) -> Training:
    """`fully_shard` on one mesh."""
    training = train(shard(model, mesh))
    state = training.model.state_dict()
    save_role(role, training, state)
    save_expected(role, state)
    return training


def write_tensor_parallel(role: Path) -> None:
    """Tensor parallel first, then FSDP on the other axis: `_StridedShard` appears."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    model = fsdp_models.policy()
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in _COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in _ROWS}
    write_fsdp2(role, parallelize_module(model, mesh["tp"], plan), mesh["fsdp"])


_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def write_lora(out: Path, mesh: DeviceMesh) -> None:
    """One training, saved whole (`lora`) and with `save_lora_only` (`lora-only`)."""
    training = train(shard(fsdp_models.lora(), mesh))
    state = training.model.state_dict()
    adapters = {name: value for name, value in state.items() if "lora_" in name}
    for role, part in ((out / "lora", state), (out / "lora-only", adapters)):
        save_role(role, training, part)
        save_expected(role, part)
        if dist.get_rank() == 0:
            write_lora_meta(role)


def write_lora_meta(role: Path) -> None:
    """The rank and scale, without which adapters cannot be merged."""
    meta = {"r": fsdp_models.LORA_RANK, "lora_alpha": fsdp_models.LORA_ALPHA, "task_type": "CAUSAL_LM"}
    (role / "lora_train_meta.json").write_text(json.dumps(meta, indent=4))


def write_fsdp1(role: Path, mesh: DeviceMesh | None) -> None:
    """FSDP1 (HYBRID_SHARD on two axes); its own FULL_STATE_DICT is the oracle."""
    training = train(fsdp1.wrap(fsdp_models.policy(), mesh))
    state = fsdp1.state_dict(training.model, StateDictType.SHARDED_STATE_DICT)
    save_role(role, training, state, version=1)
    save_expected(role, fsdp1.state_dict(training.model, StateDictType.FULL_STATE_DICT))
    save_logits(role, training.model)


def write_single(role: Path) -> None:
    """A world of one under FSDP1 saves a FULL_STATE_DICT: plain tensors."""
    training = train(fsdp_models.policy())
    save_expected(role, training.model.state_dict())
    save_logits(role, training.model)
    if dist.get_rank() == 0:
        save_single(role, training)


def save_single(role: Path, training: Training) -> None:
    """The files of rank 0 of 1."""
    role.mkdir()
    tail = "world_size_1_rank_0.pt"
    torch.save(training.model.state_dict(), role / f"model_{tail}")
    torch.save(training.optimizer.state_dict(), role / f"optim_{tail}")
    extra = {"lr_scheduler": training.scheduler.state_dict(), "rng": random_states()}
    torch.save(extra, role / f"extra_state_{tail}")
    write_fsdp_config(role, 1, 1)
    write_side_files(role / "huggingface", training.model.config)


def write_dcp(out: Path, mesh: DeviceMesh) -> None:
    """The same training as plain torch DCP: once as torchtitan, once as accelerate lays it out."""
    training = train(shard(fsdp_models.policy(), mesh))
    model = training.model.state_dict()
    optimizer = get_optimizer_state_dict(training.model, training.optimizer)
    clock = {"step": torch.tensor(10), "ntokens_seen": torch.tensor(4096)}
    whole = {
        "model": model,
        "optimizer": optimizer,
        "lr_scheduler": training.scheduler.state_dict(),
        "train_state": clock,
    }
    dcp.save(whole, checkpoint_id=out / "dcp" / "step-10")
    dcp.save({"model": model}, checkpoint_id=out / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": optimizer}, checkpoint_id=out / "accelerate" / "optimizer_0")
    save_expected(out / "dcp", model)
    save_expected(out / "accelerate", model)
