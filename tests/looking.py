"""What the tests of `inspect` share: short questions to its answer, and shards with chosen contents or pickles."""

from __future__ import annotations

import json
import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpttool.errors import Problem
from ckpttool.inspection import Inspection
from tests.hostile import PROTO, named, stacked, text
from tests.writers.reading import part_of, read_metadata

State = dict[str, Any]
Tensors = dict[str, tuple[str, tuple[int, ...]]]
RankState = Callable[[int, DeviceMesh], State]


def codes(found: Inspection) -> list[str]:
    """The codes of all problems, notes included, in order."""
    return [problem.code for problem in found.problems]


def faults(found: Inspection) -> list[str]:
    """The codes of what makes the checkpoint less than whole, in order."""
    return [problem.code for problem in found.faults]


def problem(found: Inspection, code: str) -> Problem:
    """The one problem of this code."""
    (only,) = [p for p in found.problems if p.code == code]
    return only


def holds(found: Inspection) -> set[tuple[str, str]]:
    """What is in it, and where."""
    return {(content.name, content.where) for content in found.contents}


def headers(*paths: Path) -> Tensors:
    """Name to dtype and shape, by the safetensors library."""
    entries = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                entries[name] = (_short(tensor.dtype), tuple(tensor.shape))
    return entries


def weights(archive: Path) -> Tensors:
    """Name to dtype and shape of what belongs to the model of a distributed checkpoint, by torch."""
    return {
        key: (_short(entry.properties.dtype), tuple(entry.size))
        for key, entry in read_metadata(archive).state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and part_of(key) == "model"
    }


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def numel(tensors: Tensors) -> int:
    """How many elements these tensors have together."""
    return sum(torch.Size(shape).numel() for _, shape in tensors.values())


def elements(*paths: Path) -> int:
    """How many elements safetensors files hold, by the safetensors library."""
    return numel(headers(*paths))


def listed(found: Inspection) -> Tensors:
    """Name to dtype and shape, as listed."""
    return {row.name: (row.dtype, row.shape) for row in found.tensors}


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def change_json(path: Path, **changes: object) -> None:
    """Set fields of a JSON object."""
    write_json(path, {**json.loads(path.read_text()), **changes})


def write_shards(
    role: Path, state: RankState, shape: tuple[int, ...] = (2,), names: tuple[str, ...] = ("fsdp",)
) -> Path:
    """Shards of a made-up world, by torch: each rank in turn believes in its process group."""
    role.mkdir(parents=True, exist_ok=True)
    world = torch.Size(shape).numel()
    for rank in range(world):
        dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            torch.save(state(rank, mesh), role / f"model_world_size_{world}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    return role


def repack(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Change the pickle inside a `torch.save` archive; every other record stays."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(name, change(data) if name.endswith("/data.pkl") else data)


def save_dcp(path: Path, state: Mapping[str, torch.Tensor], *, backend: str | None = None) -> Path:
    """A distributed checkpoint of one process, by torch; with a backend, Megatron's last word on it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(dict(state), checkpoint_id=path, no_dist=True)
    if backend is not None:
        write_json(path / "metadata.json", {"sharded_backend": backend, "sharded_backend_version": 1})
    return path


def change_metadata(path: Path, change: Callable[[Metadata], None]) -> None:
    """Edit the index of a distributed checkpoint with torch's own classes."""
    metadata = read_metadata(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def bombs(marker: Path) -> Mapping[str, bytes]:
    """Pickles that create a file when they are loaded, each in another way."""
    shell, python = f"touch {marker}", f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system in text opcodes": b"cos\nsystem\n(V" + shell.encode() + b"\ntR.",
        "posix.system by GLOBAL": b"\x80\x02" + named("posix", "system") + text(shell) + b"\x85R.",
        "eval in text opcodes": b"c__builtin__\neval\n(V" + python.encode() + b"\ntR.",
        "os.system by STACK_GLOBAL": PROTO + stacked("os", "system") + text(shell) + b"\x85R.",
        "exec by STACK_GLOBAL": PROTO + stacked("builtins", "exec") + text(python) + b"\x85R.",
        "subprocess in text opcodes": b"csubprocess\ncall\n((lVtouch\naV" + str(marker).encode() + b"\natR.",
        "subprocess by STACK_GLOBAL": (
            PROTO + stacked("subprocess", "call") + b"](" + text("touch") + text(str(marker)) + b"e\x85R."
        ),
    }


BOMBS = tuple(bombs(Path("marker")))
"""The ways of `bombs`, for parametrised tests."""
