"""`merge-fsdp --lora fuse --base`: adapters that were saved alone, on bases that lie as the hub has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from ckpttool.merging import Options, merge
from tests.merged import Tensors, tensors_in, unequal, write_role

META = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM"}
PREFIX = "base_model.model."


def adapters(modules: dict[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Random factors of rank 2 for modules of these shapes `(out, in)`."""
    state = {}
    for module, (rows, columns) in modules.items():
        state[f"{PREFIX}{module}.lora_A.default.weight"] = torch.randn(2, columns)
        state[f"{PREFIX}{module}.lora_B.default.weight"] = torch.randn(rows, 2)
    return state


def fused(weight: torch.Tensor, state: Tensors, module: str) -> torch.Tensor:
    """What PEFT's formula gives, in float64."""
    down, up = (state[f"{PREFIX}{module}.lora_{side}.default.weight"].double() for side in "AB")
    return (weight.double() + 3 * (up @ down)).float()


def merged(role: Path, base: Path, **options: Any) -> dict[str, torch.Tensor]:
    given = Options(lora="fuse", lora_alpha=6, base=str(base), **options)
    merge(role, role.parent / "out", given)
    return tensors_in(role.parent / "out")


def close(found: Tensors, expected: Tensors, names: set[str]) -> None:
    """These are fused, all others are what they were, bit for bit."""
    for name in names:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=1e-6)
    assert unequal({**found, **{name: expected[name] for name in names}}, expected) == set()


def test_a_whole_copy_takes_the_place_of_what_the_base_has(lora_checkpoints: Path, tmp_path: Path) -> None:
    base = lora_checkpoints / "expected" / "head.base"
    module = "model.layers.0.self_attn.q_proj"
    weights = tensors_in(base)
    state = adapters({module: tuple(weights[f"{module}.weight"].shape)})
    head = torch.randn_like(weights["lm_head.weight"])
    state[f"{PREFIX}lm_head.modules_to_save.default.weight"] = head
    found = merged(write_role(tmp_path / "role", state), base)
    expected = {**weights, "lm_head.weight": head}
    expected[f"{module}.weight"] = fused(weights[f"{module}.weight"], state, module)
    close(found, expected, {f"{module}.weight"})


def test_a_base_under_the_names_of_the_hub(served_checkpoints: Path, tmp_path: Path) -> None:
    """Trained as `model.language_model.`, stored as `model.`; `visual.` moves, too."""
    base = served_checkpoints / "expected" / "qwen2-vl"
    weights = tensors_in(base)
    modules = {
        "model.language_model.layers.1.self_attn.q_proj": "model.layers.1.self_attn.q_proj.weight",
        "model.visual.blocks.0.attn.qkv": "visual.blocks.0.attn.qkv.weight",
    }
    state = adapters({module: tuple(weights[name].shape) for module, name in modules.items()})
    found = merged(write_role(tmp_path / "role", state), base)
    expected = {**weights, **{name: fused(weights[name], state, module) for module, name in modules.items()}}
    close(found, expected, set(modules.values()))


def test_packed_experts_on_a_base_that_has_them_one_by_one(
    lora_checkpoints: Path, served_checkpoints: Path, tmp_path: Path
) -> None:
    """PEFT adapts `experts.gate_up_proj`; the hub has gate and up of every expert."""
    base = served_checkpoints / "expected" / "qwen3-moe"
    weights, experts, rank = tensors_in(base), 6, 2
    state = {}
    for path, rows, columns in (("experts.base_layer", 24, 32), ("experts", 32, 12)):
        for layer in range(2):
            head = f"{PREFIX}model.layers.{layer}.mlp.{path}"
            state[f"{head}.lora_A.default.weight"] = torch.randn(rank * experts, columns)
            state[f"{head}.lora_B.default.weight"] = torch.randn(rows, rank * experts)
    role = write_role(tmp_path / "role", state)
    expected = dict(weights)
    for layer in range(2):
        head = f"model.layers.{layer}.mlp.experts"
        gate_up = delta(state, f"{PREFIX}{head}.base_layer", experts, rank)
        down = delta(state, f"{PREFIX}{head}", experts, rank)
        for expert in range(experts):
            for name, change in (
                ("gate_proj", gate_up[expert][:12]),
                ("up_proj", gate_up[expert][12:]),
                ("down_proj", down[expert]),
            ):
                key = f"{head}.{expert}.{name}.weight"
                expected[key] = (weights[key].double() + 3 * change).float()
    close(merged(role, base), expected, {name for name in weights if ".experts." in name})


def delta(state: Tensors, head: str, experts: int, rank: int) -> torch.Tensor:
    """`[experts, out, in]`: A has the expert as its slow index, B as its fast one."""
    down = state[f"{head}.lora_A.default.weight"].double().reshape(experts, rank, -1)
    up = state[f"{head}.lora_B.default.weight"].double()
    return torch.einsum("ore,eri->eoi", up.reshape(up.shape[0], rank, experts), down)


def test_a_base_keeps_its_dtype_and_the_shards_keep_theirs(lora_checkpoints: Path, tmp_path: Path) -> None:
    base = lora_checkpoints / "expected" / "only-dora.base"
    weights = {name: value for file in base.glob("*.safetensors") for name, value in load_file(file).items()}
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    module = "model.layers.0.self_attn.q_proj"
    state = adapters({module: tuple(weights[f"{module}.weight"].shape)})
    found = merged(write_role(tmp_path / "role", state), base)
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    wanted = fused(weights[f"{module}.weight"], state, module).bfloat16()
    assert (found[f"{module}.weight"].float() - wanted.float()).abs().max() <= wanted.float().abs().max() * 2**-8
