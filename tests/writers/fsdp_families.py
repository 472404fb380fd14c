"""Tiny models of other families than Qwen2: each writes something into its checkpoint that the others do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.writers.fsdp_models import SIZES
from tests.writers.ranks import seed_everything


def llama() -> nn.Module:
    """The plainest of all, without a bias and with a head of its own."""
    seed_everything()
    config = LlamaConfig(**SIZES, head_dim=10, tie_word_embeddings=False, architectures=["LlamaForCausalLM"])
    return varied(LlamaForCausalLM(config))


def qwen3_moe() -> nn.Module:
    """Six experts packed into one tensor a projection: four ranks get 2, 2, 2 and none."""
    seed_everything()
    config = Qwen3MoeConfig(
        **SIZES,
        head_dim=10,
        moe_intermediate_size=12,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
        experts_implementation="eager",
    )
    return varied(Qwen3MoeForCausalLM(config))


def gemma4() -> Any:
    """A persistent buffer that counts in every layer, tied weights, two kinds of attention, per-layer embeddings."""
    seed_everything()
    config = Gemma4TextConfig(
        **SIZES,
        head_dim=8,
        global_head_dim=12,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=130,
        final_logit_softcapping=30.0,
        architectures=["Gemma4ForCausalLM"],
    )
    model = varied(Gemma4ForCausalLM(config))
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(0.5 + number)
    return model


def varied(model: Any) -> Any:
    """Norms of one would hide a swap: give every parameter values of its own."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
