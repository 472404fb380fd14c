"""The vocabulary of weight maps: how one tensor of a Hugging Face model follows from slots of a Megatron one.

A :class:`Weight` names a tensor, the recipe that makes it and the shape that the configuration gives it. Recipes are
data: they say which rows of which slots come one after the other and never touch a byte. The row orders are those of
Megatron-Core's ``dist_checkpointing``: a query group is its queries, its key, its value; a gated first projection is
all of the gate, then all of the up projection, whatever the parallel layout was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from ckpttool.architectures.model import NVIDIA, SWIFT, Model
from ckpttool.architectures.slots import Slot
from ckpttool.plan import Arrangement, Dropped, Rows
from ckpttool.tensors import Index


class Absent(Exception):
    """The checkpoint lacks what a tensor is made of: each argument names a slot, or those that would do instead."""


class Contradiction(Exception):
    """What is stored has another shape than the configuration says; the text shows both."""


class Undecided(Exception):
    """The same key can mean two row orders, and nothing tells which."""


@dataclass(slots=True)
class Taken:
    """Which slots have been used so far, and what was cut off on the way."""

    keys: set[str] = field(default_factory=set)
    cut: dict[str, Dropped] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a recipe looks: all slots, the prefix of the block, the expert."""

    slots: Mapping[str, Slot]
    prefix: str
    model: Model
    taken: Taken
    expert: int = 0

    def of(self, expert: int) -> Place:
        """Return the same place for another expert."""
        return Place(self.slots, self.prefix, self.model, self.taken, expert) if expert != self.expert else self

    def slot(self, *names: str) -> Slot:
        """Return the first of these that is there; raises :class:`Absent`."""
        keys = [self.prefix + name.replace("{e}", str(self.expert)) for name in names]
        for key in keys:
            if key in self.slots:
                self.taken.keys.add(key)
                return self.slots[key]
        raise Absent(" or ".join(keys))


@dataclass(frozen=True, slots=True)
class Made:
    """Rows one after the other: their shape together, the dtypes that they are stored in, how they are turned.

    ``origin`` names where they are stored, for people; ``shift`` is added to every element.
    """

    parts: tuple[Rows, ...]
    shape: Index
    dtypes: tuple[str, ...]
    origin: str
    arrangement: Arrangement | None = None
    shift: int = 0


class Recipe(Protocol):
    """Says which rows make a tensor."""

    def make(self, place: Place) -> Made:
        """Return them; raises :class:`Absent`, :class:`Contradiction`, :class:`Undecided`."""


@dataclass(frozen=True, slots=True, init=False)
class Copy:
    """A slot as it is, under whichever of its names it is stored."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def make(self, place: Place) -> Made:
        """Return all of its rows."""
        slot = place.slot(*self.names)
        return Made((slot.rows(),), slot.shape, (slot.dtype,), slot.origin)


@dataclass(frozen=True, slots=True, init=False)
class Vocabulary:
    """The first ``vocab_size`` rows: training pads the vocabulary so that ranks can share it."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def make(self, place: Place) -> Made:
        """Return them, and note what is cut."""
        slot, wanted = place.slot(*self.names), place.model.size("vocab")
        if not slot.shape or slot.shape[0] < wanted:
            raise Contradiction(_both(slot, wanted, place.model.said("vocab")))
        if slot.shape[0] > wanted:
            why = f"padding behind vocab_size {wanted:,}: {slot.shape[0] - wanted:,} rows"
            place.taken.cut[slot.key] = Dropped(slot.source, "vocabulary-padding", why, slot.box(wanted))
        shape = (wanted, *slot.shape[1:])
        return Made((slot.rows(0, wanted),), shape, (slot.dtype,), slot.origin)


@dataclass(frozen=True, slots=True)
class Qkv:
    """One projection out of query groups; ``which`` is ``q``, ``k`` or ``v``.

    A group has ``heads / groups`` queries, a key and a value of ``head_dim`` rows each.
    """

    which: str
    name: str

    def make(self, place: Place) -> Made:
        """Return its rows of every group: blocks that lie a group apart."""
        return _of_groups(place.slot(self.name), place.model, self.which, _queries(place.model))


