"""What Megatron stores, taken apart: one slot a tensor of one layer and one expert, whatever dialect the keys are in.

On disk a homogeneous stack has one key for all layers (``decoder.layers.mlp.linear_fc2.weight [L, ...]``) and a second
leading axis for experts; other stacks have the number of the layer in the key, and ``singleton_local_shards`` that of
the expert too. Each key is looked at by itself: a checkpoint may have all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from ckpttool.errors import Problem
from ckpttool.formats.findings import Findings
from ckpttool.formats.folding import NUMBER
from ckpttool.plan import Rows
from ckpttool.tensors import Box, Index, TensorInfo

NUMBERS = re.compile(rf"(?<=\.){NUMBER}(?=\.)")

PREFIXES = ("model.module.module.", "model.module.", "module.module.", "model.", "module.")
"""What wrappers put before every key; native checkpoints have nothing there."""

_STACK = re.compile(r"(decoder\.layers)\.(?![0-9]+\.)(.+)")
_EXPERTS = re.compile(rf"(.*\.)?experts\.experts\.(?:({NUMBER})\.)?(linear_fc[12]\..+)")
_MTP = re.compile(rf"(mtp\.layers\.{NUMBER})\.mtp_model_layer\.(?!layers\.)(.+)")
_NAMES = {"decoder.final_norm.weight": "decoder.final_layernorm.weight"}


@dataclass(frozen=True, slots=True)
class Slot:
    """A source behind fixed leading indices; ``shape`` is without those.

    ``key`` names it as if every layer and expert had a key of its own: ``decoder.layers.3.mlp.experts.7.linear_fc1``.
    """

    key: str
    source: str
    shape: Index
    dtype: str
    lead: Index = ()

    def rows(self, first: int = 0, count: int | None = None, block: int = 0, step: int = 0) -> Rows:
        """Return a run of its rows, all of them without arguments; a tensor without axes is one row."""
        every = self.shape[0] if self.shape else 1
        return Rows(self.source, first, every - first if count is None else count, self.lead, block, step)

    def box(self, first: int) -> Box:
        """Return the rows from ``first`` on as a box of the source."""
        offset = (*self.lead, first, *(0 for _ in self.shape[1:]))
        return offset, (*(1 for _ in self.lead), self.shape[0] - first, *self.shape[1:])

    @property
    def origin(self) -> str:
        """The source with stars for layers and experts: the same for all that are alike."""
        return NUMBERS.sub("*", self.source)

    @property
    def stored_as(self) -> str:
        """The name of the source; of a part of one, the key that it would have by itself."""
        return self.key if self.lead else self.source


def take_apart(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, Slot], tuple[Problem, ...]]:
    """Return the slots of all tensors by key, and the keys that are stored in two dialects at once."""
    found = Findings()
    slots: dict[str, Slot] = {}
    prefix = common_prefix(tensors)
    for name, tensor in tensors.items():
        for slot in _unstacked(name.removeprefix(prefix), tensor):
            if slot.key in slots:
                found.group("stored-twice", f"also stored in {slots[slot.key].origin}", slot.source)
            slots[slot.key] = slot
    return slots, found.all()


def common_prefix(names: Iterable[str]) -> str:
    """Return what is put before every key by wrappers."""
    names = list(names)
    return next((prefix for prefix in PREFIXES if names and all(name.startswith(prefix) for name in names)), "")


def _unstacked(name: str, tensor: TensorInfo) -> Iterator[Slot]:
    key = _MTP.sub(r"\1.transformer_layer.\2", _NAMES.get(name, name))
    stacked, experts = _STACK.fullmatch(key), _EXPERTS.fullmatch(key)
    axes = bool(stacked) + bool(experts and experts[2] is None)
    if len(tensor.shape) < axes or 0 in tensor.shape:  # no stack after all: under its own name no rule knows it
        yield Slot(key, tensor.name, tensor.shape, tensor.dtype)
        return
    for lead in product(*map(range, tensor.shape[:axes])):
        numbers = list(lead)
        named = f"{stacked[1]}.{numbers.pop(0)}.{stacked[2]}" if stacked else key
        if match := _EXPERTS.fullmatch(named):
            named = f"{match[1] or ''}experts.{match[2] or numbers.pop(0)}.{match[3]}"
        yield Slot(named, tensor.name, tensor.shape[axes:], tensor.dtype, lead)
