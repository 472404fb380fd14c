"""The LoRA checkpoints are what they claim to be, and the oracles agree with each other and with the formula."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.adapters import (
    State,
    adapter_config,
    adapter_of,
    answer,
    assert_answers,
    base_of,
    load_adapter,
    load_model,
    oracle,
    whole,
)
from tests.writers.lora_models import Variant, variants
from tests.writers.reading import SIDE_FILES

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VARIANTS = {variant.name: variant for variant in variants()}
WHOLE = [name for name, variant in VARIANTS.items() if not variant.only]
PREFIX = "base_model.model."


@pytest.mark.parametrize("name", VARIANTS)
def test_a_role_has_its_files(lora_checkpoints: Path, name: str) -> None:
    role, variant = lora_checkpoints / name, VARIANTS[name]
    assert {path.name for path in role.glob("*.pt")} == {f"model_world_size_4_rank_{rank}.pt" for rank in range(4)}
    config = json.loads((role / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": variant.fsdp, "world_size": 4}
    assert {path.name for path in (role / "huggingface").iterdir()} >= SIDE_FILES
    assert (role / "lora_train_meta.json").exists()
    found = [str(path.parent.relative_to(role)) for path in role.rglob("adapter_config.json")]
    assert sorted(found) == ([] if variant.config_at is None else config_places(variant))


def config_places(variant: Variant) -> list[str]:
    """The folder of the variant, and one below it for an adapter with a name of its own."""
    assert variant.config_at is not None
    names = ["" if name == "default" else name for name in variant.adapters]
    return sorted(str(Path(variant.config_at) / name) for name in names)


@pytest.mark.parametrize("name", WHOLE)
def test_the_shards_and_the_formula_give_what_peft_merges(lora_checkpoints: Path, name: str) -> None:
    """In float64, where an order of sums or a rounding on the way cannot hide anything."""
    state, expected = whole(lora_checkpoints / name), oracle(lora_checkpoints, name, "exact")
    found = merged({key: value.double() for key, value in state.items()}, VARIANTS[name])
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-13, msg=key)


@pytest.mark.parametrize("name", [name for name in VARIANTS if VARIANTS[name].only])
def test_adapters_alone_with_the_base_give_what_peft_merges(lora_checkpoints: Path, name: str) -> None:
    state, base = whole(lora_checkpoints / name), load_model(base_of(lora_checkpoints, name)).state_dict()
    assert all("lora_" in key for key in state)
    below = {key.split(".lora_")[0].removeprefix(PREFIX) for key in state}
    for key, value in base.items():
        module, _, kind = key.rpartition(".")
        state[f"{PREFIX}{module}.base_layer.{kind}" if module in below else PREFIX + key] = value
    found = merged({key: value.double() for key, value in state.items()}, VARIANTS[name])
    for key, value in oracle(lora_checkpoints, name, "exact").items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-13, msg=key)


@pytest.mark.parametrize("name", VARIANTS)
def test_peft_merges_in_the_dtype_of_the_base(lora_checkpoints: Path, name: str) -> None:
    """Once in its own dtype and once in float64; half precision is rounded twice on the way."""
    exact = oracle(lora_checkpoints, name, "exact")
    for key, value in oracle(lora_checkpoints, name).items():
        half = value.dtype is torch.bfloat16
        torch.testing.assert_close(
            value.double(), exact[key], rtol=2**-7 if half else 1e-6, atol=4e-3 if half else 1e-6
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_what_peft_wrote_gives_the_logits(lora_checkpoints: Path, name: str) -> None:
    """PEFT's own directory on the base that lies beside it; the base alone says something else."""
    told, base, adapter = oracle(lora_checkpoints, name, "logits"), *places(lora_checkpoints, name)
    folders = [adapter / ("" if each == "default" else each) for each in VARIANTS[name].adapters]
    assert_answers(load_adapter(base, *folders), told)
    assert (answer(load_model(base), told["input_ids"]) - told["logits"]).abs().max() > 0.5


def places(root: Path, name: str) -> tuple[Path, Path]:
    return base_of(root, name), adapter_of(root, name)


@pytest.mark.parametrize("each", ["default", "style"])
def test_one_of_two_adapters_gives_its_logits(lora_checkpoints: Path, each: str) -> None:
    base, adapter = places(lora_checkpoints, "two")
    told = oracle(lora_checkpoints, f"two.{each}", "logits")
    assert_answers(load_adapter(base, adapter / ("" if each == "default" else each)), told)


@pytest.mark.parametrize("name", VARIANTS)
def test_peft_stores_what_the_shards_hold(lora_checkpoints: Path, name: str) -> None:
    """Bit by bit, the name of the adapter taken out; a magnitude loses `.weight` as well."""
    state = whole(lora_checkpoints / name)
    for each in VARIANTS[name].adapters:
        folder = adapter_of(lora_checkpoints, name) / ("" if each == "default" else each)
        stored = load_file(folder / "adapter_model.safetensors")
        own = {bare(key, each): value for key, value in state.items() if f".{each}" in key}
        assert own.keys() <= stored.keys()
        assert all(torch.equal(stored[key], value) for key, value in own.items())
        further = {key.rpartition(".base_layer.")[2] for key in stored.keys() - own.keys()}
        assert further == {"trained-bias": {"bias"}}.get(name, {"weight"} if "embedding" in name else set())


def bare(key: str, adapter: str) -> str:
    key = key.replace(f".modules_to_save.{adapter}.", ".").replace(f".{adapter}", "")
    return key.removesuffix(".weight") if "magnitude" in key else key


