"""The files of FSDP shards by kind, world size and rank; which set of them is meant, and whether it is there.

verl and SkyRL write ``model_world_size_<W>_rank_<R>.pt``. accelerate writes ``pytorch_model_fsdp_<I>_rank<R>.bin``:
the size of the world is in the meshes then.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem
from ckpttool.formats import torchzip
from ckpttool.formats.findings import OTHER_NODES, Findings, counted, listing, ranges
from ckpttool.formats.jsonfile import read_object

KINDS = ("model", "optim", "extra_state")
SHARD_FILE = re.compile(rf"({'|'.join(KINDS)})_world_size_([1-9]\d{{0,5}})_rank_(\d{{1,6}})\.pt")
CONFIG_FILE = "fsdp_config.json"
_ACCELERATE_FILE = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_(\d{1,4}))?_rank(\d{1,6})\.bin")
_ACCELERATE_KINDS = {"pytorch_model_fsdp": "model", "optimizer": "optim"}


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shard files of a directory: kind, then world size, then rank to file name.

    Files of further directories have absolute names; ``twice`` are files that two directories have, first and other.
    ``models`` are the numbers of the models that accelerate saved together; it does not name the world size.
    """

    by_kind: Mapping[str, Mapping[int, Mapping[int, str]]]
    twice: tuple[tuple[str, str], ...] = ()
    models: frozenset[str] = frozenset()

    def ranks(self, kind: str, world_size: int) -> Mapping[int, str]:
        """Return rank to file name of one set; empty where there is none."""
        return self.by_kind.get(kind, {}).get(world_size, {})

    def missing(self, kind: str, world_size: int) -> list[int]:
        """Return the ranks of ``range(world_size)`` that have no file."""
        present = self.ranks(kind, world_size)
        return [rank for rank in range(world_size) if rank not in present]


def scan(path: Path, also: Sequence[Path] = ()) -> ShardFiles:
    """List the shard files of a directory, and of further ones with it, by kind, world size and rank."""
    found: dict[str, dict[int, dict[int, str]]] = {}
    twice: list[tuple[str, str]] = []
    for folder in (path, *also):
        for name in sorted(os.listdir(folder)):
            match = SHARD_FILE.fullmatch(name)
            if match:
                ranks = found.setdefault(match[1], {}).setdefault(int(match[2]), {})
                file = name if folder == path else str(folder / name)
                if ranks.setdefault(int(match[3]), file) != file:
                    twice.append((ranks[int(match[3])], file))
    models = _scan_accelerate((path, *also), found, twice) if "model" not in found else frozenset()
    for ranks in (ranks for sets in found.values() for ranks in sets.values()):
        ordered = sorted(ranks.items())  # rank 2 before rank 10, whatever directory they lie in
        ranks.clear()
        ranks.update(ordered)
    return ShardFiles(MappingProxyType(found), tuple(twice), models)


def is_model_shard(name: str) -> bool:
    """Tell by its name whether a file holds a rank's part of a model."""
    verl, accelerate = SHARD_FILE.fullmatch(name), _ACCELERATE_FILE.fullmatch(name)
    return (verl is not None and verl[1] == "model") or (
        accelerate is not None and _ACCELERATE_KINDS[accelerate[1]] == "model"
    )


def _scan_accelerate(
    folders: Sequence[Path], found: dict[str, dict[int, dict[int, str]]], twice: list[tuple[str, str]]
) -> frozenset[str]:
    """Add accelerate's files; their world is as large as the highest rank says until a mesh says more."""
    files: dict[str, dict[int, str]] = {}
    models = set()
    for folder in folders:
        for match in filter(None, map(_ACCELERATE_FILE.fullmatch, sorted(os.listdir(folder)))):
            file = match[0] if folder == folders[0] else str(folder / match[0])
            ranks = files.setdefault(_ACCELERATE_KINDS[match[1]], {})
            if ranks.setdefault(int(match[3]), file) != file and (match[2] or "0") in models:
                twice.append((ranks[int(match[3])], file))
            models.add(match[2] or "0")
    size = max((rank + 1 for ranks in files.values() for rank in ranks), default=0)
    if "model" in files:
        found.update({kind: {size: ranks} for kind, ranks in files.items()})
    return frozenset(models) if "model" in files else frozenset()


