"""`merge-fsdp --like`: what a reference has and the shards lack is told, whatever it is called and however it lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.merged import QWEN2, Tensors, write_role
from tests.served import Run, merged_like, named, reference, refused_like

PLAIN = {
    "model.embed_tokens.weight": torch.ones(10, 6),
    "lm_head.weight": torch.zeros(10, 6),
    "model.layers.0.self_attn.k_proj.weight": torch.ones(4, 6),
}
EXPERTS = "model.layers.0.mlp.experts"


def one_by_one(count: int) -> Tensors:
    """Experts of width 4."""
    shapes = {"gate_proj": (4, 6), "up_proj": (4, 6), "down_proj": (6, 4)}
    return {
        f"{EXPERTS}.{expert}.{name}.weight": torch.ones(*shape)
        for expert in range(count)
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("name", ["logit_scale", "model.layers.0.layer_scale", "model.layers.0.mlp.input_scale"])
def test_a_scale_of_the_model_itself_is_missing(ckpttool: Run, tmp_path: Path, name: str) -> None:
    """Names like those of quantised weights, where no weight is quantised."""
    role = write_role(tmp_path / "role", PLAIN, config=QWEN2)
    like = reference(tmp_path / "like", {**PLAIN, name: torch.ones(1)}, QWEN2)
    assert name in named(refused_like(ckpttool, role, tmp_path / "out", like))
    merged_like(ckpttool, role, tmp_path / "out", like, "--allow-missing", name)


@pytest.mark.parametrize(
    "companions",
    [
        ("self_attn.k_proj.weight_scale", "self_attn.k_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale"),
        ("self_attn.k_proj.weight_scale_inv", "self_attn.q_scale", "self_attn.prob_scale"),
    ],
)
def test_scales_of_quantised_weights_are_not_missing(
    ckpttool: Run, tmp_path: Path, companions: tuple[str, ...]
) -> None:
    role = write_role(tmp_path / "role", PLAIN, config=QWEN2)
    scales = {f"model.layers.0.{name}": torch.ones(1) for name in companions}
    merged_like(ckpttool, role, tmp_path / "out", reference(tmp_path / "like", {**PLAIN, **scales}, QWEN2))


@pytest.mark.parametrize(
    ("weight", "stored"),
    [
        ("model.layers.0.self_attn.q_proj.weight", ("_packed", "_scale", "_shape", "_zero_point")),
        (f"{EXPERTS}.gate_up_proj", ("_blocks", "_scales")),
    ],
)
def test_a_quantised_weight_is_missing(ckpttool: Run, tmp_path: Path, weight: str, stored: tuple[str, ...]) -> None:
    """The reference has it under other names; the shards have it under none."""
    role = write_role(tmp_path / "role", PLAIN, config=QWEN2)
    quantised = {f"{weight}{end}": torch.zeros(4, 2, dtype=torch.uint8) for end in stored}
    like = reference(tmp_path / "like", {**PLAIN, **quantised}, QWEN2)
    found = named(refused_like(ckpttool, role, tmp_path / "out", like))
    assert weight in found
    assert not found & quantised.keys()
    merged_like(ckpttool, role, tmp_path / "out", like, "--allow-missing", weight)


def test_a_missing_expert_is_named(ckpttool: Run, tmp_path: Path) -> None:
    """Not the last one, which is there and has no place among the fewer."""
    config = {**QWEN2, "model_type": "qwen3_moe", "hidden_size": 6, "moe_intermediate_size": 4, "num_experts": 5}
    state = {name: value for name, value in {**PLAIN, **one_by_one(5)}.items() if ".2." not in name}
    role = write_role(tmp_path / "role", state, config=config)
    packed = {f"{EXPERTS}.gate_up_proj": torch.ones(5, 8, 6), f"{EXPERTS}.down_proj": torch.ones(5, 6, 4)}
    like = reference(tmp_path / "like", {**PLAIN, **packed}, config)
    found = refused_like(ckpttool, role, tmp_path / "out", like)
    missing = next(problem for problem in found.json["problems"] if "packed" in problem["message"])
    assert f"{EXPERTS}.2.gate_proj.weight" in missing["message"]
    assert f"{EXPERTS}.4." not in missing["message"]


@pytest.mark.parametrize(("here", "there"), [(torch.int64, torch.float32), (torch.float32, torch.int64)])
def test_a_counter_is_no_weight(ckpttool: Run, tmp_path: Path, here: torch.dtype, there: torch.dtype) -> None:
    state = {**PLAIN, "model.steps": torch.ones(3, dtype=here)}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    like = reference(tmp_path / "like", {**PLAIN, "model.steps": torch.ones(3, dtype=there)}, QWEN2)
    call = refused_like(ckpttool, role, tmp_path / "out", like)
    assert [problem["code"] for problem in call.json["problems"]] == ["dtypes-disagree"] * 2
    assert "model.steps" in named(call)
