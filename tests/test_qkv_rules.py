"""Rules that reorder rows, for any heads, groups, widths and experts: held against reshaped arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool.architectures.gpt_oss import GPT_OSS
from ckpttool.architectures.layers import GATE, UP
from ckpttool.architectures.model import NVIDIA, SWIFT, Model
from ckpttool.architectures.qwen3_next import QWEN3_NEXT
from ckpttool.architectures.rules import (
    Contradiction,
    Copy,
    Experts,
    GatedQkv,
    Half,
    Joined,
    Made,
    Place,
    Qkv,
    Recipe,
    Shifted,
    Taken,
    Undecided,
    Vocabulary,
    Weight,
)
from ckpttool.architectures.slots import take_apart
from ckpttool.tensors import Index, TensorInfo
from tests.arranging import Array, evaluated

bounded = settings(max_examples=100, deadline=None, derandomize=True)
small = st.integers(1, 4)
QKV = "self_attention.linear_qkv.weight"
LAYER = "decoder.layers.1."


@dataclass(frozen=True)
class Stored:
    """Arrays under their keys, and a place to look for one layer's."""

    arrays: Mapping[str, Array]
    sizes: Mapping[str, int]
    producer: str = ""
    blocks: Mapping[str, int] = field(default_factory=dict)
    taken: Taken = field(default_factory=Taken)

    def make(self, recipe: Recipe) -> Made:
        infos = {name: TensorInfo(name, "int64", values.shape, ()) for name, values in self.arrays.items()}
        slots, twice = take_apart(infos)
        assert not twice
        model = Model({}, self.sizes, {}, self.producer, self.blocks)
        return recipe.make(Place(slots, LAYER, model, self.taken))

    def value(self, recipe: Recipe) -> Array:
        made = self.make(recipe)
        values = evaluated(made, self.arrays)
        assert values.shape == made.shape
        return values


def numbered(*shape: int) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)


def layers(name: str, values: Array, stacked: bool) -> dict[str, Array]:
    """The tensor of layer 1: one of two layers in one key, or under a key of its own."""
    if stacked:
        return {f"decoder.layers.{name}": np.stack([values - 10_000_000, values])}
    return {LAYER + name: values}


# Queries, keys and values


@bounded
@given(small, small, small, st.sampled_from([(), (3,), (1,)]), st.booleans())
def test_queries_keys_and_values(groups: int, queries: int, width: int, behind: Index, stacked: bool) -> None:
    heads = [[(g, n) for n in range(queries + 2)] for g in range(groups)]
    rows = {head: numbered(width, *behind) + 1000 * (head[0] * 10 + head[1]) for group in heads for head in group}
    whole = np.concatenate([rows[head] for group in heads for head in group])
    stored = Stored(layers(QKV, whole, stacked), {"heads": groups * queries, "groups": groups, "head_dim": width})
    wanted = {
        "q": [rows[g, n] for g in range(groups) for n in range(queries)],
        "k": [rows[g, queries] for g in range(groups)],
        "v": [rows[g, queries + 1] for g in range(groups)],
    }
    for which, expected in wanted.items():
        assert stored.value(Qkv(which, QKV)).tolist() == np.concatenate(expected).tolist()


@bounded
@given(small, small, small, st.sampled_from([NVIDIA, SWIFT]), st.booleans())
def test_queries_with_gates(groups: int, queries: int, width: int, producer: str, stacked: bool) -> None:
    """A query and its gate are neighbours in the output, whoever wrote them."""
    hidden = 3
    query = numbered(groups, queries, width, hidden)
    gate, key, value = query + 10_000, query[:, 0] + 20_000, query[:, 0] + 30_000
    by_group = []
    for g in range(groups):
        heads = (
            [*query[g], *gate[g]]
            if producer == NVIDIA
            else [x for n in range(queries) for x in (query[g, n], gate[g, n])]
        )
        by_group += [*heads, key[g], value[g]]
    sizes = {"heads": groups * queries, "groups": groups, "head_dim": width}
    stored = Stored(layers(QKV, np.concatenate(by_group), stacked), sizes, producer)
    per_head = [np.concatenate([query[g, n], gate[g, n]]) for g in range(groups) for n in range(queries)]
    assert stored.value(GatedQkv("q", QKV)).tolist() == np.concatenate(per_head).tolist()
    assert stored.value(GatedQkv("k", QKV)).tolist() == key.reshape(-1, hidden).tolist()
    assert stored.value(GatedQkv("v", QKV)).tolist() == value.reshape(-1, hidden).tolist()