def test_names_that_are_not_those_of_a_plain_linear_layer(lora_checkpoints: Path) -> None:
    layer = f"{PREFIX}model.layers.0"
    for role, key in (
        ("embedding", f"{PREFIX}model.embed_tokens.lora_embedding_A.default"),
        ("dora", f"{layer}.self_attn.q_proj.lora_magnitude_vector.default.weight"),
        ("bias", f"{layer}.self_attn.q_proj.lora_B.default.bias"),
        ("head", f"{PREFIX}lm_head.modules_to_save.default.weight"),
        ("head", f"{PREFIX}lm_head.original_module.weight"),
        ("experts", f"{layer}.mlp.experts.base_layer.base_layer.gate_up_proj"),
        ("experts", f"{layer}.mlp.experts.base_layer.lora_A.default.weight"),
        ("experts", f"{layer}.mlp.experts.lora_A.default.weight"),
    ):
        assert key in whole(lora_checkpoints / role)


def test_magnitudes_are_not_the_norms(lora_checkpoints: Path) -> None:
    """Else a merge that forgets them would go unnoticed."""
    state = whole(lora_checkpoints / "dora")
    module = f"{PREFIX}model.layers.0.mlp.up_proj"
    norms = state[f"{module}.base_layer.weight"].norm(dim=1)
    assert (state[f"{module}.lora_magnitude_vector.default.weight"] / norms - 1).abs().max() > 0.1


def test_settings_are_those_of_training(lora_checkpoints: Path) -> None:
    config = adapter_config(lora_checkpoints / "patterns")
    assert (config["r"], config["lora_alpha"]) == (4, 8)
    assert (config["rank_pattern"]["q_proj"], config["alpha_pattern"]["q_proj"]) == (2, 3)
    assert adapter_config(lora_checkpoints / "rslora/lora_adapter")["use_rslora"] is True
    assert adapter_config(lora_checkpoints / "two/lora_adapter/style")["r"] == 3
    meta = json.loads((lora_checkpoints / "critic/lora_train_meta.json").read_text())
    assert meta == {"r": 4, "lora_alpha": 8, "task_type": "TOKEN_CLS"}


# The formula, written without PEFT


def merged(state: State, variant: Variant) -> State:
    """Plain names and merged weights."""
    found = {}
    for key, value in state.items():
        if "lora_" in key or ".original_module." in key:
            continue
        module, _, kind = key.rpartition(".")
        deltas = [delta(state, module, kind, name, config) for name, config in variant.adapters.items()]
        total = value + sum(deltas)
        magnitude = state.get(f"{module.removesuffix('.base_layer')}.lora_magnitude_vector.default.weight")
        if magnitude is not None and kind == "weight":
            total = rescaled(total, magnitude, by_row="embed_tokens" not in key and "transformer" not in key)
        found[plain(key)] = total
    return found


def plain(key: str) -> str:
    """The name in the base model."""
    return re.sub(r"\.base_layer|\.modules_to_save\.\w+", "", key.removeprefix(PREFIX))


def rescaled(weight: torch.Tensor, magnitude: torch.Tensor, *, by_row: bool) -> torch.Tensor:
    """Each output (in an embedding: each column) gets the length that was trained for it."""
    return weight * (
        magnitude[:, None] / weight.norm(dim=1, keepdim=True) if by_row else magnitude / weight.norm(dim=0)
    )


def delta(state: State, module: str, kind: str, adapter: str, config: Any) -> torch.Tensor | float:
    """What one adapter adds to one tensor of a wrapped module; nothing where it has no factors there."""
    owner = module.removesuffix(".base_layer")
    if owner == module:
        return 0.0
    if kind == "bias":
        down, bias = state.get(f"{owner}.lora_A.{adapter}.weight"), state.get(f"{owner}.lora_B.{adapter}.bias")
        return 0.0 if down is None or bias is None else bias * scale(config, owner, len(down))
    if kind in ("gate_up_proj", "down_proj"):
        return of_experts(state, owner, kind, config)
    if kind != "weight":
        return 0.0
    embedding = state.get(f"{owner}.lora_embedding_A.{adapter}")
    if embedding is not None:
        up = state[f"{owner}.lora_embedding_B.{adapter}"]
        return (up @ embedding).T * scale(config, owner, len(embedding))
    down = state.get(f"{owner}.lora_A.{adapter}.weight")
    if down is None:
        return 0.0
    product = state[f"{owner}.lora_B.{adapter}.weight"] @ down * scale(config, owner, len(down))
    return product.T if config.fan_in_fan_out else product


def scale(config: Any, module: str, rank: int) -> float:
    """Alpha over the rank, or over its root."""
    said = [alpha for key, alpha in config.alpha_pattern.items() if re.search(rf"(^|\.){re.escape(key)}$", module)]
    alpha = said[0] if said else config.lora_alpha
    return float(alpha / (rank**0.5 if config.use_rslora else rank))


def of_experts(state: State, owner: str, kind: str, config: Any) -> torch.Tensor:
    """One expert after the other: A holds the ranks of an expert together, B the experts of a rank.

    The wrapper of the first parameter is inside that of the second.
    """
    inner = f"{owner.removesuffix('.base_layer')}.base_layer"
    place = inner if kind == "gate_up_proj" else inner.removesuffix(".base_layer")
    down, up = state[f"{place}.lora_A.default.weight"], state[f"{place}.lora_B.default.weight"]
    shape = state[f"{inner}.base_layer.{kind}"].shape
    rank = len(down) // shape[0]
    parts = [up[:, e :: shape[0]] @ down[e * rank : (e + 1) * rank] * config.lora_alpha / rank for e in range(shape[0])]
    transposed = f"{inner}.base_layer.{kind}_bias" in state  # gpt-oss alone has these biases here
    return torch.stack([part.T if transposed else part for part in parts])
