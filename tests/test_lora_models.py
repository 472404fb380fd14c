"""LoRA in `merge-fsdp`: the output is the model that was trained, by the judgement of PEFT and transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests import builders
from tests.adapters import (
    State,
    adapter_config,
    adapter_of,
    assert_answers,
    base_of,
    load_adapter,
    load_model,
    oracle,
    whole,
)
from tests.conftest import Call
from tests.merged import config_of, fingerprint, leftovers, same, tensors_in, unequal
from tests.writers.lora_models import Variant, variants

# The shards are read by one process as a second opinion.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

VARIANTS = {variant.name: variant for variant in variants()}
UNTIED = ("tied-embedding", "tied-head")
TIED = ("tied", "conv1d", "conv1d-dora")
HALF = ("bf16", "bf16-fp32", "only-dora")
PREFIX = "base_model.model."
Run = Callable[..., Call]


def options(root: Path, name: str, how: str) -> list[object]:
    """The command line of a variant: what only its user can know is said."""
    variant = VARIANTS[name]
    found: list[object] = ["--lora", how]
    if len(variant.adapters) > 1:
        found += [word for adapter in variant.adapters for word in ("--adapter", adapter)]
    if how != "adapter" and variant.only:
        found += ["--base", base_of(root, name)]
    if how != "adapter" and name in UNTIED:
        found += ["--untie"]
    return found


def merged(run: Run, root: Path, name: str, how: str, out: Path, *more: object) -> Path:
    """Run it; the sources stay as they were and nothing lies beside the output."""
    before = fingerprint(root / name), fingerprint(base_of(root, name))
    call = run("merge-fsdp", root / name, "-o", out, *options(root, name, how), *more)
    assert call.code == 0, call.err
    assert (fingerprint(root / name), fingerprint(base_of(root, name))) == before
    assert leftovers(out) == []
    return out


# Fused


@pytest.mark.parametrize("name", VARIANTS)
def test_fused_tensors_are_those_that_peft_merges(
    ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str
) -> None:
    """Case 22: the training is in the output."""
    out = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out")
    assert_fused(tensors_in(out), lora_checkpoints, name)
    assert not [path for path in out.rglob("*") if "adapter" in path.name]


@pytest.mark.parametrize("name", VARIANTS)
def test_transformers_loads_the_fused_model(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out")
    assert_answers(load_model(out), oracle(lora_checkpoints, name, "logits"))


@pytest.mark.parametrize("name", [name for name in VARIANTS if not VARIANTS[name].only])
def test_what_no_adapter_touches_keeps_every_bit(
    ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str
) -> None:
    found = tensors_in(merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out"))
    state = {key.removeprefix(PREFIX): value for key, value in whole(lora_checkpoints / name).items()}
    if name != "bias":
        state |= {key.replace(".base_layer", ""): value for key, value in state.items() if key.endswith("bias")}
    untouched = state.keys() & found.keys()
    assert len(untouched) >= 6
    assert [key for key in untouched if not same(found[key], state[key])] == []


@pytest.mark.parametrize("name", ["only", "only-dora"])
def test_what_lies_in_the_base_alone_keeps_every_bit(
    ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str
) -> None:
    """Case 24."""
    found = tensors_in(merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out"))
    base = tensors_in(base_of(lora_checkpoints, name))
    assert found.keys() == base.keys()
    touched = {key.split(".lora_")[0].removeprefix(PREFIX) for key in whole(lora_checkpoints / name)}
    changed = {key for key in found if not same(found[key], base[key])}
    assert changed == {f"{module}.weight" for module in touched}


def assert_fused(found: State, root: Path, name: str, stem: str | None = None) -> None:
    """Names exactly; values as PEFT has them in float64, rounded once; PEFT's own where its base is float32."""
    expected, exact = oracle(root, stem or name), oracle(root, stem or name, "exact")
    if name in TIED:  # the alias of the embeddings is not written
        expected.pop("lm_head.weight")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape), key
        if value.dtype is torch.bfloat16:
            assert_rounded_once(found[key], exact[key])
        else:
            torch.testing.assert_close(found[key], value, rtol=1e-5, atol=1e-6, msg=key)


def assert_rounded_once(found: torch.Tensor, exact: torch.Tensor) -> None:
    """In almost all places what float64 rounds to, nowhere a step further; rounding twice differs in many."""
    steps = (places(found) - places(exact.to(found.dtype))).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).double().mean()) < 0.01


