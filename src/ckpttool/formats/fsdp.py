"""FSDP shards: one ``torch.save`` file a rank, ``model_world_size_<W>_rank_<R>.pt`` (verl, SkyRL and others).

accelerate names them ``pytorch_model_fsdp_<I>_rank<R>.bin``: the size of the world is in the meshes then. Every rank's
index is read (its zip directory and ``data.pkl``), no tensor. A value is a ``DTensor`` or
``ShardedTensor`` (sharded, as its placements say) or a plain tensor (replicated: every rank stores all of it).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem, Refused
from ckpttool.formats import torchzip
from ckpttool.formats.findings import Findings, counted, listing, ranges
from ckpttool.formats.mesh import Mesh
from ckpttool.formats.peftnames import is_adapter
from ckpttool.formats.rank import PLAIN, WHOLE, Held, RankReader
from ckpttool.formats.shardfiles import (
    CONFIG_FILE,
    KINDS,
    ShardFiles,
    Sizes,
    check_files,
    check_twice,
    choose_world_size,
    open_shard,
    scan,
)
from ckpttool.records import SHARD_NAMES
from ckpttool.telling import tell
from ckpttool.tensors import Index, Piece, Place, TensorInfo, tiling_faults
from ckpttool.unpickle import Record, loads, name_of

FORMAT = "fsdp"
_FLAT = re.compile(r"(.*\.)?_flat_param")
NESTED_MOST = 100_000
"""Values inside of one that are looked at; more of them are no metadata of a tensor."""

_AGREED = ("dtype", "shape", "placement")


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSource:
    """An opened directory of FSDP shards. ``mesh`` is the largest one that a tensor uses.

    ``divided`` are tensors that some ranks have on one mesh and others on another: replicas, or parts of what only the
    trainer knows to be different (experts).
    """

    root: Path
    world_size: int
    files: ShardFiles
    mesh: Mesh | None
    tensors: Mapping[str, TensorInfo]
    problems: tuple[Problem, ...]
    divided: frozenset[str] = frozenset()
    format: str = FORMAT

    objects: Mapping[str, Place] = field(default_factory=dict)
    unsharded: Mapping[str, Any] | None = None

    def part_of(self, name: str) -> str:
        """Return ``adapter`` for LoRA weights, ``model`` for the others."""
        return "adapter" if is_adapter(name) else "model"

    @property
    def lora_only(self) -> bool:
        """Whether it holds adapters without the base model."""
        return bool(self.tensors) and all(map(is_adapter, self.tensors))


def detect(path: Path) -> tuple[str, ...] | None:
    """Return the evidence for a directory of FSDP shards, by file names alone, or ``None``."""
    files = scan(path)
    if files.models:
        return (f"{counted(len(next(iter(files.by_kind['model'].values()))), 'file')} pytorch_model_fsdp_*rank*.bin",)
    evidence = [
        f"{len(ranks)} of {world_size} {kind}_world_size_{world_size}_rank_*.pt"
        for kind, sets in files.by_kind.items()
        for world_size, ranks in sets.items()
    ]
    if not evidence:
        return None
    if (path / CONFIG_FILE).is_file():
        evidence.append(CONFIG_FILE)
    return tuple(evidence)


def open_(
    path: Path, world_size: int | None = None, *, also: Sequence[Path] = (), kinds: Sequence[str] = KINDS
) -> FsdpSource:
    """Open a directory of shards; damage becomes :attr:`FsdpSource.problems`, :class:`Refused` is raised.

    ``also`` are further directories of the same save (other nodes); only files of these ``kinds`` are looked at.
    """
    files = scan(path, also)
    found = Findings()
    size = choose_world_size(path, files, found, world_size)
    if files.models:
        size, files = _accelerate_world(path, size, files, found)
    check_twice(path, files, found)
    check_files(path, files, size, kinds, found)
    held: dict[str, dict[int, Held]] = {}
    unread: set[tuple[str, int]] = set()
    meshes: list[Mesh] = []
    read = []
    sizes = Sizes(path, files.ranks("model", size).values())
    for rank, name in files.ranks("model", size).items():
        tell(f"{path.name}/{name}")
        try:
            _read_rank(path, name, rank, held, unread, meshes, found, sizes)
            read.append(rank)
        except Refused:
            raise
        except CkpttoolError as error:
            found.of(error, name)
    alone = size == 1 and all(h.placement == PLAIN for by_rank in held.values() for h in by_rank.values())
    tensors = {}
    divided = frozenset(name for name, by_rank in held.items() if len(_meshes(by_rank)) > 1)
    suffices = _suffices(held, files.missing("model", size))
    for name in list(held):
        by_rank = held.pop(name)
        ranks_read = [r for r in read if (name, r) not in unread] if unread else read
        tensors[name] = _tensor(name, by_rank, ranks_read, size, found, alone=alone)
    for name in filter(_FLAT.fullmatch, tensors):
        found.group("flat-parameters", "LOCAL_STATE_DICT: parameters flattened into one; save SHARDED_STATE_DICT", name)
    if read and not tensors and not unread:
        found.problems.append(Problem(code="no-tensors", message="the model files hold no tensor"))
    if suffices and all(map(_is_whole, tensors.values())):
        found.problems.append(
            Problem(
                code="replicas-suffice",
                severity="note",
                message="every weight is here all the same: the missing ranks hold replicas",
            )
        )
    mesh = max(meshes, key=lambda m: (len(m.ranks), len(m.shape)), default=None)
    return FsdpSource(
        root=path,
        world_size=size,
        files=files,
        mesh=mesh,
        tensors=MappingProxyType(tensors),
        problems=found.all(),
        divided=divided,
    )


def _suffices(held: Mapping[str, Mapping[int, Held]], missing: Sequence[int]) -> bool:
    """Tell whether the meshes say that what missing ranks hold of every sharded tensor is known from others."""
    sharded = [by_rank for by_rank in held.values() if next(iter(by_rank.values())).placement != PLAIN]
    meshes = {mesh for by_rank in sharded for mesh in _meshes(by_rank)}
    return bool(missing and sharded) and all(mesh is not None and set(missing) <= set(mesh) for mesh in meshes)


def _meshes(by_rank: Mapping[int, Held]) -> set[Index | None]:
    """Return the ranks of the meshes that a tensor lies on."""
    return {held.mesh.ranks if held.mesh is not None else None for held in by_rank.values()}


def _accelerate_world(path: Path, size: int, files: ShardFiles, found: Findings) -> tuple[int, ShardFiles]:
    """Return the size of the world that accelerate's files are of, which a mesh in one of them tells."""
    if len(files.models) > 1:
        message = f"the shards of {len(files.models)} models lie here together: {listing(sorted(files.models))}"
        hint = "Put those of one model into a directory of their own; links will do."
        found.problems.append(Problem(code="two-models", message=message, hint=hint))
    rank, name = next(iter(files.ranks("model", size).items()))
    with suppress(CkpttoolError):
        reader = RankReader(torchzip.open_archive(path / name), rank)
        held = [reader.held(value) for value in _state(reader.archive).values()]
        said = [max(mesh.ranks) + 1 for mesh in reader.meshes.values()]
        size = max([size, *said, *(h.ranks for h in held if h is not None)])
    resized = {kind: {size: ranks} for kind, sets in files.by_kind.items() for ranks in sets.values()}
    return size, replace(files, by_kind=MappingProxyType(resized))


