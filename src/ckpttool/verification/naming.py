"""Which tensor a damaged record is: asked only where there is one, as it takes reading what ``inspect`` reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ckpttool.errors import CkpttoolError, Problem
from ckpttool.formats import fsdp, hf
from ckpttool.formats.shardfiles import is_model_shard
from ckpttool.tensors import TensorInfo
from ckpttool.verification.checksums import Checked


def with_tensors(checked: Checked) -> Iterator[Problem]:
    """Yield the problems of a file, with the name of the tensor that is damaged where it can be told."""
    names = _names(checked.entry.path) if checked.headers else {}
    for problem in checked.problems:
        name = names.get(checked.headers.get(problem, -1))
        yield replace(problem, message=f"{problem.message} ({name})") if name is not None else problem


def _names(path: Path) -> dict[int, str]:
    """Return the names of tensors by where their records begin; none where what says so is damaged itself."""
    try:
        if is_model_shard(path.name):
            tensors = fsdp.open_(path.parent, kinds=("model",)).tensors
        else:
            tensors = hf.read_torch(path)
    except (CkpttoolError, OSError):
        return {}
    return dict(_of_file(path, tensors.values()))


def _of_file(path: Path, tensors: Iterable[TensorInfo]) -> Iterator[tuple[int, str]]:
    for tensor in tensors:
        for piece in (*tensor.pieces, *tensor.copies):
            if piece.place.file == path.name:
                yield piece.place.offset, tensor.name
