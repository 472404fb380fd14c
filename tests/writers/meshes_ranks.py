"""Write what only a larger mesh can show, in a world of eight: `python -m tests.writers meshes OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from tests.writers import meshes_models
from tests.writers.fsdp_save import State, full, save_model, save_tensors
from tests.writers.placed import same_bits, write_random

WORLD = 8


def write_all(out: Path) -> None:
    """Every variant, one after the other, in the same eight processes."""
    line, square = mesh_of(("fsdp", 8)), mesh_of(("ddp", 2), ("fsdp", 4))
    write_random(out / "random-8", line)
    write_random(out / "random-2x4", square)
    write_random(out / "random-4x2", mesh_of(("ddp", 4), ("fsdp", 2)))
    write_random(out / "random-2x2x2", mesh_of(("pp", 2), ("ddp", 2), ("fsdp", 2)))
    wide = mesh_of(("fsdp", 2), ("tp", 4))
    write_strided(out / "strided-2x4", meshes_models.uneven(), wide)
    write_strided(out / "strided-4x2", meshes_models.uneven(), mesh_of(("fsdp", 4), ("tp", 2)))
    write_strided(out / "strided-2x2x2", meshes_models.uneven(), mesh_of(("ddp", 2), ("fsdp", 2), ("tp", 2)))
    write_starved(out / "starved-2x4", wide)
    write_dim1(out / "shard-dim1", line)


def mesh_of(*axes: tuple[str, int]) -> DeviceMesh:
    """The eight ranks under these names."""
    names, sizes = zip(*axes, strict=True)
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def write_strided(role: Path, model: Any, mesh: DeviceMesh) -> None:
    """Tensor parallelism first, then FSDP or HSDP around it."""
    before = values(model)
    state = cut_twice(model, mesh).state_dict()
    save_model(role, state)
    save_gathered(role, state, before)


def write_starved(role: Path, mesh: DeviceMesh) -> None:
    """Here torch stores an empty part in the shape (0, 0) and its own gathering hangs: the oracle is what was cut."""
    model = meshes_models.starved()
    before = values(model)
    save_model(role, cut_twice(model, mesh).state_dict())
    save_tensors(role, before)


def cut_twice(model: Any, mesh: DeviceMesh) -> Any:
    """The last axis is that of tensor parallelism, which comes first."""
    names: Any = mesh.mesh_dim_names
    plan = {name: style for name, style in meshes_models.PLAN.items() if hasattr(model, name)}
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh[names[:-1]])


def write_dim1(role: Path, mesh: DeviceMesh) -> None:
    """Another dimension than the first, which `fully_shard` asks to divide evenly."""
    model = meshes_models.deep()
    before = values(model)
    state = fully_shard(model, mesh=mesh, shard_placement_fn=last_dimension).state_dict()
    save_model(role, state)
    save_gathered(role, state, before)


def last_dimension(parameter: nn.Parameter) -> Shard | None:
    """`None` means the first dimension."""
    last = parameter.ndim - 1
    return Shard(last) if last and parameter.shape[last] % WORLD == 0 else None


def values(model: Any) -> State:
    """What the parameters are before they are sharded."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def save_gathered(role: Path, state: State, before: State) -> None:
    """torch's `full_tensor`, which has to give back what was cut."""
    whole = {name: full(value) for name, value in state.items()}
    wrong = [name for name, value in whole.items() if not same_bits(value, before[name])]
    if wrong:
        raise AssertionError(f"{role.name}: torch gathers other values of {wrong}")
    save_tensors(role, whole)