def test_gates_of_an_unknown_producer_are_undecided() -> None:
    stored = Stored(layers(QKV, numbered(12, 3), False), {"heads": 2, "groups": 1, "head_dim": 2})
    with pytest.raises(Undecided):
        stored.make(GatedQkv("q", QKV))
    assert len(stored.value(GatedQkv("k", QKV))) == 2


@bounded
@given(small, small, small, st.integers(-3, 3).filter(bool), st.sampled_from(["q", "k", "v"]), st.booleans())
def test_rows_that_do_not_follow_are_no_heads(
    groups: int, queries: int, width: int, more: int, which: str, gated: bool
) -> None:
    rows = ((2 if gated else 1) * queries + 2) * groups * width + more
    sizes = {"heads": groups * queries, "groups": groups, "head_dim": width}
    recipe = GatedQkv(which, QKV) if gated else Qkv(which, QKV)
    with pytest.raises(Contradiction):
        Stored(layers(QKV, numbered(max(rows, 0), 2), False), sizes, NVIDIA).make(recipe)


@pytest.mark.parametrize(("heads", "groups"), [(3, 2), (2, 0), (2, 4)])
def test_heads_that_groups_cannot_share(heads: int, groups: int) -> None:
    with pytest.raises(Contradiction):
        Stored(layers(QKV, numbered(8, 1), False), {"heads": heads, "groups": groups, "head_dim": 1}).make(
            Qkv("q", QKV)
        )


# Gates and up projections


@bounded
@given(small, small, st.sampled_from([(), (3,)]), st.booleans(), st.booleans())
def test_halves_in_blocks(blocks: int, size: int, behind: Index, interleaved: bool, stacked: bool) -> None:
    gate = numbered(blocks, size, *behind)
    up = gate + 1000
    whole = np.stack([gate, up], 1) if interleaved else np.stack([gate, up])
    whole = whole.reshape(2 * blocks * size, *behind)
    stored = Stored(layers("mlp.linear_fc1.weight", whole, stacked), {}, blocks={"s": size} if interleaved else {})
    for which, half in (("gate", gate), ("up", up)):
        recipe = Half(which, "mlp.linear_fc1", blocks="s")
        assert stored.value(recipe).tolist() == half.reshape(-1, *behind).tolist()


@pytest.mark.parametrize(("rows", "size"), [(3, 0), (10, 2), (4, 4)])
def test_rows_that_are_not_two_halves(rows: int, size: int) -> None:
    stored = Stored(layers("mlp.linear_fc1.weight", numbered(rows, 2), False), {}, blocks={"s": size})
    with pytest.raises(Contradiction):
        stored.make(Half("up", "mlp.linear_fc1", blocks="s"))


@bounded
@given(small, small, st.booleans())
def test_halves_of_keys_of_their_own(rows: int, hidden: int, stacked: bool) -> None:
    gate, up = numbered(rows, hidden), numbered(rows, hidden) + 1000
    stored = Stored(
        {**layers("mlp.linear_fc1.weight_w", gate, stacked), **layers("mlp.linear_fc1.weight_v", up, stacked)}, {}
    )
    assert stored.value(Half("gate", "mlp.linear_fc1")).tolist() == gate.tolist()
    assert stored.value(Half("up", "mlp.linear_fc1")).tolist() == up.tolist()


# Experts


