"""The tiny models behind the FSDP checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForTokenClassification

from tests.writers.ranks import seed_everything

LORA_RANK = 4
LORA_ALPHA = 8


SIZES: dict[str, Any] = {
    "vocab_size": 130,
    "hidden_size": 32,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
"""Sizes that do not divide by four ranks: 130 rows and 46 rows leave a short last shard."""


def tiny_config(**changes: Any) -> Qwen2Config:
    """An untied causal model of these sizes, with these changes."""
    sizes = {**SIZES, "tie_word_embeddings": False, "architectures": ["Qwen2ForCausalLM"]}
    return Qwen2Config(**{**sizes, **changes})


def policy(**changes: Any) -> nn.Module:
    """A causal model with the buffers that break naive mergers."""
    seed_everything()
    model = Qwen2ForCausalLM(tiny_config(**changes))
    add_buffers(model)
    return model


def plain_policy(**changes: Any) -> nn.Module:
    """A causal model as it comes."""
    seed_everything()
    return Qwen2ForCausalLM(tiny_config(**changes))


def critic() -> nn.Module:
    """A value model: one label, `score` instead of `lm_head`."""
    seed_everything()
    names = ["Qwen2ForTokenClassification"]
    return Qwen2ForTokenClassification(tiny_config(architectures=names, num_labels=1))


def add_buffers(model: Any) -> None:
    """Persistent buffers are replicated: a 0-d one, a `[1]` one, and one that is the first key."""
    model.register_buffer("aaa_first", torch.arange(4))
    model.model.register_buffer("layer_scalar", torch.tensor([0.5]))
    model.model.layers[0].register_buffer("step", torch.tensor(7))


class LoraLinear(nn.Module):  # type: ignore[misc]
    """A linear layer under the names PEFT gives it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        down = nn.Linear(base.in_features, LORA_RANK, bias=False)
        up = nn.Linear(LORA_RANK, base.out_features, bias=False)
        self.lora_A = nn.ModuleDict({"default": down})
        self.lora_B = nn.ModuleDict({"default": up})


class LoraModel(nn.Module):  # type: ignore[misc]
    """Adds the `base_model.model.` prefix of a PEFT model and keeps its configuration in reach."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for layer in model.model.layers:
            for name in ("q_proj", "v_proj"):
                setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name)))
        self.base_model = nn.Module()
        self.base_model.model = model
        self.config = model.config


def lora() -> nn.Module:
    """The policy with adapters on the query and value projections."""
    return LoraModel(plain_policy())
