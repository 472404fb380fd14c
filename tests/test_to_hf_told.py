"""What `ckpttool to-hf` prints, for people and for programs, and its dry runs."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttool.architectures import FAMILIES
from tests.conftest import Call
from tests.conversions import Role, make, wrong
from tests.synthetic import FAMILIES as KNOWN

Run = Callable[..., Call]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def one_line(text: str) -> str:
    return " ".join(text.split())


def critic(tmp_path: Path) -> Role:
    """A checkpoint of which there is much to tell."""
    role = make(tmp_path, "deepseek_v3", padding=32, extra=True, dtype=torch.bfloat16)
    role.say(quantization_config={"quant_method": "fp8"})
    return role


def test_a_conversion_says_what_it_did_and_what_to_type_next(ckpttool: Run, tmp_path: Path) -> None:
    role = critic(tmp_path)
    call = ckpttool("to-hf", role.path, "-o", role.output, "--no-mtp", "--dtype", "fp16")
    assert (call.code, call.err) == (0, "")
    first, *rest = call.out.splitlines()
    assert first.startswith(f"converted {role.archive} into {role.output}: ")
    told = one_line(call.out)
    for words in (
        "by megatron-core 0.19 or newer",
        "model deepseek_v3, DeepseekV3ForCausalLM",
        "weight map deepseek_v3: 3 layers, 4 experts each",
        "cast bfloat16 to float16: ",
        "e_score_correction_bias",
        "skipped common (1 object), ",
        "optimizer (",
        "extra_state (",
        "padding behind vocab_size 96: 32 rows",
        "mtp.layers.0.enorm.weight",
        "num_nextn_predict_layers: 0 (was 1): --no-mtp",
        "quantization_config: removed, the weights are not quantised",
    ):
        assert words in told
    assert rest[-1] == f"  ckpttool inspect {role.output} --strict"
    assert ckpttool(*shlex.split(rest[-1])[1:]).code == 0


def test_a_map_that_is_not_proven_is_said_to_be_that(ckpttool: Run, tmp_path: Path) -> None:
    role = make(tmp_path, "gpt_oss")
    assert "not yet proven on a real checkpoint" in one_line(ckpttool("to-hf", role.path, "-o", role.output).out)


def test_json_has_everything(ckpttool: Run, tmp_path: Path) -> None:
    role = critic(tmp_path)
    told = ckpttool("to-hf", role.path, "-o", role.output, "--json").json
    assert (told["ckpttool"], told["command"], told["ok"]) == (1, "to-hf", True)
    data = told["data"]
    assert (data["done"], data["family"], data["layers"], data["experts"]) == (True, "deepseek_v3", 3, 4)
    assert data["tensors"] == len(role.state)
    biases = {name for name in role.state if name.endswith("correction_bias")}
    assert data["parameters"] == sum(v.numel() for name, v in role.state.items() if name not in biases)
    held = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    assert data["dtypes"] == {n: sum(v.nbytes for v in role.state.values() if v.dtype == d) for n, d in held.items()}
    sizes = {path.name: path.stat().st_size for path in role.output.iterdir()}
    assert {file["name"]: file["bytes"] for file in data["files"]} == sizes
    assert data["bytes_written"] == sum(sizes.values())
    assert data["skipped"]["optimizer"]["tensors"] == len(role.entries)
    assert {drop["rule"] for drop in data["dropped"]} == {"vocabulary-padding"}
    assert wrong(role) == set()


def test_a_refusal_in_json_has_codes_and_hints(ckpttool: Run, tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(model_type="mine")
    call = ckpttool("to-hf", role.path, "-o", role.output, "--json")
    assert (call.code, call.json["ok"]) == (5, False)
    assert [problem["code"] for problem in call.json["problems"]] == ["unknown-architecture"]
    assert "qwen3_moe" in call.json["problems"][0]["hint"]


def test_a_dry_run_checks_everything_and_writes_nothing(ckpttool: Run, tmp_path: Path) -> None:
    role = critic(tmp_path)
    config = role.path / "huggingface"
    before = files(tmp_path)
    options = ["--dtype", "bf16", "--max-shard-size", "40kb", "--no-mtp", "--hf-config", config]
    options += ["--producer", "nvidia", "--arch", "deepseek_v3", "--architecture", "MyForCausalLM", "--threads", "2"]
    call = ckpttool("to-hf", role.path, "-o", role.output, "--dry-run", *options)
    assert (call.code, call.err) == (0, "")
    assert "nothing was written" in call.out
    assert "B needed, " in call.out
    assert files(tmp_path) == before
    assert not role.output.exists()
    command = shlex.split(call.out.splitlines()[-1])
    assert ckpttool(*command[1:]).code == 0
    assert json.loads((role.output / "config.json").read_text())["architectures"] == ["MyForCausalLM"]
    assert len(list(role.output.glob("*.safetensors"))) > 1


def test_a_dry_run_finds_what_would_be_refused(ckpttool: Run, tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(head_dim=16)
    assert ckpttool("to-hf", role.path, "-o", role.output, "--dry-run").code == 5


def short_of_space(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=1000))


def test_a_dry_run_without_space_shows_the_plan(ckpttool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = make(tmp_path)
    short_of_space(monkeypatch, tmp_path)
    call = ckpttool("to-hf", role.path, "-o", role.output, "--dry-run")
    assert call.code == 6
    assert "model.safetensors" in call.out
    assert "would not fit" in call.out
    told = ckpttool("to-hf", role.path, "-o", role.output, "--dry-run", "--json").json
    assert (told["ok"], told["data"]["done"], told["data"]["tensors"]) == (False, False, len(role.state))
    assert "error" in {problem["severity"] for problem in told["problems"]}


def test_without_space_nothing_is_begun(ckpttool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = make(tmp_path)
    before = files(tmp_path)
    short_of_space(monkeypatch, tmp_path)
    call = ckpttool("to-hf", role.path, "-o", role.output)
    assert (call.code, call.out) == (6, "")
    assert files(tmp_path) == before


def test_quiet_is_one_line(ckpttool: Run, tmp_path: Path) -> None:
    role = make(tmp_path)
    call = ckpttool("to-hf", role.path, "-o", role.output, "-q")
    assert (call.code, call.out.count("\n"), call.err) == (0, 1, "")


def test_keys_from_a_file_do_not_reach_the_terminal(ckpttool: Run, tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({"decoder.a\x1b[31mred\nline": torch.ones(2)})
    call = ckpttool("to-hf", role.path, "-o", role.output)
    assert call.code == 5
    assert "\x1b" not in call.err
    assert "a\\x1b[31mred\\nline" in call.err


def test_architectures_are_listed_without_a_checkpoint(ckpttool: Run) -> None:
    call = ckpttool("to-hf", "--list-architectures")
    assert (call.code, call.err) == (0, "")
    lines = {line.split()[0]: line for line in call.out.splitlines() if line.strip()}
    for family in FAMILIES:
        assert ("not yet proven on a real checkpoint" in lines[family.name]) == (not family.proven)
        assert all(name in lines[family.name] for name in family.model_types)


def test_architectures_are_listed_for_programs(ckpttool: Run) -> None:
    told = ckpttool("to-hf", "--list-architectures", "--json").json
    assert (told["command"], told["ok"], told["problems"]) == ("to-hf", True, [])
    rows = {row["name"]: row for row in told["data"]["architectures"]}
    assert rows["llama"] == {
        "name": "llama",
        "models": "Llama 2 and 3, Yi",
        "model_types": ["llama"],
        "proven": True,
    }
    known = {family.in_config.get("model_type", family.model_type) for family in KNOWN.values()}
    assert known <= {name for row in rows.values() for name in row["model_types"]}