@bounded
@given(small, small, small, st.booleans(), st.sampled_from([0, 1, 2]))
def test_all_experts_in_one_tensor(experts: int, half: int, hidden: int, stacked: bool, size: int) -> None:
    """As gpt-oss has them: turned, gate and up column by column."""
    ffn = 2 * half
    gate = numbered(experts, ffn, hidden)
    up = gate + 5000
    halves = (
        [gate.reshape(experts, ffn // size, size, hidden), up.reshape(experts, ffn // size, size, hidden)]
        if size
        else []
    )
    whole = np.stack(halves, 2).reshape(experts, 2 * ffn, hidden) if size else np.concatenate([gate, up], 1)
    blocks = {"moe_mlp_glu_interleave_size": size} if size else {}
    sizes = {"experts": experts, "ffn": ffn, "hidden": hidden}
    stored = Stored(layers("mlp.experts.experts.linear_fc1.weight", whole, stacked), sizes, blocks=blocks)
    wanted = np.empty((experts, hidden, 2 * ffn), np.int64)
    wanted[..., ::2], wanted[..., 1::2] = gate.transpose(0, 2, 1), up.transpose(0, 2, 1)
    got = stored.value(recipe_of(GPT_OSS.layer(Model({}, sizes, {}), 0), "mlp.experts.gate_up_proj"))
    assert got.reshape(wanted.shape).tolist() == wanted.tolist()


def test_experts_of_another_size_contradict() -> None:
    arrays = layers("mlp.experts.experts.linear_fc1.weight", numbered(2, 8, 3), False)
    for changed in ({"ffn": 3}, {"hidden": 4}):
        stored = Stored(arrays, {"experts": 2, "ffn": 4, "hidden": 3} | changed)
        with pytest.raises(Contradiction):
            stored.make(Experts(Joined(GATE, UP), ("experts", 2, "ffn", "hidden"), (0, 3, 2, 1)))


def test_no_experts_at_all_are_a_contradiction() -> None:
    with pytest.raises(Contradiction):
        Stored({}, {"experts": 0, "hidden": 3}).make(
            Experts(Copy("mlp.experts.{e}.linear_fc2.bias"), ("experts", "hidden"))
        )


def recipe_of(table: object, name: str) -> Recipe:
    assert isinstance(table, tuple)
    return next(w.recipe for w in table if isinstance(w, Weight) and w.name == name)


# Gated delta nets


@bounded
@given(small, small, small, small)
def test_delta_nets_of_both_producers(keys: int, each: int, key_dim: int, value_dim: int) -> None:
    """Whoever wrote it, key head by key head: query, key, values, z; beta, alpha."""
    hidden, kernel = 2, 3
    widths = {"query": key_dim, "key": key_dim, "value": each * value_dim, "z": each * value_dim}
    widths |= {"beta": each, "alpha": each}
    rows: dict[str, Array] = {
        n: numbered(keys, w, hidden) + 10_000 * count for count, (n, w) in enumerate(widths.items())
    }
    conv: dict[str, Array] = {
        n: numbered(keys, widths[n], 1, kernel) + 10_000 * count for count, n in enumerate(("query", "key", "value"))
    }
    sizes = {"key_heads": keys, "value_heads": keys * each, "key_dim": key_dim, "value_dim": value_dim}
    split: dict[str, Array] = {f"in_proj.weight.{n}": v.reshape(-1, hidden) for n, v in rows.items()}
    split |= {f"conv1d.weight.{n}": v.reshape(-1, 1, kernel) for n, v in conv.items()}
    grouped: dict[str, Array] = {"in_proj.weight": np.concatenate([rows[n] for n in widths], 1).reshape(-1, hidden)}
    grouped["conv1d.weight"] = np.concatenate(list(conv.values()), 1).reshape(-1, 1, kernel)
    wanted = {
        "in_proj_qkvz": np.concatenate([rows[n] for n in ("query", "key", "value", "z")], 1).reshape(-1, hidden),
        "in_proj_ba": np.concatenate([rows["beta"], rows["alpha"]], 1).reshape(-1, hidden),
        "conv1d": np.concatenate([v.reshape(-1, 1, kernel) for v in conv.values()]),
    }
    table = QWEN3_NEXT.layer(Model({"layer_types": ["linear_attention"]}, {**sizes, "experts": 1}, {}), 0)
    for arrays in (split, grouped):
        stored = Stored({f"{LAYER}self_attention.{n}": v for n, v in arrays.items()}, sizes)
        for name, expected in wanted.items():
            assert stored.value(recipe_of(table, f"linear_attn.{name}.weight")).tolist() == expected.tolist()


@pytest.mark.parametrize(("beside", "shift"), [("in_proj.weight.query", 1), ("in_proj.weight", 0)])
def test_the_norm_of_a_delta_net_is_shifted_for_one_producer(beside: str, shift: int) -> None:
    arrays = {f"{LAYER}out_norm.weight": numbered(4), f"{LAYER}{beside}": numbered(4)}
    assert (
        Stored(arrays, {}).value(Shifted("out_norm.weight", 1, "in_proj.weight.query")).tolist()
        == (numbered(4) + shift).tolist()
    )


# Vocabularies


@bounded
@given(small, st.integers(0, 5), small)
def test_a_vocabulary_is_cut_and_told(rows: int, padding: int, hidden: int) -> None:
    whole = numbered(rows + padding, hidden)
    stored = Stored({f"{LAYER}output_layer.weight": whole}, {"vocab": rows})
    assert stored.value(Vocabulary("output_layer.weight")).tolist() == whole[:rows].tolist()
    boxes = [cut.box for cut in stored.taken.cut.values()]
    assert boxes == ([((rows, 0), (padding, hidden))] if padding else [])


def test_too_few_rows_are_no_vocabulary() -> None:
    with pytest.raises(Contradiction):
        Stored({f"{LAYER}output_layer.weight": numbered(4, 2)}, {"vocab": 5}).make(Vocabulary("output_layer.weight"))
