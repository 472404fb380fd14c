"""Tensors of random shapes, dtypes, bits, placements and layouts in memory, gathered by torch."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.writers.fsdp_save import State, save_model, save_tensors

COUNT = 60
GAP = 3
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
# gloo gathers none of these: their bytes travel as integers.
AS_BYTES = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)
LAYOUTS = ("own", "turned", "window")


@dataclass(frozen=True)
class Drawn:
    """One tensor: its values on every rank, how it is cut, and how a rank keeps its part."""

    whole: torch.Tensor
    placements: tuple[Placement, ...] | None
    layout: str

    def __str__(self) -> str:
        """A name for the state dict: a plain tensor is one that has no placements."""
        return self.layout if self.placements is not None else f"plain-{self.layout}"


def write_random(role: Path, mesh: DeviceMesh) -> None:
    """The name of the role is the seed: every rank draws the same."""
    chance = random.Random(role.name)
    drawn = [draw(chance, DTYPES[number % len(DTYPES)], mesh.ndim) for number in range(COUNT)]
    named = {f"{number:02}.{one}": one for number, one in enumerate(drawn)}
    parts = laid_out({name: local_part(one, mesh) for name, one in named.items()})
    state = {name: in_place(parts[name], one, mesh) for name, one in named.items()}
    save_model(role, state)
    save_tensors(role, {name: gathered(state[name], one.whole) for name, one in named.items()})


def draw(chance: random.Random, dtype: torch.dtype, axes: int) -> Drawn:
    """Up to four dimensions, some of them empty, cut along any of them once, twice or not at all; some are plain."""
    shape = [chance.randint(0, 13) for _ in range(chance.choice((0, 1, 2, 2, 3, 3, 4, 4)))]
    plain = chance.random() < 0.1
    placements = None if plain else tuple(placement(chance, len(shape)) for _ in range(axes))
    return Drawn(random_bits(chance, dtype, shape), placements, chance.choice(LAYOUTS))


def placement(chance: random.Random, dimensions: int) -> Placement:
    """One axis of the mesh: mostly a cut, where there is something to cut."""
    if not dimensions or chance.random() < 0.25:
        return Replicate()
    return Shard(chance.randrange(dimensions))


def random_bits(chance: random.Random, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """Every pattern of bits may occur, NaNs with a payload among them; of a bool, the two that mean something."""
    data = chance.randbytes(math.prod(shape) * dtype.itemsize)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def local_part(one: Drawn, mesh: DeviceMesh) -> torch.Tensor:
    """What torch itself cuts off for this rank."""
    part = one.whole.clone()
    if one.placements is not None:
        placed: Any = distribute_tensor(part, mesh, one.placements, src_data_rank=None)
        part = placed.to_local().clone()
    if one.layout == "turned" and part.ndim > 1:
        return part.transpose(0, -1).contiguous().transpose(0, -1)
    return part


def laid_out(parts: State) -> State:
    """The windows of one dtype move into one storage, as slices of a flat parameter lie."""
    windows: dict[torch.dtype, list[str]] = {}
    for name, part in parts.items():
        if name.endswith("window"):
            windows.setdefault(part.dtype, []).append(name)
    moved = dict(parts)
    for dtype, names in windows.items():
        stock = torch.empty(sum(GAP + parts[name].numel() for name in names), dtype=dtype)
        at = 0
        for name in names:
            end = at + GAP + parts[name].numel()
            moved[name] = stock[at + GAP : end].view(parts[name].shape).copy_(parts[name])
            at = end
    return moved


def in_place(part: torch.Tensor, one: Drawn, mesh: DeviceMesh) -> torch.Tensor:
    """The part as a DTensor; a plain tensor stays one.

    torch copies the offset of a window into the wrapper, and then fails to save it: so the window comes later.
    """
    if one.placements is None:
        return part
    placed: Any = as_dtensor(part.clone(), mesh, one.placements, one.whole)
    placed._local_tensor = part
    whole: torch.Tensor = placed
    return whole


def as_dtensor(part: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...], whole: torch.Tensor) -> Any:
    """A part that is already cut, with the shape that torch could not guess from it."""
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def gathered(value: Any, original: torch.Tensor) -> torch.Tensor:
    """Collective: torch puts the parts together, and must find what was cut."""
    whole = full_bits(value) if isinstance(value, DTensor) else value
    if not same_bits(whole, original):
        raise AssertionError(f"{tuple(original.shape)} {original.dtype}: torch gathers other bits from {value!r}")
    return whole


def full_bits(value: Any) -> torch.Tensor:
    """`full_tensor()`; where gloo cannot carry the dtype, of the same bytes as integers."""
    if value.dtype not in AS_BYTES:
        whole: torch.Tensor = value.full_tensor()
        return whole
    twin = as_dtensor(value.to_local().view(torch.uint8), value.device_mesh, value.placements, value)
    integers: torch.Tensor = twin.full_tensor()
    return integers.view(value.dtype)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal down to the payload of a NaN."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return bits(left) == bits(right)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in order, as memory holds them."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return bytes(flat.tolist())
