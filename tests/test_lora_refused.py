"""LoRA in `merge-fsdp`: what only the user can decide is asked for, what does not fit is refused, unwritten."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model

from tests import builders
from tests.adapters import (
    CONFIG,
    LAYER,
    META,
    adapter_config,
    adapter_of,
    assert_fused,
    base_of,
    detached,
    oracle,
    refused,
    settings,
    whole,
)
from tests.conftest import Call
from tests.merged import QWEN2, same, tensors_in, write_role
from tests.writers.fsdp_models import plain_policy
from tests.writers.lora_models import ATTENTION, lora
from tests.writers.reading import quiet

# The shards are read by one process to be written anew.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Run = Callable[..., Call]


# The choice


@pytest.mark.parametrize(
    ("name", "count", "adapters"),
    [("plain", 8, ["default"]), ("two", 16, ["default", "style"]), ("only", 28, ["default"]), ("head", 9, ["default"])],
)
def test_without_a_choice_it_is_said_what_there_is(
    merge_lora: Run, lora_checkpoints: Path, name: str, count: int, adapters: list[str]
) -> None:
    """Case 22: no silent copy of the base model. Never a silent copy of the base model, nor a silent merge."""
    call = merge_lora(lora_checkpoints / name)
    assert re.search(rf"\b{count}\b", call.err), call.err
    refused(call, 2, "adapter", "--lora", "fuse", "both", *adapters)


def test_without_a_choice_in_json(merge_lora: Run, plain_lora: Path) -> None:
    call = merge_lora(plain_lora, "--json")
    assert call.code == 2
    assert "--lora" in json.dumps(call.json)


def test_another_word_than_the_three(merge_lora: Run, plain_lora: Path) -> None:
    refused(merge_lora(plain_lora, "--lora", "merge"), 2, "--lora", "fuse", "adapter", "both")


@pytest.mark.parametrize("how", ["fuse", "adapter", "both"])
def test_a_checkpoint_without_adapters(merge_lora: Run, tmp_path: Path, how: str) -> None:
    role = write_role(tmp_path / "role", {"model.norm.weight": torch.ones(4)}, config=QWEN2)
    refused(merge_lora(role, "--lora", how), 2, "--lora")


@pytest.mark.parametrize("how", ["fuse", "adapter", "both"])
def test_two_adapters_and_none_chosen(merge_lora: Run, lora_checkpoints: Path, how: str) -> None:
    refused(merge_lora(lora_checkpoints / "two", "--lora", how), 2, "--adapter", "default", "style")


@pytest.mark.parametrize("name", ["plain", "two"])
def test_an_adapter_that_is_not_there(merge_lora: Run, lora_checkpoints: Path, name: str) -> None:
    refused(merge_lora(lora_checkpoints / name, "--lora", "fuse", "--adapter", "nope"), 2, "nope", "default")


@pytest.mark.parametrize("how", ["fuse", "both"])
def test_adapters_alone_need_their_base(merge_lora: Run, lora_checkpoints: Path, how: str) -> None:
    """Case 24."""
    refused(merge_lora(lora_checkpoints / "only", "--lora", how), 2, "--base")


def test_a_base_that_nobody_needs(merge_lora: Run, lora_checkpoints: Path) -> None:
    base = base_of(lora_checkpoints, "plain")
    refused(merge_lora(lora_checkpoints / "plain", "--lora", "fuse", "--base", base), 2, "--base")


def test_a_base_of_another_model(merge_lora: Run, lora_checkpoints: Path) -> None:
    call = merge_lora(lora_checkpoints / "only", "--lora", "fuse", "--base", base_of(lora_checkpoints, "conv1d"))
    assert call.code in (4, 5), call.err
    assert "q_proj" in call.err


def test_a_base_that_lacks_a_weight(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """Other sizes than those of the adapter: each layer that does not fit is told."""
    base = base_of(lora_checkpoints, "experts")  # its q_proj has 40 rows, the experts have no up_proj of their own
    call = merge_lora(lora_checkpoints / "only", "--lora", "fuse", "--base", base)
    assert call.code in (4, 5), call.err
    assert "q_proj" in call.err
    assert "up_proj" in call.err


def test_dora_together_with_another(merge_lora: Run, tmp_path: Path) -> None:
    with quiet():
        model = get_peft_model(plain_policy(), lora(ATTENTION, use_dora=True))
        model.add_adapter("style", lora(ATTENTION))
    role = write_role(tmp_path / "role", detached(model), config=QWEN2)
    both = ("--adapter", "default", "--adapter", "style")
    refused(merge_lora(role, "--lora", "fuse", "--lora-alpha", 8, *both), 4, "DoRA")
    assert merge_lora(role, "--lora", "fuse", "--lora-alpha", 8, "--adapter", "style").code == 0


# Alpha and rank


@pytest.mark.parametrize("how", ["fuse", "adapter", "both"])
def test_alpha_is_nowhere(merge_lora: Run, plain_lora: Path, how: str) -> None:
    """Case 23."""
    (plain_lora / META).unlink()
    refused(merge_lora(plain_lora, "--lora", how), 2, "--lora-alpha")


def test_alpha_of_the_command_line(merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, tmp_path: Path) -> None:
    (plain_lora / META).unlink()
    assert merge_lora(plain_lora, "--lora", "both", "--lora-alpha", 8).code == 0
    assert_fused(tmp_path / "out", lora_checkpoints)
    config = adapter_config(tmp_path / "out" / "lora_adapter")
    assert (config["r"], config["lora_alpha"]) == (4, 8)


def test_alpha_may_have_a_fraction(merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, tmp_path: Path) -> None:
    """Half the delta, by which one sees that the number counts."""
    (plain_lora / META).unlink()
    assert merge_lora(plain_lora, "--lora", "fuse", "--lora-alpha", "4.0").code == 0
    key = "model.layers.0.self_attn.q_proj.weight"
    base = whole(lora_checkpoints / "plain")[f"{LAYER}.base_layer.weight"]
    half = (base + oracle(lora_checkpoints, "plain")[key]) / 2
    torch.testing.assert_close(tensors_in(tmp_path / "out")[key], half, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", ["nan", "inf", "-1", "0", "eight", ""])
def test_alpha_that_is_none(merge_lora: Run, plain_lora: Path, alpha: str) -> None:
    (plain_lora / META).unlink()
    refused(merge_lora(plain_lora, "--lora", "fuse", f"--lora-alpha={alpha}"), 2, "--lora-alpha")


@pytest.mark.parametrize("alpha", [0, None])
def test_verl_writes_zero_for_what_it_does_not_know(
    merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, tmp_path: Path, alpha: int | None
) -> None:
    """Case 23. With zero the output would be the base model."""
    settings(plain_lora / META, {"r": 4, "lora_alpha": alpha, "task_type": "CAUSAL_LM"})
    refused(merge_lora(plain_lora, "--lora", "fuse"), 2, "--lora-alpha")
    assert merge_lora(plain_lora, "--lora", "fuse", "--lora-alpha", 8).code == 0
    assert_fused(tmp_path / "out", lora_checkpoints)


@pytest.mark.parametrize("alpha", ["8", -8, float("nan"), float("inf"), [8], True])
def test_alpha_of_a_file_that_is_none(merge_lora: Run, plain_lora: Path, alpha: Any) -> None:
    settings(plain_lora / META, {"r": 4, "lora_alpha": alpha, "task_type": "CAUSAL_LM"})
    refused(merge_lora(plain_lora, "--lora", "fuse"), 4, META, "lora_alpha")


def test_files_that_contradict_one_another(
    merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, tmp_path: Path
) -> None:
    theirs = adapter_of(lora_checkpoints, "plain")
    settings(plain_lora / CONFIG, {**adapter_config(theirs), "lora_alpha": 16})
    refused(merge_lora(plain_lora, "--lora", "fuse"), 4, META, CONFIG, "16", "8")
    assert merge_lora(plain_lora, "--lora", "fuse", "--adapter-config", theirs).code == 0
    assert_fused(tmp_path / "out", lora_checkpoints)


def test_files_that_agree(merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, tmp_path: Path) -> None:
    settings(plain_lora / CONFIG, adapter_config(adapter_of(lora_checkpoints, "plain")))
    assert merge_lora(plain_lora, "--lora", "fuse").code == 0
    assert_fused(tmp_path / "out", lora_checkpoints)


@pytest.mark.parametrize("file", [META, CONFIG])
def test_a_rank_that_is_not_that_of_the_tensors(
    merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, file: str
) -> None:
    """Alpha over another rank is another model."""
    said = {
        META: json.loads((plain_lora / META).read_text()),
        CONFIG: adapter_config(adapter_of(lora_checkpoints, "plain")),
    }
    (plain_lora / META).unlink()
    settings(plain_lora / file, {**said[file], "r": 8})
    refused(merge_lora(plain_lora, "--lora", "fuse"), 4, "rank 4", "8", "q_proj")


def test_ranks_of_patterns_need_their_file(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """verl's file knows one rank and one alpha: with several the scale of a layer is unknown."""
    role = builders.copy(lora_checkpoints / "patterns", tmp_path / "role")
    (role / CONFIG).unlink()
    refused(merge_lora(role, "--lora", "fuse"), 4, "rank", "q_proj", "layers.1.mlp.down_proj")


