"""Reading the checkpoints back with the libraries that know them: the tests' second opinion."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

SIDE_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def shards(role: Path) -> list[dict[str, Any]]:
    """The model files of a role in the order of its ranks, by torch."""
    world = len(list(role.glob("model_world_size_*_rank_*.pt")))
    paths = [role / f"model_world_size_{world}_rank_{rank}.pt" for rank in range(world)]
    return [torch.load(path, weights_only=False) for path in paths]


def expected(root: Path, name: str) -> dict[str, torch.Tensor]:
    """The oracle beside a role."""
    tensors: dict[str, torch.Tensor] = load_file(root / "expected" / f"{name}.safetensors")
    return tensors


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Equal names, dtypes, shapes and values."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name]) for name in left
    )


def read_metadata(folder: Path) -> Metadata:
    """The index of a DCP directory, by torch."""
    return FileSystemReader(folder).read_metadata()


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of an archive, by torch itself."""
    found = read_metadata(folder).state_dict_metadata
    tensors = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in found.items()
        if isinstance(value, TensorStorageMetadata)
    }
    dcp.load(tensors, checkpoint_id=folder, no_dist=True)
    return tensors


def part_of(key: str) -> str:
    """Which part of a training a key of an archive belongs to."""
    if key.startswith(("optimizer.", "chained_0.optimizer.", "chained_1.optimizer.")):
        return "optimizer"
    return "rng_state" if key.startswith("rng_state/") else "model"


@contextmanager
def quiet() -> Iterator[None]:
    """transformers and PEFT tell of things that are meant here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
