"""From what the shards hold to what is written: names, dtypes, tied weights, output files. No tensor is read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ckpttool.errors import Problem
from ckpttool.export.outputs import IsBuffer
from ckpttool.export.precision import is_buffer, written_dtype
from ckpttool.export.ties import Tie
from ckpttool.merging.result import Options
from ckpttool.plan import Target, faults, whole
from ckpttool.tensors import TensorInfo, dtype_bytes


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


def buffers(tensors: Mapping[str, TensorInfo]) -> IsBuffer:
    """Return what tells whether a target is a buffer."""
    return lambda target: is_buffer(tensors[target.name])
