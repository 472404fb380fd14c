"""What the tests of `merge-fsdp --like` share: calls, references made for one test, and the models in transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import logging as transformers_logging

from tests.conftest import Call
from tests.conversions import unfolded
from tests.merged import Tensors, leftovers

Run = Callable[..., Call]

RENAMED = (
    *("qwen2-moe", "qwen3-moe", "qwen3-moe-square", "qwen3-next", "deepseek-v3", "glm4-moe", "ernie4.5-moe"),
    *("mixtral", "phimoe", "minimax-m2"),
    *("qwen2-vl", "qwen2.5-vl", "gemma3", "llava", "llava-next"),
)
"""Models that `save_pretrained` writes under other names than those of training."""

TRANSPOSED = ("qwen3-vl-moe", "qwen3-vl-moe-square")
"""Models of the same names whose experts lie the other way round on the hub."""

KEPT = ("qwen2-tied", "qwen3.5", "qwen3-vl", "gpt-oss", "llama4")
"""Models that are saved as they are trained."""

HUBS = ("gemma3", "llava", "llava-next", "qwen3.5", *TRANSPOSED)
"""Models of which the hub has another form than `save_pretrained` writes of a model that was never loaded."""

ALL = (*RENAMED, *TRANSPOSED, *KEPT)


ODD = {f"model.layers.{layer}.odd.{part}.weight": torch.ones(2) for layer in (0, 1) for part in range(12)}
"""Tensors that no model has."""


def trained(checkpoints: Path, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a model under the names of training, gathered by torch."""
    tensors: dict[str, torch.Tensor] = load_file(checkpoints / "expected" / f"{name}.safetensors")
    return tensors


def config_in(folder: Path) -> dict[str, Any]:
    """The config of a model directory."""
    value = json.loads((folder / "config.json").read_text())
    assert isinstance(value, dict)
    return value


def without(tensors: Tensors, pattern: str) -> dict[str, torch.Tensor]:
    """The tensors but those whose names have a pattern in them; there are such."""
    kept = {name: value for name, value in tensors.items() if not re.search(pattern, name)}
    assert len(kept) < len(tensors)
    return kept


def reference(folder: Path, tensors: Tensors, config: Mapping[str, Any] | None = None) -> Path:
    """A model directory with tensors of these names, dtypes and shapes, and zeros for values."""
    folder.mkdir(parents=True)
    zeros = {name: torch.zeros_like(value) for name, value in tensors.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def index_alone(folder: Path, names: Iterator[str] | Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    """A model directory of an index and a config, without weights."""
    folder.mkdir(parents=True)
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def merged_like(ckpttool: Run, role: Path, output: Path, like: Path, *options: object) -> Call:
    """A merge that has to succeed."""
    call = ckpttool("merge-fsdp", role, "-o", output, "--like", like, "--json", *options)
    assert call.code == 0, call.err + call.out
    return call


def refused_like(
    ckpttool: Run, role: Path, output: Path, like: Path, *options: object, code: int | tuple[int, ...] = 5
) -> Call:
    """A merge that has to be refused with (one of) these exit codes, and to leave nothing behind."""
    call = ckpttool("merge-fsdp", role, "-o", output, "--like", like, "--json", *options)
    assert call.code in (code if isinstance(code, tuple) else (code,)), call.err + call.out
    assert not output.exists()
    assert leftovers(output) == []
    return call


def named(call: Call) -> set[str]:
    """Every word that the problems of a refused call say, written out: folded names are names again."""
    problems = call.json["problems"]
    words = unfolded(" ".join(f"{problem['message']} {problem.get('hint') or ''}" for problem in problems))
    return {word.strip("(),:;'") for word in words}


def said(call: Call) -> str:
    """Everything that a call told, in one line."""
    return " ".join(f"{call.out} {call.err}".split())


@contextmanager
def silent() -> Iterator[None]:
    """transformers tells of every file that it loads."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def load(folder: Path) -> Any:
    """The model in the class that its config names; every tensor of it was there, and no other one."""
    (name,) = config_in(folder)["architectures"]
    with silent():
        model, told = getattr(transformers, name).from_pretrained(
            folder,
            dtype="auto",
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
    assert {key: found for key, found in told.items() if found} == {}
    return model.eval()


def answers(model: Any, checkpoints: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a model says, and what the one said that was sharded."""
    told = load_file(checkpoints / "expected" / f"{name}.logits.safetensors")
    logits = told.pop("logits")
    with torch.no_grad():
        return model(**told, use_cache=False).logits, logits
