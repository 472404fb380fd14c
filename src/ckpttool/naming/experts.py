"""Experts in two forms: packed into one tensor a projection, or one tensor an expert; how one lies in the other.

In memory, transformers 5 packs them: ``experts.gate_up_proj [E, 2I, H]`` has the rows of the gate, then those of the up
projection, ``experts.down_proj [E, H, I]``. One by one they are ``experts.3.gate_proj.weight [I, H]``, ``up_proj`` and
``down_proj.weight [H, I]`` (Mixtral: ``w1``, ``w3``, ``w2``).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from ckpttool.formats.folding import NUMBER
from ckpttool.naming.rules import MIXTRAL_EXPERTS, USUAL_EXPERTS

GATE_UP, DOWN = "gate_up_proj", "down_proj"
NAMINGS = (USUAL_EXPERTS, MIXTRAL_EXPERTS)

_PACKED = re.compile(rf"(?P<prefix>.*\.experts\.)(?P<projection>{GATE_UP}|{DOWN})")
_ONE = "|".join(name for names in NAMINGS for name in names)
_SINGLE = re.compile(rf"(?P<prefix>.*\.experts\.)(?P<expert>{NUMBER})\.(?P<projection>{_ONE})\.weight")


@dataclass(frozen=True, slots=True)
class Packed:
    """The name of packed experts: what is before it, and which projection they are."""

    prefix: str
    projection: str

    @property
    def halves(self) -> int:
        """How many projections it holds one after the other."""
        return 2 if self.projection == GATE_UP else 1

    def single(self, naming: tuple[str, str, str], expert: int, half: int) -> str:
        """Return the name of one expert's projection."""
        projection = naming[half] if self.projection == GATE_UP else naming[2]
        return f"{self.prefix}{expert}.{projection}.weight"


def packed(name: str) -> Packed | None:
    """Take the name of packed experts apart, ``None`` for any other."""
    match = _PACKED.fullmatch(name)
    return Packed(match["prefix"], match["projection"]) if match else None


def naming_of(prefix: str, names: Container[str]) -> tuple[str, str, str] | None:
    """Return how the experts behind a prefix are called one by one, ``None`` where they are not there like that."""
    return next((naming for naming in NAMINGS if f"{prefix}0.{naming[0]}.weight" in names), None)


@dataclass(frozen=True, slots=True)
class Single:
    """The name of one expert's projection; ``half`` is its place among those that are packed together."""

    prefix: str
    expert: int
    naming: tuple[str, str, str]
    projection: str
    half: int

    def called(self, prefix: str, naming: tuple[str, str, str]) -> str:
        """Return the name of the same projection behind another prefix and in another naming."""
        return Packed(prefix, self.projection).single(naming, self.expert, self.half)


def single(name: str) -> Single | None:
    """Take the name of one expert's projection apart, ``None`` for any other."""
    match = _SINGLE.fullmatch(name)
    if match is None:
        return None
    naming = next(names for names in NAMINGS if match["projection"] in names)
    place = naming.index(match["projection"])
    return Single(match["prefix"], int(match["expert"]), naming, DOWN if place == 2 else GATE_UP, place % 2)


def by_prefix(names: Iterable[str]) -> Mapping[str, dict[int, list[str]]]:
    """Gather the projections of experts that are there one by one: by prefix, then by expert."""
    found: dict[str, dict[int, list[str]]] = {}
    for name in names:
        one = single(name)
        if one is not None:
            found.setdefault(one.prefix, {}).setdefault(one.expert, []).append(name)
    return found


def numbered(prefix: str, names: Container[str], naming: tuple[str, str, str]) -> Iterator[int]:
    """Count the experts behind a prefix: 0, 1, ... as long as one is there."""
    expert = 0
    while f"{prefix}{expert}.{naming[0]}.weight" in names:
        yield expert
        expert += 1
