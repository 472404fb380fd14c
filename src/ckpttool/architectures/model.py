"""What a configuration says of a model: sizes, switches, and what lies beside it that shapes cannot show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpttool.errors import Unmapped
from ckpttool.tensors import Index

NVIDIA, SWIFT = "nvidia", "swift"
"""Who orders the rows of a gated attention how: megatron-core and its bridges, or ms-swift."""


@dataclass(frozen=True, slots=True)
class Model:
    """What the configuration says: sizes by our names, and the field that each was read from.

    ``producer`` and ``interleaved`` (the blocks of rows in which gate and up projections lie, by setting) are what
    shapes cannot show.
    """

    config: Mapping[str, Any]
    sizes: Mapping[str, int]
    fields: Mapping[str, str]
    producer: str = ""
    interleaved: Mapping[str, int] = field(default_factory=dict)

    def size(self, text: str | int) -> int:
        """Evaluate a product of sizes: ``heads*head_dim``, ``2*ffn``."""
        factors = [f if isinstance(f, int) else int(f) if f.isdecimal() else self.sizes[f] for f in _factors(text)]
        return math.prod(factors)

    def shape(self, texts: tuple[str | int, ...]) -> Index:
        """Evaluate every axis of a shape."""
        return tuple(map(self.size, texts))

    def said(self, *texts: str | int) -> str:
        """Name the fields of the configuration that sizes were read from, with their values."""
        names = dict.fromkeys(f for text in texts for f in _factors(text) if isinstance(f, str) and not f.isdecimal())
        return ", ".join(f"{self.fields.get(name, name)} {self.sizes[name]}" for name in names)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a switch of the configuration, such as ``attention_bias``."""
        value = self.config.get(name)
        return default if value is None else bool(value)

    def number(self, name: str, default: int) -> int:
        """Return a whole number of the configuration; raises :class:`Unmapped` for anything else under its name."""
        value = self.config.get(name)
        if value is None:
            return default
        if type(value) is not int or value < min(default, 1):
            raise _no_number(name, value)
        return value

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers of the configuration, empty where it has none."""
        value = self.config.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(type(entry) is int for entry in value):
            raise _no_number(name, value)
        return value


def _no_number(name: str, value: object) -> Unmapped:
    shown = repr(value)
    return Unmapped(f"config.json: {name} is {shown[:40]}, which makes no sense", code="config-lacks")


def _factors(text: str | int) -> list[str | int]:
    return [text] if isinstance(text, int) else list(text.split("*"))
