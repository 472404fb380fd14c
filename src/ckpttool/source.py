"""Open a checkpoint of any format that we read, as a :class:`Source`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.tensors import Place, TensorInfo


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
    def objects(self) -> Mapping[str, Place]:
        """Pickled values that are no tensors, by key; only distributed archives have some."""

    @property
    def unsharded(self) -> Mapping[str, Any] | None:
        """What the ranks share beside tensors and objects, where it was read: Megatron's common state."""

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What the headers show to be missing, short or contradictory."""

    def part_of(self, name: str) -> str:
        """Say what a tensor or object belongs to: ``model``, ``adapter``, ``optimizer``, ``rng`` and so on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What only the user can say of a training's checkpoint that is compared; ``lora`` is ``fuse`` or nothing."""

    hf_config: str | None = None
    arch: str | None = None
    producer: str | None = None
    lora: str | None = None
    lora_alpha: float | None = None

    def of_source(self) -> dict[str, Any]:
        """Return these alone, to be handed on."""
        return {field.name: getattr(self, field.name) for field in fields(SourceOptions)}


def open_checkpoint(path: Path | str) -> Source:
    """Open the one checkpoint that lies directly in a directory.

    Raises :class:`NotACheckpoint` where no format recognises it, :class:`~ckpttool.errors.Refused` for a pickle that
    names what no checkpoint needs. Damage is not raised: it is in :attr:`Source.problems`.
    """
    from ckpttool.formats import dcp, fsdp, hf

    path = Path(path)
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: no such directory")
    if fsdp.detect(path) is not None:
        return fsdp.open_(path)
    if dcp.detect(path) is not None:
        return dcp.open_(path)
    if hf.detect(path) is not None:
        return hf.open_(path)
    raise NotACheckpoint(
        f"{path}: no FSDP shards, no distributed checkpoint, no Hugging Face model lie directly in it",
        hint="A Megatron role keeps its archives in dist_ckpt/ or model/dist_ckpt/; ckpttool inspect shows where.",
    )
