"""Low-rank updates as data: what is added to a stored tensor when an adapter (LoRA, DoRA) is fused into it.

A weight ``[out, in]`` becomes ``W + scale * (B @ A)`` with ``B [out, r]`` and ``A [r, in]``; DoRA then gives every row
the length that its magnitude says. The formulas are those of PEFT 0.21 (``lora.Linear``, ``lora.Embedding``,
``lora.Conv*d``, ``lora.ParamWrapper``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpttool.tensors import Box, Index


@dataclass(frozen=True, slots=True)
class LowRank:
    """One update, by the names of its factors: ``up`` is B and ``down`` is A, scaled by ``scale``.

    Without ``down`` it is a vector that is added (the bias of B). A weight that is ``turned`` is stored ``[in, out]``
    (Conv1D, embeddings). With ``experts`` it is one more axis in front, A is ``[experts * r, in]`` and B ``[out, r *
    experts]``, the expert running fastest. Otherwise axes in front of a weight are axes in front of A and B, too; of
    a factor that has fewer of them, the last ones share it. B may have but some rows of the weight: those from
    ``start`` on, in blocks of ``block`` rows of which each begins ``step`` rows after the one before (without blocks
    one after the other).
    """

    up: str
    down: str
    scale: float
    turned: bool = False
    experts: int = 0
    start: int = 0
    block: int = 0
    step: int = 0

    @property
    def factors(self) -> tuple[str, ...]:
        """The tensors that it is made of."""
        return (self.down, self.up) if self.down else (self.up,)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What a stored tensor becomes: its updates added, then (DoRA) its rows made as long as ``magnitude`` says.

    The updates are in the coordinates of the parameter that was trained. Where the stored tensor is a part of that (one
    expert of all, the gate of gate and up), ``lead`` are its fixed indices and ``first`` the row it begins with.
    ``stacked`` is how many axes of the stored tensor (layers, experts) lie in front of the rows.
    """

    source: str
    updates: tuple[LowRank, ...]
    magnitude: str = ""
    lead: Index = ()
    first: int = 0
    stacked: int = 0

    @property
    def factors(self) -> Iterator[str]:
        """All tensors that are added into this one."""
        for update in self.updates:
            yield from update.factors
        if self.magnitude:
            yield self.magnitude

    def trained(self, box: Box) -> Box:
        """Return a box of the stored tensor in the coordinates of the parameter that was trained."""
        offset, size = list(box[0]), box[1]
        offset[self.stacked] += self.first
        return (*self.lead, *offset), (*(1 for _ in self.lead), *size)