# Tensors that do not fit


def rewritten(root: Path, folder: Path, changes: Mapping[str, torch.Tensor | None]) -> Path:
    """The role `plain` with these tensors in place of its own, `None` takes one out."""
    state: dict[str, torch.Tensor | None] = {**whole(root / "plain"), **changes}
    assert changes.keys() <= state.keys()
    kept = {key: value for key, value in state.items() if value is not None}
    write_role(folder, kept, config=json.loads((root / "plain/huggingface/config.json").read_text()))
    (folder / META).write_bytes((root / "plain" / META).read_bytes())
    return folder


def test_written_anew_it_merges(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """So what follows fails by what is changed."""
    assert merge_lora(rewritten(lora_checkpoints, tmp_path / "role", {}), "--lora", "fuse").code == 0
    assert_fused(tmp_path / "out", lora_checkpoints)


@pytest.mark.parametrize("how", ["fuse", "adapter"])
@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_one_factor_alone(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path, part: str, how: str) -> None:
    role = rewritten(lora_checkpoints, tmp_path / "role", {f"{LAYER}.{part}.default.weight": None})
    other = "lora_B" if part == "lora_A" else "lora_A"
    refused(merge_lora(role, "--lora", how), 4, f"q_proj.{other}.default.weight", part)


def test_a_factor_is_missing_in_every_layer(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """All are told at once."""
    gone = [f"base_model.model.model.layers.{n}.self_attn.v_proj.lora_B.default.weight" for n in range(2)]
    call = merge_lora(rewritten(lora_checkpoints, tmp_path / "role", dict.fromkeys(gone)), "--lora", "fuse")
    refused(call, 4, "v_proj", "lora_B")
    assert "0-1" in call.err or all(f"layers.{n}." in call.err for n in range(2))


def test_the_weight_below_an_adapter_is_missing(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    role = rewritten(lora_checkpoints, tmp_path / "role", {f"{LAYER}.base_layer.weight": None})
    refused(merge_lora(role, "--lora", "fuse"), 4, "layers.0.self_attn.q_proj")


@pytest.mark.parametrize(
    ("part", "shape"),
    [("lora_A", (4, 31)), ("lora_A", (3, 32)), ("lora_B", (33, 4)), ("lora_B", (32, 5)), ("lora_B", (32,))],
)
def test_shapes_that_do_not_fit(
    merge_lora: Run, lora_checkpoints: Path, tmp_path: Path, part: str, shape: tuple[int, ...]
) -> None:
    changed = {f"{LAYER}.{part}.default.weight": torch.ones(shape)}
    refused(merge_lora(rewritten(lora_checkpoints, tmp_path / "role", changed), "--lora", "fuse"), 4, "q_proj")


def test_magnitudes_that_do_not_fit(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """As many as columns, where rows are needed."""
    key = "base_model.model.model.layers.0.self_attn.v_proj.lora_magnitude_vector.default.weight"
    state = {**whole(lora_checkpoints / "plain"), key: torch.ones(32)}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", "--lora-alpha", 8), 4, "v_proj", "magnitude")


def test_a_bias_without_one_below(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """`o_proj` of Qwen2 has none that the trained one could be added to."""
    module = "base_model.model.model.layers.0.self_attn.o_proj"
    state = whole(lora_checkpoints / "patterns")
    state[f"{module}.lora_B.default.bias"] = torch.ones(32)
    role = write_role(tmp_path / "role", state, config=QWEN2)
    config = adapter_of(lora_checkpoints, "patterns")
    refused(merge_lora(role, "--lora", "fuse", "--adapter-config", config), 4, "o_proj", "bias")


def test_an_adapter_of_zeros_is_the_base(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """Sound: PEFT begins so."""
    key = f"{LAYER}.lora_B.default.weight"
    zeros = {key: torch.zeros(32, 4)}
    base = whole(lora_checkpoints / "plain")[f"{LAYER}.base_layer.weight"]
    assert merge_lora(rewritten(lora_checkpoints, tmp_path / "role", zeros), "--lora", "fuse").code == 0
    assert same(tensors_in(tmp_path / "out")["model.layers.0.self_attn.q_proj.weight"], base)
