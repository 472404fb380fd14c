"""Write the compact checkpoints that ship in the package: `python -m tests.writers demo OUT`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh

from tests.writers.fsdp_models import plain_policy
from tests.writers.fsdp_save import save_model, save_role, train
from tests.writers.megatron_cpu import Parallel, prepare_rank
from tests.writers.megatron_models import dense_model
from tests.writers.megatron_ranks import trained, write_v1
from tests.writers.megatron_save import FULLY_RESHARDABLE, content_metadata
from tests.writers.ranks import WORLD
from tests.writers.sharding import shard

VOCABULARY = 64
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 2}


def write_all(out: Path) -> None:
    """Small enough for a wheel, real enough for every command."""
    prepare_rank()
    write_fsdp(out / "fsdp")
    write_lora(out / "lora")
    hf = dense_model(**SIZES, intermediate_size=16)
    training = trained(hf, Parallel(tp=2, pp=2), VOCABULARY)
    write_v1(out / "megatron", training, hf, content_metadata(FULLY_RESHARDABLE))


def write_fsdp(role: Path) -> None:
    """The model alone, as with `save_contents=['model']`: the rest would triple the size."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    training = train(shard(plain_policy(**SIZES, intermediate_size=14), mesh))
    save_role(role, training, training.model.state_dict())
    for part in ("optim", "extra_state"):
        (role / f"{part}_world_size_{WORLD}_rank_{dist.get_rank()}.pt").unlink()


def write_lora(role: Path) -> None:
    """Adapters of the same model alone, as with verl's `save_lora_only`."""
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    settings = {"r": 2, "lora_alpha": 4, "task_type": "CAUSAL_LM"}
    model = get_peft_model(
        plain_policy(**SIZES, intermediate_size=14), LoraConfig(**settings, target_modules=["q_proj", "v_proj"])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros before the first step
            torch.nn.init.normal_(parameter, std=0.02)
    state = shard(model, mesh).state_dict()
    save_model(role, {name: value for name, value in state.items() if "lora_" in name})
    if dist.get_rank() == 0:
        (role / "lora_train_meta.json").write_text(json.dumps(settings, indent=4))
