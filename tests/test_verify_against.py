"""`verify --against` and `--second-opinion`: what a conversion wrote, and what torch reads of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Call
from tests.hostile import save_bomb
from tests.merged import QWEN2, bits, fingerprint, tensors_in, write_role

Run = Callable[..., Call]


def checks(call: Call) -> dict[str, str]:
    return {check["name"]: check["state"] for check in call.json["data"]["checks"]}


def faults(call: Call) -> list[dict[str, Any]]:
    return [problem for problem in call.json["problems"] if problem["severity"] == "error"]


def flip(output: Path, name: str) -> None:
    """Flip the lowest bit of the first element of a tensor."""
    file = next(file for file in output.glob("*.safetensors") if name in load_file(file))
    tensors = load_file(file)
    bits(tensors[name])[0] ^= 1
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("name", ["qwen3-tp4", "deepseek-v3-pp2-ep2", "qwen2-pp2"])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_conversion_is_proven(
    ckpttool: Run, name: str, dtype: str | None, converted_checkpoints: Path, tmp_path: Path
) -> None:
    role, output = converted_checkpoints / name, tmp_path / "out"
    cast = ["--dtype", dtype] if dtype else []
    assert ckpttool("to-hf", role, "-o", output, *cast).code == 0
    before = fingerprint(role)
    call = ckpttool("verify", output, "--against", role, "--json")
    assert call.code == 0, faults(call)
    assert checks(call)["against"] == "sound"
    assert fingerprint(role) == before
    wrong = sorted(tensors_in(output))[3:5]
    for tensor in wrong:
        flip(output, tensor)
    call = ckpttool("verify", output, "--against", role, "--json")
    assert call.code == 1
    assert {problem["code"] for problem in faults(call)} == {"against-differs"}
    assert all(any(tensor in problem["message"] for problem in faults(call)) for tensor in wrong)


def test_a_merge_is_proven(ckpttool: Run, fsdp_checkpoints: Path, lora_checkpoints: Path, tmp_path: Path) -> None:
    for role, options in ((fsdp_checkpoints / "fsdp-tp", []), (lora_checkpoints / "plain", ["--lora", "fuse"])):
        output = tmp_path / role.name
        assert ckpttool("merge-fsdp", role, "-o", output, "--dtype", "bf16", *options).code == 0
        call = ckpttool("verify", output, "--against", role, *options, "--json")
        assert call.code == 0, faults(call)


def test_missing_extra_and_other_shapes(ckpttool: Run, tmp_path: Path) -> None:
    state = {name: torch.randn(4, 3) for name in ("a.weight", "b.weight", "c.weight")}
    role, output = write_role(tmp_path / "role", state, config=QWEN2), tmp_path / "out"
    assert ckpttool("merge-fsdp", role, "-o", output).code == 0
    written = tensors_in(output)
    del written["a.weight"]
    written["b.weight"] = torch.zeros(2, 3)
    written["d.weight"] = torch.zeros(1)
    save_file(written, output / "model.safetensors", {"format": "pt"})
    call = ckpttool("verify", output, "--against", role, "--json")
    assert call.code == 1
    assert {p["code"]: p["message"] for p in faults(call)} == {
        "against-differs": "not as the source has it (shape): b.weight",
        "against-missing": "only in the source: a.weight",
        "against-extra": "not in the source: d.weight",
    }


def test_another_model(ckpttool: Run, converted_checkpoints: Path, tmp_path: Path) -> None:
    assert ckpttool("to-hf", converted_checkpoints / "qwen3-tp4", "-o", tmp_path / "out").code == 0
    call = ckpttool("verify", tmp_path / "out", "--against", converted_checkpoints / "llama-tp4", "--json")
    assert (call.code, checks(call)["against"]) == (1, "faults")
    assert not any("nothing was written" in problem["message"] for problem in faults(call))


def test_a_source_that_cannot_be_compared_with(ckpttool: Run, tmp_path: Path) -> None:
    """One that is not there is said before anything is read; one that is damaged or hostile is a fault like others."""
    role, output = write_role(tmp_path / "role", {"w": torch.ones(4)}, config=QWEN2), tmp_path / "out"
    assert ckpttool("merge-fsdp", role, "-o", output).code == 0
    assert ckpttool("verify", output, "--against", tmp_path / "absent").code == 3
    save_file({"w": torch.full((4,), torch.nan)}, output / "model.safetensors", {"format": "pt"})
    shard = role / "model_world_size_2_rank_1.pt"
    shard.write_bytes(shard.read_bytes()[:-100])
    call = ckpttool("verify", output, "--values", "--against", role, "--json")
    assert (call.code, checks(call)["against"]) == (1, "faults")
    assert {problem["code"] for problem in faults(call)} >= {"not-a-number", "broken-source", "truncated"}
    save_bomb(shard, tmp_path / "ran")
    call = ckpttool("verify", output, "--values", "--against", role, "--json")
    assert (call.code, checks(call)["against"]) == (7, "faults")
    assert {problem["code"] for problem in faults(call)} == {"not-a-number", "refused"}
    assert not (tmp_path / "ran").exists()


def test_a_second_opinion_of_every_kind(ckpttool: Run, data: Path, converted_checkpoints: Path, tmp_path: Path) -> None:
    assert ckpttool("to-hf", converted_checkpoints / "qwen3-tp4", "-o", tmp_path / "out").code == 0
    for path in (data / "fsdp/torch2.9-fsdp2", data / "megatron/mcore0.19-dense-tp2", tmp_path / "out"):
        call = ckpttool("verify", path, "--second-opinion", "--json")
        assert call.code == 0, faults(call)
        assert checks(call)["second-opinion"] == "sound"


def test_nothing_is_vouched_for_that_others_find_wrong(ckpttool: Run, tmp_path: Path) -> None:
    """Hashes are written last: NaN and a source that differs are faults like any other."""
    role = write_role(tmp_path / "role", {"w": torch.ones(4)}, config=QWEN2)
    cases: list[tuple[torch.Tensor, list[Any]]] = [
        (torch.full((4,), torch.nan), ["--values"]),
        (torch.zeros(4), ["--against", role]),
    ]
    for change, option in cases:
        output = tmp_path / option[0]
        assert ckpttool("merge-fsdp", role, "-o", output).code == 0
        save_file({"w": change}, output / "model.safetensors", {"format": "pt"})
        assert ckpttool("verify", output, *option, "--write-integrity").code == 1
        assert not (output / "integrity.json").exists()
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "good").code == 0
    assert ckpttool("verify", tmp_path / "good", "--against", role, "--values", "--write-integrity").code == 0
    assert json.loads((tmp_path / "good/integrity.json").read_text())["algorithm"] == "sha256"


@pytest.mark.parametrize("option", ["--hf-config", "--arch", "--producer", "--lora", "--lora-alpha"])
def test_how_a_source_is_read_needs_a_source(ckpttool: Run, option: str, tmp_path: Path) -> None:
    call = ckpttool("verify", tmp_path, option, "1")
    assert call.code == 2
    assert f"{option} without --against" in call.err
