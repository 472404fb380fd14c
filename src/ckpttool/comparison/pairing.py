"""Bring two sides under one set of names: as they are stored, or through the plans of the converters.

Two Megatron archives are compared tensor by layer and expert, whatever dialect their keys are in. Where one side is
Megatron's alone, its weight map makes the targets that a conversion would write; where names differ otherwise (of
training, of the hub), the rules of ``--like`` bring A under those of B.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpttool.architectures.slots import PREFIXES, Slot, take_apart
from ckpttool.comparison.result import Options
from ckpttool.comparison.sides import Opened
from ckpttool.comparison.values import Stock
from ckpttool.converting import planning
from ckpttool.converting.choosing import find_side_folder
from ckpttool.converting.opening import open_archive
from ckpttool.converting.result import AUTO
from ckpttool.converting.result import Options as ConvertOptions
from ckpttool.errors import BrokenCheckpoint, Problem, Unmapped, UsageError
from ckpttool.export.config import ModelConfig
from ckpttool.export.ties import decide, heads_of
from ckpttool.formats.findings import counted
from ckpttool.formats.folding import folded
from ckpttool.merging.serving import sizes_of
from ckpttool.naming.following import follow
from ckpttool.naming.matching import ANY
from ckpttool.naming.reference import Reference, as_mapped
from ckpttool.plan import Dropped, Target, faults, whole
from ckpttool.tensors import TensorInfo

_HALVES = ("_w", "_v")
"""How keys of gate and up end where a gated projection is stored as two."""


@dataclass(frozen=True, slots=True)
class Laid:
    """One side under the names of the comparison: targets in their own dtypes, and where these come from.

    ``aliases`` are names that a tied model stores once: what they are another name of.
    """

    stock: Stock
    targets: Mapping[str, Target]
    aliases: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Both sides, how they were made comparable in one line, and what is to be said of that."""

    a: Laid
    b: Laid
    plan: str = ""
    notes: tuple[Problem, ...] = ()


def pair(a: Opened, b: Opened, options: Options) -> Pairing:
    """Lay out both sides; raises :class:`Unmapped` where no weight map fits, :class:`UsageError` for a choice."""
    if a.megatron and b.megatron:
        return Pairing(_unstacked(a), _unstacked(b))
    if a.megatron:
        laid, plan, notes = _converted(a, b, options)
        return Pairing(laid, _with_aliases(_plain(b), b.config, laid), plan, notes)
    if b.megatron:
        laid, plan, notes = _converted(b, a, options)
        return Pairing(_with_aliases(_plain(a), a.config, laid), laid, plan, notes)
    mine, theirs, plan, notes = _followed(a, b)
    return Pairing(_with_aliases(mine, a.config, theirs), _with_aliases(theirs, b.config, mine), plan, notes)


def _plain(side: Opened) -> Laid:
    return Laid(side.stock, {name: whole(tensor) for name, tensor in side.tensors.items()})


def _unstacked(side: Opened) -> Laid:
    """Lay out an archive of Megatron, a target for every layer and expert; other parts than the model as they are."""
    of_model = {name: tensor for name, tensor in side.tensors.items() if not _is_state(name)}
    slots, twice = take_apart(of_model)
    if twice:
        raise BrokenCheckpoint(f"{side.found.path}: cannot be compared", code=twice[0].code, problems=twice)
    targets = _joined({key: _of_slot(slot) for key, slot in slots.items()})
    others = {name: whole(tensor) for name, tensor in side.tensors.items() if name not in of_model}
    return Laid(side.stock, {**targets, **others})


def _joined(targets: Mapping[str, Target]) -> dict[str, Target]:
    """Put gate and up of a gated projection together again, which one dialect stores under two keys."""
    found: dict[str, Target] = {}
    for key, target in targets.items():
        whole_, half = key[:-2], key[-2:]
        gate, up = targets.get(whole_ + _HALVES[0]), targets.get(whole_ + _HALVES[1])
        if half not in _HALVES or gate is None or up is None or not _are_alike(gate, up) or whole_ in targets:
            found[key] = target
        elif half == _HALVES[0]:
            shape = (gate.shape[0] + up.shape[0], *gate.shape[1:])
            found[whole_] = Target(whole_, gate.dtype, shape, (*gate.parts, *up.parts))
    return found


def _are_alike(gate: Target, up: Target) -> bool:
    """Tell whether two have the same rows and one dtype: one target of both has no other."""
    return bool(gate.shape) and (gate.shape, gate.dtype) == (up.shape, up.dtype)


def _is_state(name: str) -> bool:
    """Tell what belongs to no model by its key: the state of an optimizer has the model's keys behind its own."""
    return name.startswith(("optimizer.", "chained_"))


def _of_slot(slot: Slot) -> Target:
    return Target(slot.key, slot.dtype, slot.shape, (slot.rows(),))


