"""Mixtures of experts on the attention of the dense models: Mixtral, Qwen2-MoE, Qwen3-MoE."""

from __future__ import annotations

from ckpttool.architectures.family import Family
from ckpttool.architectures.layers import (
    ATTENTION,
    DOWN,
    EXPERTS,
    GATE,
    MLP,
    NORMS,
    O_BIAS,
    QK_NORM,
    QKV_BIAS,
    ROUTER,
    UP,
    shared_experts,
)
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Copy, Table, Weight

_MIXTRAL: Table = (
    Weight("block_sparse_moe.gate.weight", Copy("mlp.router.weight"), ("experts", "hidden")),
    Weight("block_sparse_moe.experts.{e}.w1.weight", GATE, ("ffn", "hidden")),
    Weight("block_sparse_moe.experts.{e}.w3.weight", UP, ("ffn", "hidden")),
    Weight("block_sparse_moe.experts.{e}.w2.weight", DOWN, ("hidden", "ffn")),
)
QWEN2_SHARED: Table = (
    *shared_experts("shared_expert", "shared_ffn"),
    Weight("mlp.shared_expert_gate.weight", Copy("mlp.shared_experts.gate_weight"), (1, "hidden")),
)
QWEN_SIZES = {"experts": ("num_experts", "num_local_experts"), "expert_ffn": ("moe_intermediate_size",)}


def is_sparse(model: Model, layer: int) -> bool:
    """Tell whether a layer of a Qwen model has experts."""
    return layer not in model.numbers("mlp_only_layers") and (layer + 1) % model.number("decoder_sparse_step", 1) == 0


def _mixtral(_model: Model, _layer: int) -> Table:
    return (*NORMS, *ATTENTION, *_MIXTRAL)


def _qwen2_moe(model: Model, layer: int) -> Table:
    bias = QKV_BIAS if model.flag("qkv_bias", default=True) else ()
    return (*NORMS, *ATTENTION, *bias, *((*ROUTER, EXPERTS, *QWEN2_SHARED) if is_sparse(model, layer) else MLP))


def _qwen3_moe(model: Model, layer: int) -> Table:
    bias = (*QKV_BIAS, *O_BIAS) if model.flag("attention_bias") else ()
    return (*NORMS, *ATTENTION, *QK_NORM, *bias, *((*ROUTER, EXPERTS) if is_sparse(model, layer) else MLP))


MIXTRAL = Family(
    name="mixtral",
    title="Mixtral",
    model_types=("mixtral",),
    layer=_mixtral,
    sizes={"experts": ("num_local_experts", "num_experts")},
    proven=True,
)
QWEN2_MOE = Family(
    name="qwen2_moe",
    title="Qwen1.5-MoE, Qwen2-MoE",
    model_types=("qwen2_moe",),
    layer=_qwen2_moe,
    sizes={**QWEN_SIZES, "shared_ffn": ("shared_expert_intermediate_size",)},
    proven=True,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    title="Qwen3-MoE",
    model_types=("qwen3_moe",),
    layer=_qwen3_moe,
    sizes=QWEN_SIZES,
    proven=True,
)