def _is_whole(tensor: TensorInfo) -> bool:
    """Tell whether the ranks that are here hold all of a tensor."""
    return not any(tiling_faults(tensor.shape, ((piece.offset, piece.size) for piece in tensor.pieces)))


def count_entries(archive: torchzip.TorchZip) -> int:
    """Return how many entries the state dict of one rank has; raises like :func:`open_` for one that is none."""
    return len(_state(archive))


def _state(archive: torchzip.TorchZip) -> dict[Any, Any]:
    name = archive.path.name
    state, _ = loads(archive.read("data.pkl"), SHARD_NAMES, where=name)
    if not isinstance(state, dict):
        raise BrokenCheckpoint(f"{name}: holds {type(state).__name__}, not a state dict", code="no-state-dict")
    return state


def _read_rank(
    root: Path,
    name: str,
    rank: int,
    held: dict[str, dict[int, Held]],
    unread: set[tuple[str, int]],
    meshes: list[Mesh],
    found: Findings,
    sizes: Sizes,
) -> None:
    archive = open_shard(root / name, sizes)
    reader = RankReader(archive, rank, name)
    others = []
    state = _state(archive)
    for key in list(state):
        value = state.pop(key)  # so that records go as soon as what they say is taken
        if not isinstance(key, str) or rank in held.get(key, {}):
            found.group("odd-key", "a key of the state dict that is no text", name_of(key), rank)
            continue
        try:
            entry = reader.held(value)
        except Refused:
            raise
        except BrokenCheckpoint as error:
            found.group(error.code, error.message, name_of(key), rank)
            unread.add((name_of(key), rank))
            continue
        if entry is None and _holds_tensors(value):
            found.group("nested-state", "tensors inside of another value: not a flat state dict", name_of(key), rank)
        elif entry is None:
            others.append(name_of(key))
        else:
            held.setdefault(name_of(key), {})[rank] = entry
    meshes += reader.meshes.values()
    if others:
        message = f"{counted(len(others), 'entry', 'entries')} that are no tensors: {listing(others)}"
        found.problems.append(Problem(code="not-tensors", severity="note", path=name, message=message))