def places(value: torch.Tensor) -> torch.Tensor:
    """Numbers of bfloat16 in their order, as integers."""
    assert value.dtype is torch.bfloat16
    raw = value.contiguous().view(torch.int16).to(torch.int32)
    return torch.where(raw < 0, -(raw & 0x7FFF), raw)


def test_peft_itself_rounds_twice(lora_checkpoints: Path) -> None:
    """So the check above tells the two apart."""
    theirs, exact = oracle(lora_checkpoints, "bf16"), oracle(lora_checkpoints, "bf16", "exact")
    key = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(AssertionError):
        assert_rounded_once(theirs[key], exact[key])


@pytest.mark.parametrize("name", ["plain", "dora", "experts"])
def test_a_cast_is_the_only_rounding(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out", "--dtype", "bfloat16")
    exact, found = oracle(lora_checkpoints, name, "exact"), tensors_in(out)
    assert found.keys() == exact.keys()
    for key, value in found.items():
        assert_rounded_once(value, exact[key])


@pytest.mark.parametrize("name", ["bf16", "bf16-fp32"])
def test_half_precision_can_be_fused_into_float32(
    ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str
) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out", "--dtype", "float32")
    for key, value in tensors_in(out).items():
        exact = oracle(lora_checkpoints, name, "exact")[key]
        torch.testing.assert_close(value, exact.float(), rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", ["plain", "experts", "only"])
def test_many_files_hold_the_same(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    one = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "one")
    many = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "many", "--max-shard-size", "20KB")
    assert len(list(many.glob("model-*.safetensors"))) > 2
    assert unequal(tensors_in(one), tensors_in(many)) == set()


@pytest.mark.parametrize("name", UNTIED)
def test_a_head_that_leaves_its_embeddings_needs_a_word(
    ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str
) -> None:
    """PEFT would merge an adapter of tied embeddings into the head as well, which training never saw."""
    call = ckpttool("merge-fsdp", lora_checkpoints / name, "-o", tmp_path / "out", "--lora", "fuse")
    assert call.code == 4
    assert "--untie" in call.err
    assert not (tmp_path / "out").exists()
    out = merged(ckpttool, lora_checkpoints, name, "fuse", tmp_path / "out")
    assert config_of(out)["tie_word_embeddings"] is False


def test_side_files_come_along(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    out = merged(ckpttool, lora_checkpoints, "plain", "fuse", tmp_path / "out")
    huggingface = lora_checkpoints / "plain" / "huggingface"
    names = {path.name for path in huggingface.iterdir()} - {"config.json"}
    assert {name for name in names if (out / name).read_bytes() != (huggingface / name).read_bytes()} == set()
    assert config_of(out)["architectures"] == ["Qwen2ForCausalLM"]


# The adapter


@pytest.mark.parametrize("name", VARIANTS)
def test_the_adapter_is_what_peft_saves(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "adapter", tmp_path / "out")
    for found, theirs in pairs(lora_checkpoints, VARIANTS[name], out):
        assert_saved(found, theirs, VARIANTS[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_peft_loads_the_adapter(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "adapter", tmp_path / "out")
    assert_loads(lora_checkpoints, VARIANTS[name], out)


def pairs(root: Path, variant: Variant, out: Path) -> list[tuple[Path, Path]]:
    """The directory of each adapter and PEFT's own; of one adapter it is the output itself."""
    theirs, several = adapter_of(root, variant.name), len(variant.adapters) > 1
    return [
        (out / name if several else out, theirs if name == "default" else theirs / name) for name in variant.adapters
    ]


def assert_loads(root: Path, variant: Variant, out: Path) -> None:
    """PEFT finds exactly the modules that were trained, and the model answers as the trained one."""
    mine, theirs = zip(*pairs(root, variant, out), strict=True)
    base = base_of(root, variant.name)
    model = load_adapter(base, *mine)
    assert model.state_dict().keys() == load_adapter(base, *theirs).state_dict().keys()
    assert_answers(model, oracle(root, variant.name, "logits"))


def assert_saved(found: Path, theirs: Path, variant: Variant) -> None:
    """Both files, every key and bit, and a config that says the same."""
    assert {path.name for path in found.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    weights = found / "adapter_model.safetensors"
    with safe_open(weights, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert unequal(load_file(weights), load_file(theirs / "adapter_model.safetensors")) == set()
    assert_says(adapter_config(found), adapter_config(theirs), known=variant.config_at is not None)


SAME = ("peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "lora_bias", "inference_mode", "bias")
PATTERNS = ("rank_pattern", "alpha_pattern", "fan_in_fan_out")
LISTS = ("target_modules", "modules_to_save", "target_parameters")


def assert_says(found: dict[str, Any], theirs: dict[str, Any], *, known: bool) -> None:
    """Where PEFT's file lay beside the shards, every field is as it was; else what the names can tell is told."""
    assert {key: found.get(key) for key in SAME} == {key: theirs[key] for key in SAME}
    if known:
        assert {key: found[key] for key in PATTERNS} == {key: theirs[key] for key in PATTERNS}
        assert {key: as_set(found[key]) for key in LISTS} == {key: as_set(theirs[key]) for key in LISTS}
        rest = theirs.keys() - {*SAME, *PATTERNS, *LISTS, "base_model_name_or_path", "peft_version"}
        assert {key: found[key] for key in rest} == {key: theirs[key] for key in rest}


def as_set(value: list[str] | None) -> set[str]:
    return set(value or ())


@pytest.mark.parametrize("name", ["plain", "dora", "bias"])
def test_targets_are_named_from_the_tensors(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    """`lora_train_meta.json` alone knows no targets."""
    role = builders.copy(lora_checkpoints / name, tmp_path / "role")
    for path in role.rglob("adapter_config.json"):
        path.unlink()
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--lora", "adapter").code == 0
    assert_says(adapter_config(tmp_path / "out"), adapter_config(adapter_of(lora_checkpoints, name)), known=False)
    assert_loads(lora_checkpoints, VARIANTS[name], tmp_path / "out")


# Both


@pytest.mark.parametrize("name", VARIANTS)
def test_both_are_both(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "both", tmp_path / "out")
    assert_fused(tensors_in(out), lora_checkpoints, name)
    for found, theirs in pairs(lora_checkpoints, VARIANTS[name], out / "lora_adapter"):
        assert_saved(found, theirs, VARIANTS[name])


@pytest.mark.parametrize("name", ["plain", "two", "only"])
def test_both_load(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, name: str) -> None:
    out = merged(ckpttool, lora_checkpoints, name, "both", tmp_path / "out")
    assert_answers(load_model(out), oracle(lora_checkpoints, name, "logits"))
    assert_loads(lora_checkpoints, VARIANTS[name], out / "lora_adapter")


# One of several


@pytest.mark.parametrize("each", ["default", "style"])
def test_one_of_two_adapters(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, each: str) -> None:
    """The other one is in neither output; one adapter needs no folder of its own."""
    out = tmp_path / "out"
    call = ckpttool("merge-fsdp", lora_checkpoints / "two", "-o", out, "--lora", "both", "--adapter", each)
    assert call.code == 0, call.err
    told = oracle(lora_checkpoints, f"two.{each}", "logits")
    assert_fused(tensors_in(out), lora_checkpoints, "two", f"two.{each}")
    assert_answers(load_model(out), told)
    theirs = adapter_of(lora_checkpoints, "two") / ("" if each == "default" else each)
    assert_saved(out / "lora_adapter", theirs, VARIANTS["two"])
    assert_answers(load_adapter(base_of(lora_checkpoints, "two"), out / "lora_adapter"), told)


# Where the settings come from


@pytest.mark.parametrize("place", ["folder", "file", "lora_adapter", "huggingface", "huggingface/lora_adapter", "step"])
def test_settings_are_found(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path, place: str) -> None:
    """Case 23. By `--adapter-config`, in each directory where trainings leave them, and in verl's file of the step."""
    role = builders.copy(lora_checkpoints / "plain", tmp_path / "global_step_5" / "actor")
    settings, theirs = role / "lora_train_meta.json", adapter_of(lora_checkpoints, "plain")
    more: list[object] = []
    if place == "step":
        settings.rename(role.parent / settings.name)
    else:
        settings.unlink()
        config = theirs / "adapter_config.json"
        if place in ("folder", "file"):
            more = ["--adapter-config", theirs if place == "folder" else config]
        else:
            (role / place).mkdir(exist_ok=True)
            (role / place / config.name).write_bytes(config.read_bytes())
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--lora", "fuse", *more)
    assert call.code == 0, call.err
    assert_fused(tensors_in(tmp_path / "out"), lora_checkpoints, "plain")


def test_a_dry_run_writes_nothing(ckpttool: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    line = ("merge-fsdp", lora_checkpoints / "plain", "-o", tmp_path / "out", "--lora", "both")
    for more in ((), ("--json",)):
        call = ckpttool(*line, "--dry-run", *more)
        assert call.code == 0, call.err
        assert list(tmp_path.iterdir()) == []
    assert call.json["ok"] is True
