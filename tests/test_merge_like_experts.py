"""Packed experts under `merge-fsdp --like`: how they lie follows from rules and configs, never from what would fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.merged import Tensors, tensors_in, unequal, write_role
from tests.served import Run, config_in, merged_like, named, reference, refused_like, trained

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def turned(tensors: Tensors, *suffixes: str) -> dict[str, torch.Tensor]:
    """The same with these tensors the other way round."""
    found = {n: v.transpose(1, 2).contiguous() if n.endswith(suffixes) else v for n, v in tensors.items()}
    assert any(name.endswith(suffixes) for name in tensors)
    return found


def saved(checkpoints: Path, name: str) -> tuple[Path, dict[str, torch.Tensor], dict[str, Any]]:
    folder = checkpoints / "expected" / name
    return folder, tensors_in(folder), config_in(folder)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "deepseek-v3"])
@pytest.mark.parametrize("suffixes", [(GATE_UP,), (DOWN,), (GATE_UP, DOWN)])
def test_experts_that_lie_otherwise_than_the_rule_says_are_refused(
    suffixes: tuple[str, ...], name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """Nobody writes them so: to turn them would be a guess."""
    like, _, config = saved(served_checkpoints, name)
    state = turned(trained(served_checkpoints, name), *suffixes)
    role = write_role(tmp_path / "role", state, config=config)
    call = refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5))
    wrong = {key for key in state if key.endswith(suffixes)}
    assert wrong <= named(call)
    assert [str(list(state[key].shape)) for key in wrong if str(list(state[key].shape)) not in call.out] == []


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3-moe", "moe_intermediate_size", 16),
        ("qwen3-moe", "num_experts", 8),
        ("qwen3-moe", "hidden_size", 64),
        ("mixtral", "intermediate_size", 92),
        ("mixtral", "num_local_experts", 2),
        ("deepseek-v3", "n_routed_experts", 6),
    ],
)
def test_experts_that_contradict_the_config_are_refused(
    name: str, field: str, value: int, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """Case 29: sizes are held against the config."""
    like, _, config = saved(served_checkpoints, name)
    role = write_role(tmp_path / "role", trained(served_checkpoints, name), config={**config, field: value})
    call = refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5))
    assert str(value) in call.out
    assert "experts.gate_up_proj" in call.out


@pytest.mark.parametrize("rows", [23, 25])
def test_an_odd_number_of_rows_has_no_halves(
    rows: int, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    like, _, config = saved(served_checkpoints, "qwen3-moe")
    state = trained(served_checkpoints, "qwen3-moe")
    key = f"model.layers.1.{GATE_UP}"
    role = write_role(tmp_path / "role", {**state, key: torch.randn(6, rows, 32)}, config=config)
    assert key in named(refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5)))


def test_a_reference_of_the_other_way_round_where_the_family_has_none_is_refused(
    ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """Qwen3-MoE is packed in memory alone; only Qwen3-VL has two ways."""
    state = trained(served_checkpoints, "qwen3-moe")
    config = config_in(served_checkpoints / "expected" / "qwen3-moe")
    like = reference(tmp_path / "like", turned(state, GATE_UP, DOWN), config)
    call = refused_like(ckpttool, served_checkpoints / "qwen3-moe", tmp_path / "out", like, code=(4, 5))
    assert "[6, 32, 24]" in call.out
    assert {key for key in state if key.endswith((GATE_UP, DOWN))} <= named(call)


@pytest.mark.parametrize("suffix", [GATE_UP, DOWN])
def test_a_reference_that_is_of_two_minds_is_refused(
    suffix: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """One of the two lies as in memory, the other as on the hub."""
    _, hub, config = saved(served_checkpoints, "qwen3-vl-moe-hub")
    like = reference(tmp_path / "like", turned(hub, suffix), config)
    refused_like(ckpttool, served_checkpoints / "qwen3-vl-moe", tmp_path / "out", like, code=(4, 5))


def test_a_shape_that_no_way_round_fits_is_refused(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    _, hub, config = saved(served_checkpoints, "qwen3-vl-moe-hub")
    other = {name: torch.zeros(4, 12, 64) if name.endswith(DOWN) else value for name, value in hub.items()}
    like = reference(tmp_path / "like", other, config)
    call = refused_like(ckpttool, served_checkpoints / "qwen3-vl-moe", tmp_path / "out", like, code=(4, 5))
    assert "[4, 12, 64]" in call.out
    assert "[4, 32, 12]" in call.out


def test_interleaved_experts_are_not_cut_in_halves(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """GPT-OSS has gate and up in turn: to a reference of separate experts there is no rule."""
    state = trained(served_checkpoints, "gpt-oss")
    config = config_in(served_checkpoints / "expected" / "gpt-oss")
    apart = {name: value for name, value in state.items() if ".experts." not in name}
    for layer in range(2):
        for expert in range(4):
            head = f"model.layers.{layer}.mlp.experts.{expert}"
            apart |= {f"{head}.{which}_proj.weight": torch.zeros(46, 32) for which in ("gate", "up")}
            apart[f"{head}.down_proj.weight"] = torch.zeros(32, 46)
    like = reference(tmp_path / "like", apart, config)
    call = refused_like(ckpttool, served_checkpoints / "gpt-oss", tmp_path / "out", like)
    assert {name for name in state if ".experts." in name} <= named(call)


# And back


def packed_from(
    served_checkpoints: Path, tmp_path: Path, changes: dict[str, torch.Tensor | None]
) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Shards of single experts with these changes, and a reference of packed ones."""
    _, hub, config = saved(served_checkpoints, "qwen3-moe")
    state = {name: value for name, value in {**hub, **changes}.items() if value is not None}
    expected = trained(served_checkpoints, "qwen3-moe")
    role = write_role(tmp_path / "role", state, config=config)
    return role, reference(tmp_path / "like", expected, config), expected


