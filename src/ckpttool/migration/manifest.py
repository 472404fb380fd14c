"""The manifest (schema 2) of a migrated role: what an earlier one said, what can be known, and who migrated it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ckpttool import __version__, layout
from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats import hf
from ckpttool.formats.jsonfile import parse_object, read_raw

TOOL = "ckpttool migrate"
BEFORE = "v1_manifest"
"""The key under which a manifest of before layout v2, whose form is not known, is kept."""

_BEFORE_TEXT = "v1_manifest_text"

_HOLDS = {
    layout.MODEL: "Megatron shards of the model weights.",
    layout.OPTIMIZER: "Megatron shards of the optimizer and its scheduler.",
    layout.EXTRA: "Megatron shards of the random-number states.",
    layout.HUGGINGFACE: "Hugging Face files: configuration, tokenizer, weights where a bridge wrote them.",
}


def read(role: Path) -> dict[str, Any]:
    """Return the manifest of a role, empty where there is none.

    Raises :class:`~ckpttool.errors.BrokenCheckpoint` for one that cannot be read, or that says what ours never do.
    """
    file = role / layout.MANIFEST
    if not file.is_file():
        if file.exists():
            raise BrokenCheckpoint(f"{layout.MANIFEST} is not a file", code="bad-manifest")
        return {}
    raw = read_raw(file)
    manifest = parse_object(raw, file.name)
    if not _is_text(raw):
        raise BrokenCheckpoint(f"{layout.MANIFEST}: not UTF-8 text", code="bad-manifest")
    if is_ours(manifest) and not _is_sound(manifest):
        raise BrokenCheckpoint(f"{layout.MANIFEST}: not as the migration wrote it", code="bad-manifest")
    return manifest


def _is_text(raw: bytes) -> bool:
    """Tell what is UTF-8 from what JSON may be besides: UTF-16, and halves of a character."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_sound(manifest: Mapping[str, Any]) -> bool:
    """Tell whether what we go by has the types that we gave it."""
    text = _migration(manifest).get(_BEFORE_TEXT, "")
    return (
        isinstance(manifest.get("directories", {}), dict)
        and isinstance(manifest.get(BEFORE, {}), dict)
        and isinstance(text, str)
        and text.encode(errors="replace").decode() == text  # no halves of a character
    )


def is_ours(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest was written by a migration of ours."""
    return _migration(manifest).get("tool") == TOOL


def _migration(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    migration = manifest.get("migration")
    return migration if isinstance(migration, dict) else {}


def is_v2(manifest: Mapping[str, Any]) -> bool:
    """Tell whether a manifest speaks of layout v2, or of one that came after it."""
    version = manifest.get("schema_version")
    return type(version) is int and version >= layout.SCHEMA_VERSION


def being_undone(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return what stands in the manifest's place while a migration is undone: no schema, the earlier one kept."""
    return {key: value for key, value in manifest.items() if key in ("migration", BEFORE)}


def earlier_text(manifest: Mapping[str, Any]) -> str | None:
    """Return the text of the manifest that a migration found, to the letter, or ``None`` where there was none."""
    if BEFORE not in manifest:
        return None
    text = _migration(manifest).get(_BEFORE_TEXT)
    return text if isinstance(text, str) else render(manifest[BEFORE])


def compose(
    role: Path,
    found: Mapping[str, Any],
    trees: Collection[str],
    parts: Collection[str],
    ranks: int,
    mode: str,
    source: hf.HfSource | None,
) -> dict[str, Any]:
    """Return the manifest of a migrated role. ``parts`` are those of the archive, ``ranks`` wrote its data files.

    ``found`` is the manifest that was there: of before the migration, or of an earlier run of it; ``source`` are the
    Hugging Face files.
    """
    kept = _kept(role, found)
    earlier = kept.get(BEFORE, {})
    text = _migration(kept).get(_BEFORE_TEXT)
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
    migration: dict[str, Any] = {
        "tool": TOOL,
        "version": __version__,
        "from_layout": 1,
        "mode": mode,
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    told = {BEFORE: earlier} if BEFORE in kept else {}
    if text is not None:
        migration[_BEFORE_TEXT] = text
    return {**known, **_said_before(earlier), **told, "migration": migration}


def _kept(role: Path, found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the earlier manifest under its key; with its text where that is not what we would write."""
    file = role / layout.MANIFEST
    if is_ours(found) or not file.is_file():
        return found
    text = file.read_text(encoding="utf-8", errors="replace")  # one that is no UTF-8 has been refused
    return {BEFORE: found, "migration": {} if text == render(found) else {_BEFORE_TEXT: text}}


def _said_before(earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier manifest says under the names that schema 2 uses for the same facts."""
    same = ("role", "arch", "global_step", "world_size")
    return {name: earlier[name] for name in same if isinstance(earlier.get(name), int | str)}


def render(manifest: Mapping[str, Any]) -> str:
    """Return the text of a manifest, in the form that verl writes."""
    return json.dumps(manifest, indent=2, sort_keys=True)


def _architecture(source: hf.HfSource | None) -> str | None:
    classes = (source.config or {}).get("architectures") if source else None
    return str(classes[0]) if isinstance(classes, list) and classes else None


def _save_contents(parts: Collection[str], weights: bool) -> list[str]:
    """Return the words of ``save_contents`` that leave just these trees; see ``layout.expected_trees``."""
    words = ["model"] if weights or "model" in parts else []
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
