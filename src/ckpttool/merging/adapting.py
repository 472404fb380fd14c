"""What becomes of the adapters in a save: fused into the model, written alone, or both; and of what base model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpttool.adapters import found, fusion, settings, writing
from ckpttool.adapters.found import Adapted, Adapter
from ckpttool.adapters.fusion import CONV1D, Fusions, Parameter, Part
from ckpttool.adapters.settings import FOLDER, Given, Settings, read_settings
from ckpttool.errors import BrokenCheckpoint, Problem, Unmapped, UsageError
from ckpttool.export.config import ModelConfig
from ckpttool.export.result import FUSE, Fused
from ckpttool.formats.findings import Findings, counted, listing
from ckpttool.formats.folding import folded
from ckpttool.formats.hf import ADAPTER_CONFIG
from ckpttool.formats.peftnames import has_adapters
from ckpttool.lowrank import Fusion
from ckpttool.merging.result import Options
from ckpttool.naming import experts
from ckpttool.naming.rules import Move, candidates, moves_for
from ckpttool.plan import Dropped
from ckpttool.tensors import Index, TensorInfo

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
    if parts.foreign or not parts.adapters:
        raise _no_lora(role, parts)
    if options.lora is None:
        raise _undecided(role, parts, tensors)
    chosen = _chosen(role, parts, options)
    fuse = options.lora in FUSE
    problems = found.faults(parts, chosen, fuse=fuse)
    if fuse and parts.alone and base is None:
        raise UsageError(
            f"{role}: the adapters were saved without their base model",
            hint="Name the directory of that model: --base MODEL_DIR; or write the adapter alone: --lora adapter.",
        )
    if base is not None and not (fuse and parts.alone):
        why = "the base model is in the shards" if fuse else "--lora adapter needs none"
        raise UsageError(f"--base {options.base}: {why}")
    _refuse(role, problems)
    given = Given(options.lora_alpha, options.adapter_config, roles)
    said = [(a, read_settings(given, a.name, several=len(parts.adapters) > 1)) for a in chosen]
    _check_kinds(said, fuse=fuse, elsewhere=base is not None)
    _refuse(role, list(_dora_faults(said)))
    kinds = config.model_types if config is not None else ()
    model = _model(parts, tensors) if base is None else dict(base)
    copies = _copies(chosen, model, moves_for(kinds) if base is not None else ())
    if base is None and parts.alone:
        fusions = fusion.alone(said, tensors)
    else:
        turned = any(kind in CONV1D for kind in kinds) if kinds else None
        fusions = fusion.fusions(said, tensors, *_finders(model, kinds), conv1d=turned)
    taken = {*parts.base, *parts.original, *copies.values()}
    dtypes = {name: model[name].dtype for name in copies if name in model} if base is not None else {}
    model |= {name: replace(tensors[copy], name=name) for name, copy in copies.items()}
    _refuse(role, list(fusions.problems.all()))
    files = tuple(_files(parts, said, fusions, config, options)) if options.lora != "fuse" else ()
    written = {name for file in files for name in file.names}
    dropped = tuple(_dropped(parts, chosen, written, fuse=fuse))
    sources = dict(tensors)
    if fuse:
        beside = {*written, *(drop.name for drop in dropped)}
        sources = {**model, **{name: t for name, t in tensors.items() if name in beside or name not in taken}}
    return Weights(
        sources=sources,
        model=model if fuse else {},
        fusions=fusions.by_source if fuse else {},
        files=files,
        adapters=tuple(_told(a, its, fusions) for a, its in said),
        dropped=dropped,
        notes=tuple(_notes(said, options)),
        base=base is not None,
        dtypes=dtypes,
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


def _finders(
    model: Mapping[str, TensorInfo], kinds: tuple[str, ...]
) -> tuple[fusion.Parameters, Callable[[str], Iterable[str]]]:
    """Return what finds a parameter of training among these tensors, and what lists those right below a module."""
    moves = moves_for(kinds)
    modules: dict[str, list[str]] = {}
    for name in model:
        modules.setdefault(name.rpartition(".")[0], []).append(name)

    def parameters(name: str) -> Parameter | None:
        for candidate in candidates(name, moves):
            if candidate.name in model:
                return Parameter(model[candidate.name].shape, (Part(candidate.name),))
            packed = experts.packed(candidate.name)
            naming = experts.naming_of(packed.prefix, model) if packed is not None else None
            if packed is not None and naming is not None:
                return _one_by_one(packed, naming, model)
        return None

    def below(module: str) -> list[str]:
        return [*modules.get(module, ()), *(f"{module}.{name}" for name in (experts.GATE_UP, experts.DOWN))]

    return parameters, lambda module: dict.fromkeys(below(module))


def _one_by_one(
    packed: experts.Packed, naming: tuple[str, str, str], model: Mapping[str, TensorInfo]
) -> Parameter | None:
    """Return packed experts of training that are stored one by one."""
    parts: list[Part] = []
    count = len(list(experts.numbered(packed.prefix, model, naming)))
    shape: Index = ()
    for expert in range(count):
        for half in range(packed.halves):
            tensor = model.get(packed.single(naming, expert, half))
            if tensor is None or len(tensor.shape) != 2 or (shape and tensor.shape != shape):
                return None
            shape = tensor.shape
            parts.append(Part(tensor.name, (expert,), half * shape[0]))
    return Parameter((count, packed.halves * shape[0], shape[1]), tuple(parts)) if parts else None


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


def _check_kinds(said: Iterable[tuple[Adapter, Settings]], *, fuse: bool, elsewhere: bool) -> None:
    """Raise :class:`Unmapped` for adapters that cannot be fused like LoRA, or not into the base that is given."""
    for adapter, its in said:
        if fuse and its.unusual:
            raise Unmapped(
                f"{its.where}: the adapter {adapter.name} has {listing(its.unusual)}: it is no plain LoRA to fuse",
                hint="Write it alone: --lora adapter; or fuse it with peft itself.",
                code="adapter-kind",
            )
        if elsewhere and its.changed_base:
            raise Unmapped(
                f"{its.where}: training began with {its.changed_base}, which takes out of the base what the adapter "
                "begins with: the model on the hub is not its base",
                hint="Fuse it into the base that the training saved, with a configuration that says so.",
                code="adapter-kind",
            )


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


def _refuse(role: Path, problems: list[Problem]) -> None:
    if problems:
        raise BrokenCheckpoint(
            f"{role}: its adapters do not fit; nothing was written", code=problems[0].code, problems=problems
        )


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
        ranks = {layer.plain: fusions.ranks.get(layer.down, 0) for layer in adapter.layers.values()}
        turned = any(layer.down in fusions.turned for layer in adapter.layers.values())
        made = writing.config_bytes(adapter, parts, its, ranks, experts=fusions.experts, turned=turned, base=base)
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


def _dropped(parts: Adapted, chosen: list[Adapter], kept: Iterable[str], *, fuse: bool) -> Iterator[Dropped]:
    """Yield what is not written, by which rule; ``kept`` is written with an adapter."""
    copied = {plain for adapter in chosen for plain in adapter.saved}
    for name, plain in parts.original.items():
        if plain in copied or not fuse:
            yield Dropped(name, "original-module", "the trained copy takes its place")
    if not fuse:
        reason = "--lora adapter: the base model is not written"
        kept = set(kept)
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
