"""From transformers' names to Megatron's: the tests' own map, so that the product's is not its oracle."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

Tensors = dict[str, torch.Tensor]


def to_megatron(hf: Tensors, config: Any) -> Tensors:
    """Whole tensors under the keys of the archive, layers (and experts) stacked."""
    layers = [_layer(hf, f"model.layers.{n}.", config) for n in range(config.num_hidden_layers)]
    stacked = {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return stacked | {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": hf["model.norm.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }


def _layer(hf: Tensors, prefix: str, config: Any) -> Tensors:
    own = {name.removeprefix(prefix): t for name, t in hf.items() if name.startswith(prefix)}
    found = {
        "self_attention.linear_qkv.weight": _qkv(own, "weight", config),
        "self_attention.linear_proj.weight": own["self_attn.o_proj.weight"],
        "self_attention.linear_qkv.layer_norm_weight": own["input_layernorm.weight"],
        "mlp.linear_fc1.layer_norm_weight": own["post_attention_layernorm.weight"],
    }
    if "self_attn.q_proj.bias" in own:
        found["self_attention.linear_qkv.bias"] = _qkv(own, "bias", config)
    if "self_attn.q_norm.weight" in own:
        found["self_attention.q_layernorm.weight"] = own["self_attn.q_norm.weight"]
        found["self_attention.k_layernorm.weight"] = own["self_attn.k_norm.weight"]
    return found | (_experts(own) if "mlp.gate.weight" in own else _mlp(own))


def _qkv(own: Tensors, kind: str, config: Any) -> torch.Tensor:
    """Query heads of a group, then its key head, then its value head, group after group."""
    groups = config.num_key_value_heads
    parts = [own[f"self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
    by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(by_group, dim=1).flatten(0, 1)


def _mlp(own: Tensors) -> Tensors:
    gate_up = [own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]]
    return {
        "mlp.linear_fc1.weight": torch.cat(gate_up),
        "mlp.linear_fc2.weight": own["mlp.down_proj.weight"],
    }


def _experts(own: Tensors) -> Tensors:
    """transformers keeps experts fused since version 5: `[experts, gate and up, hidden]`."""
    return {
        "mlp.router.weight": own["mlp.gate.weight"],
        "mlp.experts.experts.linear_fc1.weight": own["mlp.experts.gate_up_proj"],
        "mlp.experts.experts.linear_fc2.weight": own["mlp.experts.down_proj"],
    }


def load(model: Any, whole: Tensors) -> None:
    """Copy this rank's slice of every tensor; a parameter without a source is an error."""
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    with torch.no_grad():
        for piece in nested_values(sharded):
            if isinstance(piece, ShardedTensor):
                piece.data.copy_(whole[piece.key][piece.global_slice()])
