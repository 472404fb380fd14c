"""Open a checkpoint of any format that we read, as a :class:`Source`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.tensors import TensorInfo


class Source(Protocol):
    """An opened checkpoint: where it lies, what it holds, what is wrong with it. No tensor has been read."""

    @property
    def root(self) -> Path:
        """The directory that the places of all pieces are relative to."""

    @property
    def format(self) -> str:
        """``fsdp``, ``torch_dist``, ``dcp`` or ``huggingface``."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every logical tensor by name."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What the headers show to be missing, short or contradictory."""


def open_checkpoint(path: Path) -> Source:
    """Open the one checkpoint that lies directly in a directory.

    Raises :class:`NotACheckpoint` where no format recognises it, :class:`~ckpttool.errors.Refused` for a pickle that
    names what no checkpoint needs. Damage is not raised: it is in :attr:`Source.problems`.
    """
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: no such directory")
    if fsdp.detect(path) is not None:
        return fsdp.open_(path)
    if dcp.detect(path) is not None:
        return dcp.open_(path)
    if hf.detect(path) is not None:
        return hf.open_(path)
    raise NotACheckpoint(f"{path}: no FSDP shards, no distributed checkpoint, no Hugging Face model lie directly in it")
