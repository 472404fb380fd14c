"""Counting: parameters, dtypes, the module tree, and what lies on disk under how many names."""

from __future__ import annotations

import os
import stat
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import Problem
from ckpttool.formats.findings import counted, listing
from ckpttool.inspection.result import Disk, DtypeUse, Module, SharedTrees
from ckpttool.tensors import TensorInfo

MOST_WAYS = 8
"""Ways on which one directory is entered: the trees of a migration are four; more is a maze of links."""

TREE_DEPTH = 4
"""Levels of the module tree that are kept; deeper modules are summed up into their parent."""


def parameters(tensors: Iterable[TensorInfo]) -> int:
    """Count elements, each tensor once."""
    return sum(tensor.numel for tensor in tensors)


def dtypes(tensors: Iterable[TensorInfo]) -> tuple[DtypeUse, ...]:
    """Sum up by dtype, the largest first."""
    groups: dict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in tensors:
        groups[tensor.dtype].append(tensor)
    uses = [DtypeUse(d, len(ts), parameters(ts), sum(t.nbytes for t in ts)) for d, ts in groups.items()]
    return tuple(sorted(uses, key=lambda use: (-use.bytes, use.dtype)))


@dataclass(slots=True)
class _Node:
    tensors: int = 0
    parameters: int = 0
    bytes: int = 0
    numbers: set[str] = field(default_factory=set)
    children: dict[str, _Node] = field(default_factory=dict)


def modules(tensors: Iterable[TensorInfo]) -> Module:
    """Return the tree of modules; numbered siblings (``layers.0``, ``layers.1``) are one node ``layers.*``."""
    root = _Node()
    for tensor in tensors:
        for node in _path(root, tensor.name):
            node.tensors += 1
            node.parameters += tensor.numel
            node.bytes += tensor.nbytes
    return _freeze("", root)


def _path(root: _Node, name: str) -> Iterator[_Node]:
    """Yield the nodes from the root to the module of a tensor, making those that are new."""
    yield root
    node, depth = root, 0
    words = name.split(".")
    for word, following in zip(words[:-1] or words, [*words[1:], ""], strict=False):
        if word.isdigit() and node is not root:
            node.numbers.add(word)
            continue
        if depth == TREE_DEPTH:
            return
        depth += 1
        node = node.children.setdefault(f"{word}.*" if following.isdigit() else word, _Node())
        yield node


def _freeze(name: str, node: _Node) -> Module:
    children = sorted((_freeze(n, c) for n, c in node.children.items()), key=lambda m: -m.bytes)
    label = f"{name} ({len(node.numbers)})" if node.numbers else name
    return Module(label, node.tensors, node.parameters, node.bytes, tuple(children))


@dataclass(slots=True)
class _Walk:
    """What a walk over the names below a directory met."""

    names: dict[tuple[int, int], list[str]] = field(default_factory=lambda: defaultdict(list))
    sizes: dict[tuple[int, int], int] = field(default_factory=dict)
    symbolic: set[str] = field(default_factory=set)
    dangling: list[str] = field(default_factory=list)
    modified: float = 0.0


def disk(root: Path) -> tuple[Disk, tuple[Problem, ...]]:
    """Measure everything below a directory, through links; links that lead nowhere are problems."""
    walk = _Walk()
    if root.is_file():
        info = root.stat()
        return Disk(1, info.st_size, info.st_size, info.st_mtime), ()
    _visit(root, walk)
    apparent = sum(walk.sizes[file] * len(names) for file, names in walk.names.items())
    result = Disk(
        files=sum(map(len, walk.names.values())),
        apparent=apparent,
        unique=sum(walk.sizes.values()),
        modified=walk.modified,
        shared=_shared(walk),
    )
    problems: tuple[Problem, ...] = ()
    if walk.dangling:
        ours = any(map(_is_of_a_checkpoint, walk.dangling))
        problems = (
            Problem(
                code="dangling-link",
                message=f"{counted(len(walk.dangling), 'link')} leading nowhere: {_places(walk.dangling)}",
                hint="The checkpoint was moved or copied without what its links point at." if ours else "",
                severity="error" if ours else "note",
            ),
        )
    return result, problems


_SUFFIXES = (".pt", ".bin", ".safetensors", ".distcp", ".metadata", ".json")


def _is_of_a_checkpoint(name: str) -> bool:
    """Tell a link that a loader would follow from the litter of loggers."""
    *folders, file = name.split("/")
    known = any(map(keeps_checkpoints, [*folders, file])) or file.endswith(_SUFFIXES)
    return known and not {"wandb", "logs", "tensorboard", "tensorboard_log"} & set(folders)


def _places(names: list[str]) -> str:
    """Name a few files, or the directories of many."""
    if len(names) <= 8:
        return listing(sorted(names))
    return f"in {listing(sorted({name.rpartition('/')[0] or '.' for name in names}))}"


def _visit(root: Path, walk: _Walk) -> None:
    """Walk without recursion; a directory is entered on a few of the ways to it, never inside itself.

    Links to directories outside are followed only where a checkpoint is kept: steps, roles' trees.
    """
    todo: list[tuple[str, frozenset[tuple[int, int]], bool]] = [("", frozenset(), False)]
    entered: Counter[tuple[int, int]] = Counter()
    real = os.path.realpath(root)
    while todo:
        where, above, linked = todo.pop()
        try:
            entries = sorted(os.scandir(root / where), key=lambda e: e.name)
        except OSError:
            continue
        for entry in entries:
            name = f"{where}/{entry.name}" if where else entry.name
            try:
                info = entry.stat()
            except OSError:
                walk.dangling.append(name)
                continue
            file, is_link = (info.st_dev, info.st_ino), linked or entry.is_symlink()
            if stat.S_ISDIR(info.st_mode):
                entered[file] += 1
                outside = entry.is_symlink() and not _inside(root / name, real)
                if file not in above and entered[file] <= MOST_WAYS and (not outside or keeps_checkpoints(entry.name)):
                    todo.append((name, above | {file}, is_link))
            elif stat.S_ISREG(info.st_mode):
                walk.names[file].append(name)
                walk.sizes[file] = info.st_size
                walk.modified = max(walk.modified, info.st_mtime)
                if is_link:
                    walk.symbolic.add(name)


def _inside(path: Path, root: str) -> bool:
    return os.path.commonpath([os.path.realpath(path), root]) == root


def keeps_checkpoints(name: str) -> bool:
    """Tell by its name a directory that is a step, a role or a tree of one: links to those are followed."""
    trees = (layout.V1_ARCHIVE, layout.V1_HUGGINGFACE, *layout.V2_PARENTS, *layout.ROLES)
    return layout.step_of(name) is not None or name in trees


def _shared(walk: _Walk) -> tuple[SharedTrees, ...]:
    """Group the files that have several names here by the set of directories that hold them."""
    files: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    symbolic: set[tuple[str, ...]] = set()
    for file, names in walk.names.items():
        trees = tuple(sorted({name.rpartition("/")[0] or "." for name in names}))
        if len(names) > 1:
            files[trees] += 1
            sizes[trees] += walk.sizes[file]
            if any(name in walk.symbolic for name in names):
                symbolic.add(trees)
    return tuple(SharedTrees(trees, n, sizes[trees], trees in symbolic) for trees, n in files.most_common())
