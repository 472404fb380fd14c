"""Hub tensors in the names and the order of rows that Megatron keeps."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch

from tests.synthetic.hub import Tensors


@dataclass(frozen=True)
class Naming:
    """Which of the names and orders that mean the same are written."""

    norms: str = "te"
    post_norms: str = "te"
    producer: str = "nvidia"


def to_megatron(state: Tensors, config: Any, naming: Naming, padding: int) -> Tensors:
    """All tensors of a model under Megatron's keys, one entry a layer, experts of a layer in one tensor."""
    rest = dict(state)
    out = {"embedding.word_embeddings.weight": _padded(rest.pop("model.embed_tokens.weight"), padding)}
    out["decoder.final_layernorm.weight"] = rest.pop("model.norm.weight")
    if "lm_head.weight" in rest:
        out["output_layer.weight"] = _padded(rest.pop("lm_head.weight"), padding)
    if "score.weight" in rest:
        out["output_layer.weight"] = rest.pop("score.weight")
    for index in range(config.num_hidden_layers):
        _add(out, f"decoder.layers.{index}.", _layer(_taken(rest, f"model.layers.{index}."), config, naming))
    _add_mtp(out, rest, config, naming)
    assert not rest, sorted(rest)
    return out


def _padded(value: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([value, torch.full((padding, value.shape[1]), 9.0, dtype=value.dtype)])


def _taken(state: Tensors, prefix: str) -> Tensors:
    return {name.removeprefix(prefix): state.pop(name) for name in list(state) if name.startswith(prefix)}


def _add(out: Tensors, prefix: str, tensors: Tensors) -> None:
    out.update({prefix + name: value for name, value in tensors.items()})


def _add_mtp(out: Tensors, rest: Tensors, config: Any, naming: Naming) -> None:
    own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm"}
    index = 0
    while found := _taken(rest, f"model.layers.{config.num_hidden_layers + index}."):
        head = {f"{key}.weight": found.pop(f"{name}.weight") for key, name in own.items()}
        _add(out, f"mtp.layers.{index}.", head)
        _add(out, f"mtp.layers.{index}.transformer_layer.", _layer(found, config, naming))
        index += 1
    own = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "final_layernorm": "norm"}
    if found := _taken(rest, "mtp.layers.0."):
        _add(out, "mtp.layers.0.", {f"{key}.weight": rest.pop(f"mtp.{name}.weight") for key, name in own.items()})
        _add(out, "mtp.layers.0.transformer_layer.", _layer(found, config, naming))


def _layer(hub: Tensors, config: Any, naming: Naming) -> Tensors:
    before_attention, before_mlp = _norm_keys(hub, config, naming)
    if "self_attn.kv_b_proj.weight" in hub:
        out = _mla(hub, naming)
    elif "linear_attn.A_log" in hub:
        out = _delta_net(_taken(hub, "linear_attn."), config, naming)
    else:
        out = _attention(hub, config, naming)
    out[before_attention] = hub.pop("input_layernorm.weight")
    out.update(_mlp_norms(hub, before_mlp, naming))
    out.update(_moe(hub) if any(".experts." in name for name in hub) else _dense(hub))
    assert not hub, sorted(hub)
    return out


def _norm_keys(hub: Tensors, config: Any, naming: Naming) -> tuple[str, str]:
    """Where the norms before attention and before the MLP lie; local layers of plain attention rename both."""
    te, moe, delta = naming.norms == "te", any(".experts." in name for name in hub), "linear_attn.A_log" in hub
    mla, hybrid = hasattr(config, "kv_lora_rank"), hasattr(config, "linear_num_key_heads")
    fused = not moe if te else not mla and not hybrid
    mlp = "mlp.linear_fc1.layer_norm_weight" if fused else "pre_mlp_layernorm.weight"
    if delta and naming.producer == "slime":
        return "self_attention.input_layernorm.weight", mlp
    if mla or (hybrid and not te):
        return "input_layernorm.weight", mlp
    return f"self_attention.{'in_proj' if delta else 'linear_qkv'}.layer_norm_weight", mlp


