"""From what the shards hold to what is written: names, dtypes, tied weights, output files. No tensor is read here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckpttool.errors import Problem
from ckpttool.export.config import CONFIG, ModelConfig, edited
from ckpttool.export.precision import SHORT, is_buffer, written_dtype
from ckpttool.export.side_files import SideFiles
from ckpttool.export.ties import Tie
from ckpttool.formats.hf import INDEXES
from ckpttool.formats.hfindex import index_bytes
from ckpttool.merging.result import Cast, Options
from ckpttool.plan import Plan, Target, WeightFile, faults, weight_files, whole
from ckpttool.tensors import CASTABLE, TensorInfo, dtype_bytes


@dataclass(frozen=True, slots=True)
class Draft:
    """Targets before they are distributed over files, and everything that is wrong with them."""

    targets: tuple[Target, ...]
    tie: Tie
    problems: tuple[Problem, ...]


def draft(tensors: Mapping[str, TensorInfo], tie: Tie, options: Options) -> Draft:
    """Say for every tensor (by the name it is written under) what becomes of it, and check that nothing is lost."""
    left_out = {drop.name for drop in tie.dropped}
    targets = tuple(
        whole(tensor, name, written_dtype(tensor, options.dtype, cast_buffers=options.cast_buffers))
        for name, tensor in tensors.items()
        if name not in left_out
    )
    return Draft(targets, tie, (*tie.problems, *faults(targets, tie.dropped, tensors)))


def nbytes(tensors: Mapping[str, TensorInfo], options: Options) -> int:
    """Return the bytes of all tensors as they will be written, before any of them is read."""
    dtypes = ((t, written_dtype(t, options.dtype, cast_buffers=options.cast_buffers)) for t in tensors.values())
    return sum(dtype_bytes(dtype, tensor.numel) for tensor, dtype in dtypes)


def renamed(tensors: Mapping[str, TensorInfo], names: Mapping[str, str]) -> Mapping[str, TensorInfo]:
    """Return tensors under their new names."""
    if all(name == new for name, new in names.items()):
        return tensors
    return {names[name]: replace(tensor, name=names[name]) for name, tensor in tensors.items()}


def finish(
    made: Draft,
    tensors: Mapping[str, TensorInfo],
    config: ModelConfig | None,
    side: SideFiles,
    options: Options,
) -> tuple[Plan, tuple[str, ...]]:
    """Return the whole plan, and what it changes in ``config.json``."""
    weights = weight_files(made.targets, options.max_shard_size)
    contents: dict[str, bytes] = {}
    changes: tuple[str, ...] = ()
    if config is not None:
        contents[CONFIG], changes = edited(config, main_dtype(made.targets, tensors), untie=made.tie.untie)
    if len(weights) > 1:
        contents[INDEXES[0]] = _index(weights, tensors)
    return Plan(weights, side.copied, contents, made.tie.dropped), changes


def _index(weights: Sequence[WeightFile], tensors: Mapping[str, TensorInfo]) -> bytes:
    targets = [target for file in weights for target in file.targets]
    total = sum(target.nbytes for target in targets)
    return index_bytes(
        {t.name: file.name for file in weights for t in file.targets}, total, parameters(tensors, targets)
    )


def parameters(tensors: Mapping[str, TensorInfo], targets: Iterable[Target]) -> int:
    """Count the elements of what is written and is no buffer."""
    return sum(tensors[t.name].numel for t in targets if not is_buffer(tensors[t.name]))


def main_dtype(targets: Iterable[Target], tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the dtype that most of the parameters are written in, by bytes; ``None`` where none is a plain float."""
    held: Counter[str] = Counter()
    for target in targets:
        if target.dtype in CASTABLE and not is_buffer(tensors[target.name]):
            held[target.dtype] += target.nbytes
    return held.most_common(1)[0][0] if held else None


def dtype_note(
    targets: Iterable[Target], tensors: Mapping[str, TensorInfo], config: ModelConfig | None, options: Options
) -> Iterator[Problem]:
    """Tell when the config speaks of a smaller dtype than that of the shards: trainers keep masters in float32."""
    written = main_dtype(targets, tensors)
    said = config.dtype if config is not None else None
    if options.dtype is None and written == "float32" and said in ("bfloat16", "float16"):
        message = f"config.json said {said}, the shards hold float32, and so does the output"
        yield Problem(code="dtype", message=message, hint=f"To write {said}: --dtype {SHORT[said]}.", severity="note")


def casts(targets: Iterable[Target], tensors: Mapping[str, TensorInfo], lost: Mapping[str, int]) -> tuple[Cast, ...]:
    """Return what changes its dtype, one entry a pair of dtypes; ``lost`` are elements that became infinite."""
    pairs: dict[tuple[str, str], list[Target]] = {}
    for target in targets:
        if target.dtype != tensors[target.name].dtype:
            pairs.setdefault((tensors[target.name].dtype, target.dtype), []).append(target)
    return tuple(
        Cast(
            dtype=dtype,
            to=to,
            names=tuple(t.name for t in several),
            bytes=sum(t.nbytes for t in several),
            overflowed={t.name: lost[t.name] for t in several if t.name in lost},
        )
        for (dtype, to), several in pairs.items()
    )


def kept(targets: Iterable[Target], tensors: Mapping[str, TensorInfo], dtype: str | None) -> tuple[str, ...]:
    """Return the floating tensors that ``--dtype`` does not touch, because they are buffers."""
    return tuple(
        target.name
        for target in targets
        if dtype is not None and target.dtype != dtype and target.dtype in CASTABLE and is_buffer(tensors[target.name])
    )
