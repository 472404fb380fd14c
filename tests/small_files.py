"""What the tests of small files share: a sound directory of a model, and its one problem."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from ckpttool.errors import Problem
from ckpttool.inspection import inspect
from tests.looking import write_json
from tests.merged import write_generation

CONFIG = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 10,
    "eos_token_id": 1,
}
WEIGHTS = {"model.embed_tokens.weight": torch.ones(10, 4), "lm_head.weight": torch.zeros(10, 4)}
HEADLESS = {"model.embed_tokens.weight": torch.ones(10, 4)}
FP8 = {"quant_method": "fp8"}


def write_model(
    folder: Path,
    weights: Mapping[str, torch.Tensor] = WEIGHTS,
    fields: Mapping[str, Any] = MappingProxyType({}),
    *,
    generation: bool = True,
    **changes: Any,
) -> Path:
    """A Hugging Face directory: sound, but for the fields that are changed (`...` takes one away)."""
    said = {key: value for key, value in {**CONFIG, **fields, **changes}.items() if value is not ...}
    write_json(folder / "config.json", said)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "Qwen2Tokenizer"})
    write_json(folder / "tokenizer.json", {})
    if generation:
        write_generation(folder)
    if weights:
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def told(folder: Path) -> Problem:
    """The one problem of a directory, which is a note and leaves it whole."""
    found = inspect(folder)
    (only,) = found.problems
    assert (only.severity, found.state, found.whole) == ("note", "complete", True)
    return only


QUANTISED = {
    "fp8": {"model.a.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)},
    "fp8-scales": {"model.a.weight_scale_inv": torch.ones(1, 1)},
    "int8": {"model.a.weight": torch.zeros(4, 4, dtype=torch.int8)},
    "bitsandbytes-int8": {"model.a.SCB": torch.ones(4)},
    "bitsandbytes-nf4": {"model.a.weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)},
    "gptq": {"model.a.qweight": torch.zeros(4, 4, dtype=torch.int32)},
    "awq": {"model.a.qzeros": torch.zeros(4, 4, dtype=torch.int32)},
    "compressed-tensors": {"model.a.weight_packed": torch.zeros(4, 4, dtype=torch.int32)},
    "mxfp4": {"model.experts.gate_up_proj_blocks": torch.zeros(4, 4, dtype=torch.uint8)},
    "hqq": {"model.a.W_q": torch.zeros(4, dtype=torch.uint8)},
}
