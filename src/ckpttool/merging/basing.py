"""The model that adapters were saved without: its weights as sources, wherever they lie. Headers are read, no more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.export.config import ModelConfig, read_config
from ckpttool.export.writing import Stamps, stamps
from ckpttool.formats import hf
from ckpttool.inspection.search import model_directory
from ckpttool.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class Base:
    """A model directory: its tensors, with places from anywhere, its configuration, when its files were written."""

    folder: Path
    tensors: Mapping[str, TensorInfo]
    config: ModelConfig | None
    stamps: Stamps


def read_base(given: str) -> Base:
    """Open the weights of a model directory.

    Raises :class:`NotACheckpoint` for a directory without weights, :class:`BrokenCheckpoint` with everything that is
    wrong with them.
    """
    folder = model_directory("--base", given).absolute()
    before = stamps_of(folder)
    source = hf.open_(folder)
    faults = [problem for problem in source.problems if problem.severity == "error"]
    if faults:
        raise BrokenCheckpoint(
            f"--base {folder}: its weights are not whole; nothing was written",
            hint="Mend or complete what is listed, then run again.",
            code="base-broken",
            problems=faults,
        )
    if not source.tensors or source.adapter:
        raise NotACheckpoint(
            f"--base {folder}: {'an adapter' if source.adapter else 'no weights'} there, not a whole model",
            hint="Give the directory of the model that was trained, with its weights.",
        )
    tensors = {name: _from_anywhere(tensor, folder) for name, tensor in source.tensors.items()}
    return Base(folder, tensors, read_config(folder), before)


def _from_anywhere(tensor: TensorInfo, folder: Path) -> TensorInfo:
    """Return a tensor whose places name their files from the root on."""
    pieces = (
        replace(piece, place=replace(piece.place, file=str(folder / piece.place.file))) for piece in tensor.pieces
    )
    return replace(tensor, pieces=tuple(pieces))


def stamps_of(folder: Path) -> Stamps:
    """Return size and time of the config and of every file of weights."""
    return stamps(folder / name for name in (hf.CONFIG, *hf.weight_files(path.name for path in folder.iterdir())))
