"""`merge-fsdp --like`: what does not fit is all told and nothing is guessed; dtypes, aliases and forms are followed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.merged import Tensors, tensors_in, unequal, write_role
from tests.served import (
    ODD,
    Run,
    config_in,
    merged_like,
    named,
    reference,
    refused_like,
    trained,
    without,
)

# Missing and extra


def test_what_only_the_reference_has_is_all_told(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    """Case 27."""
    more = {**ODD, "visual.patch.weight": torch.ones(3)}
    call = refused_like(
        ckpttool, mixtral, tmp_path / "out", reference(tmp_path / "like", {**mixtral_hub, **more}, mixtral_config)
    )
    assert more.keys() <= named(call)
    assert not named(call) & mixtral_hub.keys()


def test_what_only_the_checkpoint_has_is_all_told(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    fewer = without(mixtral_hub, r"input_layernorm|^model\.norm|\.1\.block_sparse_moe\.gate")
    call = refused_like(ckpttool, mixtral, tmp_path / "out", reference(tmp_path / "like", fewer, mixtral_config))
    assert {f"model.layers.{n}.input_layernorm.weight" for n in (0, 1)} | {"model.norm.weight"} <= named(call)
    gates = {"model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.mlp.gate.weight"}
    assert gates & named(call)
    assert not named(call) & fewer.keys()


def test_both_are_told_together_and_folded(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    like = reference(tmp_path / "like", {**without(mixtral_hub, "input_layernorm"), **ODD}, mixtral_config)
    call = ckpttool("merge-fsdp", mixtral, "-o", tmp_path / "out", "--like", like)
    assert (call.code, call.out) == (5, "")
    assert "model.layers.[0-1].odd.[0-11].weight" in call.err
    assert "model.layers.[0-1].input_layernorm.weight" in call.err
    assert "--allow-missing" in call.err
    assert "--allow-extra" in call.err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_is_refused_alike(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    like = reference(tmp_path / "like", {**mixtral_hub, **ODD}, mixtral_config)
    assert ODD.keys() <= named(refused_like(ckpttool, mixtral, tmp_path / "out", like, "--dry-run"))


@pytest.mark.parametrize(
    "patterns",
    [
        ["model.layers.*.odd.*.weight"],
        ["*odd*"],
        ["model.layers.[01].odd.?.weight", "model.layers.?.odd.1[01].weight"],
        [*ODD],
    ],
)
def test_what_may_be_missing_is_named(
    patterns: list[str],
    ckpttool: Run,
    mixtral: Path,
    mixtral_hub: Tensors,
    mixtral_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    like = reference(tmp_path / "like", {**mixtral_hub, **ODD}, mixtral_config)
    options = [part for pattern in patterns for part in ("--allow-missing", pattern)]
    merged_like(ckpttool, mixtral, tmp_path / "out", like, *options)
    assert unequal(tensors_in(tmp_path / "out"), mixtral_hub) == set()


@pytest.mark.parametrize("patterns", [["value.bias", "value.weight"], ["value.*"], ["val*"]])
def test_what_may_be_extra_is_named_and_written(
    patterns: list[str], ckpttool: Run, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    """Nothing is lost: it keeps its name, dtype and bits."""
    more = {"value.weight": torch.randn(6, 2), "value.bias": torch.randn(6)}
    role = write_role(tmp_path / "role", {**mixtral_hub, **more}, config=mixtral_config)
    like = reference(tmp_path / "like", mixtral_hub, mixtral_config)
    assert more.keys() <= named(refused_like(ckpttool, role, tmp_path / "out", like))
    options = [part for pattern in patterns for part in ("--allow-extra", pattern)]
    merged_like(ckpttool, role, tmp_path / "out", like, *options)
    assert unequal(tensors_in(tmp_path / "out"), {**mixtral_hub, **more}) == set()


def test_what_is_not_named_is_still_told(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    like = reference(tmp_path / "like", {**mixtral_hub, **ODD}, mixtral_config)
    call = refused_like(ckpttool, mixtral, tmp_path / "out", like, "--allow-missing", "model.layers.0.odd.*")
    assert {name for name in ODD if ".1.odd." in name} == named(call) & ODD.keys()


@pytest.mark.parametrize("option", ["--allow-missing", "--allow-extra"])
def test_what_is_allowed_one_way_is_not_allowed_the_other(
    option: str, ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    """Of two names that are wrong, each on its side."""
    like = reference(
        tmp_path / "like", {**without(mixtral_hub, "model.norm"), "model.final.weight": torch.ones(32)}, mixtral_config
    )
    right = {"--allow-missing": "model.final.weight", "--allow-extra": "model.norm.weight"}
    other = {"--allow-missing": "model.norm.weight", "--allow-extra": "model.final.weight"}
    call = refused_like(ckpttool, mixtral, tmp_path / "out", like, option, right[option])
    assert other[option] in named(call)
    refused_like(ckpttool, mixtral, tmp_path / "out", like, option, other[option], code=2)


@pytest.mark.parametrize("option", ["--allow-missing", "--allow-extra"])
@pytest.mark.parametrize("pattern", ["model.nothing.*", "lm_head", "MODEL.NORM.WEIGHT", "model.norm.weight", ""])
def test_an_allowance_for_nothing_is_wrong(
    option: str, pattern: str, ckpttool: Run, served_checkpoints: Path, mixtral: Path, tmp_path: Path
) -> None:
    """A slip of the pen, or a name that is there on both sides."""
    like = served_checkpoints / "expected" / "mixtral"
    call = refused_like(ckpttool, mixtral, tmp_path / "out", like, option, pattern, code=2)
    assert option in call.out + call.err


@pytest.mark.parametrize("option", ["--allow-missing", "--allow-extra"])
def test_an_allowance_needs_a_reference(option: str, ckpttool: Run, mixtral: Path, tmp_path: Path) -> None:
    call = ckpttool("merge-fsdp", mixtral, "-o", tmp_path / "out", option, "lm_head.weight")
    assert call.code == 2
    assert "--like" in call.err
    assert not (tmp_path / "out").exists()


# Names are matched by rules, or not at all


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (r"model\.layers\.0\.", "model.layer.0."),
        (r"model\.layers\.0\.", "model.layers.00."),
        (r"model\.layers\.1\.", "model.layers.2."),
        (r"model\.norm\.weight", "model.norm.weights"),
        (r"model\.norm\.weight", "model.Norm.weight"),
        (r"model\.norm\.weight", "transformer.model.norm.weight"),
        (r"q_proj", "q_projection"),
        (r"block_sparse_moe\.gate", "block_sparse_moe.router"),
        (r"experts\.0\.w1", "experts.0.w4"),
        (r"lm_head", "head"),
    ],
)
def test_names_that_are_nearly_right_are_not_taken(
    before: str, after: str, ckpttool: Run, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    odd = {re.sub(before, after, name): value for name, value in mixtral_hub.items()}
    assert odd.keys() != mixtral_hub.keys()
    role = write_role(tmp_path / "role", odd, config=mixtral_config)
    told = named(
        refused_like(ckpttool, role, tmp_path / "out", reference(tmp_path / "like", mixtral_hub, mixtral_config))
    )
    assert mixtral_hub.keys() - odd.keys() <= told
    assert odd.keys() - mixtral_hub.keys() <= told


def test_two_tensors_for_one_name_are_refused(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """Under both of its names, and they differ."""
    like = served_checkpoints / "expected" / "qwen2-vl"
    both = {**trained(served_checkpoints, "qwen2-vl"), "model.norm.weight": torch.randn(32)}
    role = write_role(tmp_path / "role", both, config=config_in(like))
    told = named(refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5)))
    assert {"model.norm.weight", "model.language_model.norm.weight"} <= told


@pytest.mark.parametrize("other", ["qwen2-tied", "gemma3", "qwen3-moe", "deepseek-v3"])
def test_a_reference_of_another_family_is_said_to_be_that(
    other: str, ckpttool: Run, served_checkpoints: Path, mixtral: Path, tmp_path: Path
) -> None:
    like = served_checkpoints / "expected" / other
    call = refused_like(ckpttool, mixtral, tmp_path / "out", like)
    assert "mixtral" in call.out
    assert config_in(like)["model_type"] in call.out.replace(str(like), "")


# Another size


@pytest.mark.parametrize(
    ("pattern", "numbers", "what"),
    [(r"layers\.1\.", {"1", "2"}, "layer"), (r"experts\.[23]\.", {"2", "4"}, "expert")],
)
def test_a_reference_of_another_size_is_said_to_be_that_first(
    pattern: str,
    numbers: set[str],
    what: str,
    ckpttool: Run,
    mixtral: Path,
    mixtral_hub: Tensors,
    mixtral_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    like = reference(tmp_path / "like", without(mixtral_hub, pattern), mixtral_config)
    first = refused_like(ckpttool, mixtral, tmp_path / "out", like).json["problems"][0]["message"]
    assert what in first
    assert numbers <= set(re.findall(r"\d+", first))


def test_a_larger_reference_lists_its_layers(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    third = {
        name.replace("layers.1.", "layers.2."): value for name, value in mixtral_hub.items() if "layers.1." in name
    }
    call = refused_like(
        ckpttool, mixtral, tmp_path / "out", reference(tmp_path / "like", {**mixtral_hub, **third}, mixtral_config)
    )
    assert third.keys() <= named(call)


@pytest.mark.parametrize(("before", "after"), [(32, 40), (46, 48), (100, 101)])
def test_other_shapes_show_both_sides(
    before: int,
    after: int,
    ckpttool: Run,
    mixtral: Path,
    mixtral_hub: Tensors,
    mixtral_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Hidden size, rows of the experts, vocabulary: every tensor of another shape is named."""

    def resized(value: torch.Tensor) -> torch.Tensor:
        return torch.zeros([after if size == before else size for size in value.shape])

    like = reference(tmp_path / "like", {name: resized(value) for name, value in mixtral_hub.items()}, mixtral_config)
    call = refused_like(ckpttool, mixtral, tmp_path / "out", like, code=(4, 5))
    wrong = {name for name, value in mixtral_hub.items() if before in value.shape}
    assert wrong
    assert wrong <= named(call)
    shapes = {str(list(mixtral_hub[name].shape)) for name in wrong}
    assert [shape for shape in shapes if shape not in call.out] == []
    assert [shape for shape in shapes if shape.replace(str(before), str(after)) not in call.out] == []
