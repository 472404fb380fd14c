"""What becomes of the adapters in a save: fused into the model, written alone, or both; and of what base model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpttool.adapters import found, fusion, writing
from ckpttool.adapters.found import Adapted, Adapter
from ckpttool.adapters.fusion import CONV1D, Fusions
from ckpttool.adapters.settings import FOLDER, Given, Settings, read_settings
from ckpttool.errors import Problem
from ckpttool.export.config import ModelConfig
from ckpttool.export.result import FUSE, Fused
from ckpttool.formats.hf import ADAPTER_CONFIG
from ckpttool.formats.peftnames import has_adapters
from ckpttool.lowrank import Fusion
from ckpttool.merging.asking import check_kinds, choose, refuse_if_any
from ckpttool.merging.parameters import finders
from ckpttool.merging.result import Options
from ckpttool.naming.rules import Move, candidates, moves_for
from ckpttool.plan import Dropped
from ckpttool.tensors import TensorInfo

PART_OF_THE_MODEL = frozenset({"phi4mm"})
"""Model types whose own code has adapters in it: they are weights like any other."""


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter to write: its folder in the output, names of its file by sources, its configuration."""

    folder: str
    names: Mapping[str, str]
    config: bytes


@dataclass(frozen=True, slots=True)
class Weights:
    """What a save is to become: the model by the names of training, what is fused into it, adapters to write.

    ``sources`` are all tensors, those of the model under the same names; ``adapters`` tells of each that is written or
    fused, ``copies`` are the weights of the model that are whole copies, ``dtypes`` those of the base in their place.
    """

    sources: Mapping[str, TensorInfo]
    model: Mapping[str, TensorInfo]
    fusions: Mapping[str, Fusion] = field(default_factory=dict)
    files: tuple[AdapterFile, ...] = ()
    adapters: tuple[Fused, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    notes: tuple[Problem, ...] = ()
    base: bool = False
    dtypes: Mapping[str, str] = field(default_factory=dict)
    copies: frozenset[str] = frozenset()


def is_adapted(tensors: Iterable[str], config: ModelConfig | None) -> bool:
    """Tell whether a save is that of a PEFT model."""
    own = config is not None and any(kind in PART_OF_THE_MODEL for kind in config.model_types)
    return not own and has_adapters(tensors)


def plain_weights(tensors: Mapping[str, TensorInfo]) -> Weights:
    """Return what a save without adapters becomes."""
    return Weights(tensors, tensors)


def adapt(
    role: Path,
    roles: tuple[Path, ...],
    tensors: Mapping[str, TensorInfo],
    base: Mapping[str, TensorInfo] | None,
    config: ModelConfig | None,
    options: Options,
) -> Weights:
    """Decide what every tensor of a PEFT model becomes; ``base`` are the weights that lie elsewhere.

    Raises :class:`UsageError` for what the user has to say, :class:`BrokenCheckpoint` with everything that does not
    fit, :class:`Unmapped` for adapters that are no LoRA.
    """
    parts = found.take_apart(tensors)
    chosen = choose(role, parts, tensors, options)
    given = Given(options.lora_alpha, options.adapter_config, roles)
    said = [(a, read_settings(given, a.name, several=len(parts.adapters) > 1)) for a in chosen]
    check_kinds(role, said, options)
    kinds = config.model_types if config is not None else ()
    model = _model(parts, tensors) if base is None else dict(base)
    if base is None and parts.alone:
        fusions = fusion.alone(said, tensors)
    else:
        conv1d = any(kind in CONV1D for kind in kinds) if kinds else None
        fusions = fusion.fusions(said, tensors, *finders(model, kinds), conv1d=conv1d)
    refuse_if_any(role, list(fusions.problems.all()))
    files = tuple(_files(parts, said, fusions, config, options)) if options.lora != "fuse" else ()
    made = Weights(
        sources=tensors,
        model={},
        files=files,
        adapters=tuple(_told(a, its, fusions) for a, its in said),
        dropped=tuple(_dropped(parts, chosen, files, fuse=options.lora in FUSE)),
        notes=tuple(_notes(said, options)),
        base=base is not None,
    )
    copies = _copies(chosen, model, moves_for(kinds) if base is not None else ())
    return _fused(made, parts, model, copies, fusions) if options.lora in FUSE else made


def _fused(
    made: Weights, parts: Adapted, model: Mapping[str, TensorInfo], copies: Mapping[str, str], fusions: Fusions
) -> Weights:
    """Return the same with a whole model: its weights under plain names, whole copies in their places."""
    taken = {*parts.base, *parts.original, *copies.values()}
    beside = {name for file in made.files for name in file.names} | {drop.name for drop in made.dropped}
    whole = {**model, **{name: replace(made.sources[copy], name=name) for name, copy in copies.items()}}
    others = {name: tensor for name, tensor in made.sources.items() if name in beside or name not in taken}
    return replace(
        made,
        sources={**whole, **others},
        model=whole,
        fusions=fusions.by_source,
        dtypes={name: model[name].dtype for name in copies if name in model} if made.base else {},
        copies=frozenset(copies),
    )


def _model(parts: Adapted, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of the base model by plain names."""
    stored = (*parts.base.items(), *parts.original.items())
    return {plain: replace(tensors[name], name=plain) for name, plain in stored}


def _copies(chosen: Iterable[Adapter], model: Mapping[str, TensorInfo], moves: Sequence[Move]) -> dict[str, str]:
    """Return the whole copies of the chosen adapters by the names of what they replace, or else by their own."""
    copies = {}
    for plain, name in (item for adapter in chosen for item in adapter.saved.items()):
        there = (candidate.name for candidate in candidates(plain, moves) if candidate.name in model)
        copies[next(there, plain)] = name
    return copies


def _files(
    parts: Adapted,
    said: list[tuple[Adapter, Settings]],
    fusions: Fusions,
    config: ModelConfig | None,
    options: Options,
) -> Iterator[AdapterFile]:
    named = config.values.get("_name_or_path") if config is not None else None
    base = options.base or (named if isinstance(named, str) and named else None)
    for adapter, its in said:
        folder = "".join([f"{FOLDER}/" if options.lora == "both" else "", f"{adapter.name}/" if len(said) > 1 else ""])
        made = writing.config_bytes(adapter, parts, its, fusions, base)
        yield AdapterFile(folder, writing.tensors(adapter, parts, its), made)


def _told(adapter: Adapter, its: Settings, fusions: Fusions) -> Fused:
    layers = adapter.layers.values()
    return Fused(
        name=adapter.name,
        layers=len(layers),
        tensors=len(list(adapter.tensors)),
        ranks=tuple(sorted({fusions.ranks[layer.down] for layer in layers if layer.down in fusions.ranks})),
        alpha=its.alpha,
        alphas=dict(its.alphas),
        rslora=its.rslora,
        dora=adapter.dora,
        task_type=its.task_type,
        copies=tuple(sorted(adapter.saved)),
        settings=its.where,
    )


def _dropped(parts: Adapted, chosen: list[Adapter], files: Iterable[AdapterFile], *, fuse: bool) -> Iterator[Dropped]:
    """Yield what is not written, not even with an adapter in one of its ``files``, and by which rule."""
    copied = {plain for adapter in chosen for plain in adapter.saved}
    for name, plain in parts.original.items():
        if plain in copied or not fuse:
            yield Dropped(name, "original-module", "the trained copy takes its place")
    if not fuse:
        reason = "--lora adapter: the base model is not written"
        kept = {name for file in files for name in file.names}
        yield from (Dropped(name, "base-model", reason) for name in parts.base if name not in kept)
    for adapter in parts.adapters.values():
        if adapter not in chosen:
            reason = f"of the adapter {adapter.name}, which --adapter does not name"
            yield from (Dropped(name, "adapter-not-chosen", reason) for name in adapter.tensors)


def _notes(said: list[tuple[Adapter, Settings]], options: Options) -> Iterator[Problem]:
    for adapter, its in said:
        if not its.config:
            message = (
                f"{adapter.name}: no {ADAPTER_CONFIG} says otherwise, so the scale is alpha / r "
                f"(alpha {its.alpha:g}, {its.where})"
            )
            hint = "Was it trained with use_rslora or an alpha_pattern? Name the file that says so: --adapter-config."
            yield Problem(code="adapter-settings", message=message, hint=hint, severity="note")
        if its.changed_base and options.lora != "fuse":
            message = (
                f"{adapter.name}: training began with {its.changed_base}: it fits the base that was saved then alone"
            )
            yield Problem(code="adapter-base", message=message, severity="note")
    if options.lora == "both":
        message = f"{FOLDER}/ belongs on the base model, not on what is written beside it, which has it in its weights"
        yield Problem(code="adapter-beside", message=message, severity="note")
