"""Small files that lie beside a checkpoint: dataloader states, LoRA's rank and alpha."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import CkpttoolError
from ckpttool.formats.findings import listing
from ckpttool.formats.jsonfile import read_object
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Content

_DATALOADER = re.compile(r"data(_\d+)?\.pt")


def add_dataloader(draft: Draft) -> None:
    """Add the dataloader states that lie directly in a directory (never opened)."""
    files = sorted(p for p in draft.path.iterdir() if _DATALOADER.fullmatch(p.name) and p.is_file())
    if files:
        size = sum(file.stat().st_size for file in files)
        draft.contents.append(Content("dataloader state", "", bytes=size, detail=listing([f.name for f in files], 4)))


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
