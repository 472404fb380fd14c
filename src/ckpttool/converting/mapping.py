"""Hold a weight map against what is stored: targets, what is missing, what no rule knows. No byte is read here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ckpttool.architectures.family import HEAD, Family
from ckpttool.architectures.model import Model
from ckpttool.architectures.rules import (
    Absent,
    Block,
    Contradiction,
    Copy,
    Forms,
    Made,
    Place,
    Taken,
    Undecided,
    Weight,
)
from ckpttool.architectures.slots import Slot
from ckpttool.errors import Problem
from ckpttool.formats.findings import ranges
from ckpttool.formats.folding import numbered
from ckpttool.naming.reference import Reference
from ckpttool.plan import Dropped, Target
from ckpttool.tensors import CASTABLE

OUTPUT_LAYER = "output_layer.weight"
OUTPUT_BIAS = "output_layer.bias"
SCORE = "score.weight"

_COMPUTED = re.compile(r"(.*\.)?rotary_pos_emb\.inv_freq|.*\.rotary_emb\.inv_freq")


@dataclass(slots=True)
class Mapped:
    """What a weight map makes of the slots, and everything that does not fit.

    ``missing`` are targets with the keys that they could be made of; ``unknown`` are slots that nothing is made of;
    ``contradictions`` are texts that show what is stored and what the config says, with the targets they hold for.
    """

    targets: list[Target] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    missing: dict[str, tuple[str, ...]] = field(default_factory=dict)
    unknown: list[Slot] = field(default_factory=list)
    contradictions: dict[str, list[str]] = field(default_factory=dict)
    undecided: list[str] = field(default_factory=list)
    value_head: int = 0


def map_weights(
    family: Family, model: Model, slots: Mapping[str, Slot], like: Reference | None, *, labels: int
) -> Mapped:
    """Make every target that a model of this configuration has out of the slots.

    ``labels`` is the number of labels of the configuration: an output layer of one row, or of so many that are not
    the vocabulary, is a value head.
    """
    mapped, taken = Mapped(), Taken()
    for block in family.blocks(model):
        place = Place(slots, block.of, model, taken)
        for weight in _weights(block, like):
            for name, expert in _expanded(block, weight, model):
                if not block.twice or (like is not None and like.has(name)):
                    _add(mapped, name, weight, place.of(expert), block.twice)
    _add_head(mapped, Place(slots, "", model, taken), labels)
    dropped = {
        key: Dropped(slots[key].source, "computed", "made anew when it is loaded")
        for key in slots
        if _COMPUTED.fullmatch(key)
    }
    mapped.dropped += [*taken.cut.values(), *dropped.values()]
    mapped.unknown = [slot for key, slot in slots.items() if key not in taken.keys and key not in dropped]
    return mapped


def _weights(block: Block, like: Reference | None) -> Iterator[Weight]:
    """Yield the weights of a block, of two forms the one that the reference has."""
    for entry in block.table:
        if isinstance(entry, Forms):
            packed = like is not None and any(like.has(block.to + weight.name) for weight in entry.packed)
            yield from entry.packed if packed else entry.usual
        else:
            yield entry


def _expanded(block: Block, weight: Weight, model: Model) -> Iterator[tuple[str, int]]:
    """Yield the names of a weight with their experts."""
    name = block.to + weight.name
    if "{e}" not in name:
        yield name, 0
        return
    yield from ((name.replace("{e}", str(expert)), expert) for expert in range(model.size("experts")))


def _add(mapped: Mapped, name: str, weight: Weight, place: Place, twice: str = "") -> None:
    try:
        made = weight.recipe.make(place)
    except Absent as absent:
        mapped.missing[name] = absent.args
    except Contradiction as contradiction:
        mapped.contradictions.setdefault(str(contradiction), []).append(name)
    except Undecided as undecided:
        mapped.undecided.append(str(undecided))
    else:
        shape, dtype = place.model.shape(weight.shape), _dtype(made)
        if made.arrangement is None and made.shape != shape:
            said = place.model.said(*weight.shape)
            by = f"config.json ({said})" if said else f"{weight.name}"
            text = f"{made.origin} gives {list(made.shape)}, {by} wants {list(shape)}"
            mapped.contradictions.setdefault(text, []).append(name)
        if dtype is None:
            text = f"{made.origin} is stored in {' and '.join(made.dtypes)}, which no dtype holds both of"
            mapped.contradictions.setdefault(text, []).append(name)
        mapped.targets.append(
            Target(name, dtype or made.dtypes[0], shape, made.parts, made.arrangement, twice, made.shift)
        )


def _dtype(made: Made) -> str | None:
    """Return the dtype that loses nothing of parts that are stored in several; ``None`` where there is none."""
    if len(made.dtypes) == 1:
        return made.dtypes[0]
    if not CASTABLE.issuperset(made.dtypes):
        return None
    return "float64" if "float64" in made.dtypes else "float32"


def _add_head(mapped: Mapped, place: Place, labels: int) -> None:
    """Add the head over the vocabulary, or the value head; whether one is missing depends on ties."""
    slot = place.slots.get(OUTPUT_LAYER)
    if slot is None:
        return
    rows = slot.shape[0] if slot.shape else 0
    if rows < place.model.size("vocab") and rows in (1, labels):
        mapped.value_head = rows
        _add(mapped, SCORE, Weight(SCORE, Copy(OUTPUT_LAYER), (rows, "hidden")), place)
        if OUTPUT_BIAS in place.slots:
            _add(mapped, "score.bias", Weight("score.bias", Copy(OUTPUT_BIAS), (rows,)), place)
        return
    _add(mapped, HEAD.name, HEAD, place)


_COUNTED = {
    "layers": r"decoder\.layers\.",
    "experts": r".*\.mlp\.experts\.",
    "mtp": r"mtp\.layers\.",
}
_CALLED = {"layers": "layer%s", "experts": "expert%s", "mtp": "block%s of multi-token prediction"}


def counts(family: Family, model: Model, slots: Iterable[str]) -> tuple[list[Problem], dict[str, int]]:
    """Return where the checkpoint and the configuration disagree about how many there are, and how many are stored."""
    keys = list(slots)
    problems, stored = [], {}
    for size, prefix in _COUNTED.items():
        found, wanted = numbered(keys, prefix), model.sizes.get(size, 0)
        if size == "experts" and not found and not _has_experts(family, model):
            continue
        if len(found) != wanted or not _is_all(found):
            problems.append(_disagree(model, size, found))
            if _is_all(found) or wanted > LAYERS_MOST:  # what else there is to say is said of as many
                stored[size] = len(found)
    return problems, stored


def _is_all(found: set[int]) -> bool:
    return not found or max(found) == len(found) - 1


def _has_experts(family: Family, model: Model) -> bool:
    """Tell whether any layer of a model has experts: a configuration may make all of them dense."""
    few = replace(model, sizes={**model.sizes, "layers": min(model.size("layers"), LAYERS_MOST)})
    tables = (block.table for block in family.blocks(few))
    return any(isinstance(e, Forms) or ".experts." in e.name for table in tables for e in table)


LAYERS_MOST = 10_000
"""Layers that are looked at: a config may claim any number of them."""


def _disagree(model: Model, size: str, found: set[int]) -> Problem:
    several = _CALLED[size] % "s"
    counted = f"{len(found)} {_CALLED[size] % ('s' * (len(found) != 1))}" if found else f"no {several}"
    held = counted if _is_all(found) else f"the {several} {ranges(found)} alone"
    said = model.said(size) if size in model.sizes else f"nothing of {several}"
    hint = "To leave them out of weights and config: --no-mtp." if size == "mtp" else ""
    return Problem(code=f"{size}-disagree", message=f"the checkpoint has {held}, config.json says {said}", hint=hint)


def predictions(slots: Iterable[str]) -> int:
    """Return how many blocks of multi-token prediction are stored."""
    return len(numbered(slots, _COUNTED["mtp"]))


def without_mtp(slots: dict[str, Slot]) -> list[Dropped]:
    """Take the blocks of multi-token prediction out of the slots; return what was left out by that."""
    keys = [key for key in slots if key.startswith("mtp.")]
    sources = dict.fromkeys(slots.pop(key).source for key in keys)
    return [Dropped(source, "no-mtp", "--no-mtp: no multi-token prediction in the output") for source in sources]
