"""Tiny models whose tensors are saved under other names, or in another form, than they are trained in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.writers import served_vision
from tests.writers.ranks import seed_everything

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
INTERMEDIATE = 12
"""Rows of an expert's projection: no half of it is another dimension."""


def qwen2_tied() -> Any:
    """The head is the embeddings: `save_pretrained` leaves it out."""
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": True}))


def qwen2_moe() -> Any:
    """A shared expert with a gate of its own beside the routed ones."""
    changes = {"num_experts": 6, "moe_intermediate_size": INTERMEDIATE, "shared_expert_intermediate_size": 20}
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **EXPERTS, **changes))


def qwen3_moe() -> Any:
    """Six experts, packed in memory, saved one by one."""
    changes = {"num_experts": 6, "moe_intermediate_size": INTERMEDIATE, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **changes))


def qwen3_moe_square() -> Any:
    """Twice the rows of an expert are the hidden size: shapes do not tell which way a tensor lies."""
    changes = {"num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, **changes))


def qwen3_next() -> Any:
    """Linear attention in one layer, full in the other; a shared expert."""
    changes = {
        "num_experts": 4,
        "moe_intermediate_size": INTERMEDIATE,
        "shared_expert_intermediate_size": 20,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **EXPERTS, **changes))


def mixtral() -> Any:
    """`block_sparse_moe` and `w1`, `w2`, `w3`."""
    return MixtralForCausalLM(MixtralConfig(**SIZES, **EXPERTS, num_local_experts=4))


def phimoe() -> Any:
    """Mixtral's names with biases, a router of another name and a bias in the head."""
    changes = {"num_local_experts": 4, "attention_bias": True, "lm_head_bias": True}
    return PhimoeForCausalLM(PhimoeConfig(**SIZES, **EXPERTS, **changes))


def minimax_m2() -> Any:
    """Mixtral's names with a correction bias that is a buffer."""
    return MiniMaxM2ForCausalLM(MiniMaxM2Config(**SIZES, **EXPERTS, num_local_experts=4))


def deepseek_v3() -> Any:
    """Latent attention; the first layer is dense, the others have experts."""
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    changes = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": INTERMEDIATE,
        "q_lora_rank": 10,
        "kv_lora_rank": 14,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **EXPERTS, **changes}))


def glm4_moe() -> Any:
    """A dense first layer, norms of queries and keys, a shared expert."""
    changes = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "moe_intermediate_size": INTERMEDIATE,
        "use_qk_norm": True,
        "attention_bias": True,
    }
    return Glm4MoeForCausalLM(Glm4MoeConfig(**{**SIZES, **EXPERTS, **changes}))


def ernie4_5_moe() -> Any:
    """The correction bias of a router lies one module deeper in memory than on disk."""
    changes = {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    changes |= {"moe_intermediate_size": INTERMEDIATE, "moe_layer_start_index": 1}
    config = Ernie4_5_MoeConfig(**{**SIZES, **changes, "experts_implementation": "eager"})
    return Ernie4_5_MoeForCausalLM(config)


def qwen3_5() -> Any:
    """A model of text alone; on the hub it is the language model of one that sees."""
    changes = {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**SIZES, **changes))


def gpt_oss() -> Any:
    """Experts lie transposed, with gate and up interleaved: in memory and on disk alike."""
    return GptOssForCausalLM(GptOssConfig(**SIZES, **EXPERTS, num_local_experts=4, sliding_window=8))


def llama4() -> Any:
    """Experts lie transposed in memory and on disk alike; a shared expert."""
    changes = {"num_local_experts": 4, "intermediate_size_mlp": 40, "interleave_moe_layer_step": 2}
    return Llama4ForCausalLM(Llama4TextConfig(**{**SIZES, **changes}))


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2-tied": qwen2_tied,
    "qwen2-moe": qwen2_moe,
    "qwen3-moe": qwen3_moe,
    "qwen3-moe-square": qwen3_moe_square,
    "qwen3-next": qwen3_next,
    "mixtral": mixtral,
    "phimoe": phimoe,
    "minimax-m2": minimax_m2,
    "deepseek-v3": deepseek_v3,
    "glm4-moe": glm4_moe,
    "ernie4.5-moe": ernie4_5_moe,
    "qwen3.5": qwen3_5,
    "gpt-oss": gpt_oss,
    "llama4": llama4,
    **served_vision.MODELS,
}


def build(name: str) -> Any:
    """The model of this name, the same on every rank, with values of its own in every tensor that is saved."""
    seed_everything()
    model = MODELS[name]()
    with torch.no_grad():
        for value in model.state_dict(keep_vars=True).values():
            if value.is_floating_point():
                value.add_(torch.randn_like(value) * 0.1)
    model.config.architectures = [type(model).__name__]
    return model.eval()
