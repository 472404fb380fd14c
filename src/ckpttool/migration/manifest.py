"""The manifest (schema 2) of a migrated role: what an earlier one said, what can be known, and who migrated it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpttool import __version__, layout
from ckpttool.errors import CkpttoolError
from ckpttool.formats import hf
from ckpttool.formats.jsonfile import read_object

TOOL = "ckpttool migrate"
BEFORE = "v1_manifest"
"""The key under which a manifest of before layout v2, whose form is not known, is kept."""

_HOLDS = {
    layout.MODEL: "Megatron shards of the model weights.",
    layout.OPTIMIZER: "Megatron shards of the optimizer and its scheduler.",
    layout.EXTRA: "Megatron shards of the random-number states.",
    layout.HUGGINGFACE: "Hugging Face files: configuration, tokenizer, weights where a bridge wrote them.",
}


def read(role: Path) -> dict[str, Any]:
    """Return the manifest of a role, or nothing where there is none that can be read."""
    try:
        return read_object(role / layout.MANIFEST)
    except CkpttoolError:
        return {}


def is_ours(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest was written by a migration of ours."""
    migration = manifest.get("migration")
    return isinstance(migration, dict) and migration.get("tool") == TOOL


def is_v2(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest speaks of layout v2."""
    return manifest.get("schema_version") == layout.SCHEMA_VERSION


def compose(
    role: Path, earlier: dict[str, Any], trees: Collection[str], parts: Collection[str], ranks: int, mode: str
) -> dict[str, Any]:
    """Return the manifest of a migrated role. ``parts`` are those of the archive, ``ranks`` wrote its data files."""
    source = _huggingface(role)
    weights = bool(source and source.weights)
    known = {
        "schema_version": layout.SCHEMA_VERSION,
        "framework": "megatron",
        "role": role.name,
        "arch": _architecture(source),
        "global_step": layout.step_of(role.parent.name),
        "world_size": ranks or None,
        "backend": {
            "has_bridge": weights,
            "use_dist_checkpointing": "model" in parts,
            "peft": "adapter" in parts,
        },
        "save_contents": _save_contents(parts, weights),
        "contents": _contents(role, trees, parts, source),
        "directories": {tree: _HOLDS[tree] for tree in sorted(trees)},
        "saved_any_dist_ckpt": bool(set(trees) - {layout.HUGGINGFACE}),
    }
    migration = {
        "tool": TOOL,
        "version": __version__,
        "from_layout": 1,
        "mode": mode,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    kept = {BEFORE: earlier} if earlier else {}
    return {**known, **_said_before(earlier), **kept, "migration": migration}


def _said_before(earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier manifest says under the names that schema 2 uses for the same facts."""
    same = ("role", "arch", "global_step", "world_size")
    return {name: earlier[name] for name in same if isinstance(earlier.get(name), int | str)}


def render(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, in the form that verl writes."""
    return json.dumps(manifest, indent=2, sort_keys=True)


def _huggingface(role: Path) -> hf.HfSource | None:
    for where in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE):
        if (role / where).is_dir() and any((role / where).iterdir()):
            return hf.open_(role / where)
    return None


def _architecture(source: hf.HfSource | None) -> str | None:
    classes = (source.config or {}).get("architectures") if source else None
    return str(classes[0]) if isinstance(classes, list) and classes else None


def _save_contents(parts: Collection[str], weights: bool) -> list[str]:
    """Return the words of ``save_contents`` that leave just these trees; see ``layout.expected_trees``."""
    words = ["model"] if weights or {"model", "adapter"} & set(parts) else []
    words += ["hf_model"] if weights and "model" in parts else []
    words += ["optimizer"] if {"optimizer", "scheduler"} & set(parts) else []
    words += ["extra"] if "rng" in parts else []
    return words


def _contents(
    role: Path, trees: Collection[str], parts: Collection[str], source: hf.HfSource | None
) -> dict[str, dict[str, Any]]:
    archive, hugging = layout.ARCHIVE_FORMAT, layout.HUGGINGFACE_FORMAT
    model, hugging_weights = "model" in parts, bool(source and source.weights)
    bridge_only = hugging_weights and not model
    here = source if layout.HUGGINGFACE in trees else None
    entries = (
        ("model", model, {"path": layout.MODEL, "format": archive, "backend": "dist_checkpointing"}),
        ("model", bridge_only, {"path": layout.HUGGINGFACE, "format": hugging, "backend": "mbridge"}),
        ("hf_model", hugging_weights and model, {"path": layout.HUGGINGFACE, "format": hugging}),
        ("peft_adapters", "adapter" in parts, {"path": layout.MODEL, "format": archive}),
        ("optimizer", "optimizer" in parts, {"path": layout.OPTIMIZER, "format": archive}),
        ("lr_scheduler", "scheduler" in parts, {"path": layout.OPTIMIZER, "format": archive, "key": "lr_scheduler"}),
        ("rng_state", "rng" in parts, {"path": layout.EXTRA, "format": archive, "key": "rng_state"}),
        ("transformer_config", _has_config(role), {"path": layout.TRANSFORMER_CONFIG, "format": layout.JSON_FORMAT}),
        ("hf_config", here and here.config is not None, {"path": layout.HUGGINGFACE, "format": hugging}),
        ("tokenizer", here and here.has_tokenizer, {"path": layout.HUGGINGFACE, "format": hugging}),
    )
    return {name: entry for name, holds, entry in entries if holds}


def _has_config(role: Path) -> bool:
    return (role / layout.TRANSFORMER_CONFIG).is_file()
