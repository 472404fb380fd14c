"""Bare distributed archives: Megatron's ``torch_dist``, plain torch DCP."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpttool.formats import dcp
from ckpttool.formats.dcpkeys import part_of
from ckpttool.formats.findings import counted, listing
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Content
from ckpttool.inspection.sections import Section
from ckpttool.tensors import TensorInfo

_INDEXED = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
_STACKED = re.compile(r"(.*\blayers)\.(\D.*)")
_ONE_EXPERT = re.compile(r".*\.experts\.(?:experts|local_experts)\.(\d+)\..*")
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.+)")
_OLD = "The weights are not affected. To resume with the optimizer, load it with the megatron-core that wrote it."


def inspect_archive(path: Path, evidence: tuple[str, ...]) -> Draft:
    """Describe a bare distributed archive: Megatron's ``torch_dist``, or plain torch DCP."""
    source = dcp.open_(path)
    megatron = source.format == dcp.TORCH_DIST
    title = "Megatron distributed checkpoint (torch_dist)" if megatron else "torch distributed checkpoint (DCP)"
    draft = Draft(path=path, kind=source.format, title=title, evidence=evidence)
    draft.add(Section("", source))
    if not source.tensors and not source.objects and not (path / dcp.METADATA_FILE).is_file():
        draft.title = "distributed checkpoint without its index"
    archive_facts(draft, source)
    for name in ("run_config.yaml", "train_state.pt", "modelopt_state"):
        if (path / name).exists():
            draft.contents.append(Content("side file", name))
    return draft


def archive_facts(draft: Draft, source: dcp.DcpSource) -> None:
    """Add what an archive says about its writer, its layers and its optimizer."""
    if source.writer:
        draft.facts.setdefault("written by", source.writer)
    if source.ranks:
        draft.facts.setdefault("world size", f"data files of {counted(source.ranks, 'rank')}")
    layers = _layers({n: t for n, t in source.tensors.items() if part_of(n) == "model"})
    if layers:
        draft.facts.setdefault("layers", layers)
    optimizer = _optimizer_format(source.tensors.keys() | source.objects.keys())
    if optimizer and _is_flattened(source):
        optimizer = "old format: ranges of flattened tensors (fully_sharded_model_space)"
        draft.note(
            "old-optimizer", "old optimizer format: megatron-core 0.16 and newer cannot load this state", hint=_OLD
        )
    if optimizer:
        draft.facts.setdefault("optimizer", optimizer)
    iteration = source.unsharded.get("iteration") if source.unsharded else None
    if type(iteration) is int:
        draft.facts.setdefault("iteration", f"{iteration:,} (in {source.common_kind})")


def _layers(tensors: Mapping[str, TensorInfo]) -> str:
    """Say how layers are stored, family by family: stacked along a leading axis, or one key a layer."""
    indexed: dict[str, set[int]] = {}
    stacked: dict[str, int] = {}
    for name, info in tensors.items():
        if match := _INDEXED.fullmatch(name):
            indexed.setdefault(match[1], set()).add(int(match[2]))
        elif (match := _STACKED.fullmatch(name)) and info.shape:
            stacked[match[1]] = max(stacked.get(match[1], 0), info.shape[0])
    words = [f"{family}: {n} stacked in one key" for family, n in stacked.items()]
    words += [f"{family}: {len(numbers)}, one key each" for family, numbers in indexed.items()]
    if any(map(_ONE_EXPERT.fullmatch, tensors)):
        words.append("one key an expert")
    return "; ".join(words)


def _optimizer_format(keys: Iterable[str]) -> str:
    """Name the format of the optimizer state by its keys."""
    found = {key for key in keys if part_of(key) == "optimizer"}
    if not found:
        return ""
    if any(".gbuf_idx_" in key for key in found):
        return "dp_reshardable buckets (loads on the same data-parallel layout only)"
    if any(".param_state/" in key for key in found):
        return "dp_zero_gather_scatter (one object a data-parallel group)"
    states = {m[1] for key in found if (m := _STATE.fullmatch(key))}
    if "param" in states:
        return "fully_reshardable"
    return "one tensor a parameter" + (f" ({listing(sorted(states))})" if states else "")


def _is_flattened(source: dcp.DcpSource) -> bool:
    """Tell whether optimizer states are ranges of flattened parameters, as megatron-core wrote them to 0.15."""
    content = (source.unsharded or {}).get("content_metadata")
    if isinstance(content, dict) and content.get("distrib_optim_sharding_type") == "fully_sharded_model_space":
        return True
    if any(part_of(key) == "optimizer" for key in source.flattened):
        return True
    states = ((m[2], info) for name, info in source.tensors.items() if (m := _STATE.fullmatch(name)))
    return any(name in source.tensors and source.tensors[name].shape != info.shape for name, info in states)
