"""A conversion as data: which rows of which tensors make up which target, in which file, and what is left out.

A target is a concatenation along its first axis of :class:`Rows` of source tensors, which an :class:`Arrangement` may
then turn (transposed experts, interleaved projections), so that a plan grows with the number of tensors, never with
their rows. Nothing here touches a byte of a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import EllipsisType, MappingProxyType

from ckpttool.errors import Problem
from ckpttool.formats.findings import Findings, listing
from ckpttool.formats.safetensorsfile import HEADER_MOST, METADATA, SAFETENSORS_NAMES, Entry, header_bytes
from ckpttool.lowrank import Fusion
from ckpttool.tensors import CASTABLE, Box, Index, TensorInfo, dtype_bytes, tiling_faults

PAGE = 4096
"""Blocks of file systems: where source and target both begin at one, some share it instead of copying."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A run of rows of a source tensor.

    ``lead`` are fixed indices of its first axes (a layer, an expert); the axis after them is the one that is counted:
    ``count`` rows from ``start`` on, in blocks of ``block`` rows of which each begins ``step`` rows after the one
    before (query groups, interleaved projections; without blocks one after the other). ``column`` is the first one
    taken of the axis after that; how many follows from the target.
    """

    source: str
    start: int
    count: int
    lead: Index = ()
    block: int = 0
    step: int = 0
    column: int = 0

    def boxes(self, first: int, box: Box) -> Iterator[tuple[slice, Box]]:
        """Yield where the rows of a target's box come from: the rows of the box, and the box of the source.

        ``first`` is the target's row with which this run begins; rows of other runs are left out.
        """
        (row, *offset), (rows, *size) = box
        at, end = max(row, first), min(row + rows, first + self.count)
        offset = [offset[0] + self.column, *offset[1:]] if offset else []
        while at < end:
            block, inside = divmod(at - first, self.block or self.count)
            taken = min(end - at, (self.block or self.count) - inside)
            begin = self.start + block * self.step + inside
            source = ((*self.lead, begin, *offset), (*(1 for _ in self.lead), taken, *size))
            yield slice(at - row, at - row + taken), source
            at += taken


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a target follows from the concatenation of its parts: seen as ``view``, its axes in ``order``, reshaped.

    The first ``folded`` axes of the view are the rows of the concatenation.
    """

    view: Index
    order: Index
    folded: int

    @property
    def concatenated(self) -> Index:
        """The shape of the concatenation."""
        return (math.prod(self.view[: self.folded]), *self.view[self.folded :])

    @property
    def turned(self) -> Index:
        """The view's axes in the order of the target, before they are reshaped to its own."""
        return tuple(self.view[axis] for axis in self.order)

    def runs(self, box: Box) -> Iterator[tuple[Box, Index]]:
        """Yield for a box of the view the boxes of the concatenation that it consists of.

        With each comes the index of its place in an array of the box's size: the leading axes, taken one by one.
        """
        offset, size = box
        axis = self.folded - 1
        while axis and size[axis] == self.view[axis]:
            axis -= 1
        inner = math.prod(self.view[axis + 1 : self.folded])
        for lead in product(*map(range, size[:axis])):
            row = 0
            for at, index in enumerate(lead):
                row = row * self.view[at] + offset[at] + index
            first = (row * self.view[axis] + offset[axis]) * inner
            tail = offset[self.folded :], size[self.folded :]
            yield ((first, *tail[0]), (size[axis] * inner, *tail[1])), lead

    @property
    def moves(self) -> bool:
        """Whether it changes the order of elements, not the shape alone."""
        return self.order != tuple(range(len(self.view)))


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor to write; its dtype may be another one than that of its sources, which is a cast.

    ``twice`` is the rule by which its sources are written although another target is made of them; ``shift`` is added
    to every element (a gain that one side stores as 1 + w).
    """

    name: str
    dtype: str
    shape: Index
    parts: tuple[Rows, ...]
    arrangement: Arrangement | None = None
    twice: str = ""
    shift: int = 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return dtype_bytes(self.dtype, self.numel)

    @property
    def concatenated(self) -> Index:
        """The shape of its parts one after the other."""
        return self.shape if self.arrangement is None else self.arrangement.concatenated

    def is_copy_of(self, tensor: TensorInfo) -> bool:
        """Tell whether it is all of one source, in its dtype."""
        same = (self.dtype, self.shape) == (tensor.dtype, tensor.shape)
        same = same and self.arrangement is None and not self.shift
        return same and self.parts == whole(tensor).parts

    def sources(self, box: Box) -> Iterator[tuple[str, slice | EllipsisType, Box]]:
        """Yield for a box of the concatenation: source name, which rows of the box, the box of the source."""
        if not self.shape:
            yield self.parts[0].source, ..., (self.parts[0].lead, (1,) * len(self.parts[0].lead))
            return
        first = 0
        for part in self.parts:
            for rows, source in part.boxes(first, box):
                yield part.source, rows, source
            first += part.count


@dataclass(frozen=True, slots=True)
class Dropped:
    """A source tensor that is not written, or only ``box`` of it: by which rule, and why."""

    name: str
    rule: str
    reason: str
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file: its targets in the order of their bytes, and its whole header."""

    name: str
    targets: tuple[Target, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(target.nbytes for target in self.targets)


@dataclass(frozen=True, slots=True)
class SideFile:
    """A file to copy byte for byte: its name in the output, where it lies, its bytes."""

    name: str
    path: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole output directory: files of tensors, files to copy, small files with their content; what is left out.

    ``fusions`` are the sources that are not written as they are stored, by name.
    """

    weights: tuple[WeightFile, ...]
    copies: tuple[SideFile, ...]
    contents: Mapping[str, bytes]
    dropped: tuple[Dropped, ...]
    fusions: Mapping[str, Fusion] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the directory."""
        small = sum(map(len, self.contents.values())) + sum(file.bytes for file in self.copies)
        return small + sum(file.nbytes for file in self.weights)

    @property
    def targets(self) -> tuple[Target, ...]:
        """All tensors to write."""
        return tuple(target for file in self.weights for target in file.targets)

    @property
    def sources(self) -> frozenset[str]:
        """Every tensor that is read."""
        read = {part.source for target in self.targets for part in target.parts}
        return frozenset(read | {factor for fusion in self.fusions.values() for factor in fusion.factors})


def whole(tensor: TensorInfo, name: str = "", dtype: str = "") -> Target:
    """Return the target that is one source tensor as it is, but for its name or dtype."""
    rows = tensor.shape[0] if tensor.shape else 1
    return Target(name or tensor.name, dtype or tensor.dtype, tensor.shape, (Rows(tensor.name, 0, rows),))


def weight_files(targets: Sequence[Target], most: int) -> tuple[WeightFile, ...]:
    """Distribute targets over files of at most ``most`` bytes of tensors, cut and named as transformers does it.

    Files are filled in order; a tensor larger than the limit gets a file of its own. In a file, tensors of whole
    pages come first, so that as many as possible begin at a page, then by the size of their elements.
    """
    groups = list(_groups(targets, most)) or [[]]
    names = [f"model-{n:05d}-of-{len(groups):05d}.safetensors" for n in range(1, len(groups) + 1)]
    return tuple(
        weight_file(name, group)
        for name, group in zip(names if len(groups) > 1 else ["model.safetensors"], groups, strict=True)
    )


def _groups(targets: Iterable[Target], most: int) -> Iterator[list[Target]]:
    """Yield the tensors of one file after the other, as ``split_torch_state_dict_into_shards`` groups them."""
    group: list[Target] = []
    held = 0
    for target in targets:
        if target.nbytes > most:
            yield [target]
            continue
        if held + target.nbytes > most:
            yield group
            group, held = [], 0
        group.append(target)
        held += target.nbytes
    if group:
        yield group


def weight_file(name: str, targets: Iterable[Target]) -> WeightFile:
    """Lay targets out in one file: those of whole pages first, then by the size of their elements."""
    ordered = sorted(targets, key=lambda t: (t.nbytes % PAGE != 0, -dtype_bytes(t.dtype, 1)))
    return WeightFile(name, tuple(ordered), header_bytes([Entry(t.name, t.dtype, t.shape) for t in ordered], PAGE))


def header_faults(files: Iterable[WeightFile]) -> list[Problem]:
    """Return the files whose headers are longer than readers of safetensors accept."""
    return [
        Problem(
            code="header-too-long",
            message=f"{file.name} would have {len(file.header):,} bytes of header, {HEADER_MOST:,} are allowed",
            hint="Distribute the tensors over more files: --max-shard-size.",
        )
        for file in files
        if len(file.header) > HEADER_MOST
    ]


def faults(
    targets: Sequence[Target],
    dropped: Iterable[Dropped],
    sources: Mapping[str, TensorInfo],
    fusions: Mapping[str, Fusion] = MappingProxyType({}),
    beside: Sequence[Sequence[Target]] = (),
) -> list[Problem]:
    """Return everything that is wrong with a plan: the sum of its parts is each source once, and each target once.

    What is fused into a source is used by that; groups of targets ``beside`` the others have names of their own.
    """
    found = Findings()
    for group in (targets, *beside):
        _check_names(group, found)
    targets = [*targets, *(target for group in beside for target in group)]
    for target in targets:
        _check_target(target, sources, found)
    if any(code == "rows-negative" for code, _ in found.grouped):  # they have no boxes
        return list(found.all())
    used = _used(targets)
    _check_fusions(fusions, used, sources, found)
    left_out = _left_out(dropped, used)
    for name, tensor in sources.items():
        if name in left_out and name in used:
            found.group("dropped-and-used", "both written and left out", name)
        elif name not in left_out and name not in used:
            found.group("unused", "neither written nor left out by a rule", name)
        for fault in tiling_faults(tensor.shape, used[name]) if name in used else ():
            found.group("not-once", f"not written exactly once: {fault}", name)
    return list(found.all())


def _check_names(targets: Iterable[Target], found: Findings) -> None:
    by_name: dict[str, list[str]] = {}
    for target in targets:
        by_name.setdefault(target.name, []).append(target.parts[0].source if target.parts else "")
    for name, sources in by_name.items():
        if len(sources) > 1:
            others = listing([source for source in sources if source != name] or sources)
            found.group("target-twice", f"{len(sources)} tensors would be written under one name ({others})", name)


def _check_fusions(
    fusions: Mapping[str, Fusion], used: dict[str, list[Box]], sources: Mapping[str, TensorInfo], found: Findings
) -> None:
    """Count what is fused into sources that are written as used, all of it."""
    added: dict[str, None] = {}
    for fusion in fusions.values():
        if fusion.source not in used:
            found.group("fused-into-nothing", "something is fused into it, and it is not written", fusion.source)
        for name in (fusion.source, *fusion.factors):
            if name not in sources or sources[name].dtype not in CASTABLE:
                found.group("bad-cast", "cannot be fused: no plain floating tensor", name)
        added.update(dict.fromkeys(fusion.factors))
    for name in added.keys() & sources.keys():
        used.setdefault(name, []).append(((0,) * len(sources[name].shape), sources[name].shape))


def _left_out(dropped: Iterable[Dropped], used: dict[str, list[Box]]) -> set[str]:
    """Return the sources that are left out; a part of one that is counts as used."""
    whole = set()
    for drop in dropped:
        if drop.box is None:
            whole.add(drop.name)
        else:
            used.setdefault(drop.name, []).append(drop.box)
    return whole


def _used(targets: Iterable[Target]) -> dict[str, list[Box]]:
    """Return which boxes of which sources targets are made of."""
    used: dict[str, list[Box]] = {}
    for target in targets:
        if target.twice:
            continue
        for part in target.parts:
            used.setdefault(part.source, [])
        shape = target.concatenated
        for source, _, box in target.sources(((0,) * len(shape), shape)):
            used[source].append(box)
    return used


def _check_target(target: Target, sources: Mapping[str, TensorInfo], found: Findings) -> None:
    if target.dtype not in SAFETENSORS_NAMES:
        found.group("unwritable-dtype", f"safetensors has no {target.dtype}", target.name)
    if target.name == METADATA or not _is_text(target.name):
        found.group("unwritable-name", "no name that safetensors can hold", target.name)
    if not target.parts:
        found.group("source-missing", "made of nothing", target.name)
    if any(min(part.start, part.count, part.block, part.step) < 0 for part in target.parts):
        found.group("rows-negative", "made of a negative number of rows", target.name)
    absent = [part.source for part in target.parts if part.source not in sources]
    if absent:
        found.group("source-missing", f"made of {listing(absent)}, which the checkpoint does not have", target.name)
        return
    if target.shift and target.dtype not in CASTABLE:
        found.group("bad-cast", f"{target.shift:+d} cannot be added to {target.dtype}", target.name)
    stored = {sources[part.source].dtype for part in target.parts} - {target.dtype}
    if stored and not {target.dtype, *stored} <= CASTABLE:
        found.group("bad-cast", f"{listing(sorted(stored))} cannot be cast to {target.dtype}", target.name)
    shape = target.concatenated
    if shape and sum(part.count for part in target.parts) != shape[0]:
        found.group("rows-disagree", "its parts have not as many rows as it has", target.name)
    if math.prod(shape) != math.prod(target.shape):
        found.group("rows-disagree", "its parts have not as many elements as it has", target.name)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # a lone surrogate, which a pickle can hold
        return False
    return True
