"""From targets to a directory: files of tensors, their index, the config, and what is told about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ckpttool.errors import Problem
from ckpttool.export.config import CONFIG, Edits, ModelConfig, edited
from ckpttool.export.precision import SHORT
from ckpttool.export.result import Cast, OutputFile
from ckpttool.export.side_files import SideFiles
from ckpttool.formats.hf import INDEXES
from ckpttool.formats.hfindex import index_bytes
from ckpttool.plan import Dropped, Plan, Target, WeightFile, weight_files
from ckpttool.tensors import CASTABLE, TensorInfo

IsBuffer = Callable[[Target], bool]


def directory(
    targets: Sequence[Target],
    dropped: Sequence[Dropped],
    config: ModelConfig | None,
    side: SideFiles,
    edits: Edits,
    *,
    most: int,
    is_buffer: IsBuffer,
) -> tuple[Plan, tuple[str, ...]]:
    """Return the whole plan, and what it changes in ``config.json``; ``most`` bytes of tensors are in one file."""
    weights = weight_files(targets, most)
    contents: dict[str, bytes] = {}
    changes: tuple[str, ...] = ()
    if config is not None:
        contents[CONFIG], changes = edited(config, main_dtype(targets, is_buffer), edits)
    if len(weights) > 1:
        contents[INDEXES[0]] = _index(weights, is_buffer)
    return Plan(weights, side.copied, contents, tuple(dropped)), changes


def _index(weights: Sequence[WeightFile], is_buffer: IsBuffer) -> bytes:
    targets = [target for file in weights for target in file.targets]
    total = sum(target.nbytes for target in targets)
    names = {t.name: file.name for file in weights for t in file.targets}
    return index_bytes(names, total, parameters(targets, is_buffer))


def parameters(targets: Iterable[Target], is_buffer: IsBuffer) -> int:
    """Count the elements of what is written and is no buffer."""
    return sum(target.numel for target in targets if not is_buffer(target))


def main_dtype(targets: Iterable[Target], is_buffer: IsBuffer) -> str | None:
    """Return the dtype that most of the parameters are written in, by bytes; ``None`` where none is a plain float."""
    held: Counter[str] = Counter()
    for target in targets:
        if target.dtype in CASTABLE and not is_buffer(target):
            held[target.dtype] += target.nbytes
    return held.most_common(1)[0][0] if held else None


def dtype_note(written: str | None, config: ModelConfig | None, what: str) -> Iterator[Problem]:
    """Tell when the config speaks of a smaller dtype than what is stored: trainers keep masters in float32."""
    said = config.dtype if config is not None else None
    if written == "float32" and said in ("bfloat16", "float16"):
        message = f"config.json said {said}, {what} float32, and so does the output"
        yield Problem(code="dtype", message=message, hint=f"To write {said}: --dtype {SHORT[said]}.", severity="note")


def casts(targets: Iterable[Target], sources: Mapping[str, TensorInfo], lost: Mapping[str, int]) -> tuple[Cast, ...]:
    """Return what changes its dtype, one entry a pair of dtypes; ``lost`` are elements that became infinite."""
    pairs: dict[tuple[str, str], list[Target]] = {}
    for target in targets:
        for dtype in sorted({sources[part.source].dtype for part in target.parts} - {target.dtype}):
            pairs.setdefault((dtype, target.dtype), []).append(target)
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


def kept(targets: Iterable[Target], dtype: str | None) -> tuple[str, ...]:
    """Return the floating tensors that a ``--dtype`` which was asked for has not touched."""
    return tuple(t.name for t in targets if dtype is not None and t.dtype != dtype and t.dtype in CASTABLE)


def output_files(plan: Plan) -> tuple[OutputFile, ...]:
    """Return every file of a plan, those of tensors first."""
    files = [OutputFile(name=f.name, bytes=f.nbytes, tensors=len(f.targets)) for f in plan.weights]
    files += [OutputFile(name=name, bytes=len(content)) for name, content in plan.contents.items()]
    return (*files, *(OutputFile(name=f.name, bytes=f.bytes) for f in plan.copies))


def dtypes(plan: Plan) -> dict[str, int]:
    """Return the bytes of each dtype, most first."""
    held: Counter[str] = Counter()
    for target in plan.targets:
        held[target.dtype] += target.nbytes
    return dict(held.most_common())
