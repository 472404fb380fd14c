"""What shapes cannot show: settings of the run that lie beside the weights, and who wrote them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.architectures.model import NVIDIA, SWIFT, Model
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
_LINE = rb"^[ \t]*[\"']?(%s)[\"']?:[ \t]*[\"']?(%s)[\"']?[ \t]*(?:#.*)?\r?$"

_NUMBER = rb"[0-9.]{1,20}(?:[eE][+-]?[0-9]{1,3})?"

_SAME = (
    (("norm_epsilon", "layernorm_epsilon"), ("rms_norm_eps",)),
    (("rotary_base",), ("rope_theta",)),
    (("moe_router_topk",), ("num_experts_per_tok", "num_experts_per_token")),
)
"""Settings that change what the model says and no weight: of Megatron, and of a configuration."""

_ROWS = {"num_attention_heads": "heads", "num_query_groups": "groups", "kv_channels": "head_dim"}
"""Settings that say how rows of attention lie, which many shapes allow several of: of Megatron, and our sizes."""

PARALLEL_EXPERTS = "expert_model_parallel_size"
"""Over how many ranks the run has distributed its experts."""

_PLAIN = (*_ROWS, PARALLEL_EXPERTS, *(name for ours, _ in _SAME for name in ours))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the run itself says, by Megatron's names, and where each was found."""

    values: Mapping[str, Any]
    places: Mapping[str, str]

    @property
    def interleaved(self) -> dict[str, int]:
        """The sizes of interleaved blocks."""
        return {name: self.values[name] for name in INTERLEAVED if self.values.get(name)}

    def row_faults(self, model: Model) -> Iterator[Problem]:
        """Yield where the configuration has other heads than the run: rows would go to the wrong ones."""
        for name, size in _ROWS.items():
            trained, said = self.values.get(name), model.size(size)
            if trained is not None and trained != said:
                where = self.places[name]
                message = f"the run had {name} {trained} ({where}), config.json has {model.said(size)}"
                yield Problem(code="settings-disagree", message=message)

    def notes(self, config: ModelConfig) -> Iterator[Problem]:
        """Yield the other settings that the configuration has other values of."""
        rope = config.values.get("rope_parameters")
        values = {**(rope if isinstance(rope, dict) else {}), **config.values}
        for ours, theirs in _SAME:
            name = next((name for name in ours if name in self.values), None)
            said = next(((name, values[name]) for name in theirs if _is_number(values.get(name))), None)
            if name is not None and said is not None and self.values[name] != said[1]:
                trained = f"{name} {self.values[name]} ({self.places[name]})"
                message = f"the run had {trained}, config.json has {said[0]} {said[1]}"
                hint = "The config is taken as it is: the model will not say what was trained, if that is wrong."
                yield Problem(code="settings-disagree", message=message, hint=hint, severity="note")


def read_settings(source: DcpSource) -> Settings:
    """Read the settings of the run from wherever a trainer keeps them: the nearest place that has one says it.

    Raises :class:`BrokenCheckpoint` for files that cannot be read: shapes do not show how rows lie.
    """
    found = [("the arguments in the archive", _of_arguments(arguments(source)))]
    file = source.root / RUN_CONFIG
    if file.is_file():
        found.append((RUN_CONFIG, _of_yaml(file)))
    for folder in (source.root, source.root.parent, source.root.parent.parent):
        file = folder / layout.TRANSFORMER_CONFIG
        if file.is_file():
            found.append((layout.TRANSFORMER_CONFIG, _of_json(file)))
            break
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    for place, settings in found:
        for name, value in settings.items():
            if name not in values:
                values[name], places[name] = value, place
    return Settings(values, places)


def arguments(source: DcpSource) -> Mapping[str, Any]:
    """Return the arguments of the run as Megatron-LM keeps them, empty where there are none."""
    args = (source.unsharded or {}).get("args")
    state = args.state if isinstance(args, Record) else args
    return state if isinstance(state, dict) else {}


def _of_arguments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings among arguments; without query groups, Megatron-LM keeps a number of them all the same."""
    found = _plain(args)
    if args.get("group_query_attention") is False:
        found.pop("num_query_groups", None)
        if "num_attention_heads" in found:
            found["num_query_groups"] = found["num_attention_heads"]
    return found


def _of_json(file: Path) -> dict[str, Any]:
    try:
        return _plain(read_object(file))
    except BrokenCheckpoint as error:
        hint = "It says how rows lie, which shapes do not show: mend it, or move it away if it is of another run."
        raise BrokenCheckpoint(f"{file}: {error.message}", hint=hint, code=error.code) from error


def _of_yaml(path: Path) -> dict[str, Any]:
    """Find settings in YAML without reading all of it; raises where interleaving is there and is not understood."""
    raw = read_raw(path)
    blocks = re.findall(_LINE % (_any_of(INTERLEAVED), rb"[0-9]{1,9}|null|~|"), raw, re.MULTILINE)
    for name in INTERLEAVED:
        if len(re.findall(rb"\b%s\b" % name.encode(), raw)) != sum(found == name.encode() for found, _ in blocks):
            hint = "It says whether gate and up rows are interleaved: write it as NAME: NUMBER in a line of its own."
            raise BrokenCheckpoint(f"{path}: {name} is not understood", hint=hint, code="settings-unreadable")
    said: dict[str, set[Any]] = {}
    for name, text in re.findall(
        _LINE % (_any_of(_PLAIN), rb"[0-9.]{1,20}(?:[eE][+-]?[0-9]{1,3})?"), raw, re.MULTILINE
    ):
        with suppress(ValueError):
            said.setdefault(name.decode(), set()).add(json.loads(text))
    found = {name: values.pop() for name, values in said.items() if len(values) == 1}
    return found | {name.decode(): int(size) for name, size in blocks if size.isdigit()}


def _any_of(names: Iterable[str]) -> bytes:
    return b"|".join(name.encode() for name in names)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    below = [name for name in INTERLEAVED if type(values.get(name)) is int and values[name] < 0]
    if below:
        raise BrokenCheckpoint(
            f"{below[0]} is {values[below[0]]} in the settings of the run", code="settings-unreadable"
        )
    whole = {name: values[name] for name in (*INTERLEAVED, *_ROWS, PARALLEL_EXPERTS) if type(values.get(name)) is int}
    return whole | {name: values[name] for name in _PLAIN if name not in whole and _is_number(values.get(name))}


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


def producer_by_keys(keys: Iterable[str]) -> str:
    """Return whose order of rows an archive has, by its keys; nothing where they do not tell."""
    for key in keys:
        if key.endswith("self_attention.in_proj.weight.query") or ".self_attention.linear_attn." in key:
            return NVIDIA
        if key.endswith(("self_attention.in_proj.weight", "self_attention.in_proj_qkvz.weight")):
            return SWIFT
    return ""


def producer_by_files(source: DcpSource) -> tuple[str, str]:
    """Return the same by what lies beside an archive, and what that is."""
    root = source.root
    if any((folder / SWIFT_ARGS).is_file() for folder in (root, root.parent)):
        return SWIFT, SWIFT_ARGS
    around = (
        *(root / RUN_CONFIG, root.parent / layout.V1_HUGGINGFACE),
        *(root.parent / layout.MANIFEST, root.parent.parent / layout.MANIFEST),
    )
    if found := next((path.name for path in around if path.exists()), ""):
        return NVIDIA, found
    if any(name == "hf_checkpoint" or name.startswith("rollout_") for name in arguments(source)):
        return NVIDIA, "the arguments in the archive"
    return "", ""
