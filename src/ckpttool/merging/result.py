"""What ``merge-fsdp`` is asked and what it answers, as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from ckpttool.export.result import Export, ExportOptions, Fused, Lora

OnMismatch = Literal["error", "rank0"]
ON_MISMATCH: tuple[OnMismatch, ...] = get_args(OnMismatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ExportOptions):
    """How to merge. ``inputs`` are further directories of the save.

    ``lora`` says what becomes of adapters, ``adapters`` which of several; ``lora_alpha`` and ``adapter_config`` what
    they weigh; ``base`` is the directory of the model that they were saved without.
    """

    WORDS: ClassVar[tuple[str, ...]] = (
        *("world_size", "lora", "lora_alpha", "adapter_config", "base", "like", "dtype", "on_mismatch", "hf_config"),
        *("architecture", "max_shard_size", "threads"),
    )
    SWITCHES: ClassVar[tuple[str, ...]] = ("cast_buffers", "allow_overflow", "untie", "drop_lm_head", "force")

    inputs: tuple[str, ...] = ()
    world_size: int | None = None
    cast_buffers: bool = False
    on_mismatch: OnMismatch = "error"
    check_replicas: bool = True
    lora: Lora | None = None
    adapters: tuple[str, ...] = ()
    lora_alpha: float | None = None
    adapter_config: str | None = None
    base: str | None = None

    def flags(self) -> Iterator[str]:
        """Yield the options as one types them; see :meth:`ExportOptions.flags`."""
        for folder in self.inputs:
            yield f"--input {shlex.quote(folder)}"
        yield from ExportOptions.flags(self)
        for name in self.adapters:
            yield f"--adapter {shlex.quote(name)}"
        if not self.check_replicas:
            yield "--no-check-replicas"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A tensor whose stored copies are not the same on all ranks: those that differ from rank ``reference``.

    ``changed`` counts elements whose bits differ on the rank where most do, ``nans`` those of them that are NaN on
    either side, ``largest`` is the largest difference between the others.
    """

    name: str
    reference: int
    ranks: tuple[int, ...]
    elements: int
    changed: int
    largest: float
    nans: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What was compared: replicated tensors, and replicas of shards (HSDP), by bytes or by recorded CRC-32."""

    replicated: int = 0
    replicated_bytes: int = 0
    replicas: int = 0
    by_crc: int = 0
    by_bytes: int = 0
    checked: bool = True
    mismatches: tuple[Mismatch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Export):
    """What a merge does or did: ``folders`` are those that hold the save, ``renamed`` what was taken out of names.

    ``lora`` is what was done with ``adapters``, nothing where there are none.
    """

    options: Options
    folders: tuple[str, ...]
    copies: Copies
    renamed: Mapping[str, int] = field(default_factory=dict)
    lora: Lora | None = None
    adapters: tuple[Fused, ...] = ()
    base: str | None = None
