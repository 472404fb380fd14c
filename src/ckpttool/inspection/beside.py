"""Small files that lie beside a checkpoint: dataloader states, LoRA's rank and alpha."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, CkpttoolError
from ckpttool.formats.findings import listing
from ckpttool.formats.jsonfile import read_object
from ckpttool.formats.torchzip import open_archive
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Content

_DATALOADER = re.compile(r"data(_\d+)?\.pt")
_TRAINER = re.compile(r"trainer_state\.(pt|json)|training_args\.bin")
_ARCHIVES = (".pt", ".pth", ".bin")


def add_dataloader(draft: Draft) -> None:
    """Add the dataloader states that lie directly in a directory; they are never unpickled."""
    _add_files(draft, "dataloader state", _DATALOADER)
    _add_files(draft, "trainer state", _TRAINER)


def add_trainer_files(draft: Draft) -> None:
    """Add what transformers' Trainer saves beside a model: optimizer, scheduler, rng, its own state."""
    _add_files(draft, "optimizer", re.compile(r"optimizer\.(pt|bin)"))
    _add_files(draft, "scheduler", re.compile(r"scheduler\.pt"))
    _add_files(draft, "rng", re.compile(r"rng_state(_\d+)?\.pth"))
    _add_files(draft, "trainer state", _TRAINER)


def _add_files(draft: Draft, name: str, pattern: re.Pattern[str]) -> None:
    """Add files to the contents; of a ``torch.save`` archive only the end is looked at, which a killed save lacks."""
    files = sorted(p for p in draft.path.iterdir() if pattern.fullmatch(p.name) and p.is_file())
    for file in files:
        try:
            if file.suffix in _ARCHIVES:
                open_archive(file)
        except BrokenCheckpoint as error:
            if error.code in ("truncated", "damaged-zip"):
                draft.fault(error.code, error.message, path=file.name, hint=error.hint)
    if files:
        size = sum(file.stat().st_size for file in files)
        draft.contents.append(Content(name, "", bytes=size, detail=listing([f.name for f in files], 4)))


def add_lora_meta(draft: Draft) -> None:
    """Add rank and alpha of an adapter, from the role or the step directory."""
    for folder in (draft.path, draft.path.parent):
        meta = small_object(folder / layout.LORA_META)
        if meta:
            draft.facts["lora"] = f"r {meta.get('r')}, alpha {meta.get('lora_alpha')}, {meta.get('task_type')}"
            return


def small_object(path: Path) -> Mapping[str, Any]:
    """Return a small JSON object, or nothing: these files are cross-checks."""
    try:
        return read_object(path)
    except CkpttoolError:
        return {}
