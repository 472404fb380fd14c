"""FSDP shards: one ``torch.save`` file a rank, ``model_world_size_<W>_rank_<R>.pt`` (verl, SkyRL and others).

Every rank's index is read (its zip directory and ``data.pkl``), no tensor. A value is a ``DTensor`` or
``ShardedTensor`` (sharded, as its placements say) or a plain tensor (replicated: every rank stores all of it).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem, Refused
from ckpttool.formats import torchzip
from ckpttool.formats.findings import OTHER_NODES, Findings, listing, ranges
from ckpttool.formats.jsonfile import read_object
from ckpttool.formats.mesh import Mesh
from ckpttool.formats.rank import PLAIN, WHOLE, Held, RankReader
from ckpttool.records import SHARD_NAMES
from ckpttool.telling import tell
from ckpttool.tensors import Index, Piece, Place, TensorInfo, tiling_faults
from ckpttool.unpickle import loads, name_of

FORMAT = "fsdp"
KINDS = ("model", "optim", "extra_state")
SHARD_FILE = re.compile(rf"({'|'.join(KINDS)})_world_size_([1-9]\d{{0,5}})_rank_(\d{{1,6}})\.pt")
CONFIG_FILE = "fsdp_config.json"
_AGREED = ("dtype", "shape", "placement")
_ADAPTER = re.compile(r"lora_|\.adapter_")


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shard files of a directory: kind, then world size, then rank to file name."""

    by_kind: Mapping[str, Mapping[int, Mapping[int, str]]]

    def ranks(self, kind: str, world_size: int) -> Mapping[int, str]:
        """Return rank to file name of one set; empty where there is none."""
        return self.by_kind.get(kind, {}).get(world_size, {})

    def missing(self, kind: str, world_size: int) -> list[int]:
        """Return the ranks of ``range(world_size)`` that have no file."""
        present = self.ranks(kind, world_size)
        return [rank for rank in range(world_size) if rank not in present]


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpSource:
    """An opened directory of FSDP shards. ``mesh`` is the largest one that a tensor uses."""

    root: Path
    world_size: int
    files: ShardFiles
    mesh: Mesh | None
    tensors: Mapping[str, TensorInfo]
    problems: tuple[Problem, ...]
    format: str = FORMAT

    objects: Mapping[str, Place] = field(default_factory=dict)
    unsharded: Mapping[str, Any] | None = None

    def part_of(self, name: str) -> str:
        """Return ``adapter`` for LoRA weights, ``model`` for the others."""
        return "adapter" if _ADAPTER.search(name) else "model"

    @property
    def lora_only(self) -> bool:
        """Whether it holds adapters without the base model."""
        return bool(self.tensors) and all(map(_ADAPTER.search, self.tensors))


def scan(path: Path) -> ShardFiles:
    """List the shard files of a directory by kind, world size and rank."""
    found: dict[str, dict[int, dict[int, str]]] = {}
    for name in sorted(os.listdir(path)):
        match = SHARD_FILE.fullmatch(name)
        if match:
            kind, world_size, rank = match[1], int(match[2]), int(match[3])
            found.setdefault(kind, {}).setdefault(world_size, {})[rank] = name
    return ShardFiles(MappingProxyType(found))


def detect(path: Path) -> tuple[str, ...] | None:
    """Return the evidence for a directory of FSDP shards, by file names alone, or ``None``."""
    files = scan(path)
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


def open_(path: Path, world_size: int | None = None) -> FsdpSource:
    """Open a directory of shards; damage becomes :attr:`FsdpSource.problems`, :class:`Refused` is raised."""
    files = scan(path)
    found = Findings()
    size = world_size or _choose_world_size(path, files, found)
    _check_files(path, files, size, found)
    held: dict[str, dict[int, Held]] = {}
    unread: set[tuple[str, int]] = set()
    meshes: list[Mesh] = []
    read = []
    for rank, name in files.ranks("model", size).items():
        tell(f"{path.name}/{name}")
        try:
            _read_rank(path / name, rank, held, unread, meshes, found)
            read.append(rank)
        except Refused:
            raise
        except CkpttoolError as error:
            found.of(error, name)
    tensors = {
        name: _tensor(name, by_rank, [r for r in read if (name, r) not in unread] if unread else read, size, found)
        for name, by_rank in held.items()
    }
    if read and not tensors:
        found.problems.append(Problem(code="no-tensors", message="the model files hold no tensor"))
    if tensors and files.missing("model", size) and all(map(_is_whole, tensors.values())):
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
    )


def _is_whole(tensor: TensorInfo) -> bool:
    """Tell whether the ranks that are here hold all of a tensor."""
    return not any(tiling_faults(tensor.shape, ((piece.offset, piece.size) for piece in tensor.pieces)))