def _mlp_norms(hub: Tensors, before: str, naming: Naming) -> Tensors:
    """The norm before an MLP and, in the families that have them, those behind attention and MLP."""
    if "pre_feedforward_layernorm.weight" not in hub:
        return {before: hub.pop("post_attention_layernorm.weight")}
    te = naming.post_norms == "te"
    behind_attention = "self_attention.linear_proj.post_layernorm.weight" if te else "post_attention_layernorm.weight"
    behind_mlp = "mlp.linear_fc2.post_layernorm.weight" if te else "post_feedforward_layernorm.weight"
    return {
        before: hub.pop("pre_feedforward_layernorm.weight"),
        behind_attention: hub.pop("post_attention_layernorm.weight"),
        behind_mlp: hub.pop("post_feedforward_layernorm.weight"),
    }


def _attention(hub: Tensors, config: Any, naming: Naming) -> Tensors:
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    groups = config.num_key_value_heads
    out = {}
    for kind in ("weight", "bias"):
        if f"self_attn.k_proj.{kind}" in hub:
            q, k, v = (hub.pop(f"self_attn.{name}_proj.{kind}") for name in "qkv")
            if hasattr(config, "linear_num_key_heads") and naming.producer != "swift":
                q = _gates_behind(q, config.num_attention_heads // groups, head)
            out[f"self_attention.linear_qkv.{kind}"] = _by_group([q, k, v], groups)
    renamed = {
        "o_proj.weight": "linear_proj.weight",
        "o_proj.bias": "linear_proj.bias",
        "q_norm.weight": "q_layernorm.weight",
        "k_norm.weight": "k_layernorm.weight",
        "sinks": "core_attention.softmax_offset",
    }
    for name, key in renamed.items():
        if f"self_attn.{name}" in hub:
            out[f"self_attention.{key}"] = hub.pop(f"self_attn.{name}")
    return out


def _by_group(parts: list[torch.Tensor], groups: int) -> torch.Tensor:
    """Rows of several tensors, those of the first group of each first."""
    rows = []
    for group in range(groups):
        for part in parts:
            size = len(part) // groups
            rows.append(part[group * size : (group + 1) * size])
    return torch.cat(rows)


def _gates_behind(q: torch.Tensor, heads: int, size: int) -> torch.Tensor:
    """Query heads of a group, then their gates, where transformers has each gate behind its head."""
    rows = []
    for start in range(0, len(q), 2 * heads * size):
        for first in (0, size):
            rows += [q[at : at + size] for at in range(start + first, start + 2 * heads * size, 2 * size)]
    return torch.cat(rows)


def _mla(hub: Tensors, naming: Naming) -> Tensors:
    te = naming.norms == "te"
    renamed = {
        "q_proj": "linear_q_proj.weight",
        "q_a_proj": "linear_q_down_proj.weight",
        "q_a_layernorm": "linear_q_up_proj.layer_norm_weight" if te else "q_layernorm.weight",
        "q_b_proj": "linear_q_up_proj.weight",
        "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
        "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight" if te else "kv_layernorm.weight",
        "kv_b_proj": "linear_kv_up_proj.weight",
        "o_proj": "linear_proj.weight",
    }
    names = {name: f"self_attn.{name}.weight" for name in renamed}
    return {f"self_attention.{key}": hub.pop(names[name]) for name, key in renamed.items() if names[name] in hub}


def _delta_net(found: Tensors, config: Any, naming: Naming) -> Tensors:
    if naming.producer == "slime":
        return {f"self_attention.linear_attn.{name}": value for name, value in found.items()}
    groups, key_size, value_size = _delta_sizes(config)
    mixed, gates = found.pop("in_proj_qkvz.weight"), found.pop("in_proj_ba.weight")
    convolution = found.pop("conv1d.weight")
    q, k, v, z = _split_groups(mixed, groups, [key_size, key_size, value_size, value_size])
    beta, alpha = _split_groups(gates, groups, [len(gates) // groups // 2] * 2)
    cq, ck, cv = convolution.split([groups * key_size, groups * key_size, groups * value_size])
    norm = found.pop("norm.weight")
    out = {f"self_attention.{name}": found.pop(name) for name in ("A_log", "dt_bias", "out_proj.weight")}
    assert not found, sorted(found)
    if naming.producer == "swift":
        out["self_attention.in_proj.weight"] = _by_group([q, k, v, z, beta, alpha], groups)
        out["self_attention.conv1d.weight"] = _by_group([cq, ck, cv], groups)
        out["self_attention.out_norm.weight"] = norm
        return out
    out["self_attention.out_norm.weight"] = (norm.float() - 1).to(norm.dtype)
    named = {"query": q, "key": k, "value": v, "z": z, "beta": beta, "alpha": alpha}
    _add(out, "self_attention.in_proj.weight.", named)
    _add(out, "self_attention.conv1d.weight.", {"query": cq, "key": ck, "value": cv})
    return out


def _delta_sizes(config: Any) -> tuple[int, int, int]:
    """How many key heads, and how many rows one of them has among keys and among values."""
    groups = config.linear_num_key_heads
    return groups, config.linear_key_head_dim, config.linear_num_value_heads // groups * config.linear_value_head_dim


def _split_groups(value: torch.Tensor, groups: int, sizes: list[int]) -> list[torch.Tensor]:
    """Undo `_by_group`."""
    parts: list[list[torch.Tensor]] = [[] for _ in sizes]
    for group in value.chunk(groups):
        for part, rows in zip(parts, group.split(sizes), strict=True):
            part.append(rows)
    return [torch.cat(part) for part in parts]


def _dense(hub: Tensors, hub_prefix: str = "mlp.", prefix: str = "mlp.") -> Tensors:
    out = {}
    for kind in ("weight", "bias"):
        if f"{hub_prefix}gate_proj.{kind}" in hub:
            gate, up, down = (hub.pop(f"{hub_prefix}{name}_proj.{kind}") for name in ("gate", "up", "down"))
            out[f"{prefix}linear_fc1.{kind}"] = torch.cat([gate, up])
            out[f"{prefix}linear_fc2.{kind}"] = down
    return out


def _moe(hub: Tensors) -> Tensors:
    out = _fused_experts(hub) if "mlp.experts.gate_up_proj" in hub else _experts(hub)
    renamed = {
        "mlp.gate.weight": "weight",
        "block_sparse_moe.gate.weight": "weight",
        "mlp.router.weight": "weight",
        "mlp.router.bias": "bias",
        "mlp.gate.e_score_correction_bias": "expert_bias",
    }
    out |= {f"mlp.router.{key}": hub.pop(name) for name, key in renamed.items() if name in hub}
    if "mlp.shared_expert_gate.weight" in hub:
        out["mlp.shared_experts.gate_weight"] = hub.pop("mlp.shared_expert_gate.weight")
    shared = "mlp.shared_expert." if "mlp.shared_expert.gate_proj.weight" in hub else "mlp.shared_experts."
    return {**out, **_dense(hub, shared, "mlp.shared_experts.")}


def _experts(hub: Tensors) -> Tensors:
    """Experts of a layer, one behind the other, from one entry each."""
    pattern = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
    experts: dict[int, Tensors] = {}
    for name in list(hub):
        if found := pattern.fullmatch(name):
            role = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(found[2], found[2])
            experts.setdefault(int(found[1]), {})[role] = hub.pop(name)
    ordered = [experts[index] for index in range(len(experts))]
    gated = [torch.cat([expert["gate_proj"], expert["up_proj"]]) for expert in ordered]
    return {
        "mlp.experts.experts.linear_fc1.weight": torch.stack(gated),
        "mlp.experts.experts.linear_fc2.weight": torch.stack([expert["down_proj"] for expert in ordered]),
    }


def _fused_experts(hub: Tensors) -> Tensors:
    """Experts from columns that are a gate, its up, the next gate and so on."""
    weight, bias = hub.pop("mlp.experts.gate_up_proj").mT, hub.pop("mlp.experts.gate_up_proj_bias")
    return {
        "mlp.experts.experts.linear_fc1.weight": torch.cat([weight[:, 0::2], weight[:, 1::2]], dim=1),
        "mlp.experts.experts.linear_fc1.bias": torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1),
        "mlp.experts.experts.linear_fc2.weight": hub.pop("mlp.experts.down_proj").mT.contiguous(),
        "mlp.experts.experts.linear_fc2.bias": hub.pop("mlp.experts.down_proj_bias"),
    }
