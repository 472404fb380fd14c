"""The families: a tiny configuration of each, and the little that tells one from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VOCAB = 96
LENGTH = 14


@dataclass(frozen=True)
class Family:
    """What transformers needs to build a family, and how its hub files differ from its modules."""

    model_type: str
    config: Mapping[str, Any]
    zero_centred: bool = False
    """Norms multiply by one plus their weight, but for those of gated delta nets."""
    mtp: str | None = None
    """How hub files name the layers of multi-token prediction: ``layers`` behind the last one, or ``mtp``."""
    in_config: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``config.json`` that transformers must not see when it builds the model."""


_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WIDE = {**_SIZES, "head_dim": 12}
_MLA = {
    **_SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
_SHARED = {"shared_expert_intermediate_size": 40}
_GEMMA = {**_WIDE, "num_hidden_layers": 2, "sliding_window": 6, "query_pre_attn_scalar": 12, "pad_token_id": 0}

FAMILIES = {
    "llama": Family("llama", _WIDE),
    "mistral": Family("mistral", {**_WIDE, "sliding_window": None}),
    "qwen2": Family("qwen2", _SIZES),
    "qwen3": Family("qwen3", _WIDE),
    "seed_oss": Family("seed_oss", {**_WIDE, "attention_bias": True, "attention_out_bias": False}),
    "mixtral": Family("mixtral", {**_SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "qwen2_moe": Family("qwen2_moe", {**_SIZES, **_EXPERTS, **_SHARED}),
    "qwen3_moe": Family("qwen3_moe", {**_WIDE, **_EXPERTS}),
    "glm4_moe": Family(
        "glm4_moe",
        {
            **_WIDE,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 24,
            "num_nextn_predict_layers": 1,
        },
        mtp="layers",
    ),
    "gpt_oss": Family(
        "gpt_oss",
        {**_SIZES, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    ),
    "gemma2": Family("gemma2", _GEMMA, zero_centred=True),
    "gemma3_text": Family("gemma3_text", {**_GEMMA, "sliding_window_pattern": 2}, zero_centred=True),
    "deepseek_v2": Family("deepseek_v2", {**_MLA, "q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": Family("deepseek_v3", {**_MLA, "num_nextn_predict_layers": 1}, mtp="layers"),
    "moonlight": Family("deepseek_v3", {**_MLA, "q_lora_rank": None, "num_nextn_predict_layers": 0}, mtp="layers"),
    "kimi_k2": Family(
        "deepseek_v3",
        {**_MLA, "n_group": 1, "num_nextn_predict_layers": 0},
        mtp="layers",
        in_config={"model_type": "kimi_k2"},
    ),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **_WIDE,
            **_EXPERTS,
            **_SHARED,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "partial_rotary_factor": 0.5,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
        },
        zero_centred=True,
        mtp="mtp",
    ),
}
