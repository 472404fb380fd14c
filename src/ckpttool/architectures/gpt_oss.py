"""gpt-oss: attention sinks, biases everywhere, all experts of a layer in one transposed tensor.

Its gate and up projections are interleaved column by column. What the hub has is quantised (MXFP4); what is written
here is not.
"""

from __future__ import annotations

from ckpttool.architectures.family import Family
from ckpttool.architectures.layers import ATTENTION, DOWN, GATE, NORMS, O_BIAS, QKV_BIAS, UP
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import Copy, Experts, Half, Joined, Table, Weight

_GATE_BIAS, _UP_BIAS = (
    Half(which, "mlp.experts.{e}.linear_fc1", "bias", blocks="moe_mlp_glu_interleave_size") for which in ("gate", "up")
)
_LAYER: Table = (
    *NORMS,
    *ATTENTION,
    Weight("self_attn.sinks", Copy("self_attention.core_attention.softmax_offset"), ("heads",)),
    Weight("mlp.router.weight", Copy("mlp.router.weight"), ("experts", "hidden")),
    Weight("mlp.router.bias", Copy("mlp.router.bias"), ("experts",)),
    Weight(
        "mlp.experts.gate_up_proj",
        Experts(Joined(GATE, UP), ("experts", 2, "ffn", "hidden"), (0, 3, 2, 1)),
        ("experts", "hidden", "2*ffn"),
    ),
    Weight(
        "mlp.experts.gate_up_proj_bias",
        Experts(Joined(_GATE_BIAS, _UP_BIAS), ("experts", 2, "ffn"), (0, 2, 1)),
        ("experts", "2*ffn"),
    ),
    Weight(
        "mlp.experts.down_proj",
        Experts(DOWN, ("experts", "hidden", "ffn"), (0, 2, 1)),
        ("experts", "ffn", "hidden"),
    ),
    Weight(
        "mlp.experts.down_proj_bias",
        Experts(Copy("mlp.experts.{e}.linear_fc2.bias"), ("experts", "hidden")),
        ("experts", "hidden"),
    ),
)


def _gpt_oss(model: Model, _layer: int) -> Table:
    return (*_LAYER, *QKV_BIAS, *O_BIAS) if model.flag("attention_bias", default=True) else _LAYER


GPT_OSS = Family(
    name="gpt_oss",
    title="gpt-oss",
    model_types=("gpt_oss",),
    layer=_gpt_oss,
    sizes={"experts": ("num_local_experts", "num_experts")},
)
