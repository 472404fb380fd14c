"""What shapes cannot show: settings of the run that lie beside the weights, and who wrote them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.architectures.model import NVIDIA, SWIFT
from ckpttool.errors import BrokenCheckpoint, Problem
from ckpttool.export.config import ModelConfig
from ckpttool.formats.dcp import DcpSource
from ckpttool.formats.jsonfile import read_object, read_raw
from ckpttool.unpickle import Record

INTERLEAVED = ("moe_mlp_glu_interleave_size", "moe_shared_expert_glu_interleave_size")
"""Settings of megatron-core 0.18 and newer: gate and up rows lie in blocks of so many."""

RUN_CONFIG = "run_config.yaml"
SWIFT_ARGS = "args.json"

_MODEL_ID = re.compile(rb"^\s*hf_model_id:\s*['\"]?([^'\"\s]+)", re.MULTILINE)
_YAML = re.compile(
    rb"^[ \t]*[\"']?(%s)[\"']?:[ \t]*[\"']?([0-9]{1,9}|null|~|)[\"']?[ \t]*(?:#.*)?\r?$"
    % b"|".join(name.encode() for name in INTERLEAVED),
    re.MULTILINE,
)


def arguments(source: DcpSource) -> Mapping[str, Any]:
    """Return the arguments of the run as Megatron-LM keeps them, empty where there are none."""
    args = (source.unsharded or {}).get("args")
    state = args.state if isinstance(args, Record) else args
    return state if isinstance(state, dict) else {}


def interleaved(source: DcpSource) -> Mapping[str, int]:
    """Return the sizes of interleaved blocks, from wherever a trainer keeps its settings: the nearest file has it.

    Raises :class:`BrokenCheckpoint` for settings that cannot be read: the shapes do not show how rows lie.
    """
    root, found = source.root, _plain(arguments(source))
    if (root / RUN_CONFIG).is_file():
        found |= _of_yaml(root / RUN_CONFIG)
    for folder in (root, root.parent, root.parent.parent):
        file = folder / layout.TRANSFORMER_CONFIG
        if file.is_file():
            try:
                return _positive(_plain(read_object(file)) | found)
            except BrokenCheckpoint as error:
                hint = "It says whether gate and up rows are interleaved; mend it, or move it away if they are not."
                raise BrokenCheckpoint(f"{file}: {error.message}", hint=hint, code=error.code) from error
    return _positive(found)


def _of_yaml(path: Path) -> dict[str, int]:
    """Find the settings in YAML without reading all of it; raises where one is there and is not understood."""
    raw = read_raw(path)
    found = {name.decode(): size for name, size in _YAML.findall(raw)}
    for name in INTERLEAVED:
        if len(re.findall(rb"\b%s\b" % name.encode(), raw)) != (name in found):
            hint = "It says whether gate and up rows are interleaved: write it as NAME: NUMBER in a line of its own."
            raise BrokenCheckpoint(f"{path}: {name} is not understood", hint=hint, code="settings-unreadable")
    return {name: int(size) for name, size in found.items() if size.isdigit()}


def _plain(values: Mapping[str, Any]) -> dict[str, int]:
    return {name: values[name] for name in INTERLEAVED if type(values.get(name)) is int}


def _positive(found: Mapping[str, int]) -> Mapping[str, int]:
    return {name: size for name, size in found.items() if size > 0}


_SAME = (
    (("norm_epsilon", "layernorm_epsilon"), ("rms_norm_eps",)),
    (("rotary_base",), ("rope_theta",)),
    (("moe_router_topk",), ("num_experts_per_tok", "num_experts_per_token")),
)
"""Settings that change what the model says and no weight: of Megatron, and of a configuration."""


def disagreements(source: DcpSource, config: ModelConfig) -> Iterator[Problem]:
    """Yield the settings of the run that the configuration has other values of."""
    run = arguments(source)
    rope = config.values.get("rope_parameters")
    values = {**(rope if isinstance(rope, dict) else {}), **config.values}
    for ours, theirs in _SAME:
        trained = next(((name, run[name]) for name in ours if _is_number(run.get(name))), None)
        said = next(((name, values[name]) for name in theirs if _is_number(values.get(name))), None)
        if trained is not None and said is not None and trained[1] != said[1]:
            message = f"the run had {trained[0]} {trained[1]}, config.json has {said[0]} {said[1]}"
            hint = "The config is taken as it is: the model will not say what was trained, if that is wrong."
            yield Problem(code="settings-disagree", message=message, hint=hint, severity="note")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def started_from(source: DcpSource) -> str:
    """Return what model a run was started from, where it says so."""
    named = arguments(source).get("hf_checkpoint")
    if isinstance(named, str):
        return named
    file = source.root / RUN_CONFIG
    found = _MODEL_ID.search(read_raw(file)) if file.is_file() else None
    return found[1].decode(errors="replace") if found else ""


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
