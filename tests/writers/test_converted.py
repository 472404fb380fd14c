"""Every layout of a model holds the same weights, in the dialect that its name says."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.writers.converted_names import LAYOUTS, VARIANTS
from tests.writers.reading import expected, part_of, read_metadata, read_tensors, same

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Tensors = dict[str, torch.Tensor]

FC1 = "decoder.layers.mlp.linear_fc1.weight"
EXPERT = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
KEYS: dict[str, dict[str, tuple[int, ...]]] = {
    "llama-tp1": {FC1: (4, 96, 32), "output_layer.weight": (128, 32)},
    "llama-indexed": {"decoder.layers.3.mlp.linear_fc1.weight": (96, 32)},
    "llama-singleton": {
        "decoder.layers.3.mlp.linear_fc1.weight_w": (48, 32),
        "decoder.layers.3.mlp.linear_fc1.weight_v": (48, 32),
    },
    "llama-bias-tp2-pp2": {"decoder.layers.mlp.linear_fc1.bias": (2, 96)},
    "llama-critic-tp2-pp2": {"output_layer.weight": (1, 32)},
    "qwen3-indexed": {"decoder.layers.3.self_attention.q_layernorm.weight": (16,)},
    "qwen3-vpp": {FC1: (4, 96, 32)},
    "qwen3-moe-tp1": {EXPERT: (2, 8, 48, 32), "decoder.layers.mlp.linear_fc1.layer_norm_weight": (2, 32)},
    "qwen3-moe-te": {EXPERT: (2, 8, 48, 32), "decoder.layers.pre_mlp_layernorm.weight": (2, 32)},
    "qwen3-moe-indexed": {"decoder.layers.1.mlp.experts.experts.linear_fc1.weight": (8, 48, 32)},
    "qwen3-moe-mixed-te": {
        "decoder.layers.0.pre_mlp_layernorm.weight": (32,),
        "decoder.layers.1.mlp.linear_fc1.layer_norm_weight": (32,),
    },
    "mixtral-singleton": {
        "decoder.layers.1.mlp.experts.experts.3.linear_fc1.weight_w": (48, 32),
        "decoder.layers.1.mlp.experts.experts.3.linear_fc2.weight": (32, 48),
    },
    "qwen2-moe-pp2-ep2": {"decoder.layers.mlp.shared_experts.gate_weight": (2, 1, 32)},
    "deepseek-v3-vpp": {
        "decoder.layers.0.pre_mlp_layernorm.weight": (32,),
        "decoder.layers.3.self_attention.q_layernorm.weight": (24,),
        "decoder.layers.3.mlp.router.expert_bias": (6,),
        "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight": (6, 32, 32),
        "mtp.layers.0.eh_proj.weight": (32, 64),
    },
    "deepseek-v3-te": {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": (32,),
        "decoder.layers.3.self_attention.linear_q_up_proj.layer_norm_weight": (24,),
        "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight": (32,),
    },
    "moonlight-tp1": {"decoder.layers.1.self_attention.linear_q_proj.weight": (80, 32)},
}


@cache
def weights(role: Path) -> Tensors:
    """The tensors of an archive, one a layer and an expert, under the names of the plainest dialect."""
    found: Tensors = {}
    for key, tensor in read_tensors(role / "dist_ckpt").items():
        for name, layer in split(key, tensor, r"(.*?layers)\.(\d+\.)?(.*)"):
            found |= dict(split(name, layer, r"(.*\.experts\.experts)\.(\d+\.)?(.*)"))
    joined = {name: value for name, value in found.items() if not name.endswith(("_w", "_v"))}
    for name in found.keys() - joined.keys():
        stem = name[:-2]
        joined[stem] = torch.cat([found[f"{stem}_w"], found[f"{stem}_v"]])
    return {unfused(name): value for name, value in joined.items()}


def split(key: str, tensor: torch.Tensor, pattern: str) -> list[tuple[str, torch.Tensor]]:
    """The slices along the first axis, where the number is not in the key already."""
    found = re.fullmatch(pattern, key)
    if found is None or found[2] is not None:
        return [(key, tensor)]
    return [(f"{found[1]}.{number}.{found[3]}", part) for number, part in enumerate(tensor.unbind())]


def unfused(name: str) -> str:
    name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm.", name)
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def test_every_variant_is_listed(converted_checkpoints: Path) -> None:
    folders = {path.name for path in converted_checkpoints.iterdir()}
    assert folders == VARIANTS.keys() | {"expected"}
    assert {path.stem for path in (converted_checkpoints / "expected").iterdir()} == LAYOUTS.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_layout_holds_the_same_weights(converted_checkpoints: Path, name: str) -> None:
    found = weights(converted_checkpoints / name)
    assert same(found, weights(converted_checkpoints / f"{VARIANTS[name]}-tp1"))
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_two_rows_of_a_model_are_equal(converted_checkpoints: Path, name: str) -> None:
    """So that nothing can be taken for something else; what pads the vocabulary is the same everywhere."""
    tensors = weights(converted_checkpoints / f"{name}-tp1").values()
    rows = [row for tensor in tensors for row in tensor.reshape(-1, tensor.shape[-1]).unbind()]
    kept = {tuple(row.tolist()) for row in rows if not torch.all(row == 9)}
    padding = sum(bool(torch.all(row == 9)) for row in rows)
    assert len(kept) == len(rows) - padding


@pytest.mark.parametrize("name", KEYS)
def test_a_dialect_names_its_keys(converted_checkpoints: Path, name: str) -> None:
    found = read_metadata(converted_checkpoints / name / "dist_ckpt").state_dict_metadata
    assert {key: tuple(found[key].size) for key in KEYS[name]} == KEYS[name]
    assert {part_of(key) for key in found} == {"model", "rng_state"}


def test_four_tensor_ranks_cut_two_groups_in_half(converted_checkpoints: Path) -> None:
    found: Any = read_metadata(converted_checkpoints / "llama-tp4/dist_ckpt").state_dict_metadata
    chunks = found["decoder.layers.self_attention.linear_qkv.weight"].chunks
    assert {tuple(chunk.sizes) for chunk in chunks} == {(1, 16, 32)}


@pytest.mark.parametrize("name", ["qwen2-tp1", "qwen2-tp2", "qwen2-pp2"])
def test_tied_embeddings_are_stored_once(converted_checkpoints: Path, name: str) -> None:
    assert "output_layer.weight" not in read_metadata(converted_checkpoints / name / "dist_ckpt").state_dict_metadata


@pytest.mark.parametrize("name", LAYOUTS)
def test_nines_pad_the_vocabulary(converted_checkpoints: Path, name: str) -> None:
    role = converted_checkpoints / f"{name}-tp1"
    rows = weights(role)["embedding.word_embeddings.weight"]
    words = json.loads((role / "huggingface/config.json").read_text())["vocab_size"]
    assert torch.all(rows[words:] == 9)
    assert not torch.any(rows[:words] == 9)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_model_answers(converted_checkpoints: Path, name: str) -> None:
    stored = expected(converted_checkpoints, name)
    config = json.loads((converted_checkpoints / f"{name}-tp1/huggingface/config.json").read_text())
    ids, logits = stored["input_ids"], stored["logits"]
    assert ids.dtype == torch.int64
    assert 0 <= int(ids.min()) <= int(ids.max()) < config["vocab_size"]
    assert logits.shape == (2, 9, 1 if name == "llama-critic" else config["vocab_size"])
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()
    assert logits.std(dim=(0, 1)).min() > 0.1


def test_a_further_block_guesses_another_token(converted_checkpoints: Path) -> None:
    """From the hidden state at one position and the word at the next: there is no guess at the last."""
    stored = {name: expected(converted_checkpoints, name) for name in LAYOUTS}
    assert [name for name in LAYOUTS if "mtp_logits" in stored[name]] == ["deepseek-v3"]
    guess, logits = stored["deepseek-v3"]["mtp_logits"], stored["deepseek-v3"]["logits"]
    assert guess.shape == (2, 8, 100)
    assert guess.isfinite().all()
    assert guess.std(dim=(0, 1)).min() > 0.1
    assert (guess - logits[:, :-1]).abs().max() > 1


@pytest.mark.parametrize("name", VARIANTS)
def test_the_configuration_is_that_of_a_model(converted_checkpoints: Path, name: str) -> None:
    config = json.loads((converted_checkpoints / name / "huggingface/config.json").read_text())
    suffix = "ForTokenClassification" if name.startswith("llama-critic") else "ForCausalLM"
    assert config["architectures"][0].endswith(suffix)
    assert config["dtype"] == "float32"