@dataclass(frozen=True, slots=True)
class GatedQkv:
    """The same where every query has an output gate: ``q`` is both, head by head.

    Megatron-Core stores ``[queries, gates, key, value]`` a group, ms-swift ``[query, gate, query, gate, ..., key,
    value]`` under the same key.
    """

    which: str
    name: str

    def make(self, place: Place) -> Made:
        """Return its rows of every group; raises :class:`Undecided` for queries of an unknown producer."""
        slot, model, queries = place.slot(self.name), place.model, _queries(place.model)
        made = _of_groups(slot, model, self.which, 2 * queries)
        if self.which != "q" or model.producer == SWIFT:
            return made
        if model.producer != NVIDIA:
            raise Undecided(slot.key)
        view = (model.size("groups"), 2, queries, model.size("head_dim"), *slot.shape[1:])
        return replace(made, arrangement=Arrangement(view, (0, 2, 1, *range(3, len(view))), 4))


def _of_groups(slot: Slot, model: Model, which: str, queries: int) -> Made:
    """Return one projection of every group, of which each has so many heads of queries, a key and a value."""
    groups, width = model.size("groups"), model.size("head_dim")
    if slot.shape[:1] != (every := (queries + 2) * groups * width,):
        raise Contradiction(_both(slot, every, model.said("heads", "groups", "head_dim")))
    first, block = {"q": (0, queries), "k": (queries, 1), "v": (queries + 1, 1)}[which]
    rows = slot.rows(first * width, groups * block * width, block * width, (queries + 2) * width)
    return Made((rows,), (groups * block * width, *slot.shape[1:]), (slot.dtype,), slot.origin)


def _queries(model: Model) -> int:
    heads, groups = model.size("heads"), model.size("groups")
    if not groups or heads % groups:
        raise Contradiction(f"heads cannot be shared evenly by groups: {model.said('heads', 'groups')}")
    return heads // groups


@dataclass(frozen=True, slots=True)
class Half:
    """The ``gate`` or the ``up`` half of a gated first projection: one tensor, or ``_w`` and ``_v`` in two keys.

    ``blocks`` names the setting by which the halves of experts may lie interleaved in blocks of rows.
    """

    which: str
    name: str
    kind: str = "weight"
    blocks: str = ""

    def make(self, place: Place) -> Made:
        """Return its rows."""
        letter = {"gate": "w", "up": "v"}[self.which]
        slot = place.slot(f"{self.name}.{self.kind}", f"{self.name}.{self.kind}_{letter}")
        if slot.key.endswith(f"_{letter}"):
            if place.model.interleaved.get(self.blocks):
                raise Contradiction(f"{slot.origin} is one half, but the run had {self.blocks} (interleaved halves)")
            return Made((slot.rows(),), slot.shape, (slot.dtype,), slot.origin)
        rows, block = slot.shape[0] if slot.shape else 1, place.model.interleaved.get(self.blocks, 0)
        if rows % (2 * block or 2):
            raise Contradiction(f"{slot.origin} has {rows:,} rows, which are not two halves")
        half, second = rows // 2, self.which == "up"
        run = slot.rows(block * second, half, block, 2 * block) if block else slot.rows(half * second, half)
        return Made((run,), (half, *slot.shape[1:]), (slot.dtype,), slot.origin)


@dataclass(frozen=True, slots=True, init=False)
class Joined:
    """Several one after the other."""

    recipes: tuple[Recipe, ...]

    def __init__(self, *recipes: Recipe) -> None:
        object.__setattr__(self, "recipes", recipes)

    def make(self, place: Place) -> Made:
        """Return the rows of all."""
        return _joined(_all_made((recipe, place) for recipe in self.recipes))


