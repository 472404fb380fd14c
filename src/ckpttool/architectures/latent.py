"""Models of the DeepSeek kind: leading dense layers, shared experts, multi-token prediction; latent attention or not.

The i-th block of multi-token prediction is written as layer ``L + i``, as on the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from ckpttool.architectures.family import Family
from ckpttool.architectures.layers import (
    ATTENTION,
    EXPERTS,
    MLP,
    NORMS,
    PRE_MLP_NORM,
    QK_NORM,
    QKV_BIAS,
    ROUTER,
    ROUTER_BIAS,
    shared_experts,
)
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Block, Copy, Table, Vocabulary, Weight

_LATENT: Table = (
    Weight("input_layernorm.weight", Copy("input_layernorm.weight"), ("hidden",)),
    Weight("post_attention_layernorm.weight", PRE_MLP_NORM, ("hidden",)),
    Weight(
        "self_attn.kv_a_proj_with_mqa.weight", Copy("self_attention.linear_kv_down_proj.weight"), ("kv_down", "hidden")
    ),
    Weight(
        "self_attn.kv_a_layernorm.weight",
        Copy("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        ("kv_lora",),
    ),
    Weight("self_attn.kv_b_proj.weight", Copy("self_attention.linear_kv_up_proj.weight"), ("heads*kv_up", "kv_lora")),
    Weight("self_attn.o_proj.weight", Copy("self_attention.linear_proj.weight"), ("hidden", "heads*v_dim")),
)
_Q: Table = (Weight("self_attn.q_proj.weight", Copy("self_attention.linear_q_proj.weight"), ("heads*q_dim", "hidden")),)
_Q_LORA: Table = (
    Weight("self_attn.q_a_proj.weight", Copy("self_attention.linear_q_down_proj.weight"), ("q_lora", "hidden")),
    Weight(
        "self_attn.q_a_layernorm.weight",
        Copy("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        ("q_lora",),
    ),
    Weight("self_attn.q_b_proj.weight", Copy("self_attention.linear_q_up_proj.weight"), ("heads*q_dim", "q_lora")),
)
_Q_LORA_BIAS: Table = (Weight("self_attn.q_a_proj.bias", Copy("self_attention.linear_q_down_proj.bias"), ("q_lora",)),)
_LATENT_BIAS: Table = (
    Weight("self_attn.kv_a_proj_with_mqa.bias", Copy("self_attention.linear_kv_down_proj.bias"), ("kv_down",)),
    Weight("self_attn.o_proj.bias", Copy("self_attention.linear_proj.bias"), ("hidden",)),
)
_MTP: Table = (
    Weight("enorm.weight", Copy("enorm.weight"), ("hidden",)),
    Weight("hnorm.weight", Copy("hnorm.weight"), ("hidden",)),
    Weight("eh_proj.weight", Copy("eh_proj.weight"), ("hidden", "2*hidden")),
    Weight("shared_head.norm.weight", Copy("final_layernorm.weight"), ("hidden",)),
)
_MTP_COPIES: Table = (
    Weight("embed_tokens.weight", Vocabulary("embedding.word_embeddings.weight"), ("vocab", "hidden")),
    Weight(
        "shared_head.head.weight",
        Vocabulary("output_layer.weight", "embedding.word_embeddings.weight"),
        ("vocab", "hidden"),
    ),
)
_SIZES = {
    "experts": ("n_routed_experts", "num_experts"),
    "expert_ffn": ("moe_intermediate_size",),
}
_SHARED = {"shared": ("n_shared_experts",)}
_LATENT_SIZES = {
    **_SIZES,
    "kv_lora": ("kv_lora_rank",),
    "rope_dim": ("qk_rope_head_dim",),
    "nope_dim": ("qk_nope_head_dim",),
    "v_dim": ("v_head_dim",),
}
_LATENT_SUMS = {"kv_down": ("kv_lora", "rope_dim"), "kv_up": ("nope_dim", "v_dim"), "q_dim": ("nope_dim", "rope_dim")}


def _experts(model: Model, layer: int, bias: Table) -> Table:
    """Return the second half of a layer: dense in the first ones, experts in the others."""
    if layer < model.number("first_k_dense_replace", 0) or layer % model.number("moe_layer_freq", 1):
        return MLP
    shared = shared_experts("shared_experts", "shared*expert_ffn") if model.size("shared") else ()
    return (*ROUTER, *bias, EXPERTS, *shared)


def _latent(model: Model, layer: int, router: Table) -> Table:
    queries = _Q_LORA if model.size("q_lora") else _Q
    bias = _LATENT_BIAS if model.flag("attention_bias") else ()
    q_bias = _Q_LORA_BIAS if bias and model.size("q_lora") else ()
    return (*_LATENT, *queries, *q_bias, *bias, *_experts(model, layer, router))


def _deepseek_v2(model: Model, layer: int) -> Table:
    return _latent(model, layer, ())


def _deepseek_v3(model: Model, layer: int) -> Table:
    """Remote code names the method of routing; without a name it is that of the class in transformers."""
    return _latent(model, layer, ROUTER_BIAS if model.config.get("topk_method") in (None, "noaux_tc") else ())


def _glm4_moe(model: Model, layer: int) -> Table:
    bias = QKV_BIAS if model.flag("attention_bias") else ()
    norms = QK_NORM if model.flag("use_qk_norm") else ()
    return (*NORMS, *ATTENTION, *bias, *norms, *_experts(model, layer, ROUTER_BIAS))


def _prediction(family: Callable[[Model, int], Table], model: Model) -> Iterator[Block]:
    """Yield the blocks of multi-token prediction; their embeddings and head are copies that only some models have."""
    for n in range(model.size("mtp")):
        layer = model.size("layers") + n
        to = f"model.layers.{layer}."
        yield Block(f"mtp.layers.{n}.", to, _MTP)
        yield Block(f"mtp.layers.{n}.transformer_layer.", to, family(model, layer))
        yield Block("", to, _MTP_COPIES, twice="mtp-copy")


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    title="DeepSeek-V2",
    model_types=("deepseek_v2",),
    layer=_deepseek_v2,
    sizes=_LATENT_SIZES,
    optional={**_SHARED, "q_lora": ("q_lora_rank",)},
    sums=_LATENT_SUMS,
    groups_rows=False,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    title="DeepSeek-V3 and R1, Moonlight, Kimi-K2",
    model_types=("deepseek_v3", "kimi_k2"),
    layer=_deepseek_v3,
    predicts=1,
    more=partial(_prediction, _deepseek_v3),
    sizes=_LATENT_SIZES,
    optional={**_SHARED, "q_lora": ("q_lora_rank",)},
    sums=_LATENT_SUMS,
    groups_rows=False,
    proven=True,
)
GLM4_MOE = Family(
    name="glm4_moe",
    title="GLM-4.5, 4.6 and 4.7",
    model_types=("glm4_moe",),
    layer=_glm4_moe,
    predicts=1,
    more=partial(_prediction, _glm4_moe),
    sizes=_SIZES,
    optional=_SHARED,
)
