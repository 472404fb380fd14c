"""Gemma: norms before and behind both halves of a layer. Gains are stored as 1 + w on both sides, and are copied."""

from __future__ import annotations

from ckpttool.architectures.family import Family
from ckpttool.architectures.layers import ATTENTION, INPUT_NORM, MLP, NORMS, O_BIAS, PRE_MLP_NORM, QK_NORM, QKV_BIAS
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Copy, Table, Weight

_FOUR_NORMS: Table = (
    Weight("input_layernorm.weight", INPUT_NORM, ("hidden",)),
    Weight(
        "post_attention_layernorm.weight",
        Copy("self_attention.linear_proj.post_layernorm.weight", "post_attention_layernorm.weight"),
        ("hidden",),
    ),
    Weight("pre_feedforward_layernorm.weight", PRE_MLP_NORM, ("hidden",)),
    Weight(
        "post_feedforward_layernorm.weight",
        Copy("mlp.linear_fc2.post_layernorm.weight", "post_feedforward_layernorm.weight"),
        ("hidden",),
    ),
)


def _bias(model: Model) -> Table:
    return (*QKV_BIAS, *O_BIAS) if model.flag("attention_bias") else ()


def _gemma(model: Model, _layer: int) -> Table:
    return (*NORMS, *ATTENTION, *_bias(model), *MLP)


def _gemma2(model: Model, _layer: int) -> Table:
    return (*_FOUR_NORMS, *ATTENTION, *_bias(model), *MLP)


def _gemma3(model: Model, _layer: int) -> Table:
    return (*_FOUR_NORMS, *ATTENTION, *QK_NORM, *_bias(model), *MLP)


GEMMA = Family(name="gemma", title="Gemma", model_types=("gemma",), layer=_gemma)
GEMMA2 = Family(name="gemma2", title="Gemma 2", model_types=("gemma2",), layer=_gemma2)
GEMMA3 = Family(name="gemma3_text", title="Gemma 3, text models", model_types=("gemma3_text",), layer=_gemma3)