def _choose_world_size(path: Path, files: ShardFiles, found: Findings) -> int:
    """Pick the one complete set of model files; say so when that is a choice."""
    sets = files.by_kind.get("model") or next(iter(files.by_kind.values()))
    said = _said(path, found)
    complete = [size for size in sets if not files.missing("model", size)]
    if len(complete) > 1:
        found.problems.append(
            Problem(
                code="two-world-sizes",
                message=f"complete sets of shards for world sizes {listing(sorted(complete))} lie here together",
                hint="One of them is left over from an earlier run: look at the dates, move one set away.",
            )
        )
    candidates = complete or list(sets)
    best = max(candidates, key=lambda size: (size == said, len(sets[size]) / size, size))
    if type(said) is int and said not in (0, best):
        found.problems.append(
            Problem(
                code="config-contradicts",
                path=CONFIG_FILE,
                message=f"says world size {said}, the files are of world size {best}",
                hint="The file is from another save than the shards; the shards decide.",
            )
        )
    if best in complete:
        _note_stale(files, {*complete, best}, best, found)
    return best


def _note_stale(files: ShardFiles, complete: set[int], best: int, found: Findings) -> None:
    """Tell of files of other world sizes, one note a size; a second complete set is a problem of its own."""
    sizes = {size for by_size in files.by_kind.values() for size in by_size} - complete
    for size in sorted(sizes):
        held = [f"{len(ranks)} {kind}" for kind in files.by_kind if (ranks := files.ranks(kind, size))]
        found.problems.append(
            Problem(
                code="stale-shards",
                severity="note",
                message=f"{', '.join(held)} files of world size {size} lie beside the set of {best}",
                hint="They belong to another save and are not read.",
            )
        )


def _said(path: Path, found: Findings) -> Any:
    """Return the world size of ``fsdp_config.json``, which is a cross-check: older verl has no such file."""
    if not (path / CONFIG_FILE).is_file():
        return None
    try:
        return read_object(path / CONFIG_FILE).get("world_size")
    except CkpttoolError as error:
        found.of(error, CONFIG_FILE)
        return None


def _check_files(path: Path, files: ShardFiles, world_size: int, found: Findings) -> None:
    """Report missing ranks of every kind, and files that their zip directory shows to be cut short."""
    for kind in dict.fromkeys(("model", *files.by_kind)):
        present = files.ranks(kind, world_size)
        missing = files.missing(kind, world_size)
        if missing and (present or kind == "model"):
            found.problems.append(
                Problem(
                    code="rank-missing",
                    message=f"{kind} shards of rank {ranges(missing)} are missing "
                    f"({len(missing)} of {world_size} ranks)",
                    hint=OTHER_NODES,
                )
            )
        extra = [rank for rank in present if rank >= world_size]
        if extra:
            found.problems.append(
                Problem(
                    code="rank-too-high",
                    message=f"{kind} shards of rank {ranges(extra)} in a world of {world_size}",
                )
            )
        if kind != "model":
            _check_archives(path, present, found)


def _check_archives(path: Path, names: Mapping[int, str], found: Findings) -> None:
    """Look at the zip directory only: optimizer and RNG states are never unpickled."""
    for rank, name in names.items():
        try:
            torchzip.open_archive(path / name)
        except CkpttoolError as error:
            others = {torchzip.file_size(path / n) for r, n in names.items() if r != rank and (path / n).is_file()}
            found.problems.append(_damage(error, name, others))


def _damage(error: CkpttoolError, name: str, others: set[int]) -> Problem:
    beside = f"; the other ranks' files have {listing(f'{n:,}' for n in sorted(others))} bytes" if others else ""
    return Problem(code=error.code, message=error.message + beside, hint=error.hint, path=name)


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
    path: Path,
    rank: int,
    held: dict[str, dict[int, Held]],
    unread: set[tuple[str, int]],
    meshes: list[Mesh],
    found: Findings,
) -> None:
    archive = _open_shard(path)
    reader = RankReader(archive, rank)
    for name, value in _state(archive).items():
        try:
            entry = reader.held(value)
        except Refused:
            raise
        except BrokenCheckpoint as error:
            found.group(error.code, error.message, name_of(name), rank)
            unread.add((name_of(name), rank))
            continue
        if entry is not None:
            held.setdefault(name_of(name), {})[rank] = entry
    meshes += reader.meshes.values()
    if reader.other:
        found.problems.append(
            Problem(
                code="not-tensors",
                severity="note",
                path=path.name,
                message=f"{reader.other} entries that are no tensors",
            )
        )


def _open_shard(path: Path) -> torchzip.TorchZip:
    try:
        return torchzip.open_archive(path)
    except BrokenCheckpoint as error:
        match = SHARD_FILE.fullmatch(path.name)
        others = {
            torchzip.file_size(p)
            for p in path.parent.glob(f"model_world_size_{match[2] if match else '*'}_rank_*.pt")
            if p != path and p.is_file()
        }
        problem = _damage(error, path.name, others)
        raise BrokenCheckpoint(problem.message, hint=problem.hint, code=problem.code) from error


def _tensor(name: str, by_rank: Mapping[int, Held], read: list[int], world_size: int, found: Findings) -> TensorInfo:
    """Join what the ranks hold, and report where they contradict each other or leave a hole."""
    first = next(iter(by_rank.values()))
    if len({(held.dtype, held.shape, held.placement) for held in by_rank.values()}) > 1:
        what = next(w for w in _AGREED if any(getattr(held, w) != getattr(first, w) for held in by_rank.values()))
        found.group(f"{what}-disagrees", f"ranks disagree on the {what}", name)
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
    placement = WHOLE if world_size == 1 and first.placement == PLAIN else first.placement
    return TensorInfo(name, first.dtype, first.shape, pieces, copies, placement)
