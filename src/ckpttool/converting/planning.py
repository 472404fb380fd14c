"""From an opened archive to a plan: the weight map, the reference, ties, heads, dtypes. Only tied weights are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ckpttool.architectures import find, named
from ckpttool.architectures.family import HEAD, Family
from ckpttool.architectures.model import Model
from ckpttool.architectures.slots import NUMBERS, Slot, take_apart
from ckpttool.converting import heads, settings
from ckpttool.converting.folding import folded
from ckpttool.converting.mapping import Mapped, counts, map_weights, numbered, predictions, without_mtp
from ckpttool.converting.opening import Opened
from ckpttool.converting.reference import Reference
from ckpttool.converting.result import AUTO, Options
from ckpttool.errors import Problem, Unmapped, UsageError
from ckpttool.export import ties
from ckpttool.export.comparing import differing
from ckpttool.export.config import Edits, ModelConfig
from ckpttool.export.precision import KEPT
from ckpttool.plan import Dropped, Target, faults
from ckpttool.reading import Reader
from ckpttool.tensors import CASTABLE, DTYPE_BITS, TensorInfo

QUANTISATION = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class Draft:
    """Targets before they are distributed over files, what is left out, and what the config has to say."""

    family: Family
    model: Model
    targets: tuple[Target, ...]
    dropped: tuple[Dropped, ...]
    edits: Edits
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]


def draft(opened: Opened, like: Reference | None, options: Options) -> Draft:
    """Make every target that the configuration asks for, and check that nothing is lost and nothing missing.

    Raises :class:`Unmapped` with everything that does not fit, :class:`UsageError` where the user has to choose.
    """
    slots, twice = take_apart(opened.tensors)
    left_out = without_mtp(slots) if not options.mtp else []
    family, model = _model(opened, slots, options)
    vision = [slot for key, slot in slots.items() if key.startswith(_VISION)]
    _refuse(opened, family, list(_of_vision(vision)), Mapped(unknown=vision))
    disagreements, stored = counts(family, model, slots)
    config = opened.config
    labels = heads.labels_of(config)
    mapped = map_weights(family, replace(model, sizes={**model.sizes, **stored}), slots, like, labels=labels)
    mapped.dropped += left_out
    head = heads.decide(mapped, config, family, options.architecture)
    _refuse(opened, family, [*twice, *disagreements, *_misfits(mapped), *head.problems], mapped)
    if mapped.undecided:
        raise _undecided(opened, mapped)
    tie = _tie(mapped, opened, head.config, options)
    _refuse(opened, family, [problem for problem in tie.problems if problem.code in _MISSING], mapped)
    _drop_head(mapped, tie)
    if like is not None and not tie.problems:
        _refuse(opened, family, list(_unlike(mapped, like, model, mtp=options.mtp)), mapped)
    targets = _named(_with_dtypes(mapped.targets, like, options), like)
    edits = Edits(
        tie.untie, {**head.fields, **_no_mtp(config, family, options)}, {**head.removed, **_unquantised(targets)}
    )
    notes = [Problem(code="tied", message=note, severity="note") for note in tie.notes]
    problems = (*tie.problems, *faults(targets, mapped.dropped, opened.tensors))
    return Draft(family, model, tuple(targets), tuple(mapped.dropped), edits, problems, tuple(notes))


def _model(opened: Opened, slots: Mapping[str, Slot], options: Options) -> tuple[Family, Model]:
    types = opened.config.model_types
    family = named(options.arch) if options.arch is not None else find(types[0] if types else None, opened.config.path)
    sizes, fields = family.read(opened.config.values, opened.config.path)
    if not options.mtp:
        sizes["mtp"] = 0
    elif fields["mtp"] not in opened.config.values:  # transformers takes 1 then: what is stored decides
        sizes["mtp"] = predictions(slots)
    producer = options.producer
    if producer == AUTO:
        producer = settings.producer(opened.source, opened.tensors) if family.gated_attention else ""
    return family, Model(opened.config.values, sizes, fields, producer, settings.interleaved(opened.source))


def _refuse(opened: Opened, family: Family, problems: list[Problem], mapped: Mapped | None = None) -> None:
    if not problems:
        return
    error = Unmapped(
        f"{opened.source.root}: does not fit the weight map {family.name}; nothing was written",
        code=problems[0].code,
        problems=problems,
    )
    if mapped is not None:
        error.data = {
            "missing": list(mapped.missing),
            "unknown": [slot.stored_as for slot in mapped.unknown],
            "contradictions": [{"message": text, "names": names} for text, names in mapped.contradictions.items()],
        }
    raise error


_MISSING = ("head-missing", "embedding-missing")
_VISION = ("language_model.", "vision_model.", "visual.", "vision_tower.", "vision_projection.", "mm_projector.")


def _of_vision(slots: Iterable[Slot]) -> Iterator[Problem]:
    """Yield the tensors of models of vision and language: the text alone would be half of the model."""
    for text, count in folded(slot.stored_as for slot in slots):
        hint = "A model of vision and language: only models of text are converted."
        yield Problem(code="weight-unknown", message=f"unknown{_times(count)}: {text}", hint=hint)


def _misfits(mapped: Mapped) -> Iterator[Problem]:
    """Yield everything that is missing, unknown or contradictory: few lines, but every name is in one of them."""
    for text, names in mapped.contradictions.items():
        yield Problem(code="shapes-disagree", message=f"{text}: {', '.join(name for name, _ in folded(names))}")
    by_keys: dict[tuple[str, ...], list[str]] = {}
    for name, keys in mapped.missing.items():
        alike = tuple(NUMBERS.sub("*", key) for key in keys) if len(keys) == 1 else keys
        by_keys.setdefault(alike, []).append(name)
    for keys, names in by_keys.items():
        lacking = " and ".join(key for key, _ in folded(keys))
        for text, count in folded(names):
            yield Problem(code="weight-missing", message=f"missing{_times(count)}: {text} (from {lacking})")
    for text, count in folded(slot.stored_as for slot in mapped.unknown):
        yield Problem(code="weight-unknown", message=f"unknown{_times(count)}: {text}", hint=_hint(text))


def _times(count: int) -> str:
    return f", {count:,} of them" if count > 1 else ""


def _hint(name: str) -> str:
    if ".self_attention.linear_qgkv." in name:
        return "Written by Pai-Megatron-Patch, whose layers are not mapped."
    return ""


def _unlike(mapped: Mapped, like: Reference, model: Model, *, mtp: bool) -> Iterator[Problem]:
    """Yield the names that only the reference has, and those that it does not have, and other shapes.

    A head that is missing here is an alias by now.
    """
    written = {target.name: target for target in mapped.targets}
    hint = f"The reference is {like.path} (--like)."
    wanted = like.wanted - written.keys() - {HEAD.name}
    if not mtp:
        wanted = frozenset(name for name in wanted if not _is_of_mtp(name, model))
    for text, count in folded(sorted(wanted)):
        yield Problem(code="only-in-reference", message=f"in the reference only{_times(count)}: {text}", hint=hint)
    for text, count in folded(name for name in written if not like.has(name)):
        yield Problem(code="not-in-reference", message=f"not in the reference{_times(count)}: {text}", hint=hint)
    others: dict[str, list[str]] = {}
    for name, target in written.items():
        shape = like.shape(name)
        if shape is not None and shape != target.shape:
            others.setdefault(f"{list(target.shape)} here, {list(shape)} in the reference", []).append(name)
    for text, names in others.items():
        shown = ", ".join(name for name, _ in folded(names))
        yield Problem(code="shapes-disagree", message=f"{text}: {shown}", hint=hint)


def _is_of_mtp(name: str, model: Model) -> bool:
    """Tell the tensors of multi-token prediction by their names on the hub: layers behind the last one."""
    return name.startswith("mtp.") or any(n >= model.size("layers") for n in numbered([name], r"model\.layers\."))


def _undecided(opened: Opened, mapped: Mapped) -> UsageError:
    keys = ", ".join(text for text, _ in folded(mapped.undecided))
    return UsageError(
        f"{opened.source.root}: {keys} can have its rows in two orders, and nothing tells whose it is",
        hint="Who wrote it? --producer nvidia (Megatron-LM, Bridge, verl, slime) or --producer swift (ms-swift).",
    )


def _tie(mapped: Mapped, opened: Opened, config: ModelConfig, options: Options) -> ties.Tie:
    targets = {target.name: target for target in mapped.targets if not target.twice}
    shown = {name: TensorInfo(name, target.dtype, target.shape, ()) for name, target in targets.items()}

    def differs(a: str, b: str) -> str:
        stored = (replace(opened.tensors[targets[n].parts[0].source], shape=targets[n].shape) for n in (a, b))
        with Reader(opened.source.root) as reader:
            return differing(reader, *stored)

    return ties.decide(shown, config, differs, untie=options.untie, drop_head=options.drop_lm_head)


def _drop_head(mapped: Mapped, tie: ties.Tie) -> None:
    """Leave out the head that ties made an alias, all of its rows by one rule."""
    for drop in tie.dropped:
        source = next(target.parts[0].source for target in mapped.targets if target.name == drop.name)
        mapped.targets = [target for target in mapped.targets if target.name != drop.name]
        mapped.dropped = [cut for cut in mapped.dropped if cut.name != source] + [replace(drop, name=source)]


def is_protected(target: Target, main: str | None) -> bool:
    """Tell what ``--dtype`` does not touch: biases of routers, and what was kept wider than the rest on purpose."""
    if target.name.endswith(KEPT):
        return True
    return main is not None and target.dtype in CASTABLE and DTYPE_BITS[target.dtype] > DTYPE_BITS[main]


def stored_main(targets: Iterable[Target]) -> str | None:
    """Return the plain float that most of the targets are stored in, by bytes."""
    held: Counter[str] = Counter()
    for target in targets:
        if target.dtype in CASTABLE:
            held[target.dtype] += target.nbytes
    return held.most_common(1)[0][0] if held else None


def _with_dtypes(targets: list[Target], like: Reference | None, options: Options) -> list[Target]:
    """Give targets the dtype asked for, or that of the reference; all others keep what they are stored in."""
    main = stored_main(targets)
    return [_with_dtype(target, main, like, options.dtype) for target in targets]


def _with_dtype(target: Target, main: str | None, like: Reference | None, wanted: str | None) -> Target:
    if target.dtype not in CASTABLE:
        return target
    if wanted is not None and not is_protected(target, main):
        return replace(target, dtype=wanted)
    said = like.dtype(target.name) if like is not None else None
    return replace(target, dtype=said) if said is not None else target


def _named(targets: list[Target], like: Reference | None) -> list[Target]:
    """Give targets the names that the reference has."""
    if like is None or not like.renamed:
        return targets
    return [replace(target, name=like.renamed.get(target.name, target.name)) for target in targets]


_MTP_FIELD = "num_nextn_predict_layers"


def _no_mtp(config: ModelConfig, family: Family, options: Options) -> Mapping[str, tuple[int, str]]:
    said = config.values.get(_MTP_FIELD, family.predicts)
    return {_MTP_FIELD: (0, "--no-mtp")} if not options.mtp and said else {}


def _unquantised(targets: list[Target]) -> Mapping[str, str]:
    """Return what the config says of quantisation, which is wrong of weights that are not quantised."""
    if any(target.dtype.startswith(("float8", "float4", "float6")) for target in targets):
        return {}
    return dict.fromkeys(QUANTISATION, "the weights are not quantised")
