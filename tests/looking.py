"""What the tests of `inspect` share: short questions to its answer, and shards with chosen contents or pickles."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpttool.errors import Problem
from ckpttool.inspection import Inspection

State = dict[str, Any]
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


def headers(*paths: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name to dtype and shape, by the safetensors library."""
    entries = {}
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                tensor = file.get_tensor(name)
                entries[name] = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return entries


def elements(*paths: Path) -> int:
    """How many elements safetensors files hold, by the safetensors library."""
    return sum(torch.Size(shape).numel() for _, shape in headers(*paths).values())


def listed(found: Inspection) -> dict[str, tuple[str, tuple[int, ...]]]:
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


def bombs(marker: Path) -> Mapping[str, bytes]:
    """Pickles that create a file when they are loaded, each in another way."""
    shell = f"touch {marker}"
    python = f"open({str(marker)!r}, 'w').close()"
    return {
        "os.system in text opcodes": b"cos\nsystem\n(V" + shell.encode() + b"\ntR.",
        "posix.system": b"\x80\x02cposix\nsystem\nX" + _counted(shell) + b"\x85R.",
        "builtins.eval in text opcodes": b"c__builtin__\neval\n(V" + python.encode() + b"\ntR.",
        "os.system by STACK_GLOBAL": b"\x80\x04" + _named("os", "system") + b"\x8c" + _short(shell) + b"\x85R.",
        "builtins.exec by STACK_GLOBAL": b"\x80\x04"
        + _named("builtins", "exec")
        + b"\x8c"
        + _short(python)
        + b"\x85R.",
        "subprocess by STACK_GLOBAL": (
            b"\x80\x04"
            + _named("subprocess", "Popen")
            + b"]\x8c"
            + _short("touch")
            + b"a\x8c"
            + _short(str(marker))
            + b"a\x85R."
        ),
    }


def _counted(text: str) -> bytes:
    return len(text).to_bytes(4, "little") + text.encode()


def _short(text: str) -> bytes:
    return bytes([len(text)]) + text.encode()


def _named(module: str, name: str) -> bytes:
    return b"\x8c" + _short(module) + b"\x8c" + _short(name) + b"\x93"


BOMBS = tuple(bombs(Path("marker")))
"""The ways of `bombs`, for parametrised tests."""
