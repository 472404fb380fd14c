"""The checkpoints that lie in a tree, each opened once: where the items of archives lie, and all tensors."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool.errors import CkpttoolError, Problem, Refused
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.source import Source
from ckpttool.tensors import Place, TensorInfo
from ckpttool.unpickle import collector_paused
from ckpttool.verification.tree import Tree

_OF_TENSORS = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Single:
    """One file of tensors, as a source."""

    root: Path
    tensors: Mapping[str, TensorInfo]
    format: str = "file"
    objects: Mapping[str, Place] = field(default_factory=dict)
    unsharded: Mapping[str, Any] | None = None
    problems: tuple[Problem, ...] = ()

    def part_of(self, name: str) -> str:
        """Return ``model``: what else a file holds is not known."""
        return "model"


@dataclass(slots=True)
class Opened:
    """Sources by where they lie; ``problems`` are what could not be opened, ``refused`` tells of what would run code.

    ``indexed`` are directories whose index says where the items of their data files lie.
    """

    sources: dict[str, Source] = field(default_factory=dict)
    indexed: set[Path] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    refused: bool = False


def open_sources(tree: Tree, known: Mapping[str, Source], *, every: bool) -> Opened:
    """Open the archives of a tree, whose items only their indexes tell, and with ``every`` all that holds tensors.

    An archive that has several names is opened once, and one of the ``known`` not again. What is wrong with a source
    itself, the structure tells.
    """
    found = Opened()
    with collector_paused():
        for where, make in _ways(tree, known, every=every):
            try:
                made = known[where] if where in known else make()
                found.sources[where] = made
                if isinstance(made, dcp.DcpSource) and (made.tensors or made.objects):
                    found.indexed.add(made.root)
            except Refused as error:
                found.refused = True
                found.problems.append(Problem(code="refused", message=error.message, hint=error.hint, path=where))
            except CkpttoolError as error:
                found.problems.append(Problem(code=error.code, message=error.message, hint=error.hint, path=where))
    return found


def _ways(tree: Tree, known: Container[str], *, every: bool) -> Iterator[tuple[str, Callable[[], Source]]]:
    """Yield where a source lies and what opens it."""
    if tree.is_file:
        yield from _of_file(tree.base, every=every)
        return
    seen = set()
    for where, folder in sorted(tree.folders.items(), key=lambda item: item[0] not in known):
        index = tree.entry(folder / dcp.METADATA_FILE)
        if dcp.detect(folder) is not None:
            if index is None or index.identity not in seen:
                yield where, lambda folder=folder: dcp.open_(folder)  # type: ignore[misc]
            seen.add(index.identity if index is not None else (0, 0))
        elif every and fsdp.detect(folder) is not None:
            yield where, lambda folder=folder: fsdp.open_(folder, kinds=("model",))  # type: ignore[misc]
        elif every and hf.detect(folder) is not None:
            yield where, lambda folder=folder: hf.open_(folder)  # type: ignore[misc]


def _of_file(path: Path, *, every: bool) -> Iterator[tuple[str, Callable[[], Source]]]:
    if path.suffix == ".distcp":
        if dcp.detect(path.parent) is not None:
            yield "", lambda: dcp.open_(path.parent)
    elif every and path.suffix in _OF_TENSORS:
        yield "", lambda: Single(path.parent, hf.read_weights(path))
