"""Qwen3-Next: gated attention in every fourth layer, gated delta nets in the others, experts in all of them.

Megatron-Core keeps the projections of a delta net under a key each and its norm around zero; ms-swift keeps one
projection with the rows of a key head together; slime keeps the tensors of Hugging Face as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpttool.architectures.experts import QWEN2_SHARED, QWEN_SIZES, is_sparse
from ckpttool.architectures.family import Family
from ckpttool.architectures.layers import EXPERTS, MLP, O_BIAS, PRE_MLP_NORM, QK_NORM, ROUTER
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import (
    Block,
    Contradiction,
    Copy,
    FirstOf,
    GatedQkv,
    Joined,
    Made,
    Place,
    Shifted,
    Table,
    Weight,
)

_QUERY, _KEY, _VALUE, _Z, _BETA, _ALPHA = "q", "k", "v", "z", "b", "a"
_ORDER = (_QUERY, _KEY, _VALUE, _Z, _BETA, _ALPHA)
_IN = "self_attention.in_proj"
_SPLIT = {_QUERY: "query", _KEY: "key", _VALUE: "value", _Z: "z", _BETA: "beta", _ALPHA: "alpha"}


def _widths(model: Model) -> dict[str, int]:
    """Return how many rows each projection has for one key head."""
    keys, values = model.size("key_heads"), model.size("value_heads")
    if not keys or values % keys:
        raise Contradiction(f"value heads cannot be shared evenly: {model.said('key_heads', 'value_heads')}")
    key, each = model.size("key_dim"), values // keys
    value = each * model.size("value_dim")
    return {_QUERY: key, _KEY: key, _VALUE: value, _Z: value, _BETA: each, _ALPHA: each}


@dataclass(frozen=True, slots=True)
class _Together:
    """Rows of projections that have a key each, brought together key head by key head."""

    which: tuple[str, ...]

    def make(self, place: Place) -> Made:
        """Return the rows of one key head after the other."""
        heads, widths = place.model.size("key_heads"), _widths(place.model)
        slots = {name: place.slot(f"{_IN}.weight.{_SPLIT[name]}") for name in self.which}
        for name, slot in slots.items():
            if slot.shape[:1] != (heads * widths[name],):
                said = place.model.said("key_heads", "value_heads", "key_dim", "value_dim")
                raise Contradiction(f"{slot.origin} is {list(slot.shape)}, config.json has {said}")
        rows = [slots[n].rows(head * widths[n], widths[n]) for head in range(heads) for n in self.which]
        shape = (sum(row.count for row in rows), *slots[self.which[0]].shape[1:])
        dtypes = tuple(dict.fromkeys(slot.dtype for slot in slots.values()))
        return Made(tuple(rows), shape, dtypes, slots[self.which[0]].origin)


@dataclass(frozen=True, slots=True)
class _OfEach:
    """Some of the rows that every key head has together in one slot; ``every`` are all of them, in their order."""

    name: str
    which: tuple[str, ...]
    every: tuple[str, ...]

    def make(self, place: Place) -> Made:
        """Return them, block after block."""
        slot, heads, widths = place.slot(self.name), place.model.size("key_heads"), _widths(place.model)
        step = sum(widths[name] for name in self.every)
        if slot.shape[:1] != (heads * step,):
            said = place.model.said("key_heads", "value_heads", "key_dim", "value_dim")
            raise Contradiction(f"{slot.origin} is {list(slot.shape)}, config.json has {said}")
        first = sum(widths[name] for name in self.every[: self.every.index(self.which[0])])
        block = sum(widths[name] for name in self.which)
        run = slot.rows(first, heads * block, block, step)
        return Made((run,), (heads * block, *slot.shape[1:]), (slot.dtype,), slot.origin)


def _verbatim(name: str) -> Copy:
    """Return a tensor of Hugging Face as slime keeps it."""
    return Copy(f"self_attention.linear_attn.{name}")


_CONV = "self_attention.conv1d.weight"
_CONV_ORDER = (_QUERY, _KEY, _VALUE)

_DELTA_NET: Table = (
    Weight(
        "linear_attn.in_proj_qkvz.weight",
        FirstOf(
            _Together(_ORDER[:4]),
            _OfEach(f"{_IN}.weight", _ORDER[:4], _ORDER),
            Copy(f"{_IN}_qkvz.weight"),
            _verbatim("in_proj_qkvz.weight"),
        ),
        ("2*qkvz", "hidden"),
    ),
    Weight(
        "linear_attn.in_proj_ba.weight",
        FirstOf(
            _Together(_ORDER[4:]),
            _OfEach(f"{_IN}.weight", _ORDER[4:], _ORDER),
            Copy(f"{_IN}_ba.weight"),
            _verbatim("in_proj_ba.weight"),
        ),
        ("2*value_heads", "hidden"),
    ),
    Weight(
        "linear_attn.conv1d.weight",
        FirstOf(
            Joined(*(Copy(f"{_CONV}.{_SPLIT[name]}") for name in _CONV_ORDER)),
            Joined(*(_OfEach(_CONV, (name,), _CONV_ORDER) for name in _CONV_ORDER)),
            _verbatim("conv1d.weight"),
        ),
        ("conv", 1, "kernel"),
    ),
    Weight("linear_attn.A_log", FirstOf(Copy("self_attention.A_log"), _verbatim("A_log")), ("value_heads",)),
    Weight("linear_attn.dt_bias", FirstOf(Copy("self_attention.dt_bias"), _verbatim("dt_bias")), ("value_heads",)),
    Weight(
        "linear_attn.norm.weight",
        FirstOf(Shifted("self_attention.out_norm.weight", 1, f"{_IN}.weight.query"), _verbatim("norm.weight")),
        ("value_dim",),
    ),
    Weight(
        "linear_attn.out_proj.weight",
        FirstOf(Copy("self_attention.out_proj.weight"), _verbatim("out_proj.weight")),
        ("hidden", "value_heads*value_dim"),
    ),
)
_QKV = "self_attention.linear_qkv.weight"
_GATED: Table = (
    Weight(
        "self_attn.q_proj.weight", GatedQkv("q", "self_attention.linear_qkv.weight"), ("2*heads*head_dim", "hidden")
    ),
    Weight("self_attn.k_proj.weight", GatedQkv("k", "self_attention.linear_qkv.weight"), ("groups*head_dim", "hidden")),
    Weight("self_attn.v_proj.weight", GatedQkv("v", "self_attention.linear_qkv.weight"), ("groups*head_dim", "hidden")),
    Weight("self_attn.o_proj.weight", Copy("self_attention.linear_proj.weight"), ("hidden", "heads*head_dim")),
    *QK_NORM,
)
_BIAS: Table = (
    Weight("self_attn.q_proj.bias", GatedQkv("q", "self_attention.linear_qkv.bias"), ("2*heads*head_dim",)),
    Weight("self_attn.k_proj.bias", GatedQkv("k", "self_attention.linear_qkv.bias"), ("groups*head_dim",)),
    Weight("self_attn.v_proj.bias", GatedQkv("v", "self_attention.linear_qkv.bias"), ("groups*head_dim",)),
    *O_BIAS,
)
_NORMS: Table = (
    Weight(
        "input_layernorm.weight",
        Copy(
            "self_attention.linear_qkv.layer_norm_weight",
            f"{_IN}.layer_norm_weight",
            "input_layernorm.weight",
            "self_attention.input_layernorm.weight",
        ),
        ("hidden",),
    ),
    Weight("post_attention_layernorm.weight", PRE_MLP_NORM, ("hidden",)),
)
_MTP: Table = (
    Weight("mtp.fc.weight", Copy("eh_proj.weight"), ("hidden", "2*hidden")),
    Weight("mtp.pre_fc_norm_embedding.weight", Copy("enorm.weight"), ("hidden",)),
    Weight("mtp.pre_fc_norm_hidden.weight", Copy("hnorm.weight"), ("hidden",)),
    Weight("mtp.norm.weight", Copy("final_layernorm.weight"), ("hidden",)),
)


def _layer(model: Model, layer: int) -> Table:
    types = model.config.get("layer_types")
    if isinstance(types, list) and layer < len(types):
        attends = types[layer] == "full_attention"
    else:
        attends = (layer + 1) % model.number("full_attention_interval", 4) == 0
    return (*_NORMS, *(_attention(model) if attends else _DELTA_NET), *_mlp(model, layer))


def _attention(model: Model) -> Table:
    return (*_GATED, *_BIAS) if model.flag("attention_bias") else _GATED


def _mlp(model: Model, layer: int) -> Table:
    return (*ROUTER, EXPERTS, *QWEN2_SHARED) if is_sparse(model, layer) else MLP


def _prediction(model: Model) -> Iterator[Block]:
    for n in range(model.size("mtp")):
        yield Block(f"mtp.layers.{n}.", "", _MTP)
        table = (*_NORMS, *_attention(model), *ROUTER, EXPERTS, *QWEN2_SHARED)
        yield Block(f"mtp.layers.{n}.transformer_layer.", f"mtp.layers.{n}.", table)


QWEN3_NEXT = Family(
    name="qwen3_next",
    title="Qwen3-Next",
    model_types=("qwen3_next",),
    layer=_layer,
    more=_prediction,
    sizes={
        **QWEN_SIZES,
        "shared_ffn": ("shared_expert_intermediate_size",),
        "key_heads": ("linear_num_key_heads",),
        "value_heads": ("linear_num_value_heads",),
        "key_dim": ("linear_key_head_dim",),
        "value_dim": ("linear_value_head_dim",),
        "kernel": ("linear_conv_kernel_dim",),
    },
    products={"keys": ("key_heads", "key_dim"), "values": ("value_heads", "value_dim")},
    sums={"qkvz": ("keys", "values"), "conv": ("keys", "keys", "values")},
    gated_attention=True,
)
