"""Write the checkpoints of models that are served under other names: `python -m tests.writers served OUT`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.utils import logging

from tests.writers import served_models
from tests.writers.fsdp_logits import FIRST, LENGTH, PROMPTS
from tests.writers.fsdp_save import save_expected, save_model, save_tensors
from tests.writers.ranks import WORLD
from tests.writers.served_hub import HUBS
from tests.writers.served_vision import inputs
from tests.writers.sharding import shard

INDEX = "model.safetensors.index.json"


def write_all(out: Path) -> None:
    """Every model: a role directory; under `expected/` its tensors, and what `save_pretrained` makes of the whole."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",))
    for name in served_models.MODELS:
        write_model(out, name, line)


def write_model(out: Path, name: str, mesh: DeviceMesh) -> None:
    """Answers and references come from the model in one piece, the role from its shards."""
    role = out / name
    model = served_models.build(name)
    asked = inputs(name) or {"input_ids": torch.arange(FIRST, FIRST + PROMPTS * LENGTH).view(PROMPTS, LENGTH)}
    if dist.get_rank() == 0:
        write_references(out / "expected", name, model)
    with torch.no_grad():
        logits = model(**asked, use_cache=False).logits
    save_tensors(role.with_name(f"{name}.logits"), {**asked, "logits": logits})
    state = shard(model, mesh).state_dict()
    save_model(role, state)
    save_expected(role, state)
    if dist.get_rank() == 0:
        model.config.save_pretrained(role / "huggingface")


def write_references(expected: Path, name: str, model: Any) -> None:
    """The model as transformers saves it; for some as the hub has it, too, or without its weights, or in bf16."""
    model.save_pretrained(expected / name)
    if name in HUBS:
        write_hub(expected / f"{name}-hub", expected / name, name)
    if name == "mixtral":
        write_index(expected / f"{name}-index", model)
    if name == "qwen3-moe":
        served_models.build(name).to(torch.bfloat16).save_pretrained(expected / f"{name}-bf16")


def write_hub(hub: Path, saved: Path, name: str) -> None:
    """A model that never was loaded is saved without what only loading knows of: rename by hand."""
    hub.mkdir()
    change = HUBS[name]
    tensors = dict(change(key, value) for key, value in load_file(saved / "model.safetensors").items())
    save_file(tensors, hub / "model.safetensors", metadata={"format": "pt"})
    (hub / "config.json").write_bytes((saved / "config.json").read_bytes())


def write_index(folder: Path, model: Any) -> None:
    """A model of many files of which only the index and the config are there."""
    model.save_pretrained(folder, max_shard_size="20KB")
    assert json.loads((folder / INDEX).read_text())["weight_map"]
    for file in folder.glob("*.safetensors"):
        file.unlink()
