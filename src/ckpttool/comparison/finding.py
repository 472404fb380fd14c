"""Find the checkpoint that is meant by one of two paths, and tell of which kind it is; nothing of it is read."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpttool import layout
from ckpttool.converting.choosing import archive_of, has_weights
from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.formats import fsdp
from ckpttool.inspection.choice import choose
from ckpttool.inspection.search import below, require_directory, what_it_is

Kind = Literal["fsdp", "archive", "huggingface", "file"]

SHOWN = 12
"""Directories that are listed at most."""

FILES = (".safetensors", ".bin", ".pt", ".pth")
"""What one file of tensors is called."""


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that can be compared: its kind, where it lies, and notes on how it was chosen."""

    kind: Kind
    path: Path
    notes: tuple[Problem, ...] = ()


def find(given: Path, step: str | None, role: str | None) -> Found:
    """Return the one checkpoint that a path, a step and a role mean.

    Raises :class:`NotACheckpoint` that lists what lies below when that is not exactly one.
    """
    path = Path(os.path.abspath(given))  # noqa: PTH100 - resolve() would follow links
    if path.is_file():
        return _file(path)
    require_directory(path)
    chosen, notes = choose(path, step, role)
    found = recognise(chosen)
    if found is not None:
        return Found(found.kind, found.path, notes)
    folders, all_seen = below(chosen, lambda folder: recognise(folder) is not None)
    if len(folders) == 1 and all_seen:
        only = recognise(folders[0])
        assert only is not None
        return Found(only.kind, only.path, notes)
    if not folders:
        raise NotACheckpoint(
            f"{chosen}: no weights that can be compared in it or below{what_it_is(chosen)}",
            hint="Give a role directory with FSDP shards, a Megatron archive, a Hugging Face model, or a file of one.",
        )
    lines = [f"  {folder}" for folder in folders[:SHOWN]]
    lines += [f"  and {len(folders) - SHOWN:,} more"] * (len(folders) > SHOWN)
    raise NotACheckpoint(
        f"{chosen}: {len(folders)} checkpoints lie below it",
        hint="\n".join(["Choose one, with --step and --role or by its path:", *lines]),
    )


def recognise(folder: Path) -> Found | None:
    """Return what a directory holds, or the role that it is; ``None`` for neither."""
    if fsdp.detect(folder) is not None:
        return Found("fsdp", folder)
    archive = archive_of(folder)
    if archive is not None:
        return Found("archive", archive)
    written = (folder, folder / layout.HUGGINGFACE, folder / layout.V1_HUGGINGFACE)
    return next((Found("huggingface", place) for place in written if has_weights(place)), None)


def _file(path: Path) -> Found:
    if path.suffix in FILES:
        return Found("file", path)
    hint = f"Give its directory: {path.parent}" if path.suffix == ".distcp" or path.name == ".metadata" else ""
    raise NotACheckpoint(f"{path}: no file of tensors that can be compared ({', '.join(FILES)})", hint=hint)
