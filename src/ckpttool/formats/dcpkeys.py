"""The keys of distributed archives: what belongs to what, and which megatron-core wrote them."""

from __future__ import annotations

import re

COMMON_FILE = "common.pt"

_MEGATRON_KEY = re.compile(
    r"self_attention\.(linear_(qkv|proj|q_|kv_)|core_attention)|mlp\.(linear_fc[12]|router|experts|shared_experts)\."
    r"|\bembedding\.word_embeddings\.|_extra_state/shard_|^rng_state/shard_"
)
_COMBINED_KEY = re.compile(r"(model\.)?module\.")
_PARTS = (
    ("common", re.compile(r"common_state/shard_.*")),
    ("extra_state", re.compile(r"(.*[./])?_extra_state(/shard_.*)?")),
    ("rng", re.compile(r"(rng_state|rng_states|rng)([./].*)?")),
    ("scheduler", re.compile(r"(opt_param_scheduler|lr_scheduler|lr_schedulers|scheduler)([./].*)?")),
    ("dataloader", re.compile(r"(dataloader|train_dataloader|data_loader)([./].*)?")),
    ("optimizer", re.compile(r"(chained_\d+\.)?(optimizer|optimizers|optim)([./].*)?")),
    ("trainer", re.compile(r"(rerun_state_machine_state|train_state|trainer_state|progress|iteration)([./].*)?")),
    ("adapter", re.compile(r".*(\.adapter\.|lora_[AB]\b|lora_embedding_[AB]\b|lora_magnitude_vector).*")),
)
_MCORE_PLAN = "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan"
_MCORE_METADATA = "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata"


def part_of(key: str) -> str:
    """Say what a key of an archive belongs to: ``model``, ``optimizer``, ``rng``, ``extra_state`` and so on."""
    return next((part for part, pattern in _PARTS if pattern.fullmatch(key)), "model")


def is_megatron_key(key: str) -> bool:
    """Tell keys of ``dist_checkpointing``; Megatron-FSDP's, of ``module.``, belong to archives without its markers."""
    return bool(_MEGATRON_KEY.search(key)) and not _COMBINED_KEY.match(key)


def writer(names: set[str], has_mcore_data: bool, common_kind: str) -> str:
    """Say which megatron-core wrote the archive, as far as its marks tell."""
    if common_kind == "common_state":
        return "megatron-core 0.19 or newer"
    if _MCORE_METADATA in names:
        return "megatron-core 0.15"
    if has_mcore_data:
        return "megatron-core 0.12 to 0.14"
    if _MCORE_PLAN in names:
        return "megatron-core 0.12 to 0.15"
    return "megatron-core 0.16 to 0.18" if common_kind == COMMON_FILE else ""
