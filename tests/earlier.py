"""What the tests of configs for transformers 4 share: rotary parameters as transformers 5 has them, and conversions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpttool.export.config import Edits, edited, read_config

BASE = 777777.5
PLAIN = {"rope_type": "default", "rope_theta": BASE}
LOCAL = {"rope_type": "default", "rope_theta": 5555.5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 16.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "factor": 2.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
LONG = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [3.0, 4.0, 5.0, 6.0]}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1]}
SIZES: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64}


def based(rope: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Parameters as transformers 5 has them."""
    return {"rope_parameters": {**rope, "rope_theta": BASE, **more}}


def layered(full: Mapping[str, Any], sliding: Mapping[str, Any] = LOCAL) -> dict[str, Any]:
    """Parameters by type of layers."""
    return {"rope_parameters": {"full_attention": {**full, "rope_theta": BASE}, "sliding_attention": dict(sliding)}}


def written(config: Any, folder: Path) -> Path:
    """The directory into which transformers 5 saves a config."""
    config.save_pretrained(folder)
    return folder


def converted(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What a conversion writes of the config in a folder, there, and what it tells of it."""
    config = read_config(folder)
    assert config is not None
    raw, changes = edited(config, None, Edits())
    (folder / "config.json").write_bytes(raw)
    return json.loads(raw), changes
