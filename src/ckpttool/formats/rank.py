"""What one rank's shard file holds of each tensor, from the records that its pickle became."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.mesh import Mesh, Placement, local_box, read_mesh, read_placement
from ckpttool.formats.torchzip import TorchZip, compressed
from ckpttool.records import StoredTensor, dtype_name, is_record, shape_of, stored_tensor
from ckpttool.tensors import DTYPE_BITS, Index, Piece, Place, Wrap, contiguous_strides, extent
from ckpttool.unpickle import Record

PLAIN = "replicated"
"""How a plain tensor is placed: every rank stores all of it."""

WHOLE = "whole"
"""How a plain tensor is placed when there is one rank only."""


class Held(NamedTuple):
    """What one rank holds of one tensor of this dtype and global shape.

    ``ranks`` is how many a ``ShardedTensor`` is cut for, ``mesh`` what a ``DTensor`` lies on.
    """

    dtype: str
    shape: Index
    placement: str
    pieces: list[Piece]
    ranks: int = 1
    mesh: Mesh | None = None


@lru_cache(maxsize=4096)
def _view(size: Index, strides: Index) -> tuple[int, Index | None]:
    """Return how many elements a view spans, and its strides unless they are those of C order."""
    return extent(size, strides), None if strides == contiguous_strides(size) else strides


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, this rank's place on it, and how tensors are placed; ``words`` says it for people."""

    mesh: Mesh
    coordinate: Index
    placements: tuple[Placement, ...]
    words: str