@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("expert", [0, 3, 5])
def test_a_missing_expert_leaves_no_gap(
    which: str, expert: int, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    name = f"model.layers.1.mlp.experts.{expert}.{which}.weight"
    role, like, _ = packed_from(served_checkpoints, tmp_path, {name: None})
    assert name in named(refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5)))


@pytest.mark.parametrize("allowed", ["*", "*.experts.*", "*.gate_up_proj"])
def test_a_hole_in_a_packed_tensor_cannot_be_allowed(
    allowed: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """A tensor may be left out whole; of a part of it there is nothing to write."""
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    role, like, _ = packed_from(served_checkpoints, tmp_path, {name: None})
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--like", like, "--allow-missing", allowed)
    assert call.code in (2, 4, 5)
    assert not (tmp_path / "out").exists()


def test_an_expert_too_many_is_not_lost(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.experts.6.up_proj.weight"
    role, like, _ = packed_from(served_checkpoints, tmp_path, {name: torch.randn(12, 32)})
    assert name in named(refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5)))


@pytest.mark.parametrize("shape", [(13, 32), (32, 12), (12, 31)])
def test_an_expert_of_another_shape_is_refused(
    shape: tuple[int, int], ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    role, like, _ = packed_from(served_checkpoints, tmp_path, {name: torch.randn(shape)})
    call = refused_like(ckpttool, role, tmp_path / "out", like, code=(4, 5))
    assert name in named(call)
    assert str(list(shape)) in call.out


def test_a_reference_in_bf16_casts_what_is_packed(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    role, _, expected = packed_from(served_checkpoints, tmp_path, {})
    half = {name: value.bfloat16() for name, value in expected.items()}
    like = reference(tmp_path / "half", half, config_in(served_checkpoints / "expected" / "qwen3-moe"))
    merged_like(ckpttool, role, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), half) == set()


def test_more_than_ten_experts_stand_in_the_order_of_their_numbers(
    ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """10 comes behind 9, not behind 1."""
    config = {**config_in(served_checkpoints / "expected" / "qwen3-moe"), "num_experts": 12, "num_hidden_layers": 1}
    state = {"model.embed_tokens.weight": torch.randn(100, 32), "lm_head.weight": torch.randn(100, 32)}
    for expert in range(12):
        head = f"model.layers.0.mlp.experts.{expert}"
        state |= {f"{head}.{which}_proj.weight": torch.randn(12, 32) for which in ("gate", "up")}
        state[f"{head}.down_proj.weight"] = torch.randn(32, 12)
    expected = {name: value for name, value in state.items() if ".experts." not in name}
    expected[f"model.layers.0.{GATE_UP}"] = torch.stack([both(state, expert) for expert in range(12)])
    downs = [state[f"model.layers.0.mlp.experts.{expert}.down_proj.weight"] for expert in range(12)]
    expected[f"model.layers.0.{DOWN}"] = torch.stack(downs)
    role = write_role(tmp_path / "role", state, config=config)
    merged_like(ckpttool, role, tmp_path / "out", reference(tmp_path / "like", expected, config))
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()
    back = write_role(tmp_path / "packed", expected, config=config)
    merged_like(ckpttool, back, tmp_path / "again", reference(tmp_path / "single", state, config))
    assert unequal(tensors_in(tmp_path / "again"), state) == set()


def both(state: Tensors, expert: int) -> torch.Tensor:
    head = f"model.layers.0.mlp.experts.{expert}"
    return torch.cat([state[f"{head}.gate_proj.weight"], state[f"{head}.up_proj.weight"]])
