"""What ``inspect`` found, as plain data: rendered for people, dumped as JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ckpttool.errors import Problem

State = Literal["complete", "incomplete", "absent", "no weights", "not opened", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Content:
    """Something that the checkpoint holds: ``where`` is relative to the inspected directory."""

    name: str
    where: str
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DtypeUse:
    """How much of the model one dtype holds; every tensor is counted once, whatever the ranks store."""

    dtype: str
    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Module:
    """A node of the module tree, with everything below it summed up."""

    name: str
    tensors: int
    parameters: int
    bytes: int
    children: tuple[Module, ...] = ()


@dataclass(frozen=True, slots=True)
class SharedTrees:
    """Directories that hold the same files under several names (hard or symbolic links)."""

    trees: tuple[str, ...]
    files: int
    bytes: int
    symbolic: bool


@dataclass(frozen=True, slots=True)
class Disk:
    """Files below the directory: ``apparent`` counts every name, ``unique`` every file once."""

    files: int
    apparent: int
    unique: int
    modified: float
    shared: tuple[SharedTrees, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpectedTree:
    """A tree that the save contents of the manifest ask for, and whether it is there with something in it."""

    path: str
    holds: str
    format: str
    backend: str
    found: bool


@dataclass(frozen=True, slots=True)
class Manifest:
    """What ``ckpt_contents.json`` says."""

    schema_version: int | None
    save_contents: tuple[str, ...]
    backend: Mapping[str, bool]
    trees: tuple[ExpectedTree, ...]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor of the list: ``where`` is the archive, ``part`` what it belongs to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    placement: str
    bytes: int
    part: str
    where: str


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that wrote shards: which are here, how they lie on the mesh, how many tensors are placed how."""

    world_size: int
    present: tuple[int, ...]
    missing: tuple[int, ...]
    mesh: Mapping[str, int]
    placements: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A command to type next, and why."""

    command: str
    why: str


@dataclass(frozen=True, slots=True)
class StepRow:
    """One role of one step of a run."""

    step: int | None
    role: str
    path: str
    kind: str
    title: str
    state: State
    reason: str
    bytes: int
    modified: float


@dataclass(frozen=True, slots=True)
class Run:
    """A run's steps, its tracker (``None``: there is none) and the newest step of which every role is complete."""

    rows: tuple[StepRow, ...]
    tracker_file: str | None
    tracker: str | None
    latest_complete: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The answer to: what is this, is it whole, what is in it, what do I type next."""

    path: str
    kind: str
    title: str
    state: State
    evidence: tuple[str, ...]
    problems: tuple[Problem, ...] = ()
    step: int | None = None
    role: str | None = None
    facts: Mapping[str, str]
    ranks: Ranks | None = None
    parameters: int | None = None
    dtypes: tuple[DtypeUse, ...] = ()
    disk: Disk | None = None
    contents: tuple[Content, ...] = ()
    modules: Module | None = None
    manifest: Manifest | None = None
    run: Run | None = None
    next: tuple[Suggestion, ...] = ()
    tensors: tuple[TensorRow, ...] = ()

    @property
    def faults(self) -> tuple[Problem, ...]:
        """The problems that make the checkpoint less than whole."""
        return tuple(p for p in self.problems if p.severity == "error")

    @property
    def whole(self) -> bool:
        """Whether it is complete and nothing speaks against it: what ``--strict`` asks."""
        return self.state == "complete" and not self.faults

    @property
    def refused(self) -> bool:
        """Whether something in a run was refused because it would run code."""
        return self.run is not None and any(row.state == "refused" for row in self.run.rows)

    def as_json(self) -> dict[str, Any]:
        """Return plain data; problems are reported beside it, in the envelope."""
        data = asdict(self)
        del data["problems"]
        return data
