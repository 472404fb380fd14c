"""What shapes cannot show: settings of the run that lie beside the weights, and who wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.architectures.rules import NVIDIA, SWIFT
from ckpttool.errors import CkpttoolError
from ckpttool.formats.dcp import DcpSource
from ckpttool.formats.jsonfile import read_object, read_raw
from ckpttool.unpickle import Record

INTERLEAVED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
"""Settings of megatron-core 0.18 and newer: gate and up rows lie in blocks of so many."""

RUN_CONFIG = "run_config.yaml"
SWIFT_ARGS = "args.json"

_YAML = re.compile(rb"^\s*(%s):\s*(\d+)\s*$" % b"|".join(name.encode() for name in INTERLEAVED), re.MULTILINE)


def arguments(source: DcpSource) -> Mapping[str, Any]:
    """Return the arguments of the run as Megatron-LM keeps them, empty where there are none."""
    args = (source.unsharded or {}).get("args")
    state = args.state if isinstance(args, Record) else args
    return state if isinstance(state, dict) else {}


def interleaved(source: DcpSource) -> Mapping[str, int]:
    """Return the sizes of interleaved blocks, from wherever a trainer keeps its settings."""
    found: dict[str, Any] = {}
    root = source.root
    for folder in (root, root.parent, root.parent.parent):
        found |= _of_json(folder / layout.TRANSFORMER_CONFIG)
    if (root / RUN_CONFIG).is_file():
        found |= {name.decode(): int(size) for name, size in _YAML.findall(read_raw(root / RUN_CONFIG))}
    found |= {name: value for name, value in arguments(source).items() if name in INTERLEAVED}
    return {name: found[name] for name in INTERLEAVED if type(found.get(name)) is int and found[name] > 0}


def _of_json(path: Path) -> dict[str, Any]:
    try:
        return {n: v for n, v in read_object(path).items() if n in INTERLEAVED} if path.is_file() else {}
    except CkpttoolError:
        return {}


def producer(source: DcpSource, keys: Iterable[str]) -> str:
    """Return whose order of rows an archive has, by its keys and what lies beside it; nothing where neither tells."""
    for key in keys:
        if key.endswith("self_attention.in_proj.weight.query") or ".self_attention.linear_attn." in key:
            return NVIDIA
        if key.endswith(("self_attention.in_proj.weight", "self_attention.in_proj_qkvz.weight")):
            return SWIFT
    root = source.root
    if any((folder / SWIFT_ARGS).is_file() for folder in (root, root.parent)):
        return SWIFT
    around = (root.parent / layout.V1_HUGGINGFACE, root.parent / layout.MANIFEST, root.parent.parent / layout.MANIFEST)
    if (root / RUN_CONFIG).is_file() or any(path.exists() for path in around):
        return NVIDIA
    if any(name == "hf_checkpoint" or name.startswith("rollout_") for name in arguments(source)):
        return NVIDIA
    return ""