def choose_world_size(path: Path, files: ShardFiles, found: Findings, wanted: int | None = None) -> int:
    """Pick the set of model files that is ``wanted``, or the one complete set; say so when that is a choice."""
    sets = files.by_kind.get("model") or next(iter(files.by_kind.values()))
    if wanted is not None:
        _note_stale(files, {wanted}, wanted, found)
        return wanted
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


def check_files(path: Path, files: ShardFiles, world_size: int, kinds: Sequence[str], found: Findings) -> None:
    """Report missing ranks of these kinds, and files that their zip directory shows to be cut short."""
    for kind in (kind for kind in dict.fromkeys(("model", *files.by_kind)) if kind in kinds):
        present = files.ranks(kind, world_size)
        missing = files.missing(kind, world_size)
        if kind == "model" and not present:
            found.problems.append(_no_model(files, world_size))
        elif missing and present:
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


def _no_model(files: ShardFiles, world_size: int) -> Problem:
    others = listing(kind for kind in files.by_kind if files.ranks(kind, world_size))
    return Problem(
        code="rank-missing",
        message=f"no model shard is here: of {counted(world_size, 'rank')} there are {others} files only",
        hint=f"Was it saved without the model (verl: checkpoint.save_contents)? If not: {OTHER_NODES}",
    )


def _check_archives(path: Path, names: Mapping[int, str], found: Findings) -> None:
    """Look at the zip directory only: optimizer and RNG states are never unpickled."""
    sizes = Sizes(path, names.values())
    for name in names.values():
        try:
            torchzip.open_archive(path / name)
        except CkpttoolError as error:
            found.problems.append(_damage(error, name, sizes.beside(name)))


def _damage(error: CkpttoolError, name: str, others: set[int]) -> Problem:
    beside = f"; the other ranks' files have {listing(f'{n:,}' for n in sorted(others))} bytes" if others else ""
    return Problem(code=error.code, message=error.message + beside, hint=error.hint, path=name)


def check_twice(path: Path, files: ShardFiles, found: Findings) -> None:
    """Compare files that two directories have: the same file copied, or two saves."""
    for first, other in files.twice:
        same = _same_file(path / first, path / other)
        found.problems.append(
            Problem(
                code="rank-twice",
                severity="note" if same else "error",
                message=f"{other} and {path / first} are {'the same' if same else 'different files for one rank'}",
                hint="" if same else "Give only directories of one save.",
            )
        )


def _same_file(one: Path, other: Path) -> bool:
    """Compare by zip directories, where they record CRCs of everything, else byte by byte."""
    try:
        entries, others = torchzip.open_archive(one).entries, torchzip.open_archive(other).entries
    except CkpttoolError:
        return False
    recorded = all(entry.crc for entry in entries.values() if entry.size)
    return entries == others and (recorded or filecmp.cmp(one, other, shallow=False))


DISTINCT_MOST = 1000
"""Sizes of files beside a damaged one from which on they say nothing about it."""


class Sizes:
    """The sizes of the files of one set: looked up once, when the first of them turns out to be damaged."""

    def __init__(self, path: Path, names: Iterable[str]) -> None:
        self._path, self._names = path, names
        self._found: dict[str, int] | None = None
        self._counts: Counter[int] = Counter()

    def beside(self, name: str) -> set[int]:
        """Return the sizes, in bytes, of the other files; nothing where a thousand of them differ."""
        if self._found is None:
            paths = {name: self._path / name for name in self._names}
            self._found = {name: torchzip.file_size(path) for name, path in paths.items() if path.is_file()}
            self._counts.update(self._found.values())
        if len(self._counts) > DISTINCT_MOST:
            return set()
        own = self._found.get(name)
        return {size for size, count in self._counts.items() if size != own or count > 1}


def open_shard(path: Path, sizes: Sizes) -> torchzip.TorchZip:
    """Index one rank's file; the error for a damaged one has the sizes of the other ranks' files in it."""
    try:
        return torchzip.open_archive(path)
    except BrokenCheckpoint as error:
        problem = _damage(error, path.name, sizes.beside(path.name))
        raise BrokenCheckpoint(problem.message, hint=problem.hint, code=problem.code) from error
