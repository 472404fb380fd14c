"""Device meshes and placements as data: which box of a tensor a rank holds.

Shards are cut as ``torch.chunk`` cuts: pieces of ``ceil(n / parts)`` rows, so the last ones may be short or empty.
``_StridedShard(dim, split_factor=s)`` says that mesh dimensions to its right, of ``s`` parts together, cut the
dimension before it does: it permutes which rank owns which block and never interleaves rows inside one.
Field names by writing version (torch 2.6 to 2.13) are those of the pickles that these versions write.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from ckpttool.errors import BrokenCheckpoint
from ckpttool.records import StoredTensor, is_record, shape_of, stored_tensor
from ckpttool.tensors import Index
from ckpttool.unpickle import Record, name_of, said

MAX_RANKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on a grid: ``ranks`` in row-major order of ``shape``; ``dialect`` names the torch that wrote it."""

    names: tuple[str, ...]
    shape: Index
    ranks: Index
    dialect: str

    def coordinate(self, rank: int) -> Index | None:
        """Return the place of a rank on the grid, or ``None`` for a rank outside it."""
        if rank not in self.ranks:
            return None
        at = self.ranks.index(rank)
        return tuple(at // math.prod(self.shape[d + 1 :]) % n for d, n in enumerate(self.shape))

    def __str__(self) -> str:
        return " x ".join(f"{name}={n}" for name, n in zip(self.names, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """How one mesh dimension holds a tensor: ``kind`` as torch names it, ``dim`` and ``split_factor`` of a shard."""

    kind: str
    dim: int = 0
    split_factor: int = 1

    @property
    def shards(self) -> bool:
        """Whether the mesh dimension cuts the tensor."""
        return self.kind in ("Shard", "_StridedShard")

    def __str__(self) -> str:
        if self.kind == "_StridedShard":
            return f"_StridedShard({self.dim}, split_factor={self.split_factor})"
        return f"Shard({self.dim})" if self.kind == "Shard" else self.kind


@lru_cache(maxsize=256)
def _placement(kind: str, dim: int, split_factor: int) -> Placement:
    return Placement(kind, dim, split_factor)


def read_placement(value: Any) -> Placement:
    """Return a placement; raises :class:`BrokenCheckpoint` for one that torch does not have."""
    if is_record(value, "Replicate", "Partial", "_Partial"):
        return _placement(value.name.lstrip("_"), 0, 1)
    if is_record(value, "Shard", "_StridedShard"):
        dim = value.get("dim", value.args[0] if value.args else None)
        factor = value.get("split_factor", value.args[1] if len(value.args) > 1 else 1)
        if type(dim) is int and dim >= 0 and type(factor) is int and factor > 0:
            return _placement(value.name, dim, factor)
    raise BrokenCheckpoint(f"{said(value)} is no placement that we know", code="unknown-placement")


def read_mesh(record: Any, rank: int, read_storage: Callable[[StoredTensor], bytes]) -> Mesh:
    """Return the mesh that ``rank`` wrote, from any dialect; ``read_storage`` fetches the few bytes of its rank tensor.

    From torch 2.10 on, a sub-mesh is a layout over the ranks of the whole mesh, and which of the equal sub-meshes is
    meant follows from the rank that is in it.
    """
    if not is_record(record, "DeviceMesh"):
        raise BrokenCheckpoint(f"{said(record)} stands where a device mesh should", code="unreadable-pickle")
    names = record.get("mesh_dim_names") or record.get("_mesh_dim_names")
    if record.get("mesh") is not None:
        view = stored_tensor(record.get("mesh"))
        axes: list[tuple[Index, Index]] = [((n,), (step,)) for n, step in zip(view.size, view.strides, strict=True)]
        start, values = view.start, _integers(view, read_storage)
        dialect = "2.6 or 2.7" if record.get("_dim_group_infos") is not None else "2.8 or 2.9"
    else:
        axes = _layout(record.get("_layout"))
        values = _integers(stored_tensor(record.get("_rank_map")), read_storage)
        at = values.index(rank) if rank in values else 0
        start = at - sum(at // step % n * step for axis in axes for n, step in zip(*axis, strict=True) if step and n)
        dialect = "2.13" if isinstance(record.get("_layout").get("axes"), tuple) else "2.10 to 2.12"
    shape = tuple(math.prod(sizes) for sizes, _ in axes)
    if not 0 < math.prod(shape) <= MAX_RANKS:
        raise BrokenCheckpoint(f"a device mesh of {math.prod(shape):,} ranks", code="unreadable-pickle")
    flat = [start + sum(steps) for steps in product(*(_steps(*axis) for axis in axes))]
    if not 0 <= min(flat) <= max(flat) < len(values):
        raise BrokenCheckpoint("a device mesh reaches out of its rank map", code="unreadable-pickle")
    if not isinstance(names, tuple) or len(names) != len(shape):
        names = tuple(f"dim{d}" for d in range(len(shape)))
    return Mesh(tuple(map(name_of, names)), shape, tuple(values[at] for at in flat), dialect)


def _steps(sizes: Index, strides: Index) -> list[int]:
    """Return how far each position along one mesh dimension lies from its first."""
    return [sum(map(int.__mul__, at, strides)) for at in product(*map(range, sizes))]


def _layout(layout: Any) -> list[tuple[Index, Index]]:
    """Return (sizes, strides) of each mesh dimension of a ``_MeshLayout``.

    A flattened dimension has several of them; one of size 1 has none in 2.13.
    """
    if not isinstance(layout, Record):
        raise BrokenCheckpoint("a device mesh without a layout", code="unreadable-pickle")
    axes = layout.get("axes")
    if isinstance(axes, tuple):
        pairs = [(axis.get("shape"), axis.get("stride")) for axis in axes if isinstance(axis, Record)]
    else:
        pairs = list(zip(_as_tuple(layout.get("shape")), _as_tuple(layout.get("stride")), strict=False))
    found = [(shape_of(_as_tuple(sizes)), shape_of(_as_tuple(strides))) for sizes, strides in pairs]
    if any(len(sizes) != len(strides) for sizes, strides in found):
        raise BrokenCheckpoint("a device mesh layout with unequal axes", code="unreadable-pickle")
    return found


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _integers(view: StoredTensor, read_storage: Callable[[StoredTensor], bytes]) -> tuple[int, ...]:
    codes = {"int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B"}
    if view.dtype not in codes:
        raise BrokenCheckpoint(f"a device mesh of {view.dtype}", code="unreadable-pickle")
    code, size = codes[view.dtype], struct.calcsize(codes[view.dtype])
    if view.storage_bytes > MAX_RANKS * size:
        raise BrokenCheckpoint(f"a device mesh in {view.storage_bytes:,} bytes", code="unreadable-pickle")
    raw = read_storage(view)
    if len(raw) % size:
        raise BrokenCheckpoint(f"a device mesh in {len(raw):,} bytes of {view.dtype}", code="unreadable-pickle")
    return struct.unpack(f"<{len(raw) // size}{code}", raw)


def local_box(
    shape: Index, mesh_shape: Index, coordinate: Index, placements: Sequence[Placement]
) -> tuple[Index, Index]:
    """Return (offset, size) of the box that the rank at ``coordinate`` holds.

    Raises :class:`BrokenCheckpoint` naming the placement when it is ``Partial`` (the value is a sum over ranks that
    nobody has taken) or when a strided shard does not say which dimensions cut before it.
    """
    if len(placements) != len(mesh_shape):
        raise BrokenCheckpoint(f"{len(placements)} placements on a mesh of {len(mesh_shape)}", code="bad-placement")
    offset, size = [0] * len(shape), list(shape)
    for dim, axes in _cuts(shape, mesh_shape, placements):
        for axis in axes:
            chunk = -(-size[dim] // mesh_shape[axis])
            start = min(chunk * coordinate[axis], size[dim])
            offset[dim] += start
            size[dim] = min(chunk, size[dim] - start)
    return tuple(offset), tuple(size)


def _cuts(shape: Index, mesh_shape: Index, placements: Sequence[Placement]) -> Iterator[tuple[int, list[int]]]:
    """Yield for every cut dimension the mesh axes that cut it, first cut first."""
    order: dict[int, list[int]] = {}
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.kind == "Partial":
            raise BrokenCheckpoint(
                "placement Partial: the ranks hold summands, not values",
                hint="Redistribute to Shard or Replicate in the training process and save again.",
                code="partial-placement",
            )
        if not placement.shards:
            continue
        if placement.dim >= len(shape):
            raise BrokenCheckpoint(f"{placement} of a tensor of {len(shape)} dimensions", code="bad-placement")
        earlier = order.setdefault(placement.dim, [])
        earlier.insert(_position(placement, [mesh_shape[a] for a in earlier]), axis)
    yield from order.items()


def _position(placement: Placement, parts: list[int]) -> int:
    """Return how many of the cuts to the right come before this one: those that make up its split factor."""
    done = 1
    for position, n in enumerate([*parts, 0]):
        if done == placement.split_factor:
            return position
        done *= n
    raise BrokenCheckpoint(f"{placement} does not fit the mesh dimensions to its right", code="bad-placement")
