"""Role directories of FSDP shards: verl, SkyRL, verl's SFT steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ckpttool import layout
from ckpttool.adapters.found import summary, take_apart
from ckpttool.errors import CkpttoolError
from ckpttool.formats import fsdp
from ckpttool.formats.findings import OTHER_NODES, counted, ranges
from ckpttool.formats.hf import CONFIG
from ckpttool.formats.jsonfile import read_object
from ckpttool.formats.shardfiles import CONFIG_FILE
from ckpttool.inspection.beside import add_dataloader, add_lora_meta, small_object
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Content, Ranks
from ckpttool.inspection.sections import Section


def inspect_fsdp(path: Path, evidence: tuple[str, ...]) -> Draft:
    """Describe a role directory of FSDP shards (verl, SkyRL, verl's SFT steps)."""
    source = fsdp.open_(path)
    lora = source.lora_only
    what = "FSDP shards as accelerate names them" if source.files.models else "FSDP role directory"
    title = f"{what}, LoRA adapters only" if lora else what
    draft = Draft(path=path, kind="fsdp-lora" if lora else "fsdp", title=title, evidence=evidence)
    draft.add(Section("", source))
    present = source.files.ranks("model", source.world_size)
    placements = Counter(t.placement for t in source.tensors.values())
    draft.ranks = _ranks(source, present, placements)
    shown = ranges(present) or "none"
    draft.facts["world size"] = f"{counted(source.world_size, 'rank')} (model files of rank {shown})"
    if source.mesh is not None:
        draft.facts["mesh"] = f"{source.mesh} (written by torch {source.mesh.dialect})"
    if placements:
        draft.facts["placements"] = "; ".join(f"{words}: {n:,}" for words, n in placements.most_common())
    for kind, name in (("optim", "optimizer"), ("extra_state", "scheduler and rng")):
        files = source.files.ranks(kind, source.world_size)
        if files:
            size = sum((path / file).stat().st_size for file in files.values() if (path / file).is_file())
            draft.contents.append(
                Content(name, "", bytes=size, detail=f"{counted(len(files), f'{kind} file')}, not unpickled")
            )
    if not source.files.ranks("optim", source.world_size):
        draft.facts["optimizer"] = "none here: weights only"
    add_lora_meta(draft)
    _add_adapters(draft, source)
    add_dataloader(draft)
    _check_config(draft)
    _add_huggingface(draft, f"the weights are in {counted(len(present), 'FSDP shard')}")
    return draft


def _add_adapters(draft: Draft, source: fsdp.FsdpSource) -> None:
    """Say which adapters of PEFT there are, and that merging them is a choice."""
    if not any(source.part_of(name) == "adapter" for name in source.tensors):
        return
    adapters = take_apart(source.tensors).adapters.values()
    draft.facts["adapters"] = "; ".join(summary(adapter, source.tensors) for adapter in adapters) or "of another kind"
    hint = "ckpttool merge-fsdp asks what is to be written: --lora fuse, adapter or both."
    base = ", without their base model" if source.lora_only else ""
    draft.note("adapters", f"the shards hold adapters of PEFT{base}", hint=hint)


def _ranks(source: fsdp.FsdpSource, present: Iterable[int], placements: Counter[str]) -> Ranks:
    mesh = dict(zip(source.mesh.names, source.mesh.shape, strict=True)) if source.mesh else {}
    missing = source.files.missing("model", source.world_size)
    return Ranks(source.world_size, tuple(sorted(present)), tuple(missing), mesh, dict(placements))


def _check_config(draft: Draft) -> None:
    """Report a config beside the shards, where accelerate's users have it, that mergers could not read."""
    if (draft.path / CONFIG).is_file():
        try:
            read_object(draft.path / CONFIG)
        except CkpttoolError as error:
            draft.fault(error.code, error.message, path=CONFIG, hint=error.hint)


def inspect_fsdp_remains(path: Path) -> Draft:
    """Describe a role directory that has ``fsdp_config.json`` and no shard."""
    draft = Draft(path=path, kind="fsdp", title="FSDP role directory without shards", evidence=(CONFIG_FILE,))
    config = small_object(path / CONFIG_FILE)
    world_size = config.get("world_size")
    _add_huggingface(draft, "there are no shards")
    if not any(s.source.tensors for s in draft.sections):
        said = f" of world size {world_size}" if type(world_size) is int else ""
        draft.fault("rank-missing", f"{CONFIG_FILE} tells of shards{said}; none is here", hint=OTHER_NODES)
    return draft


def _add_huggingface(draft: Draft, weights_are: str) -> None:
    """Add the side files; verl's migration script takes such a role for Megatron and moves them."""
    for where in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE):
        if (draft.path / where).is_dir():
            from ckpttool.inspection.huggingface import add_huggingface

            add_huggingface(draft, where, weights_are)
            if where == layout.HUGGINGFACE:
                hint = f"Move it back to {layout.V1_HUGGINGFACE}/, where mergers of FSDP shards look for it."
                draft.note("misplaced", f"{where}/ is Megatron's place, this role is FSDP", path=where, hint=hint)
