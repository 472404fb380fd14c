"""What ``diff`` found, as plain data: rendered for people, drawn as a page, dumped as JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ckpttool.errors import Problem
from ckpttool.source import SourceOptions
from ckpttool.tensors import Index

State = Literal["equal", "close", "differs", "only in A", "only in B"]
STATES: tuple[State, ...] = get_args(State)

PAGE_BEGINS = "<!doctype html>\n<!-- a comparison of two checkpoints, by ckpttool diff -->\n"
"""How the page of a comparison begins: ``--force`` replaces no other file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metrics:
    """How far apart the values of two tensors of one shape are; B is measured against A.

    ``changed`` counts elements whose bits differ (the wider dtype decides where there are two). ``not_finite`` counts
    those of them whose difference is no finite number: a NaN or an infinity on one side. All that follows is measured
    over the others. ``mean_abs`` is taken over every finite element, also those that are equal; ``rel_l2`` is
    ``|B - A| / |A|`` and ``None`` where A is zero; ``cosine`` is ``None`` where either is.
    ``ulps`` counts changed elements by the distance in units in the last place of the narrower dtype: at most 0 (the
    sign of zero, or lost by the narrower one), 1, 2, 4, 8, ... ``2**(i - 1)`` for entry ``i``; empty for integers.
    """

    elements: int
    changed: int
    not_finite: int = 0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    rel_l2: float | None = 0.0
    cosine: float | None = 1.0
    ulps: tuple[int, ...] = ()

    @property
    def share(self) -> float:
        """The part of the elements that changed, from 0 to 1."""
        return self.changed / self.elements if self.elements else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One side of a tensor."""

    dtype: str
    shape: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDiff:
    """A tensor of both sides or of one, under the name by which they are compared.

    ``why`` says what differs besides values: ``shape``, ``dtype``. ``metrics`` is ``None`` where values were not
    compared: a tensor of one side, two shapes, or trusted checksums (``trusted``). ``layer`` is the number of the
    layer in its name, ``module`` the rest of its name with numbers of experts as ``*``.
    """

    name: str
    state: State
    a: Half | None
    b: Half | None
    why: str = ""
    metrics: Metrics | None = None
    trusted: bool = False
    layer: int | None = None
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Several tensors summed up: all of one module in one layer, of one layer, of one module.

    ``rel_l2`` is that of the tensors that changed, as one vector: 0 where none did, ``None`` where A is zero;
    ``missing`` are tensors that only one side has or that have two shapes.
    """

    tensors: int
    elements: int
    changed: int
    max_abs: float
    rel_l2: float | None
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """One module through all layers: a row of the heat map. A module that is in no layer has ``None`` as its layer."""

    module: str
    whole: Cell
    layers: Mapping[int | None, Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two checkpoints: its path as given, the directory or file that was read, what it is."""

    path: str
    root: str
    kind: str
    title: str
    tensors: int
    left_out: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """Tensors that only one side has, of one shape, dtype and content: perhaps one tensor under two names."""

    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SourceOptions):
    """How to compare. ``tolerance`` is absolute, or in units in the last place with ``ulps``; 0 is exact.

    ``as_written`` casts A to the dtypes of B, as a conversion would.
    """

    role: str | None = None
    step: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    tolerance: float = 0.0
    ulps: int = 0
    ignore_dtype: bool = False
    trust_crc: bool = False
    everything: bool = False
    as_written: bool = False
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The answer to: is B the same as A, and where not. ``plan`` says by what names were made comparable, if so."""

    a: Side
    b: Side
    tensors: tuple[TensorDiff, ...]
    strips: tuple[Strip, ...]
    layers: Mapping[int, Cell]
    plan: str = ""
    renamed: tuple[Renamed, ...] = ()
    excluded: int = 0
    notes: tuple[Problem, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0
    options: Options = field(default_factory=Options)

    @property
    def counts(self) -> Mapping[State, int]:
        """Tensors by state, every state."""
        found = Counter(tensor.state for tensor in self.tensors)
        return {state: found[state] for state in STATES}

    @property
    def same(self) -> bool:
        """Whether nothing differs by more than was tolerated, and both have the same tensors."""
        return all(tensor.state in ("equal", "close") for tensor in self.tensors)

    @property
    def trusted(self) -> int:
        """Tensors that were not read because both sides record the same checksum."""
        return sum(tensor.trusted for tensor in self.tensors)

    def of(self, states: Iterable[State]) -> list[TensorDiff]:
        """Return the tensors in these states, in the order of the checkpoint."""
        wanted = set(states)
        return [tensor for tensor in self.tensors if tensor.state in wanted]

    def as_json(self) -> dict[str, Any]:
        """Return it as values that JSON has; the notes are the problems of the envelope."""
        data = {name: value for name, value in asdict(self).items() if name != "notes"}
        for tensor, plain in zip(self.tensors, data["tensors"], strict=True):
            if tensor.metrics is not None:
                plain["metrics"]["share"] = tensor.metrics.share
        for strip in data["strips"]:
            strip["layers"] = [{"layer": layer, **cell} for layer, cell in strip["layers"].items()]
        data["layers"] = [{"layer": layer, **cell} for layer, cell in data["layers"].items()]
        return {"same": self.same, "counts": self.counts, "trusted": self.trusted, **data}
