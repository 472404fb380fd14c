"""What only the user can say of adapters, and which adapters are refused, with all reasons."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ckpttool.adapters import found, settings
from ckpttool.adapters.found import Adapted, Adapter
from ckpttool.adapters.settings import Settings
from ckpttool.errors import BrokenCheckpoint, Problem, Unmapped, UsageError
from ckpttool.export.result import FUSE
from ckpttool.formats.findings import Findings, counted, listing
from ckpttool.formats.folding import folded
from ckpttool.merging.result import Options
from ckpttool.tensors import TensorInfo


def choose(role: Path, parts: Adapted, tensors: Mapping[str, TensorInfo], options: Options) -> list[Adapter]:
    """Return the adapters that are meant.

    Raises :class:`UsageError` with the choice where that is not clear or where a base is wanting,
    :class:`BrokenCheckpoint` for adapters that lack something, :class:`Unmapped` for those that are no LoRA.
    """
    if parts.foreign or not parts.adapters:
        raise _no_lora(role, parts)
    if options.lora is None:
        raise _undecided(role, parts, tensors)
    chosen, fuse = _chosen(role, parts, options), options.lora in FUSE
    if fuse and parts.alone and options.base is None:
        raise UsageError(
            f"{role}: the adapters were saved without their base model",
            hint="Name the directory of that model: --base MODEL_DIR; or write the adapter alone: --lora adapter.",
        )
    if options.base is not None and not (fuse and parts.alone):
        why = "the base model is in the shards" if fuse else "--lora adapter needs none"
        raise UsageError(f"--base {options.base}: {why}")
    refuse_if_any(role, found.faults(parts, chosen, fuse=fuse))
    return chosen


def _chosen(role: Path, parts: Adapted, options: Options) -> list[Adapter]:
    """Return the adapters that are meant; raises :class:`UsageError` where that is not clear."""
    there = parts.adapters
    unknown = [name for name in options.adapters if name not in there]
    if unknown:
        raise UsageError(f"--adapter {unknown[0]}: no such adapter; there is {listing(there)}")
    if not options.adapters and len(there) > 1:
        raise UsageError(
            f"{role}: has {len(there)} adapters: {listing(there)}",
            hint=f"Choose: {' or '.join(f'--adapter {name}' for name in there)}; several can be given.",
        )
    names_ = dict.fromkeys(options.adapters) or there
    unsafe = [name for name in names_ if not settings.is_name(name)]
    if unsafe:
        message = f"{role}: an adapter is called {unsafe[0]!r}, which no directory can be"
        raise BrokenCheckpoint(message, code="adapter-name")
    return [there[name] for name in names_]


def _undecided(role: Path, parts: Adapted, tensors: Mapping[str, TensorInfo]) -> UsageError:
    """Return the error that explains what lies here and which choice there is."""
    needs = "; it lies elsewhere, so --base MODEL_DIR is needed, too" if parts.alone else ""
    return UsageError(
        f"{role}: the shards of a PEFT model, with {counted(parts.count, 'tensor')} of adapters; say what is to be "
        "written of it: --lora",
        hint=f"--lora fuse     a whole model with the adapter in its weights{needs}\n"
        "--lora adapter  the adapter alone, as peft, vLLM and SGLang load it beside its base model\n"
        "--lora both     the fused model, and the adapter in a directory inside",
        problems=[
            Problem(code="adapters", message=found.summary(adapter, tensors), severity="note")
            for adapter in parts.adapters.values()
        ],
    )


def _no_lora(role: Path, parts: Adapted) -> Unmapped:
    foreign = [text for text, _ in folded(parts.foreign)]
    what = f"adapters that are no LoRA: {listing(foreign)}" if foreign else "names of PEFT, but no adapter"
    return Unmapped(
        f"{role}: {what}",
        hint="LoRA, DoRA and modules_to_save are known here. PEFT itself can fuse others: merge_and_unload().",
        code="adapter-kind",
    )


def check_kinds(role: Path, said: Sequence[tuple[Adapter, Settings]], options: Options) -> None:
    """Raise :class:`Unmapped` for adapters that cannot be fused like LoRA, or not into the base that is given.

    Raises :class:`BrokenCheckpoint` where what is said of DoRA is not what is stored.
    """
    for adapter, its in said:
        if options.lora in FUSE and its.unusual:
            raise Unmapped(
                f"{its.where}: the adapter {adapter.name} has {listing(its.unusual)}: it is no plain LoRA to fuse",
                hint="Write it alone: --lora adapter; or fuse it with peft itself.",
                code="adapter-kind",
            )
        if options.base is not None and its.changed_base:
            raise Unmapped(
                f"{its.where}: training began with {its.changed_base}, which takes out of the base what the adapter "
                "begins with: the model on the hub is not its base",
                hint="Fuse it into the base that the training saved, with a configuration that says so.",
                code="adapter-kind",
            )
    refuse_if_any(role, list(_dora_faults(said)))


def _dora_faults(said: Iterable[tuple[Adapter, Settings]]) -> Iterator[Problem]:
    """Yield where ``use_dora`` and the magnitudes that are stored contradict one another."""
    problems = Findings(most=1 << 30)
    for adapter, its in said:
        wanted = its.config.get("use_dora")
        for layer in adapter.layers.values() if isinstance(wanted, bool) else ():
            if wanted != bool(layer.magnitude):
                there = "a magnitude" if layer.magnitude else "no lora_magnitude_vector"
                text = f"has {there}, and {its.where} has use_dora {json.dumps(wanted)}"
                problems.group("settings-disagree", text, layer.plain)
    yield from problems.all()


def refuse_if_any(role: Path, problems: Sequence[Problem]) -> None:
    """Raise :class:`BrokenCheckpoint` with all problems of adapters, if there are any."""
    if problems:
        raise BrokenCheckpoint(
            f"{role}: its adapters do not fit; nothing was written", code=problems[0].code, problems=problems
        )
