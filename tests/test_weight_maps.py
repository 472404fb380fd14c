"""The tables name the tensors that the classes of transformers have, in their shapes, whatever a config says."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import transformers

from ckpttool.architectures import FAMILIES, named
from ckpttool.architectures.family import HEAD
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Forms
from ckpttool.converting.mapping import _expanded
from tests.synthetic.hub import _unfused

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

SEEDS = 12
TYPES = sorted({name for family in FAMILIES for name in family.model_types} - {"kimi_k2"})


class Choice(random.Random):
    """Draws settings."""

    def flag(self) -> bool:
        return self.random() < 0.5

    def some(self, layers: int) -> list[int]:
        return self.sample(range(layers), self.randrange(layers + 1))


def common(draw: Choice) -> Config:
    groups = draw.choice([1, 2, 3])
    heads = groups * draw.choice([1, 2, 3])
    return {
        "vocab_size": draw.choice([33, 64]),
        "hidden_size": heads * draw.choice([4, 8]),
        "intermediate_size": draw.choice([10, 24]),
        "num_hidden_layers": draw.choice([1, 2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": draw.flag(),
        "head_dim": draw.choice([4, 6, 12]),
    }


def sparse(draw: Choice, experts: str) -> Config:
    return {experts: draw.choice([1, 3, 4]), "num_experts_per_tok": 1, "moe_intermediate_size": draw.choice([6, 8])}


def qwen(draw: Choice, layers: int) -> Config:
    every = {"decoder_sparse_step": draw.choice([1, 2, 3]), "mlp_only_layers": draw.some(layers)}
    return {**sparse(draw, "num_experts"), **every, "shared_expert_intermediate_size": draw.choice([5, 8])}


def delta(draw: Choice) -> Config:
    keys = draw.choice([1, 2])
    return {
        "full_attention_interval": draw.choice([1, 2, 4]),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": keys * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([4, 6]),
        "linear_value_head_dim": draw.choice([4, 6]),
        "linear_conv_kernel_dim": draw.choice([2, 4]),
    }


def deep(draw: Choice, layers: int) -> Config:
    return {
        **sparse(draw, "n_routed_experts"),
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": draw.choice([1, 2, 3]),
        "first_k_dense_replace": draw.choice([0, 1, layers]),
        "attention_bias": draw.flag(),
    }


def latent(draw: Choice) -> Config:
    ranks = {"kv_lora_rank": 5, "q_lora_rank": draw.choice([None, 7])}
    return {**ranks, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": draw.choice([3, 4])}


FIELDS: Mapping[str, Callable[[Choice, Config], Config]] = {
    "llama": lambda d, c: {"attention_bias": d.flag(), "mlp_bias": d.flag(), "head_dim": d.choice([None, 6])},
    "mistral": lambda d, c: {"head_dim": d.choice([None, 6])},
    "qwen2": lambda d, c: {"head_dim": c["hidden_size"] // c["num_attention_heads"]},
    "qwen3": lambda d, c: {"attention_bias": d.flag()},
    "seed_oss": lambda d, c: {name: d.flag() for name in ("attention_bias", "attention_out_bias", "mlp_bias")},
    "internlm3": lambda d, c: dict.fromkeys(("qkv_bias", "bias"), d.flag()),
    "mixtral": lambda d, c: {"num_local_experts": d.choice([1, 2, 4]), "num_experts_per_tok": 1},
    "qwen2_moe": lambda d, c: {**qwen(d, c["num_hidden_layers"]), "qkv_bias": d.flag()},
    "qwen3_moe": lambda d, c: {**qwen(d, c["num_hidden_layers"]), "attention_bias": d.flag()},
    "qwen3_next": lambda d, c: {**qwen(d, c["num_hidden_layers"]), **delta(d), "attention_bias": d.flag()},
    "deepseek_v2": lambda d, c: {
        **deep(d, c["num_hidden_layers"]),
        **latent(d),
        "num_key_value_heads": c["num_attention_heads"],
    },
    "deepseek_v3": lambda d, c: {
        **deep(d, c["num_hidden_layers"]),
        **latent(d),
        "num_key_value_heads": c["num_attention_heads"],
    },
    "glm4_moe": lambda d, c: {**deep(d, c["num_hidden_layers"]), "use_qk_norm": d.flag()},
    "gpt_oss": lambda d, c: {"num_local_experts": d.choice([1, 2, 4]), "num_experts_per_tok": 1},
    "gemma": lambda d, c: {"attention_bias": d.flag()},
    "gemma2": lambda d, c: {"attention_bias": d.flag()},
    "gemma3_text": lambda d, c: {"attention_bias": d.flag()},
}


def drawn(model_type: str, seed: int) -> Config:
    draw = Choice(seed)
    config = common(draw)
    return {**config, **FIELDS[model_type](draw, config)}


def of_transformers(model_type: str, config: Config) -> tuple[Config, Shapes]:
    """The config as it is saved, and the tensors that files of the hub have."""
    made = transformers.AutoConfig.for_model(model_type, **config)
    with torch.device("meta"):
        state = transformers.AutoModelForCausalLM.from_config(made).state_dict()
    if made.tie_word_embeddings:
        state.pop("lm_head.weight")
    parts = (part for name, value in state.items() for part in _unfused(name, value, model_type))
    return json.loads(made.to_json_string(use_diff=False)), {name: tuple(value.shape) for name, value in parts}


def of_table(model_type: str, config: Mapping[str, Any]) -> Shapes:
    family = named(model_type)
    sizes, fields = family.read(config, "config.json")
    model = Model(config, {**sizes, "mtp": 0}, fields)
    shapes = dict(_shapes(family.blocks(model), model))
    return shapes if config["tie_word_embeddings"] else {**shapes, HEAD.name: model.shape(HEAD.shape)}


def _shapes(blocks: Iterator[Any], model: Model) -> Iterator[tuple[str, tuple[int, ...]]]:
    for block in blocks:
        for entry in block.table:
            for weight in entry.usual if isinstance(entry, Forms) else (entry,):
                yield from ((name, model.shape(weight.shape)) for name, _ in _expanded(block, weight, model))


def test_every_family_is_drawn() -> None:
    assert sorted(FIELDS) == TYPES


@pytest.mark.parametrize("model_type", TYPES)
def test_names_and_shapes_are_those_of_the_class(model_type: str) -> None:
    """By the config as people write it, and as transformers saves it."""
    for seed in range(SEEDS):
        config = drawn(model_type, seed)
        saved, wanted = of_transformers(model_type, config)
        assert of_table(model_type, saved) == wanted, (config, "saved")
        assert of_table(model_type, config) == wanted, config
