"""From what a save is to become to targets: names, dtypes, tied weights, adapters. No tensor is read here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ckpttool.adapters.writing import WEIGHTS
from ckpttool.errors import Problem
from ckpttool.export.outputs import IsBuffer
from ckpttool.export.precision import is_buffer, written_dtype
from ckpttool.export.ties import ALIAS_RULE, Tie, heads_of
from ckpttool.merging.adapting import AdapterFile, Weights
from ckpttool.merging.result import Options
from ckpttool.naming.following import Followed, Sizes, follow
from ckpttool.naming.matching import Allowed, Match, match
from ckpttool.naming.reference import Reference
from ckpttool.naming.reporting import Names, names_told
from ckpttool.plan import Dropped, Target, WeightFile, faults, weight_file, whole
from ckpttool.tensors import CASTABLE, TensorInfo, dtype_bytes


@dataclass(frozen=True, slots=True)
class Draft:
    """Targets before they are distributed over files, those of adapters, and everything that is wrong with them.

    ``unlike`` is what does not match the reference, ``names`` what was done to match it.
    """

    targets: tuple[Target, ...]
    adapters: tuple[WeightFile, ...]
    dropped: tuple[Dropped, ...]
    tie: Tie
    problems: tuple[Problem, ...]
    unlike: Match = field(default_factory=Match)
    names: Names | None = None


def draft(weights: Weights, tie: Tie, like: Reference | None, sizes: Sizes, options: Options) -> Draft:
    """Say for every tensor (by the name it has in training) what becomes of it, and check that nothing is lost."""
    kept = _kept_head(tie, like)
    dropped = (*weights.dropped, *(drop for drop in tie.dropped if drop.name != kept))
    left_out = {drop.name for drop in dropped}
    model = {name: tensor for name, tensor in weights.model.items() if name not in left_out}
    followed = follow(model, like, sizes) if like is not None else Followed([whole(t) for t in model.values()])
    aliases = _aliases(followed.targets, tie, like)
    targets = tuple(_with_dtype(target, weights, like, options) for target in (*followed.targets, *aliases))
    adapters = tuple(_adapter_file(file, weights, options) for file in weights.files)
    beside = [file.targets for file in adapters]
    wrong = faults(targets, dropped, weights.sources, weights.fusions, beside)
    problems = (*tie.problems, *wrong)
    unlike, names = Match(), None
    if like is not None:
        allowed = Allowed(options.allow_missing, options.allow_extra)
        unlike = match(targets, like, like.wanted, allowed)
        unlike = replace(unlike, problems=(*followed.problems, *unlike.problems))
        names = names_told(like, followed, targets, unlike)
    return Draft(targets, adapters, dropped, tie, problems, unlike, names)


def _kept_head(tie: Tie, like: Reference | None) -> str:
    """Return the head that is an alias and is written all the same, as the reference has it."""
    heads = [drop.name for drop in tie.dropped if drop.rule == ALIAS_RULE]
    return heads[0] if heads and like is not None and heads_of(like.tensors) else ""


def _aliases(targets: Iterable[Target], tie: Tie, like: Reference | None) -> list[Target]:
    """Return the head that a reference has of tied embeddings, where only these are stored."""
    heads = heads_of(like.tensors) if like is not None and tie.tied and tie.head is None else []
    embeddings = [target for target in targets if heads and target.parts[0].source == tie.embedding]
    return [replace(embedding, name=heads[0], twice=ALIAS_RULE) for embedding in embeddings[:1]]


def _with_dtype(target: Target, weights: Weights, like: Reference | None, options: Options) -> Target:
    """Give a target the dtype asked for, or that of the reference or the base; otherwise it keeps its source's."""
    source = weights.sources[target.parts[0].source]
    dtype = written_dtype(source, options.dtype, cast_buffers=options.cast_buffers)
    if options.dtype is None and target.dtype in CASTABLE:
        dtype = weights.dtypes.get(source.name, dtype)
        dtype = (like.dtype(target.name) if like is not None else None) or dtype
    return replace(target, dtype=dtype)


def _adapter_file(file: AdapterFile, weights: Weights, options: Options) -> WeightFile:
    fused = {factor for fusion in weights.fusions.values() for factor in fusion.factors}
    targets = []
    for source, name in file.names.items():
        tensor = weights.sources[source]
        dtype = written_dtype(tensor, options.dtype, cast_buffers=options.cast_buffers)
        targets.append(replace(whole(tensor, name, dtype), twice="adapter-beside" if source in fused else ""))
    return weight_file(file.folder + WEIGHTS, targets)


def nbytes(weights: Weights, options: Options) -> int:
    """Return the bytes of all tensors as they will be written at most, before any of them is read."""
    tensors = [*weights.model.values(), *(weights.sources[name] for file in weights.files for name in file.names)]
    dtypes = ((t, written_dtype(t, options.dtype, cast_buffers=options.cast_buffers)) for t in tensors)
    return sum(dtype_bytes(dtype, tensor.numel) for tensor, dtype in dtypes)


def renamed(tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> Mapping[str, TensorInfo]:
    """Return tensors under their new names."""
    if all(name == new for name, new in names.items()):
        return tensors
    return {names[name]: replace(tensor, name=names[name]) for name, tensor in tensors.items()}


def buffers(tensors: Mapping[str, TensorInfo]) -> IsBuffer:
    """Return what tells whether a target is a buffer."""
    return lambda target: is_buffer(tensors[target.parts[0].source])
