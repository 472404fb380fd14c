"""Open the shards that are meant and what lies beside them, and refuse, with all reasons, what is no whole save."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpttool import layout
from ckpttool.adapters.settings import check_alpha
from ckpttool.errors import BrokenCheckpoint, Problem, Severity, UsageError
from ckpttool.export.config import Edits, ModelConfig, read_side_config
from ckpttool.export.running import check_names, with_torch_dtype
from ckpttool.export.side_files import SideFiles, find_side_files, side_paths
from ckpttool.export.ties import Tie
from ckpttool.export.writing import Stamps, give_back, stamps
from ckpttool.formats import fsdp
from ckpttool.formats.findings import listing
from ckpttool.formats.hf import ADAPTER_CONFIG
from ckpttool.formats.shardfiles import is_model_shard, scan
from ckpttool.merging import planning
from ckpttool.merging.adapting import plain_weights
from ckpttool.merging.basing import Base, read_base
from ckpttool.merging.choosing import find_shards, find_side_folder
from ckpttool.merging.names import unwrap
from ckpttool.merging.result import Options
from ckpttool.naming.following import Sizes
from ckpttool.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Opened:
    """The shards and what lies beside them; tensors by their names without the segments of wrappers.

    ``edits`` are what the head that is stored wants changed in the config.
    """

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
    base: Base | None = None
    edits: Edits = field(default_factory=Edits)

    @property
    def around(self) -> tuple[Path, ...]:
        """All directories that are read."""
        base = (self.base.folder,) if self.base is not None else ()
        return (*self.folders, *((self.side_folder,) if self.side_folder is not None else ()), *base)


def find_folders(path: Path, output: Path, options: Options) -> tuple[tuple[Path, ...], tuple[Problem, ...]]:
    """Return the directories that hold the save, that of the path first, and notes on how they were chosen."""
    role, notes = find_shards(path, output, options)
    others = [find_shards(Path(p).absolute(), output, options)[0] for p in options.inputs]
    return tuple(dict.fromkeys((role, *others))), notes


def open_save(folders: tuple[Path, ...], notes: tuple[Problem, ...], options: Options) -> Opened:
    """Read all indexes and refuse, with everything that is wrong, what is no whole checkpoint."""
    role, *also = folders
    _check_world_size(folders, options.world_size)
    side_folder = find_side_folder(folders, options)
    before = {**stamps_of(folders), **stamps(side_paths(side_folder, crowded=side_folder in folders))}
    source = fsdp.open_(role, options.world_size, also=also, kinds=("model",))
    base = read_base(options.base) if options.base is not None else None
    names, unwrapped, collisions = unwrap(source.tensors)
    config, config_problems = read_side_config(side_folder, given=options.hf_config is not None)
    tensors = planning.renamed(source.tensors, names)
    problems = [*sorted_out(source), *collisions, *config_problems]
    if not collisions:
        problems += planning.draft(plain_weights(tensors), Tie(), None, Sizes(), options).problems
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
        stamps=before if base is None else {**before, **base.stamps},
        divided=frozenset(names[name] for name in source.divided),
        base=base,
    )


def checked_options(options: Options) -> Options:
    """Return options with torch's name of the dtype.

    Raises :class:`UsageError` for those that contradict each other, or would be passed over without a word.
    """
    if options.cast_buffers and options.dtype is None:
        raise UsageError("--cast-buffers without --dtype: no buffer is cast")
    if options.allow_overflow and options.dtype is None and options.like is None:
        raise UsageError("--allow-overflow without --dtype or --like: nothing is cast")
    check_names(options)
    _check_adapters(options)
    return with_torch_dtype(options)


def _check_adapters(options: Options) -> None:
    given = {
        "--adapter": bool(options.adapters),
        "--lora-alpha": options.lora_alpha is not None,
        "--adapter-config": options.adapter_config is not None,
        "--base": options.base is not None,
    }
    for name in (name for name, is_given in given.items() if is_given and options.lora is None):
        raise UsageError(f"{name} without --lora", hint="Say what is to be written: --lora fuse, adapter or both.")
    if options.lora == "adapter":
        model = {
            "--like": options.like is not None,
            "--untie": options.untie,
            "--drop-lm-head": options.drop_lm_head,
        }
        for name in (name for name, is_given in model.items() if is_given):
            raise UsageError(f"{name} with --lora adapter: no model is written")
    check_alpha(options.lora_alpha)


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
    """Return size and time of every shard, and of what is said there of adapters."""
    names = ((folder, name) for folder in folders for name in os.listdir(folder))
    return stamps(folder / name for folder, name in names if is_model_shard(name) or name in _OF_ADAPTERS)


_OF_ADAPTERS = (ADAPTER_CONFIG, layout.LORA_META)


_MISSING = "rank-missing"
_OTHER_NODES = "Do they lie on other nodes? Name those directories, too: --input DIR; or copy the files into this one."


def sorted_out(source: fsdp.FsdpSource) -> list[Problem]:
    """Return the problems of the shards; ranks that hold further replicas of what is here are no fault."""
    suffices = any(problem.code == "replicas-suffice" for problem in source.problems)
    severity: Severity = "note" if suffices else "error"
    return [
        replace(problem, severity=severity, hint=_OTHER_NODES) if problem.code == _MISSING else problem
        for problem in source.problems
    ]


_CHOICES = ("two-world-sizes", "config-contradicts")


def _refuse(role: Path, source: fsdp.FsdpSource, problems: Sequence[Problem]) -> None:
    """Raise the error that all faults together are."""
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