@dataclass(frozen=True, slots=True, init=False)
class FirstOf:
    """The first of several recipes that the checkpoint has the keys of: trainers keep one thing in several forms."""

    recipes: tuple[Recipe, ...]

    def __init__(self, *recipes: Recipe) -> None:
        object.__setattr__(self, "recipes", recipes)

    def make(self, place: Place) -> Made:
        """Return its rows; raises :class:`Absent` with the keys of the first one."""
        lacking: list[Absent] = []
        for recipe in self.recipes:
            try:
                return recipe.make(place)
            except Absent as absent:
                lacking.append(absent)
        raise lacking[0]


@dataclass(frozen=True, slots=True)
class Shifted:
    """A slot to every element of which ``by`` is added, where the checkpoint has the key ``where`` beside it, too.

    Norms around zero have the gain 1 + w; where the other side stores the gain itself, it is one more.
    """

    name: str
    by: int
    where: str

    def make(self, place: Place) -> Made:
        """Return all of its rows."""
        slot = place.slot(self.name)
        shift = self.by if place.prefix + self.where in place.slots else 0
        return Made((slot.rows(),), slot.shape, (slot.dtype,), slot.origin, shift=shift)


@dataclass(frozen=True, slots=True)
class Experts:
    """All experts of a layer in one tensor; ``view`` and ``order`` say how it is turned, where it is."""

    recipe: Recipe
    view: tuple[str | int, ...]
    order: Index = ()

    def make(self, place: Place) -> Made:
        """Return the rows of one expert after the other."""
        experts = range(place.model.size("experts"))
        made = _joined(_all_made((self.recipe, place.of(expert)) for expert in experts))
        view = place.model.shape(self.view)
        arrangement = Arrangement(view, self.order or tuple(range(len(view))), len(view) - len(made.shape) + 1)
        if arrangement.concatenated != made.shape:
            stored, wanted = list(made.shape), list(arrangement.concatenated)
            raise Contradiction(
                f"all of {made.origin} are {stored}, by config.json ({place.model.said(*self.view)}) {wanted}"
            )
        return replace(made, shape=arrangement.turned, arrangement=arrangement)


def _all_made(recipes: Iterable[tuple[Recipe, Place]]) -> list[Made]:
    """Make all of them, so that no slot seems unknown because another is missing; then raise what went wrong."""
    several: list[Made] = []
    lacking: dict[str, None] = {}
    contradiction = None
    for recipe, place in recipes:
        try:
            several.append(recipe.make(place))
        except Absent as absent:
            lacking.update(dict.fromkeys(absent.args))
        except Contradiction as error:
            contradiction = error
    if contradiction is not None:
        raise contradiction
    if lacking:
        raise Absent(*lacking)
    return several


def _joined(several: list[Made]) -> Made:
    if not several:
        raise Contradiction("config.json says that there are no experts")
    parts = tuple(part for made in several for part in made.parts)
    dtypes = tuple(dict.fromkeys(dtype for made in several for dtype in made.dtypes))
    rest = {made.shape[1:] for made in several}
    if len(rest) != 1:
        raise Contradiction(f"{several[0].origin} and what belongs to it are of different widths")
    rows = sum(made.shape[0] for made in several)
    origins = list(dict.fromkeys(made.origin for made in several))
    origin = origins[0] if len(origins) == 1 else f"{origins[0]} to {origins[-1]}"
    return Made(parts, (rows, *rest.pop()), dtypes, origin)


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor: its name below that of its block (``{e}`` is the expert), what it is made of, its shape in sizes."""

    name: str
    recipe: Recipe
    shape: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Forms:
    """Tensors of which a model has the one set or the other: experts by themselves, or packed into one tensor."""

    usual: tuple[Weight, ...]
    packed: tuple[Weight, ...]


Table = tuple[Weight | Forms, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Weights that share a prefix on both sides: a layer, a block of multi-token prediction, or the whole model.

    With ``twice``, the name of a rule, they are copies of tensors that are written anyway: only where a reference
    model has them.
    """

    of: str
    to: str
    table: Table
    twice: str = ""


def _both(slot: Slot, wanted: int, said: str) -> str:
    count = slot.shape[0] if slot.shape else 1
    return f"{slot.origin} has {count:,} rows, config.json ({said}) asks for {wanted:,}"
