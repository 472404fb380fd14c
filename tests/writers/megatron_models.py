"""The tiny Hugging Face models whose weights the Megatron checkpoints hold."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.writers.ranks import seed_everything

VOCABULARY = 128


def dense_model(**changes: Any) -> Any:
    """Qwen2: grouped queries, a QKV bias, separate input and output embeddings."""
    seed_everything()
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "architectures": ["Qwen2ForCausalLM"],
        "dtype": "bfloat16",
    }
    return randomised(Qwen2ForCausalLM(Qwen2Config(**{**sizes, **changes})))


def moe_model() -> Any:
    """Qwen3-MoE: query and key norms, four experts, two of them at a time."""
    seed_everything()
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    return randomised(Qwen3MoeForCausalLM(config))


def randomised(model: Any) -> Any:
    """Norms of one and biases of zero would hide a swap: give every tensor values of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.bfloat16()