def _converted(megatron: Opened, other: Opened, options: Options) -> tuple[Laid, str, tuple[Problem, ...]]:
    """Lay out an archive as the targets that ``to-hf --like`` the other side would write, in the archive's dtypes."""
    config = options.hf_config or (str(other.folder) if other.config is not None else None)
    settings = ConvertOptions(
        hf_config=config,
        arch=options.arch,
        producer=options.producer or AUTO,
        lora="fuse" if options.lora == "fuse" else None,
        lora_alpha=options.lora_alpha,
        allow_missing=(ANY,),
        allow_extra=(ANY,),
    )
    if find_side_folder(megatron.found.path, settings) is None:
        raise UsageError(
            f"{megatron.found.path}: no config.json in or beside it or on the other side, to say what model this is",
            hint="Give the directory of the model that was trained: --hf-config MODEL",
        )
    opened = open_archive(megatron.found.path, (), settings, megatron.megatron)
    names = Reference(other.side.root, dict.fromkeys(other.tensors))
    try:
        draft = planning.draft(opened, as_mapped(names), settings)
    except Unmapped as error:  # said by a planner that means to write
        error.message = error.message.removesuffix("; nothing was written")
        raise
    if draft.problems:
        raise BrokenCheckpoint(
            f"{megatron.found.path}: cannot be compared with another kind of checkpoint as it is",
            code=draft.problems[0].code,
            problems=draft.problems,
        )
    stock = Stock(opened.source.root, opened.sources, draft.fusions.by_source)
    targets = {target.name: replace(target, dtype=stock.dtype(target)) for target in draft.targets}
    how = f"through the weight map {draft.family.name}: {counted(len(targets), 'tensor')}, as to-hf writes them"
    plan = f"{megatron.side.path} {how}"
    return Laid(stock, targets), plan, (*draft.notes, *_left_out(draft.dropped))


def _left_out(dropped: Iterable[Dropped]) -> Iterator[Problem]:
    """Yield what a conversion does not write and so nothing is compared with: a note for each rule."""
    by_rule: dict[tuple[str, str], list[str]] = {}
    for drop in dropped:
        by_rule.setdefault((drop.rule, drop.reason), []).append(drop.name)
    for (rule, reason), names in by_rule.items():
        told = ", ".join(text for text, _ in folded(names))
        yield Problem(code="left-out", severity="note", message=f"left out by {rule} ({reason}): {told}")


def _followed(a: Opened, b: Opened) -> tuple[Laid, Laid, str, tuple[Problem, ...]]:
    """Bring A under the names of B where they differ and rules say how."""
    mine, theirs = _plain(a), _plain(b)
    ours = a.tensors
    alike = {name: mine.targets[name] for name, tensor in ours.items() if _has(b, tensor)}
    if ours.keys() == b.tensors.keys() == alike.keys():
        return mine, theirs, "", ()
    prefix = _prefix(list(ours), b.tensors)
    if prefix:
        targets = {name.removeprefix(prefix): target for name, target in mine.targets.items()}
        mine = replace(mine, targets={name: replace(target, name=name) for name, target in targets.items()})
        return mine, theirs, f"names of A without their prefix {prefix!r}", ()
    known = {name: (tensor.dtype, tensor.shape) for name, tensor in b.tensors.items()}
    kind = next(iter(b.config.model_types), None) if b.config is not None else None
    reference = Reference(b.side.root, dict(known), model_type=kind)
    model = {name: tensor for name, tensor in ours.items() if name not in alike}
    found = follow(model, reference, sizes_of(b.config or a.config))
    moved = {target.name: target for target in found.targets}
    twice = any(fault.code in _LOSES for fault in faults([*alike.values(), *found.targets], (), ours))
    if twice or not any(name in b.tensors for name in moved):
        return mine, theirs, "", ()
    in_order = _in_order({**alike, **moved}, ours)
    rules = ", ".join(found.pairs)
    notes = tuple(replace(problem, severity="note") for problem in found.problems)
    return replace(mine, targets=in_order), theirs, f"names of A by the rules {rules}", notes


_LOSES = ("target-twice", "unused", "not-once")
"""What a plan has wrong that would leave a tensor of A uncompared."""


def _has(side: Opened, tensor: TensorInfo) -> bool:
    """Tell whether a side has a tensor of this name and shape."""
    return tensor.name in side.tensors and side.tensors[tensor.name].shape == tensor.shape


def _in_order(targets: Mapping[str, Target], sources: Mapping[str, TensorInfo]) -> dict[str, Target]:
    place = {name: at for at, name in enumerate(sources)}
    return dict(sorted(targets.items(), key=lambda item: place[item[1].parts[0].source]))


def _prefix(names: Sequence[str], others: Mapping[str, TensorInfo]) -> str:
    """Return what wrappers put before every name of A, where B has those names without it and not with it."""
    for prefix in PREFIXES:
        if names and all(name.startswith(prefix) for name in names):
            without = sum(name.removeprefix(prefix) in others for name in names)
            if without > sum(name in others for name in names):
                return prefix
    return ""


def _with_aliases(side: Laid, config: ModelConfig | None, other: Laid) -> Laid:
    """Give a side the head that only the other one stores, where it is tied to the embeddings."""
    lacking = [name for name in heads_of(other.targets) if name not in side.targets]
    if not lacking or config is None:
        return side
    shapes = {name: TensorInfo(name, target.dtype, target.shape, ()) for name, target in side.targets.items()}
    tie = decide(shapes, config, lambda _a, _b: "", untie=False, drop_head=False)
    if not tie.tied or tie.embedding is None or tie.embedding not in side.targets:
        return side
    embedding = side.targets[tie.embedding]
    targets = {**side.targets, lacking[0]: replace(embedding, name=lacking[0])}
    return replace(side, targets=targets, aliases={lacking[0]: tie.embedding})