def _holds_tensors(value: Any) -> bool:
    """Tell whether there are tensors in a value that is none; the depth is bounded by the records that were vetted."""
    pending = [value]
    for inner in pending:
        if isinstance(inner, Record) and inner.name.startswith("_rebuild"):
            return True
        if isinstance(inner, dict):
            pending += inner.values()
        elif isinstance(inner, (list, tuple)):
            pending += inner
        if len(pending) > NESTED_MOST:
            return True
    return False


def _versions(by_rank: Mapping[int, Held], what: str) -> str:
    """Say which ranks say what: ``float32 on rank 0-2; int32 on rank 3``."""
    sides: dict[str, list[int]] = {}
    for rank, held in by_rank.items():
        value = getattr(held, what)
        sides.setdefault(str(list(value)) if what == "shape" else value, []).append(rank)
    return "; ".join(f"{value} on rank {ranges(some)}" for value, some in list(sides.items())[:4])


def _tensor(
    name: str, by_rank: Mapping[int, Held], read: list[int], world_size: int, found: Findings, *, alone: bool
) -> TensorInfo:
    """Join what the ranks hold, and report where they contradict each other or leave a hole.

    ``alone`` tells that a single rank has stored plain tensors only, so that buffers cannot be told from parameters.
    """
    first = next(iter(by_rank.values()))
    if len({(held.dtype, held.shape, held.placement) for held in by_rank.values()}) > 1:
        what = next(w for w in _AGREED if any(getattr(held, w) != getattr(first, w) for held in by_rank.values()))
        found.group(f"{what}-disagrees", f"ranks disagree on the {what} ({_versions(by_rank, what)})", name)
    absent = [rank for rank in read if rank not in by_rank] if len(by_rank) < len(read) else []
    if absent:
        found.group("key-missing", f"absent on rank {ranges(absent)}, present on others", name)
    boxes: dict[tuple[Index, Index], list[Piece]] = {}
    for held in by_rank.values():
        for piece in held.pieces:
            if 0 not in piece.size:
                boxes.setdefault((piece.offset, piece.size), []).append(piece)
    if len(read) == world_size and not absent:
        for fault in tiling_faults(first.shape, boxes):
            found.group("does-not-tile", fault, name)
    groups = list(boxes.values())
    pieces = tuple(group[0] for group in groups)
    copies = tuple(piece for group in groups for piece in group[1:])
    placement = WHOLE if alone else first.placement
    return TensorInfo(name, first.dtype, first.shape, pieces, copies, placement)
