"""Find the directory of FSDP shards that is meant, and the side files that belong to it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.export.config import CONFIG
from ckpttool.formats import fsdp
from ckpttool.formats.shardfiles import ShardFiles, is_model_shard, scan
from ckpttool.inspection import runs
from ckpttool.inspection.choice import choose
from ckpttool.inspection.search import below, model_directory, require_directory, what_it_is
from ckpttool.merging.result import Options


def find_shards(path: Path, output: Path, options: Options) -> tuple[Path, tuple[Problem, ...]]:
    """Return the directory with shards that the path and the options mean, and notes on the choice.

    Raises :class:`NotACheckpoint` that lists what lies below, as commands to type, when that is not exactly one.
    """
    if path.is_file() and is_model_shard(path.name):
        raise NotACheckpoint(f"{path}: one rank's file", hint=f"Give the directory of all of them: {path.parent}")
    require_directory(path)
    chosen, notes = choose(path, options.step, options.role)
    if fsdp.detect(chosen) is not None:
        return chosen, notes
    found, all_seen = below(chosen, lambda folder: fsdp.detect(folder) is not None)
    if len(found) == 1 and all_seen:
        return found[0], notes
    if not found:
        raise NotACheckpoint(
            f"{chosen}: no FSDP shards (model_world_size_W_rank_R.pt) in it or below{what_it_is(chosen)}",
            hint=f"More about it: ckpttool inspect {shlex.quote(str(chosen))}",
        )
    lines = list(_commands(chosen, found, output, options))
    raise NotACheckpoint(
        f"{chosen}: {len(found)} directories of FSDP shards lie below it",
        hint="\n".join(["Choose one, with --step and --role or by its path:", *lines]),
    )


SHOWN = 12
"""Directories that are listed at most."""


def _commands(path: Path, found: Sequence[Path], output: Path, options: Options) -> Iterator[str]:
    """Yield what to type instead: parts of one save united, the newest whole step, each by its path."""
    tail = shlex.join(["-o", str(output)]) + "".join(f" {flag}" for flag in options.flags())
    files = {folder: scan(folder) for folder in found}
    sets = [shards.by_kind.get("model", {}) for shards in files.values()]
    size = next(iter(sets[0]), 0)
    ranks = [rank for by_size in sets for rank in by_size.get(size, ())]
    if len(found) > 1 and sorted(ranks) == list(range(size)) and all(set(by_size) == {size} for by_size in sets):
        others = "".join(f" --input {shlex.quote(str(folder))}" for folder in found[1:])
        yield f"  ckpttool merge-fsdp {shlex.quote(str(found[0]))}{others} {tail}"
    if runs.steps(path):
        roles = sorted({folder.name for folder in found if layout.step_of(folder.parent.name) is not None})
        role = f" --role {roles[0]}" if roles else ""
        yield f"  ckpttool merge-fsdp {shlex.quote(str(path))} --step latest{role} {tail}"
    lacking = {folder: missing for folder, shards in files.items() if (missing := _missing(shards))}
    whole = [folder for folder in found if folder not in lacking]
    yield from (f"  ckpttool merge-fsdp {shlex.quote(str(folder))} {tail}" for folder in whole[:SHOWN])
    if len(whole) > SHOWN:
        yield f"  and {len(whole) - SHOWN:,} more"
    for folder, missing in list(lacking.items())[:SHOWN]:
        yield f"Not whole: {folder} ({missing})"


def _missing(files: ShardFiles) -> str:
    """Say which ranks a directory lacks, by its names alone; nothing when one set of files is complete."""
    sets = {size: files.missing("model", size) for size in files.by_kind.get("model", {})}
    if not sets or not all(sets.values()):
        return "" if sets else "no model files"
    size = max(sets, key=lambda size: size - len(sets[size]))
    return f"{len(sets[size])} of {size} ranks missing"


def find_side_folder(roles: Sequence[Path], options: Options) -> Path | None:
    """Return the folder of configuration and tokenizer: the one given, where trainers put it beside the shards, or
    that of the base model or the reference.

    Raises :class:`NotACheckpoint` when the one given is no directory.
    """
    if options.hf_config is not None:
        return model_directory("--hf-config", options.hf_config)
    places = [role / name for role in roles for name in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE)]
    given = {"--base": options.base, "--like": options.like}
    others = [model_directory(option, folder) for option, folder in given.items() if folder is not None]
    with_config = [place for place in (*places, *roles, *others) if (place / CONFIG).is_file()]
    return next(iter([*with_config, *(place for place in places if place.is_dir())]), None)
