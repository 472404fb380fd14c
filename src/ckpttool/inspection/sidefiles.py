"""What is doubtful in the small files of a model, held against the weights that they speak of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from ckpttool.errors import Problem
from ckpttool.formats import hf
from ckpttool.formats.hfconfig import ModelConfig
from ckpttool.formats.hfdoubts import TOKENIZER, Beside, doubts, read_tokenizer, weights_of
from ckpttool.inspection.draft import Draft, once, under
from ckpttool.tensors import TensorInfo


def add_doubts(draft: Draft, where: str, source: hf.HfSource) -> None:
    """Add notes on the files of a Hugging Face directory; without weights they speak of those of the archive."""
    path = draft.path / where / TOKENIZER
    tokenizer, damage = read_tokenizer(path) if _is_file(path) else (None, ())
    config = ModelConfig(hf.CONFIG, b"", source.config) if source.config is not None else None
    own = [tensor for name, tensor in source.tensors.items() if source.part_of(name) == "model"]
    weights = weights_of(_own_storage(own or _of_the_archive(draft)), masters=not own)
    names = frozenset(name for name in source.side_files if _is_file(draft.path / where / name))
    found = (*damage, *doubts(Beside(config, tokenizer, names), weights))
    draft.problems += under(where, (_placed(problem, where) for problem in found))


def _placed(problem: Problem, where: str) -> Problem:
    """Let a message name its file by the path from the inspected directory."""
    said = f"{where}/{problem.path}" if where else problem.path
    return replace(problem, message=problem.message.replace(problem.path, said, 1))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _of_the_archive(draft: Draft) -> list[TensorInfo]:
    """Return the weights that were found first, as they are counted."""
    return next((tensors for section in draft.sections if (tensors := section.tensors("model"))), [])


def _own_storage(tensors: list[TensorInfo]) -> Iterable[TensorInfo]:
    """Leave out second names of a storage: a tied head is none of its own."""
    return once(tensors)[0]
