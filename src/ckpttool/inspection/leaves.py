"""Directories that hold one checkpoint: FSDP shards, a distributed archive, a Hugging Face model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import CkpttoolError
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.formats.findings import OTHER_NODES, listing, ranges
from ckpttool.formats.jsonfile import read_object
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Content
from ckpttool.inspection.sections import Section
from ckpttool.tensors import TensorInfo

_INDEXED = re.compile(r"(.*\blayers)\.(\d+)\.(.+)")
_STACKED = re.compile(r"(.*\blayers)\.(\D.*)")
_ONE_EXPERT = re.compile(r".*\.experts\.(?:experts|local_experts)\.(\d+)\..*")
_DATALOADER = re.compile(r"data(_\d+)?\.pt")


def inspect_fsdp(path: Path, evidence: tuple[str, ...]) -> Draft:
    """Describe a role directory of FSDP shards (verl, SkyRL, verl's SFT steps)."""
    source = fsdp.open_(path)
    lora = source.lora_only
    what = "FSDP role directory, LoRA adapters only" if lora else "FSDP role directory"
    draft = Draft(path=path, kind="fsdp-lora" if lora else "fsdp", title=what, evidence=evidence)
    draft.add(Section("", source))
    present = source.files.ranks("model", source.world_size)
    draft.facts["world size"] = f"{source.world_size} (model files of rank {ranges(present) or 'none'})"
    if source.mesh is not None:
        draft.facts["mesh"] = f"{source.mesh} (written by torch {source.mesh.dialect})"
    placements = Counter(t.placement for t in source.tensors.values())
    if placements:
        draft.facts["placements"] = "; ".join(f"{words}: {n:,}" for words, n in placements.most_common())
    for kind, name in (("optim", "optimizer"), ("extra_state", "scheduler and rng")):
        files = source.files.ranks(kind, source.world_size)
        if files:
            size = sum((path / file).stat().st_size for file in files.values() if (path / file).is_file())
            draft.contents.append(Content(name, "", bytes=size, detail=f"{len(files)} {kind} files, not opened"))
    add_lora_meta(draft)
    add_dataloader(draft)
    add_huggingface(draft, layout.V1_HUGGINGFACE, f"the weights are in {len(present)} FSDP shards")
    return draft


def inspect_fsdp_remains(path: Path) -> Draft:
    """Describe a role directory that has ``fsdp_config.json`` and no shard."""
    draft = Draft(path=path, kind="fsdp", title="FSDP role directory without shards", evidence=(fsdp.CONFIG_FILE,))
    config = _object(path / fsdp.CONFIG_FILE)
    world_size = config.get("world_size")
    add_huggingface(draft, layout.V1_HUGGINGFACE, "there are no shards")
    if not any(s.source.tensors for s in draft.sections):
        said = f" of world size {world_size}" if type(world_size) is int else ""
        draft.fault("rank-missing", f"{fsdp.CONFIG_FILE} tells of shards{said}; none is here", hint=OTHER_NODES)
    return draft


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
        draft.facts["written by"] = source.writer
    if source.ranks:
        draft.facts["world size"] = f"data files of {source.ranks} ranks"
    layers = _layers({n: t for n, t in source.tensors.items() if dcp.part_of(n) == "model"})
    if layers:
        draft.facts["layers"] = layers
    optimizer = _optimizer_format(source.tensors.keys() | source.objects.keys())
    if optimizer:
        draft.facts["optimizer"] = optimizer
    iteration = source.common.get("iteration") if source.common else None
    if type(iteration) is int:
        draft.facts["iteration"] = f"{iteration:,} (in {source.common_kind})"


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
    found = {key for key in keys if dcp.part_of(key) == "optimizer"}
    if not found:
        return ""
    if any(".gbuf_idx_" in key for key in found):
        return "dp_reshardable buckets (loads on the same data-parallel layout only)"
    if any(".param_state/" in key for key in found):
        return "dp_zero_gather_scatter (one object a data-parallel group)"
    states = {m[1] for key in found if (m := re.search(r"\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.", key))}
    if "param" in states:
        return "fully_reshardable"
    return "one tensor a parameter" + (f" ({listing(sorted(states))})" if states else "")


def inspect_hf(path: Path, evidence: tuple[str, ...]) -> Draft:
    """Describe a Hugging Face directory."""
    source = hf.open_(path)
    if source.adapter:
        kind, title = "hf-adapter", "PEFT adapter (Hugging Face)"
    elif source.weights:
        kind, title = "huggingface", "Hugging Face model"
    else:
        kind, title = "hf-config", "Hugging Face configuration without weights"
    draft = Draft(path=path, kind=kind, title=title, evidence=evidence)
    draft.add(Section("", source))
    _hf_facts(draft, source)
    if kind == "hf-config":
        draft.note("no-weights", "configuration and tokenizer files only: the weights are somewhere else")
    if kind == "huggingface" and source.config is None:
        draft.note("no-config", "config.json is not here: transformers cannot load the weights without it")
    if source.side_files:
        draft.contents.append(Content("side files", "", detail=listing(source.side_files, 12)))
    return draft


def add_huggingface(draft: Draft, where: str, weights_are: str) -> None:
    """Add a ``huggingface/`` directory below: weights, side files, or a note that it holds neither."""
    path = draft.path / where
    if not path.is_dir():
        return
    source = hf.open_(path)
    if source.weights:
        draft.add(Section(where, source))
    else:
        problems = Section(where, source).source.problems
        draft.problems += problems
        draft.note("side-files-only", f"{where}/ holds Hugging Face side files only; {weights_are}", path=where)
    _hf_facts(draft, source)
    if source.side_files:
        size = sum((path / name).stat().st_size for name in source.side_files if (path / name).is_file())
        draft.contents.append(Content("side files", where, bytes=size, detail=listing(source.side_files, 12)))
    missing = [
        what for what, there in (("config.json", source.config), ("tokenizer", source.has_tokenizer)) if not there
    ]
    if missing:
        draft.note("side-files-missing", f"{where}/ has no {' and no '.join(missing)}", path=where)


def _hf_facts(draft: Draft, source: hf.HfSource) -> None:
    config = source.config or {}
    classes = config.get("architectures")
    names = ", ".join(map(str, classes)) if isinstance(classes, list) else ""
    if config.get("model_type") or names:
        draft.facts["model"] = f"{config.get('model_type', 'no model_type')} ({names or 'no architectures'})"


def add_dataloader(draft: Draft) -> None:
    """Add the dataloader states that lie directly in a directory (never opened)."""
    files = sorted(p for p in draft.path.iterdir() if _DATALOADER.fullmatch(p.name) and p.is_file())
    if files:
        size = sum(file.stat().st_size for file in files)
        draft.contents.append(Content("dataloader state", "", bytes=size, detail=listing([f.name for f in files], 4)))


def add_lora_meta(draft: Draft) -> None:
    """Add rank and alpha of an adapter, from the role or the step directory."""
    for folder in (draft.path, draft.path.parent):
        meta = _object(folder / layout.LORA_META)
        if meta:
            draft.facts["lora"] = f"r {meta.get('r')}, alpha {meta.get('lora_alpha')}, {meta.get('task_type')}"
            return


def _object(path: Path) -> Mapping[str, Any]:
    """Return a small JSON object, or nothing: these files are cross-checks."""
    try:
        return read_object(path)
    except CkpttoolError:
        return {}
