"""The oracle of a merge: transformers loads the output, and it is the model that was trained."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers import logging as transformers_logging

from ckpttool.merging import Options, merge
from tests.merged import same

CAUSAL = ("fsdp2", "hsdp", "tied-bf16", "fsdp1", "fsdp1-shardedtensor", "fsdp1-hsdp", "single", "llama", "qwen3-moe")


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """transformers tells of the buffers that only the tests have."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(before)


def load(output: Path, name: str) -> Any:
    """The model in the class that its config names."""
    import transformers

    model = getattr(transformers, name).from_pretrained(output, dtype="auto", attn_implementation="eager")
    return model.eval()


def logits(model: Any, checkpoints: Path, role: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the loaded model says, and what the one said that wrote the shards."""
    told = load_file(checkpoints / "expected" / f"{role}.logits.safetensors")
    with torch.no_grad():
        return model(told["input_ids"]).logits, told["logits"]


def assert_same_model(output: Path, checkpoints: Path, role: str) -> None:
    architecture = AutoConfig.from_pretrained(output).architectures[0]
    model = load(output, architecture)
    expected = load_file(checkpoints / "expected" / f"{role}.safetensors")
    state = model.state_dict()
    own = {"aaa_first", "model.layer_scalar", "model.layers.0.step"}  # buffers that the class does not have
    assert [n for n, v in expected.items() if n not in own and not same(state[n], v)] == []
    assert state.keys() <= expected.keys()
    found, told = logits(model, checkpoints, role)
    half = told.dtype is torch.bfloat16  # sums in another order differ in the last bit
    torch.testing.assert_close(found, told, rtol=1e-5, atol=1e-2 if half else 1e-5)


@pytest.mark.parametrize("role", [*CAUSAL, "gemma4", "critic"])
def test_transformers_loads_the_model_that_was_trained(role: str, fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Every tensor bit by bit, and the logits of the model that wrote the checkpoint."""
    merge(fsdp_checkpoints / role, tmp_path / "out", Options())
    assert_same_model(tmp_path / "out", fsdp_checkpoints, role)


def test_in_several_files(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    merge(fsdp_checkpoints / "llama", tmp_path / "out", Options(max_shard_size=10_000, threads=2))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert_same_model(tmp_path / "out", fsdp_checkpoints, "llama")


def test_packed_experts_keep_their_form(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """transformers 5 trains experts as one tensor a layer, and loads them so."""
    merge(fsdp_checkpoints / "qwen3-moe", tmp_path / "out", Options())
    packed = [n for n in load_file(tmp_path / "out" / "model.safetensors") if n.endswith("experts.gate_up_proj")]
    assert packed


def test_cast_to_bf16_is_what_torch_casts(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """The scalars of gemma's layers are buffers: they keep float32."""
    merge(fsdp_checkpoints / "gemma4", tmp_path / "out", Options(dtype="bfloat16"))
    model = load(tmp_path / "out", AutoConfig.from_pretrained(tmp_path / "out").architectures[0])
    assert model.dtype is torch.bfloat16
    expected = load_file(fsdp_checkpoints / "expected" / "gemma4.safetensors")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in found.items():
        scalar = name.endswith("layer_scalar")
        assert same(value, expected[name] if scalar else expected[name].to(torch.bfloat16)), name
    assert any(name.endswith("layer_scalar") for name in found)


def test_side_files_load_as_they_were(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Cases 31 to 33: both end tokens, the tokenizer and its template are still there, byte for byte."""
    merge(fsdp_checkpoints / "fsdp2", tmp_path / "out", Options())
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == [1, 2]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False) == "hi "
    huggingface = fsdp_checkpoints / "fsdp2" / "huggingface"
    names = {path.name for path in huggingface.iterdir()} - {"config.json"}
    assert {
        name for name in names if (tmp_path / "out" / name).read_bytes() != (huggingface / name).read_bytes()
    } == set()
