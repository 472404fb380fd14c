"""Find the directory of FSDP shards that is meant, and the side files that belong to it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.export.config import CONFIG
from ckpttool.formats import fsdp
from ckpttool.inspection.choice import choose
from ckpttool.inspection.search import below, require_directory


def find_shards(path: Path, step: str | None, role: str | None, output: Path) -> tuple[Path, tuple[Problem, ...]]:
    """Return the directory with shards that the path and the options mean, and notes on the choice.

    Raises :class:`NotACheckpoint` that lists what lies below, as commands to type, when that is not exactly one.
    """
    require_directory(path)
    chosen, notes = choose(path, step, role)
    if fsdp.detect(chosen) is not None:
        return chosen, notes
    found, all_seen = below(chosen, lambda folder: fsdp.detect(folder) is not None)
    if len(found) == 1 and all_seen:
        message = f"{chosen} itself has no shards; those of the only directory below it are merged: {found[0]}"
        return found[0], (*notes, Problem(code="found-below", message=message, severity="note"))
    if not found:
        raise NotACheckpoint(
            f"{chosen}: no FSDP shards (model_world_size_W_rank_R.pt) in it or below",
            hint=f"What is it? ckpttool inspect {shlex.quote(str(chosen))}",
        )
    lines = [f"  ckpttool merge-fsdp {shlex.quote(str(p))} -o {shlex.quote(str(output))}" for p in found[:20]]
    raise NotACheckpoint(
        f"{chosen}: {len(found)} directories of FSDP shards lie below it",
        hint="\n".join(["Choose one, with --step and --role or by its path:", *lines]),
    )


def find_side_folder(roles: Sequence[Path], given: str | None) -> Path | None:
    """Return the folder of configuration and tokenizer: the one given, or where trainers put it beside the shards.

    Raises :class:`NotACheckpoint` when the one given is no directory.
    """
    if given is not None:
        require_directory(Path(given))
        return Path(given)
    places = [role / name for role in roles for name in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE)]
    with_config = [place for place in (*places, *roles) if (place / CONFIG).is_file()]
    return next(iter([*with_config, *(place for place in places if place.is_dir())]), None)
