"""From an opened archive to a plan: the weight map, the reference, ties, heads, dtypes. Only tied weights are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from ckpttool.architectures import FAMILIES, NAMES, find, named
from ckpttool.architectures.family import Family
from ckpttool.architectures.model import NVIDIA, Model
from ckpttool.architectures.rules import Contradiction
from ckpttool.architectures.slots import Slot, take_apart
from ckpttool.converting import settings
from ckpttool.converting.adapting import Fusions, find_fusions
from ckpttool.converting.mapping import Mapped, counts, map_weights, predictions, without_mtp
from ckpttool.converting.misfits import VISION, listed, misfits, of_vision, refuse_if_any, refuse_unlike
from ckpttool.converting.opening import Opened
from ckpttool.converting.result import AUTO, Options
from ckpttool.errors import Problem, Unmapped, UsageError
from ckpttool.export import heads, ties
from ckpttool.export.comparing import differing
from ckpttool.export.config import Edits, ModelConfig, unquantised
from ckpttool.export.outputs import main_dtype
from ckpttool.export.precision import is_kept
from ckpttool.formats.folding import folded
from ckpttool.naming.matching import Allowed, Match
from ckpttool.naming.reference import Reference
from ckpttool.naming.reporting import Names, prefixed
from ckpttool.plan import Dropped, Target, faults
from ckpttool.reading import Reader
from ckpttool.tensors import CASTABLE, DTYPE_BITS, TensorInfo


@dataclass(frozen=True, slots=True)
class Draft:
    """Targets before they are distributed over files, what is left out, and what the config has to say.

    ``orders`` say which rows were put in order and how that is known; ``confirmed`` is whether the run itself says how
    many heads it had; ``fusions`` is what adapters change.
    """

    family: Family
    model: Model
    targets: tuple[Target, ...]
    dropped: tuple[Dropped, ...]
    edits: Edits
    config: ModelConfig
    value_head: int
    names: Names | None
    orders: tuple[str, ...]
    confirmed: bool
    fusions: Fusions
    problems: tuple[Problem, ...]
    notes: tuple[Problem, ...]


def draft(opened: Opened, like: Reference | None, options: Options) -> Draft:
    """Make every target that the configuration asks for, and check that nothing is lost and nothing missing.

    Raises :class:`Unmapped` with everything that does not fit, :class:`UsageError` where the user has to choose.
    """
    slots, twice = take_apart(opened.tensors)
    vision = [slot for key, slot in slots.items() if key.startswith(VISION)]
    run, left_out = settings.read_settings(opened.source), [] if options.mtp else without_mtp(slots)
    family, model, orders, notes = _model(opened, slots, run, options)
    refuse_if_any(opened, family, list(of_vision(vision)), {"unknown": [slot.stored_as for slot in vision]})
    mapped, disagreements = _mapped(opened.config, family, model, slots, run, like)
    mapped.dropped += left_out
    shapes = {target.name: target.shape for target in mapped.targets}
    head = heads.decide(shapes, opened.config, options.architecture)
    doubts = [*twice, *disagreements, *misfits(mapped), *head.problems]
    if doubts:
        fitting = _fitting(opened.config, slots, run) if mapped.missing or mapped.unknown else ()
        refuse_if_any(opened, family, doubts, listed(mapped), fitting=fitting)
    if mapped.undecided:
        raise _undecided(opened, mapped)
    fusions = find_fusions(opened, model, run, options)
    mapped.dropped += fusions.dropped
    tie, unlike = _tie(mapped, opened, fusions, head.config, options), Match()
    refuse_if_any(opened, family, [problem for problem in tie.problems if problem.code in _MISSING])
    _drop_head(mapped, tie)
    if like is not None and not tie.problems:
        allowed = Allowed(options.allow_missing, options.allow_extra)
        unlike = refuse_unlike(opened, family, mapped, like, model, mtp=options.mtp, allowed=allowed)
    targets = _named(_with_dtypes(mapped.targets, like, options), like)
    notes += [Problem(code="tied", message=note, severity="note") for note in tie.notes]
    return Draft(
        family=family,
        model=model,
        targets=tuple(targets),
        dropped=tuple(mapped.dropped),
        edits=_edits(opened.config, family, tie, head, targets, options),
        config=head.config,
        value_head=mapped.value_head,
        names=None if like is None else prefixed(like, mapped.targets, unlike),
        orders=orders,
        confirmed=all(name in run.values for name in ("num_attention_heads", "num_query_groups")),
        fusions=fusions,
        problems=(*tie.problems, *faults(targets, mapped.dropped, opened.sources, fusions.by_source)),
        notes=(*notes, *head.notes, *run.notes(opened.config), *_about_mtp(model, opened.config)),
    )


def _mapped(
    config: ModelConfig,
    family: Family,
    model: Model,
    slots: Mapping[str, Slot],
    run: settings.Settings,
    like: Reference | None,
) -> tuple[Mapped, list[Problem]]:
    """Return what the weight map makes of the slots, and where checkpoint, run and configuration disagree.

    Where they disagree about numbers of layers or experts, what else there is to say is said of those that are stored.
    """
    disagreements, stored = counts(family, model, slots)
    if family.groups_rows:
        disagreements += run.row_faults(model)
    counted = replace(model, sizes={**model.sizes, **stored})
    return map_weights(family, counted, slots, like, labels=heads.labels_of(config)), disagreements


def _fitting(config: ModelConfig, slots: Mapping[str, Slot], run: settings.Settings) -> tuple[str, ...]:
    """Return the weight maps that would take every slot and lack none: what the checkpoint may be instead."""
    names = []
    for family in FAMILIES:
        with suppress(Unmapped, Contradiction):
            sizes, fields = family.read(config.values, config.path)
            model = Model(config.values, sizes, fields, NVIDIA, run.interleaved)
            if counts(family, model, slots)[0]:
                continue
            mapped = map_weights(family, model, slots, None, labels=heads.labels_of(config))
            if not (mapped.missing or mapped.unknown or mapped.contradictions):
                names.append(family.name)
    return tuple(names)


def _edits(
    config: ModelConfig, family: Family, tie: ties.Tie, head: heads.Head, targets: list[Target], options: Options
) -> Edits:
    fields = {**head.fields, **_no_mtp(config, family, options)}
    return Edits(tie.untie, fields, {**head.removed, **unquantised(targets)})


def _model(
    opened: Opened, slots: Mapping[str, Slot], run: settings.Settings, options: Options
) -> tuple[Family, Model, tuple[str, ...], list[Problem]]:
    """Return the family and what is known of the model, how rows are put in order, and what is doubtful in that."""
    family = _family(opened.config, options)
    sizes, fields = family.read(opened.config.values, opened.config.path)
    if not options.mtp:
        sizes["mtp"] = 0
    elif fields["mtp"] not in opened.config.values:  # transformers takes 1 then: what is stored decides
        sizes["mtp"] = predictions(slots)
    producer, orders, doubts = _producer(opened, options) if family.gated_attention else ("", [], [])
    if sizes.get("experts"):
        orders += [
            f"{name.removesuffix('_glu_interleave_size')}: gate and up rows taken apart, which lie in blocks of "
            f"{size} ({run.places[name]})"
            for name, size in run.interleaved.items()
        ]
    model = Model(opened.config.values, sizes, fields, producer, run.interleaved)
    return family, model, tuple(orders), doubts


def _family(config: ModelConfig, options: Options) -> Family:
    if options.arch is not None:
        return named(options.arch)
    types = config.model_types
    known = bool(types) and types[0] in NAMES
    if not known and any(name in config.values for name in ("vision_config", "audio_config")):
        raise Unmapped(
            f"{config.path}: {types[0] if types else 'a model'} is a model of vision or audio and language",
            hint="Only models of text are converted.",
            code="unknown-architecture",
        )
    return find(types[0] if types else None, config.architectures, config.path)


def _producer(opened: Opened, options: Options) -> tuple[str, list[str], list[Problem]]:
    """Return whose order the rows of gated attention have, how that is known, and a note where keys say otherwise."""
    by_keys = settings.producer_by_keys(opened.tensors)
    found, why = (by_keys, "its keys") if by_keys else settings.producer_by_files(opened.source)
    doubts = []
    if options.producer != AUTO:
        if by_keys and by_keys != options.producer:
            message = f"--producer {options.producer}, but the keys of the archive are those of {by_keys}"
            doubts.append(Problem(code="producer-disagrees", message=message, severity="note"))
        found, why = options.producer, "--producer"
    return found, [f"queries and gates as {found} keeps them (by {why})"] if found else [], doubts


def _about_mtp(model: Model, config: ModelConfig) -> Iterator[Problem]:
    """Tell what transformers will say of layers that it does not load."""
    if not model.size("mtp"):
        return
    silent = "" if model.fields["mtp"] in config.values else f" (config.json has no {model.fields['mtp']})"
    message = (
        f"multi-token prediction is written{silent}; transformers calls such tensors unexpected when it loads the "
        "model, and does not use them"
    )
    hint = "To leave them out: --no-mtp. Servers that want copies of embeddings and head in them: --like."
    yield Problem(code="mtp", message=message, hint=hint, severity="note")


_MISSING = ("head-missing", "embedding-missing")


def _undecided(opened: Opened, mapped: Mapped) -> UsageError:
    keys = ", ".join(text for text, _ in folded(mapped.undecided))
    return UsageError(
        f"{opened.source.root}: {keys} can have its rows in two orders, and nothing tells whose it is",
        hint="Who wrote it? --producer nvidia (Megatron-LM, Bridge, verl, slime) or --producer swift (ms-swift).",
    )


def _tie(mapped: Mapped, opened: Opened, fusions: Fusions, config: ModelConfig, options: Options) -> ties.Tie:
    targets = {target.name: target for target in mapped.targets if not target.twice}
    shown = {name: TensorInfo(name, target.dtype, target.shape, ()) for name, target in targets.items()}

    def differs(a: str, b: str) -> str:
        if fused := [n for n in (a, b) if targets[n].parts[0].source in fusions.by_source]:
            return f"an adapter is fused into {' and '.join(fused)}"
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
    if is_kept(target.name):
        return True
    return main is not None and target.dtype in CASTABLE and DTYPE_BITS[target.dtype] > DTYPE_BITS[main]


def _with_dtypes(targets: list[Target], like: Reference | None, options: Options) -> list[Target]:
    """Give targets the dtype asked for, or that of the reference; all others keep what they are stored in."""
    main = main_dtype(targets, lambda _target: False)
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
