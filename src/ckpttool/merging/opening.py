"""Open the shards that are meant and what lies beside them, and refuse, with all reasons, what is no whole save."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, Problem, Severity, Unmapped, UsageError
from ckpttool.export.config import ModelConfig, read_side_config
from ckpttool.export.running import with_torch_dtype
from ckpttool.export.side_files import SideFiles, find_side_files
from ckpttool.export.ties import Tie
from ckpttool.export.writing import Stamps, give_back, stamps
from ckpttool.formats import fsdp
from ckpttool.formats.findings import counted, listing
from ckpttool.formats.shardfiles import is_model_shard, scan
from ckpttool.merging import planning
from ckpttool.merging.choosing import find_shards, find_side_folder
from ckpttool.merging.names import unwrap
from ckpttool.merging.result import Options
from ckpttool.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Opened:
    """The shards and what lies beside them; tensors by the names that they are written under."""

    source: fsdp.FsdpSource
    folders: tuple[Path, ...]
    tensors: Mapping[str, TensorInfo]
    unwrapped: Mapping[str, int]
    config: ModelConfig | None
    side_folder: Path | None
    side: SideFiles
    notes: tuple[Problem, ...]
    stamps: Stamps
    divided: frozenset[str]

    @property
    def around(self) -> tuple[Path, ...]:
        """All directories that are read."""
        return (*self.folders, *((self.side_folder,) if self.side_folder is not None else ()))


def find_folders(path: Path, output: Path, options: Options) -> tuple[tuple[Path, ...], tuple[Problem, ...]]:
    """Return the directories that hold the save, that of the path first, and notes on how they were chosen."""
    role, notes = find_shards(path, output, options)
    others = [find_shards(Path(p).absolute(), output, options)[0] for p in options.inputs]
    return tuple(dict.fromkeys((role, *others))), notes


def open_save(folders: tuple[Path, ...], notes: tuple[Problem, ...], options: Options) -> Opened:
    """Read all indexes and refuse, with everything that is wrong, what is no whole checkpoint."""
    role, *also = folders
    _check_world_size(folders, options.world_size)
    before = stamps_of(folders)
    source = fsdp.open_(role, options.world_size, also=also, kinds=("model",))
    side_folder = find_side_folder(folders, options.hf_config)
    names, unwrapped, collisions = unwrap(source.tensors)
    config, config_problems = read_side_config(side_folder, given=options.hf_config is not None)
    tensors = planning.renamed(source.tensors, names)
    problems = [*_sorted_out(source), *collisions, *config_problems]
    if not collisions:
        problems += planning.draft(tensors, Tie(), options).problems
    _refuse(role, source, problems)
    give_back()
    return Opened(
        source=source,
        folders=folders,
        tensors=tensors,
        unwrapped=unwrapped,
        config=config,
        side_folder=side_folder,
        side=find_side_files(side_folder, config, crowded=side_folder in folders),
        notes=(*notes, *(p for p in problems if p.severity == "note")),
        stamps=before,
        divided=frozenset(names[name] for name in source.divided),
    )


def checked_options(options: Options) -> Options:
    """Return options with torch's name of the dtype.

    Raises :class:`UsageError` for those that contradict each other, or would be passed over without a word.
    """
    for name, given in (("--cast-buffers", options.cast_buffers), ("--allow-overflow", options.allow_overflow)):
        if given and options.dtype is None:
            raise UsageError(f"{name} without --dtype: nothing is cast")
    return with_torch_dtype(options)


def _check_world_size(folders: Sequence[Path], wanted: int | None) -> None:
    """Every directory that was named has to give something, and the world size has to be there."""
    sizes = sorted(scan(folders[0], folders[1:]).by_kind.get("model", {}))
    if wanted is not None and wanted not in sizes:
        there = f"there are shards of {listing(sizes)}" if sizes else "there are no model shards"
        raise UsageError(f"--world-size {wanted}: {there}")
    files = {folder: scan(folder) for folder in folders}
    kinds = {folder: bool(found.models) for folder, found in files.items() if "model" in found.by_kind}
    strangers = [folder for folder, accelerate in kinds.items() if accelerate != next(iter(kinds.values()))]
    strangers += [folder for folder in folders[1:] if folder not in kinds]
    if strangers:
        raise UsageError(f"--input {strangers[0]}: no model shards there that go with those of {folders[0]}")


def stamps_of(folders: Iterable[Path]) -> Stamps:
    """Return size and time of every shard."""
    return stamps(folder / name for folder in folders for name in os.listdir(folder) if is_model_shard(name))


_MISSING = "rank-missing"
_OTHER_NODES = "Do they lie on other nodes? Name those directories, too: --input DIR; or copy the files into this one."


def _sorted_out(source: fsdp.FsdpSource) -> list[Problem]:
    """Return the problems of the shards; ranks that hold further replicas of what is here are no fault."""
    suffices = any(problem.code == "replicas-suffice" for problem in source.problems)
    severity: Severity = "note" if suffices else "error"
    return [
        replace(problem, severity=severity, hint=_OTHER_NODES) if problem.code == _MISSING else problem
        for problem in source.problems
    ]


_ADAPTER = re.compile(r"(^|\.)lora_(A|B|embedding_[AB]|magnitude_vector)(\.|$)|^base_model\.model\.")
"""What PEFT leaves in names; a layer that is called adapter_something is a layer like any other."""

_CHOICES = ("two-world-sizes", "config-contradicts")


def _refuse(role: Path, source: fsdp.FsdpSource, problems: Sequence[Problem]) -> None:
    """Raise the error that all faults together are; adapters are refused as long as nothing here can fuse them."""
    faults = [problem for problem in problems if problem.severity == "error"]
    if any(problem.code in _CHOICES for problem in faults):
        sizes = sorted(source.files.by_kind["model"])
        raise UsageError(
            f"{role}: which save is meant? It is not clear from what lies here",
            hint=f"If the shards are the right ones: {' or '.join(f'--world-size {size}' for size in sizes)}.",
            problems=[replace(problem, hint="") if problem.code in _CHOICES else problem for problem in faults],
        )
    if faults:
        raise BrokenCheckpoint(
            f"{role}: cannot be merged; nothing was written",
            hint="Mend or complete what is listed, then run again.",
            code="broken-source",
            problems=faults,
        )
    adapters = list(filter(_ADAPTER.search, source.tensors))
    if adapters:
        raise Unmapped(
            f"{role}: holds LoRA adapters ({counted(len(adapters), 'tensor')}: {listing(adapters, 2)})",
            hint="Adapters are neither fused nor written yet; merging the base model alone would lose the training.",
            code="adapters",
        )
