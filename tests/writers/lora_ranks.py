"""Write PEFT models as FSDP shards: `python -m tests.writers lora OUT`.

The oracles are made by PEFT from the model before it is cut: a role has `expected/NAME.safetensors` (what
`merge_and_unload` gives), `NAME.exact.safetensors` (the same in float64), `NAME.logits.safetensors` (the answer
of the PEFT model), `NAME.adapter/` (what `PeftModel.save_pretrained` writes) and `NAME.base/` (the model below).
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from tests.writers import fsdp1
from tests.writers.fsdp_logits import FIRST, LENGTH, PROMPTS
from tests.writers.fsdp_save import State, save_model
from tests.writers.lora_models import Trained, Variant, build, variants
from tests.writers.ranks import WORLD
from tests.writers.reading import quiet
from tests.writers.sharding import shard
from tests.writers.side_files import write_side_files


def write_all(out: Path) -> None:
    """Every variant, one after the other, in the same four processes."""
    meshes = {
        "line": init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",)),
        "square": init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp")),
    }
    for variant in variants():
        trained = build(variant)
        if dist.get_rank() == 0:
            write_expected(out / "expected", variant, trained)
        write_role(out / variant.name, variant, trained.model, meshes[variant.mesh])


def write_role(role: Path, variant: Variant, model: Any, mesh: Any) -> None:
    """The shards as verl saves them, and the files beside them by rank 0."""
    config = model.config
    state = sharded_state(variant, model, mesh)
    save_model(role, state, version=variant.fsdp)
    if dist.get_rank() == 0:
        write_side_files(role / "huggingface", config)
        write_settings(role, variant)
    dist.barrier()


def sharded_state(variant: Variant, model: Any, mesh: Any) -> State:
    """What `model.state_dict()` gives a rank; with `only`, the adapters of it."""
    if variant.fsdp == 1:
        state = fsdp1.state_dict(fsdp1.wrap(model, mesh), StateDictType.SHARDED_STATE_DICT)
    else:
        state = shard(model, mesh, GPT2Block).state_dict()
    return {name: value for name, value in state.items() if not variant.only or "lora_" in name}


def write_settings(role: Path, variant: Variant) -> None:
    """`lora_train_meta.json` as verl has it, of the first adapter alone; PEFT's own file where only that tells all."""
    first = next(iter(variant.adapters.values()))
    meta = {"r": first.r, "lora_alpha": first.lora_alpha, "task_type": first.task_type}
    (role / "lora_train_meta.json").write_text(json.dumps(meta, indent=4))
    if variant.config_at is not None:
        copy_configs(role.parent / "expected" / f"{role.name}.adapter", role / variant.config_at)


def copy_configs(adapter: Path, target: Path) -> None:
    """Every `adapter_config.json` of what PEFT wrote, to the same place below the target."""
    for path in sorted(adapter.rglob("adapter_config.json")):
        folder = target / path.parent.relative_to(adapter)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)


# The oracles, by rank 0 alone


def write_expected(folder: Path, variant: Variant, trained: Trained) -> None:
    """All of one variant; with several adapters, of each and of all together."""
    folder.mkdir(parents=True, exist_ok=True)
    trained.base.save_pretrained(folder / f"{variant.name}.base", max_shard_size=variant.base_shards)
    names = list(variant.adapters)
    write_merged(folder, variant.name, trained.model, names)
    if len(names) > 1:
        for name in names:
            write_merged(folder, f"{variant.name}.{name}", trained.model, [name])
    with quiet():
        copy.deepcopy(trained.model).save_pretrained(folder / f"{variant.name}.adapter")


def write_merged(folder: Path, stem: str, model: Any, names: list[str]) -> None:
    """The answer of the PEFT model with these adapters, and what PEFT makes of it."""
    model = untied(copy.deepcopy(model))
    model.base_model.set_adapter(names)
    save(folder / f"{stem}.logits.safetensors", answer(model))
    exact = copy.deepcopy(model).double()
    save(folder / f"{stem}.safetensors", model.merge_and_unload(adapter_names=names).state_dict())
    save(folder / f"{stem}.exact.safetensors", exact.merge_and_unload(adapter_names=names).state_dict())


def untied(model: Any) -> Any:
    """A head of its own: PEFT would merge what it trained of the embeddings into the head that is one with them."""
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is model.get_base_model().get_input_embeddings().weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    return model


def answer(model: Any) -> State:
    """Logits without a cache, of the tokens that the other checkpoints are asked."""
    ids = torch.arange(FIRST, FIRST + PROMPTS * LENGTH).view(PROMPTS, LENGTH)
    with torch.no_grad():
        return {"input_ids": ids, "logits": model(input_ids=ids, use_cache=False).logits}


def save(path: Path, state: State) -> None:
    """Tied tensors are written twice: the reader knows which are one."""
    save_file({name: value.detach().contiguous().clone() for name, value in state.items()}, path)
