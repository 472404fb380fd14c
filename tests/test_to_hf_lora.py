"""Adapters in Megatron archives, fused: transformers says what the Megatron model said with its adapters on.

The archives are written by Megatron-Core on four ranks; what Megatron-Core has no layers for on a CPU (experts in
groups) is held against the same formula in float64.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from ckpttool import fusing, gathering
from ckpttool.converting import Options, convert
from tests.conftest import Call
from tests.conversions import Role, done, make
from tests.merged import tensors_in
from tests.test_to_hf_models import answers, load
from tests.writers.adapted_names import ALPHA, LAYOUTS, RANK, SCRAMBLED, VARIANTS

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
FUSE = Options(lora="fuse")


@pytest.mark.parametrize("model", LAYOUTS)
def test_transformers_says_what_megatron_said_with_its_adapters(
    model: str, adapted_checkpoints: Path, tmp_path: Path
) -> None:
    role, told = adapted_checkpoints / f"{model}-tp1", answers(adapted_checkpoints, model)
    convert(role, tmp_path / "out", FUSE)
    convert(role, tmp_path / "other", Options(lora="fuse", lora_alpha=ALPHA * 1.1))
    with torch.no_grad():
        found, other = (load(tmp_path / name)(told["input_ids"]).logits for name in ("out", "other"))
    torch.testing.assert_close(found, told["logits"], **CLOSE)
    assert (other - told["logits"]).abs().max() > 1e-2


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.endswith("-tp1") and name not in SCRAMBLED])
def test_any_parallel_layout_and_dialect_is_fused_to_the_same(
    variant: str, adapted_checkpoints: Path, tmp_path: Path
) -> None:
    convert(adapted_checkpoints / f"{VARIANTS[variant]}-tp1", tmp_path / "one", FUSE)
    convert(adapted_checkpoints / variant, tmp_path / "out", FUSE)
    one, out = (tensors_in(tmp_path / name) for name in ("one", "out"))
    torch.testing.assert_close(out, one, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("model", ["llama-tp2", "llama-dora-tp1", "qwen3-moe-singleton"])
def test_in_small_parts(model: str, adapted_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of a few rows, which DoRA's lengths then do not come from alone, and factors that are not kept."""
    convert(adapted_checkpoints / model, tmp_path / "one", FUSE)
    monkeypatch.setattr(gathering, "PART", 24)
    monkeypatch.setattr(fusing, "PART", 60)
    monkeypatch.setattr(fusing, "HELD", 100)
    convert(adapted_checkpoints / model, tmp_path / "out", FUSE)
    one, out = (tensors_in(tmp_path / name) for name in ("one", "out"))
    torch.testing.assert_close(out, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", SCRAMBLED)
def test_rows_that_were_saved_rank_by_rank_are_refused(
    variant: str, adapted_checkpoints: Path, tmp_path: Path, ckpttool: Callable[..., Call]
) -> None:
    call = ckpttool("to-hf", adapted_checkpoints / variant, "-o", tmp_path / "out", "--lora", "fuse", "--json")
    assert (call.code, call.json["problems"][0]["code"]) == (5, "adapter-order")
    assert not list(tmp_path.iterdir())


def test_what_was_fused_is_told(adapted_checkpoints: Path, tmp_path: Path, ckpttool: Callable[..., Call]) -> None:
    role, out = adapted_checkpoints / "qwen3-moe-tp1", tmp_path / "out"
    data = ckpttool("to-hf", role, "-o", out, "--lora", "fuse", "--json").json["data"]
    assert data["lora"] == "fuse"
    (told,) = data["adapters"]
    assert told == {
        "name": "default",
        "layers": 2 * (2 + 1 + 8 * 2),
        "tensors": 10,
        "ranks": [RANK],
        "alpha": ALPHA,
        "alphas": {},
        "rslora": False,
        "dora": False,
        "task_type": "CAUSAL_LM",
        "copies": [],
        "settings": str(role / "lora_train_meta.json"),
    }
    assert "adapter" not in data["skipped"]
    assert data["bytes_read"] > data["bytes_written"]


def test_people_are_told_the_same(adapted_checkpoints: Path, tmp_path: Path, ckpttool: Callable[..., Call]) -> None:
    role = adapted_checkpoints / "llama-dora-tp1"
    shown = ckpttool("to-hf", role, "-o", tmp_path / "out", "--lora", "fuse", "--dry-run")
    text = " ".join(shown.out.split())
    assert "default: DoRA of rank 4 on 16 layers" in text
    assert f"alpha {ALPHA} over the rank (" in text
    assert "run_config.yaml" in text
    assert "--lora fuse" in text.partition("Next")[2]


def test_what_inspect_suggests_can_be_typed(
    adapted_checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ckpttool: Callable[..., Call]
) -> None:
    monkeypatch.chdir(tmp_path)
    told = ckpttool("inspect", adapted_checkpoints / "llama-tp2", "--json").json["data"]["next"]
    (command,) = (line["command"] for line in told if " to-hf " in line["command"])
    assert ckpttool(*shlex.split(command)[1:]).code == 0
    assert "--lora fuse" in command


@dataclass(frozen=True)
class Put:
    """An adapter that was put into an archive: on which module, with which factors."""

    module: str
    down: torch.Tensor
    up: torch.Tensor

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        below = f"{self.module}.adapter"
        return {f"{below}.linear_in.weight": self.down, f"{below}.linear_out.weight": self.up}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def adapted(role: Role, module: str, down: tuple[int, ...], up: tuple[int, ...]) -> Put:
    """Factors beside what is in a role's archive, and verl's file that says what they weigh."""
    put = Put(module, drawn(*down), drawn(*up))
    role.put_all(put.tensors)
    (role.path / "lora_train_meta.json").write_text(json.dumps({"r": down[-2], "lora_alpha": ALPHA}))
    return put


def assert_fused(role: Role, put: Put, weight: torch.Tensor, delta: torch.Tensor) -> None:
    """The output is that of an archive whose weight was fused beforehand, in float64 and rounded once."""
    done(role, lora="fuse")
    exact = weight.double() + ALPHA / put.down.shape[-2] * delta
    plain = dict.fromkeys(put.tensors)
    role.put_all({**plain, f"{put.module}.weight": exact.to(weight.dtype)})
    convert(role.path, role.path.parent / "exact", Options())
    torch.testing.assert_close(tensors_in(role.output), tensors_in(role.path.parent / "exact"), rtol=1e-5, atol=1e-6)


FC1 = "decoder.layers.mlp.experts.experts.linear_fc1"
GROUPS = {
    "one an expert": ((3, 4, 8, 32), (3, 4, 96, 8)),
    "shared by all": ((3, 8, 32), (3, 96, 8)),
    "A is shared": ((3, 8, 32), (3, 4, 96, 8)),
    "B is shared": ((3, 4, 8, 32), (3, 96, 8)),
}


@pytest.mark.parametrize("how", GROUPS)
def test_experts_in_groups(how: str, tmp_path: Path) -> None:
    role = make(tmp_path, "mixtral")
    (role.path / "transformer_config.json").write_text('{"expert_model_parallel_size": 1}')
    put = adapted(role, FC1, *GROUPS[how])
    down, up = (f.double().unsqueeze(1) if f.dim() == 3 else f.double() for f in (put.down, put.up))
    assert_fused(role, put, role.entries[f"{FC1}.weight"].value, up @ down)


def test_experts_by_themselves_whose_adapters_have_an_axis(tmp_path: Path) -> None:
    role = make(tmp_path, "mixtral", dialect="singleton")
    module = "decoder.layers.1.mlp.experts.experts.linear_fc1"
    put = adapted(role, module, (4, 8, 32), (4, 96, 8))
    done(role, lora="fuse")
    found = tensors_in(role.output)
    for expert in range(4):
        delta = ALPHA / 8 * (put.up[expert].double() @ put.down[expert].double())
        for name, rows in (("w1", slice(48)), ("w3", slice(48, 96))):
            key = f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"
            exact = role.state[key].double() + delta[rows]
            torch.testing.assert_close(found[key], exact.float(), rtol=1e-5, atol=1e-6)
            assert torch.equal(found[key.replace(".1.", ".2.", 1)], role.state[key.replace(".1.", ".2.", 1)])


def test_experts_have_a_part_of_the_rank_where_that_is_said(tmp_path: Path) -> None:
    role = make(tmp_path, "mixtral")
    put = adapted(role, FC1, (3, 4, 8, 32), (3, 4, 96, 8))
    (role.path / "lora_train_meta.json").unlink()
    text = f"peft:\n  alpha: {ALPHA}.0\n  dim: 16\n  normalize_moe_lora: true\n"
    (role.archive / "run_config.yaml").write_text(text)
    done(role, lora="fuse")
    delta = ALPHA / 8 * (put.up.double() @ put.down.double())
    exact = role.entries[f"{FC1}.weight"].value.double() + delta
    found = tensors_in(role.output)["model.layers.2.block_sparse_moe.experts.3.w1.weight"]
    torch.testing.assert_close(found, exact[2, 3, :48].float(), rtol=1e-5, atol=1e-6)


def test_in_bfloat16_it_is_rounded_once(tmp_path: Path) -> None:
    role = make(tmp_path, dtype=torch.bfloat16)
    module = "decoder.layers.mlp.linear_fc2"
    put = adapted(role, module, (3, 8, 48), (3, 32, 8))
    done(role, lora="fuse")
    exact = role.entries[f"{module}.weight"].value.double() + ALPHA / 8 * (put.up.double() @ put.down.double())
    for layer in range(3):
        found = tensors_in(role.output)[f"model.layers.{layer}.mlp.down_proj.weight"]
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, exact[layer].bfloat16(), rtol=2**-8, atol=0)


def test_keys_of_wrappers(tmp_path: Path) -> None:
    """What is put before every key is before those of adapters, too."""
    role = make(tmp_path)
    put = adapted(role, "decoder.layers.mlp.linear_fc2", (3, 8, 48), (3, 32, 8))
    done(role, lora="fuse")
    plain = tensors_in(role.output)
    role.entries = {f"module.{key}": entry for key, entry in role.entries.items()}
    role.put()
    convert(role.path, tmp_path / "wrapped", FUSE)
    torch.testing.assert_close(tensors_in(tmp_path / "wrapped"), plain, rtol=0, atol=0)
    assert put.down.shape == (3, 8, 48)


def test_adapters_of_further_tokens_go_with_these(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    module = "mtp.layers.0.transformer_layer.self_attention.linear_proj"
    adapted(role, module, (8, 40), (32, 8))
    result = done(role, lora="fuse", mtp=False)
    left = {drop.name for drop in result.dropped if ".adapter." in drop.name}
    assert left == {f"{module}.adapter.linear_in.weight", f"{module}.adapter.linear_out.weight"}
    assert result.adapters == ()