class RankReader:
    """Turn the values of one rank's state dict into what it holds; meshes are shared by most of them."""

    def __init__(self, archive: TorchZip, rank: int, file: str = "") -> None:
        self.archive = archive
        self.file = file or archive.path.name
        self.rank = rank
        self.meshes: dict[int, Mesh] = {}
        self.other = 0
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._lengths: dict[int, int] = {}  # many places share one number
        self._boxes: dict[tuple[Index, int], tuple[Index, Index]] = {}

    def held(self, value: Any) -> Held | None:
        """Return what the rank holds, or ``None`` for a value that is no tensor."""
        name = value.name if isinstance(value, Record) else ""
        if name == "_rebuild_from_type_v2" and len(value.args) == 4:
            kind = getattr(value.args[1], "name", "")
            if kind == "DTensor":
                return self._dtensor(value.args[2], value.args[3])
            if kind == "ShardedTensor":
                return self._sharded(value.args[3])
        if not name.startswith("_rebuild"):
            self.other += 1
            return None
        local = stored_tensor(value)
        return Held(local.dtype, local.size, PLAIN, [self._piece((0,) * len(local.size), local)])

    def _piece(self, offset: Index, local: StoredTensor, size: Index | None = None, *, copied: bool = True) -> Piece:
        """Place a view in the file, after holding it against the storage that the archive really has.

        ``size`` is that of the view, as a tuple that other pieces share; the CRC is kept of what other ranks may hold
        ``copied``.
        """
        entry = self.archive.entries.get(f"data/{local.storage}")
        if entry is None:
            raise BrokenCheckpoint(f"storage {local.storage} is not in the archive", code="storage-missing")
        if not entry.stored:
            raise compressed(self.archive.path, f"data/{local.storage}")
        needed, strides = _view(local.size, local.strides)
        if (local.start + needed) * DTYPE_BITS[local.dtype] // 8 > entry.size or local.storage_bytes > entry.size:
            raise BrokenCheckpoint("the tensor reaches out of its storage", code="storage-short")
        length, crc = self._lengths.setdefault(entry.size, entry.size), entry.crc if copied else 0
        place = Place(self.file, entry.header, length, Wrap.ZIP_ENTRY, local.start, strides, crc)
        return Piece(offset, local.size if size is None else size, place, self.rank)

    def _dtensor(self, args: Any, state: Any) -> Held:
        fields = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state
        if not isinstance(args, tuple) or len(args) < 3 or not isinstance(fields, dict):
            raise BrokenCheckpoint("a DTensor that is not written as torch writes it", code="unreadable-pickle")
        dtype, shape, spec = dtype_name(args[1]), shape_of(args[2]), fields.get("_spec")
        if not is_record(spec, "DTensorSpec") or not isinstance(spec.state, dict):
            raise BrokenCheckpoint("a DTensor without a spec", code="unreadable-pickle")
        said = spec.state.get
        meta = said("tensor_meta")
        if is_record(meta, "TensorMeta") and meta.args and shape_of(meta.args[0]) != shape:
            raise BrokenCheckpoint(f"a DTensor of shape {shape} whose spec says {meta.args[0]}", code="shape-disagrees")
        layout = self._layout(said("mesh"), said("placements"))
        local = stored_tensor(fields.get("_local_tensor"))
        offset, size = self._box(shape, layout)
        if local.dtype != dtype:
            raise BrokenCheckpoint(f"a DTensor of {dtype} that holds {local.dtype}", code="dtype-disagrees")
        if local.size != size and (0 not in size or 0 not in local.size):
            raise BrokenCheckpoint(
                f"holds {list(local.size)} where {layout.words} of {list(shape)} gives {list(size)}",
                code="shape-disagrees",
            )
        copied = not all(placement.shards for placement in layout.placements)
        piece = self._piece(offset, local, size if local.size == size else None, copied=copied)
        return Held(dtype, shape, layout.words, [piece], mesh=layout.mesh)

    def _box(self, shape: Index, layout: Layout) -> tuple[Index, Index]:
        """Return this rank's box; most tensors of a model share a few shapes."""
        key = (shape, id(layout))
        if key not in self._boxes:
            self._boxes[key] = local_box(shape, layout.mesh.shape, layout.coordinate, layout.placements)
        return self._boxes[key]

    def _layout(self, mesh: Any, placements: Any) -> Layout:
        if not isinstance(placements, (tuple, list)):
            raise BrokenCheckpoint("a DTensor without placements", code="unreadable-pickle")
        kinds = tuple(map(read_placement, placements))
        key = (id(mesh), *map(id, kinds))  # placements are made once, and the layout keeps them
        if key not in self._layouts:
            self._layouts[key] = self._read_layout(mesh, kinds)
        return self._layouts[key]

    def _read_layout(self, record: Any, placements: tuple[Placement, ...]) -> Layout:
        if id(record) not in self.meshes:
            self.meshes[id(record)] = read_mesh(record, self.rank, self._storage)
        mesh = self.meshes[id(record)]
        coordinate = mesh.coordinate(self.rank)
        recorded = record.get("_coordinate_on_dim")
        if coordinate is None or (recorded is not None and shape_of(recorded) != coordinate):
            raise BrokenCheckpoint(
                "the file is named for one rank, its tensors were saved by another", code="rank-disagrees"
            )
        axes = zip(placements, mesh.names, mesh.shape, strict=False)
        return Layout(mesh, coordinate, placements, ", ".join(f"{p} over {name}={n}" for p, name, n in axes))

    def _storage(self, view: StoredTensor) -> bytes:
        return self.archive.read(f"data/{view.storage}")

    def _sharded(self, state: Any) -> Held:
        """Read FSDP1's ``ShardedTensor``: local shards that carry their offsets, and the global metadata."""
        if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], list):
            raise BrokenCheckpoint("a ShardedTensor that is not written as torch writes it", code="unreadable-pickle")
        meta = state[1]
        properties = meta.get("tensor_properties") if is_record(meta, "ShardedTensorMetadata") else None
        fields = getattr(properties, "state", None)
        if not isinstance(fields, tuple) or not fields:
            raise BrokenCheckpoint("a ShardedTensor without metadata", code="unreadable-pickle")
        dtype, shape = dtype_name(fields[0]), shape_of(meta.get("size"))
        cuts = meta.get("shards_metadata")
        ranks = len(cuts) if isinstance(cuts, list) else 1
        return Held(dtype, shape, "ShardedTensor", [self._shard(shard, dtype) for shard in state[0]], ranks)

    def _shard(self, shard: Any, dtype: str) -> Piece:
        where = shard.get("metadata") if is_record(shard, "Shard") else None
        if not is_record(where, "ShardMetadata"):
            raise BrokenCheckpoint("a shard without metadata", code="unreadable-pickle")
        local = stored_tensor(shard.get("tensor"))
        offset, size = shape_of(where.get("shard_offsets")), shape_of(where.get("shard_sizes"))
        if local.dtype != dtype:
            raise BrokenCheckpoint(f"a ShardedTensor of {dtype} that holds {local.dtype}", code="dtype-disagrees")
        if local.size != size:
            raise BrokenCheckpoint(f"a shard of {local.size} whose metadata says {size}", code="shape-disagrees")
        return self._piece(offset, local)
