"""What ``to-hf`` is asked and what it answers, as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ckpttool.export.result import Export, ExportOptions, Fused, Lora

AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ExportOptions):
    """How to convert. ``like`` is the directory of a reference model, ``arch`` the name of a weight map.

    ``mtp`` is whether blocks of multi-token prediction are written; ``lora`` says what becomes of adapters, of which
    ``fuse`` alone is known here, and ``lora_alpha`` what they weigh where no file says it.
    """

    WORDS: ClassVar[tuple[str, ...]] = (
        *("lora", "lora_alpha", "hf_config", "like", "arch", "architecture", "producer", "dtype", "max_shard_size"),
        "threads",
    )

    arch: str | None = None
    producer: str = AUTO
    mtp: bool = True
    lora: Lora | None = None
    lora_alpha: float | None = None

    def flags(self) -> Iterator[str]:
        """Yield the options as one types them; see :meth:`ExportOptions.flags`."""
        yield from ExportOptions.flags(self)
        if not self.mtp:
            yield "--no-mtp"


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What an archive holds beside the model and is not written: how many tensors and pickled objects, and why."""

    tensors: int
    objects: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion(Export):
    """What a conversion does or did.

    ``family`` is the weight map, ``proven`` whether a real checkpoint has shown it to be right; ``skipped`` says by
    part what of the archive is no part of the model. ``mtp`` counts blocks of multi-token prediction, ``value_head``
    the rows of one; ``heads`` and ``row_order`` say in words how rows were put in order. ``lora`` is what was done with
    ``adapters``, nothing where there are none.
    """

    options: Options
    family: str
    proven: bool
    layers: int
    experts: int
    mtp: int
    value_head: int
    heads: str
    row_order: tuple[str, ...]
    skipped: Mapping[str, Skipped] = field(default_factory=dict)
    lora: Lora | None = None
    adapters: tuple[Fused, ...] = ()
