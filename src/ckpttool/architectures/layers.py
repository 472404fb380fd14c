"""Tables that families share: attention, norms, projections, experts.

The left names are those of Hugging Face below ``model.layers.{i}.``, the right ones those of Megatron-Core below
``decoder.layers.{i}.``. Where a slot has two names, the first is that of the Transformer Engine spec and the second
that of the local one.
"""

from __future__ import annotations

from ckpttool.architectures.rules import Copy, Experts, Forms, Half, Joined, Qkv, Table, Weight

INPUT_NORM = Copy("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
PRE_MLP_NORM = Copy("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")

NORMS: Table = (
    Weight("input_layernorm.weight", INPUT_NORM, ("hidden",)),
    Weight("post_attention_layernorm.weight", PRE_MLP_NORM, ("hidden",)),
)
ATTENTION: Table = (
    Weight("self_attn.q_proj.weight", Qkv("q", "self_attention.linear_qkv.weight"), ("heads*head_dim", "hidden")),
    Weight("self_attn.k_proj.weight", Qkv("k", "self_attention.linear_qkv.weight"), ("groups*head_dim", "hidden")),
    Weight("self_attn.v_proj.weight", Qkv("v", "self_attention.linear_qkv.weight"), ("groups*head_dim", "hidden")),
    Weight("self_attn.o_proj.weight", Copy("self_attention.linear_proj.weight"), ("hidden", "heads*head_dim")),
)
QKV_BIAS: Table = (
    Weight("self_attn.q_proj.bias", Qkv("q", "self_attention.linear_qkv.bias"), ("heads*head_dim",)),
    Weight("self_attn.k_proj.bias", Qkv("k", "self_attention.linear_qkv.bias"), ("groups*head_dim",)),
    Weight("self_attn.v_proj.bias", Qkv("v", "self_attention.linear_qkv.bias"), ("groups*head_dim",)),
)
O_BIAS: Table = (Weight("self_attn.o_proj.bias", Copy("self_attention.linear_proj.bias"), ("hidden",)),)
QK_NORM: Table = (
    Weight("self_attn.q_norm.weight", Copy("self_attention.q_layernorm.weight"), ("head_dim",)),
    Weight("self_attn.k_norm.weight", Copy("self_attention.k_layernorm.weight"), ("head_dim",)),
)
MLP: Table = (
    Weight("mlp.gate_proj.weight", Half("gate", "mlp.linear_fc1"), ("ffn", "hidden")),
    Weight("mlp.up_proj.weight", Half("up", "mlp.linear_fc1"), ("ffn", "hidden")),
    Weight("mlp.down_proj.weight", Copy("mlp.linear_fc2.weight"), ("hidden", "ffn")),
)
MLP_BIAS: Table = (
    Weight("mlp.gate_proj.bias", Half("gate", "mlp.linear_fc1", "bias"), ("ffn",)),
    Weight("mlp.up_proj.bias", Half("up", "mlp.linear_fc1", "bias"), ("ffn",)),
    Weight("mlp.down_proj.bias", Copy("mlp.linear_fc2.bias"), ("hidden",)),
)

ROUTER: Table = (Weight("mlp.gate.weight", Copy("mlp.router.weight"), ("experts", "hidden")),)
ROUTER_BIAS: Table = (Weight("mlp.gate.e_score_correction_bias", Copy("mlp.router.expert_bias"), ("experts",)),)

GATE, UP = (Half(which, "mlp.experts.{e}.linear_fc1", blocks="moe_mlp_glu_interleave_size") for which in ("gate", "up"))
DOWN = Copy("mlp.experts.{e}.linear_fc2.weight")

EXPERTS = Forms(
    usual=(
        Weight("mlp.experts.{e}.gate_proj.weight", GATE, ("expert_ffn", "hidden")),
        Weight("mlp.experts.{e}.up_proj.weight", UP, ("expert_ffn", "hidden")),
        Weight("mlp.experts.{e}.down_proj.weight", DOWN, ("hidden", "expert_ffn")),
    ),
    packed=(
        Weight(
            "mlp.experts.gate_up_proj",
            Experts(Joined(GATE, UP), ("experts", "2*expert_ffn", "hidden")),
            ("experts", "2*expert_ffn", "hidden"),
        ),
        Weight(
            "mlp.experts.down_proj",
            Experts(DOWN, ("experts", "hidden", "expert_ffn")),
            ("experts", "hidden", "expert_ffn"),
        ),
    ),
)
"""One tensor a projection and an expert, as on the hub; or all experts in one, as transformers 5 has them in memory."""


def shared_experts(name: str, width: str) -> Table:
    """Return the table of the experts that every token goes through, together of this width."""
    of, blocks = "mlp.shared_experts", "moe_shared_expert_glu_interleave_size"
    return (
        Weight(f"mlp.{name}.gate_proj.weight", Half("gate", f"{of}.linear_fc1", blocks=blocks), (width, "hidden")),
        Weight(f"mlp.{name}.up_proj.weight", Half("up", f"{of}.linear_fc1", blocks=blocks), (width, "hidden")),
        Weight(f"mlp.{name}.down_proj.weight", Copy(f"{of}.linear_fc2.weight"), ("hidden", width)),
    )
