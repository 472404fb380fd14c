"""What the tests of `merge-fsdp` share: what lies in an output, and shards with chosen tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from tests.looking import State, write_shards

Tensors = Mapping[str, torch.Tensor]

QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def tensors_in(output: Path) -> dict[str, torch.Tensor]:
    """All tensors of an output, by the safetensors library."""
    return {name: value for file in sorted(output.glob("*.safetensors")) for name, value in load_file(file).items()}


def unequal(found: Tensors, expected: Tensors) -> set[str]:
    """Names of tensors that are not, dtype, shape and every bit, what is expected."""
    return {
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not same(found[name], expected[name])
    }


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(bits(a), bits(b))


def bits(value: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor."""
    return value.detach().contiguous().reshape(-1).view(torch.uint8)


def sharded(value: torch.Tensor, rank: int, mesh: DeviceMesh, dim: int = 0) -> DTensor:
    """This rank's part of a tensor on a mesh of one dimension."""
    parts = list(value.chunk(mesh.size(), dim)) if value.shape[dim] else []
    empty = value.narrow(dim, 0, 0)
    local = parts[rank] if rank < len(parts) else empty
    local = local.contiguous().clone()
    return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=value.shape, stride=value.stride())


def write_role(
    role: Path,
    parameters: Tensors,
    buffers: Tensors | Callable[[int], Tensors] | None = None,
    *,
    ranks: int = 2,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A role directory: parameters sharded on dimension 0, buffers whole on every rank, a config where one is given."""

    def state(rank: int, mesh: DeviceMesh) -> State:
        plain = buffers(rank) if callable(buffers) else buffers or {}
        return {**plain, **{name: sharded(value, rank, mesh) for name, value in parameters.items()}}

    write_shards(role, state, (ranks,))
    if config is not None:
        write_config(role, config)
    return role


def write_config(role: Path, config: Mapping[str, Any], folder: str = "huggingface") -> Path:
    """A `config.json` as transformers writes it."""
    path = role / folder / "config.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config, indent=2) + "\n")
    return path


def write_generation(folder: Path) -> Path:
    """A `generation_config.json` as transformers writes it, which a model that writes text comes with."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 0}, indent=2) + "\n")
    return path


def config_of(output: Path) -> dict[str, Any]:
    """The config that lies in an output."""
    value = json.loads((output / "config.json").read_text())
    assert isinstance(value, dict)
    return value


def leftovers(output: Path) -> list[str]:
    """What lies beside an output under a name that begins with its own."""
    return sorted(path.name for path in output.parent.iterdir() if path.name.startswith(f"{output.name}."))


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file of a directory with the hash of its bytes and its times."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
