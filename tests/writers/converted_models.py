"""The tiny models of each family: the Hugging Face configuration and what Megatron calls the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

Options = dict[str, Any]

SIZES: Options = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
}
LATENT: Options = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Model:
    """`padded` is Megatron's vocabulary, `options` what its configuration says beyond the sizes.

    A `critic` has one value for each token where others have logits.
    """

    hf: Any
    padded: int
    options: Options = field(default_factory=dict)
    critic: bool = False


def models() -> dict[str, Model]:
    """Every model under its name."""
    return dict(_dense()) | dict(_experts()) | dict(_latent())


def _dense() -> Iterator[tuple[str, Model]]:
    yield "llama", Model(_llama(num_hidden_layers=4), padded=128)
    yield "llama-mha", Model(_llama(num_hidden_layers=2, num_key_value_heads=4), padded=128)
    biased = _llama(num_hidden_layers=2, attention_bias=True, mlp_bias=True)
    yield "llama-bias", Model(biased, 128, {"add_bias_linear": True})
    critic = _config(LlamaConfig, "LlamaForTokenClassification", vocab_size=100, num_hidden_layers=2, num_labels=1)
    yield "llama-critic", Model(critic, 128, critic=True)
    qwen2 = _config(
        Qwen2Config, "Qwen2ForCausalLM", vocab_size=120, num_hidden_layers=2, tie_word_embeddings=True, theta=1e6
    )
    yield "qwen2", Model(qwen2, 128, {"add_qkv_bias": True})
    qwen3 = _config(Qwen3Config, "Qwen3ForCausalLM", vocab_size=96, num_hidden_layers=4, head_dim=16, theta=1e6)
    yield "qwen3", Model(qwen3, 96, {"qk_layernorm": True})


def _llama(**sizes: Any) -> Any:
    return _config(LlamaConfig, "LlamaForCausalLM", vocab_size=100, **sizes)


def _experts() -> Iterator[tuple[str, Model]]:
    few: Options = {"vocab_size": 96, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    qwen3: Options = {**few, "num_experts": 8, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 16}
    options = {**_routed(8, 24), "qk_layernorm": True}
    yield "qwen3-moe", Model(_config(Qwen3MoeConfig, "Qwen3MoeForCausalLM", theta=1e6, **qwen3), 96, options)
    mixed = {**qwen3, "num_hidden_layers": 3, "mlp_only_layers": [1]}
    options = {**options, "moe_layer_freq": [1, 0, 1]}
    yield "qwen3-moe-mixed", Model(_config(Qwen3MoeConfig, "Qwen3MoeForCausalLM", **mixed), 96, options)
    mixtral = _config(MixtralConfig, "MixtralForCausalLM", theta=1e6, num_local_experts=4, **few)
    yield "mixtral", Model(mixtral, 96, _routed(4, 48))
    qwen2: Options = {
        **few,
        "vocab_size": 100,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "norm_topk_prob": False,
    }
    options = {
        **_routed(4, 24),
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 40,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": True,
    }
    yield "qwen2-moe", Model(_config(Qwen2MoeConfig, "Qwen2MoeForCausalLM", **qwen2), 128, options)


def _latent() -> Iterator[tuple[str, Model]]:
    """DeepSeek: a dense layer first, then a sigmoid router with a bias for the choice alone."""
    yield "deepseek-v3", _deepseek(num_hidden_layers=4, q_lora_rank=24, num_mtp_layers=1, n_group=2)
    yield "moonlight", _deepseek(num_hidden_layers=2, q_lora_rank=None, num_mtp_layers=0, n_group=1)


def _deepseek(**sizes: Any) -> Model:
    hf = _config(
        DeepseekV3Config,
        "DeepseekV3ForCausalLM",
        vocab_size=100,
        n_routed_experts=6,
        n_shared_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **LATENT,
        **sizes,
    )
    options = {
        **_routed(6, 16),
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",
        "rotary_base": 10000.0,
        "moe_layer_freq": [0] + [1] * (hf.num_hidden_layers - 1),
        "moe_shared_expert_intermediate_size": 32,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": hf.n_group,
        "moe_router_group_topk": hf.topk_group,
        "mtp_num_layers": hf.num_mtp_layers or None,
    }
    return Model(hf, 128, options)


def _config(kind: Any, architecture: str, *, theta: float = 10000.0, **sizes: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": theta}
    return kind(**{**SIZES, **sizes}, rope_parameters=rope, architectures=[architecture])


def _routed(experts: int, width: int) -> Options:
    return {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": width,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }
