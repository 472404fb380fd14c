"""The oracle of a conversion: transformers loads the output, and it says what the model said that wrote the archive.

Every archive is written by Megatron-Core on four ranks, from weights that only Megatron's own model has seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import logging as transformers_logging

from ckpttool.architectures import FAMILIES
from ckpttool.converting import Options, convert
from tests.builders import copy
from tests.merged import tensors_in, unequal
from tests.writers.converted_names import LAYOUTS, VARIANTS

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers tells of the layers of further tokens, which its classes do not load."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    yield
    transformers_logging.set_verbosity(before)


def load(output: Path, architecture: str = "") -> Any:
    """The model in the class that its config names."""
    name = architecture or json.loads((output / "config.json").read_text())["architectures"][0]
    found = getattr(transformers, name).from_pretrained(
        output, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    model, info = found
    assert not info["missing_keys"], info["missing_keys"]
    return model.eval()


def answers(folder: Path, model: str) -> Mapping[str, torch.Tensor]:
    found: Mapping[str, torch.Tensor] = load_file(folder / "expected" / f"{model}.safetensors")
    return found


def assert_says(output: Path, told: Mapping[str, torch.Tensor], architecture: str = "") -> None:
    with torch.no_grad():
        found = load(output, architecture)(told["input_ids"]).logits
    torch.testing.assert_close(found, told["logits"], **CLOSE)
    assert told["logits"].std() > 1e-3


@pytest.mark.parametrize("model", LAYOUTS)
def test_transformers_says_what_the_megatron_model_said(
    model: str, converted_checkpoints: Path, tmp_path: Path
) -> None:
    convert(converted_checkpoints / f"{model}-tp1", tmp_path / "out", Options())
    assert_says(tmp_path / "out", answers(converted_checkpoints, model))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.endswith("-tp1")])
def test_any_parallel_layout_and_dialect_gives_the_same_bytes(
    variant: str, converted_checkpoints: Path, tmp_path: Path
) -> None:
    convert(converted_checkpoints / f"{VARIANTS[variant]}-tp1", tmp_path / "one", Options())
    convert(converted_checkpoints / variant, tmp_path / "out", Options())
    one, out = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "out"))
    assert one == out


@pytest.mark.parametrize("variant", ["deepseek-v3-tp2-ep2", "qwen2-moe-pp2-ep2", "qwen3-tp2-pp2"])
def test_in_several_files_and_threads(variant: str, converted_checkpoints: Path, tmp_path: Path) -> None:
    convert(converted_checkpoints / variant, tmp_path / "out", Options(max_shard_size=20_000, threads=2))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_says(tmp_path / "out", answers(converted_checkpoints, VARIANTS[variant]))


RELATED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("llama", "MistralForCausalLM", {"sliding_window": None}),
    "seed_oss": (
        "llama-bias",
        "SeedOssForCausalLM",
        {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    ),
}
"""Families whose layers are those of another one: the same archive is theirs with their own config."""


@pytest.mark.parametrize("model_type", RELATED)
def test_families_of_the_same_layers(model_type: str, converted_checkpoints: Path, tmp_path: Path) -> None:
    model, architecture, fields = RELATED[model_type]
    role = copy(converted_checkpoints / f"{model}-tp1", tmp_path / "role")
    config = json.loads((role / "huggingface" / "config.json").read_text())
    config |= {"model_type": model_type, "architectures": [architecture], **fields}
    (role / "huggingface" / "config.json").write_text(json.dumps(config))
    result = convert(role, tmp_path / "out", Options())
    assert result.family == model_type
    assert_says(tmp_path / "out", answers(converted_checkpoints, model))


def test_what_is_called_proven_is_what_is_proven_here(converted_checkpoints: Path) -> None:
    types = {
        json.loads((converted_checkpoints / f"{model}-tp1" / "huggingface" / "config.json").read_text())["model_type"]
        for model in LAYOUTS
    }
    proven = {family.name for family in FAMILIES if family.proven}
    assert proven == {family.name for family in FAMILIES if {*family.model_types} & {*types, *RELATED}}


@pytest.mark.parametrize("layout", LAYOUTS["deepseek-v3"])
def test_the_next_but_one_token_is_predicted_as_megatron_does(
    layout: str, converted_checkpoints: Path, tmp_path: Path
) -> None:
    """The block of multi-token prediction, run by transformers on the hidden states of the model."""
    from transformers.modeling_layers import MtpModel

    class Here(transformers.DeepseekV3ForCausalLM):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (r"model\.layers\.4\..*",)

    convert(converted_checkpoints / f"deepseek-v3-{layout}", tmp_path / "out", Options())
    told = answers(converted_checkpoints, "deepseek-v3")
    main = Here.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager").eval()
    main._keys_to_ignore_on_load_unexpected = list(Here._keys_to_ignore_on_load_unexpected)
    block = MtpModel.from_pretrained(main)
    ids = told["input_ids"]
    with torch.no_grad():
        hidden = main.model(ids).last_hidden_state
        positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
        found = block.forward_layer(0, hidden[:, :-1], positions, None, input_ids=ids[:, 1:])
        logits = block._project_to_logits(found)
    torch.testing.assert_close(logits, told["mtp_logits"], **CLOSE)


@pytest.mark.parametrize(
    ("role", "model"), [("dense-v1", "dense"), ("dense-v2", "dense"), ("moe-v1", "moe"), ("moe-v2", "moe")]
)
def test_dtypes_and_bytes_of_a_half_precision_model(
    role: str, model: str, megatron_checkpoints: Path, tmp_path: Path
) -> None:
    """bf16 in, bf16 out: exactly the tensors of the Hugging Face model that Megatron was given."""
    hf = megatron_checkpoints / "expected" / f"{model}-hf"
    convert(megatron_checkpoints / role, tmp_path / "out", Options(hf_config=str(hf)))
    assert unequal(tensors_in(tmp_path / "out"), tensors_in(hf)) == set()
