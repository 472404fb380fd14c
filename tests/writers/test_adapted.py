"""Adapters lie beside the base as Megatron Bridge keeps them, in every layout the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.writers.adapted_names import LAYOUTS, SCRAMBLED, VARIANTS
from tests.writers.reading import expected, read_metadata, read_tensors, same
from tests.writers.test_converted import weights

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FC1 = "mlp.linear_fc1.adapter"
QKV = "decoder.layers.self_attention.linear_qkv.adapter"
EXPERT = "mlp.experts.experts"
KEYS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama-tp2": {
        f"decoder.layers.{FC1}.linear_in.weight": (4, 4, 32),
        f"decoder.layers.{FC1}.linear_out.weight": (4, 96, 4),
        f"{QKV}.linear_out.weight": (4, 64, 4),
        "output_layer.adapter.linear_out.weight": (128, 4),
    },
    "llama-indexed": {f"decoder.layers.3.{FC1}.linear_out.weight": (96, 4)},
    "llama-singleton": {f"decoder.layers.3.{FC1}.linear_out.weight": (96, 4)},
    "qwen3-moe-tp2-ep2": {
        f"decoder.layers.{EXPERT}.linear_fc1.adapter.linear_in.weight": (2, 8, 4, 32),
        f"decoder.layers.{EXPERT}.linear_fc2.adapter.linear_out.weight": (2, 8, 32, 4),
        "decoder.layers.mlp.router.adapter.linear_out.weight": (2, 8, 4),
    },
    "qwen3-moe-singleton": {f"decoder.layers.1.{EXPERT}.5.linear_fc1.adapter.linear_out.weight": (48, 4)},
    "llama-dora-tp1": {f"decoder.layers.{FC1}.weight_magnitude": (4, 96)},
    "llama-attention-canonical-tp2": {
        f"{QKV}.adapter_q.linear_out.weight": (4, 32, 4),
        f"{QKV}.adapter_v.linear_out.weight": (4, 16, 4),
    },
}


def test_every_variant_is_listed(adapted_checkpoints: Path) -> None:
    assert {path.name for path in adapted_checkpoints.iterdir()} == VARIANTS.keys() | {"expected"}
    assert {path.stem for path in (adapted_checkpoints / "expected").iterdir()} == LAYOUTS.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_layout_holds_the_same_weights(adapted_checkpoints: Path, name: str) -> None:
    """The writer fills tensors by where they lie in the archive: the scrambled ones, too, hold the same numbers."""
    found = weights(adapted_checkpoints / name)
    assert same(found, weights(adapted_checkpoints / f"{VARIANTS[name]}-tp1"))
    assert any(".adapter." in key for key in found)


@pytest.mark.parametrize("name", KEYS)
def test_adapters_have_keys_below_those_of_their_module(adapted_checkpoints: Path, name: str) -> None:
    found = read_metadata(adapted_checkpoints / name / "dist_ckpt").state_dict_metadata
    assert {key: tuple(found[key].size) for key in KEYS[name]} == KEYS[name]
    assert not [key for key in found if "to_wrap" in key]


@pytest.mark.parametrize("name", SCRAMBLED)
def test_ranks_cut_what_is_scrambled_otherwise_than_the_weight(adapted_checkpoints: Path, name: str) -> None:
    found = read_metadata(adapted_checkpoints / name / "dist_ckpt").state_dict_metadata
    keys = [key for key in found if "linear_fc1" in key and "_extra_state" not in key]
    cuts = {key: len({chunk.offsets[1] for chunk in found[key].chunks}) for key in keys}
    assert cuts["decoder.layers.mlp.linear_fc1.weight"] == 4
    below = f"decoder.layers.{FC1}"
    if name == "llama-dora-tp2":
        assert cuts[f"{below}.weight_magnitude"] == 2
    else:
        assert cuts[f"{below}.adapter_up.linear_out.weight"] == 4


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_change_what_the_model_says(adapted_checkpoints: Path, name: str) -> None:
    told = expected(adapted_checkpoints, name)["logits"]
    assert told.isfinite().all()
    assert told.std(dim=(0, 1)).min() > 0.05
    factors = [
        v for key, v in read_tensors(adapted_checkpoints / f"{name}-tp1" / "dist_ckpt").items() if "_out." in key
    ]
    assert all(torch.count_nonzero(value) == value.numel() for value in factors)
