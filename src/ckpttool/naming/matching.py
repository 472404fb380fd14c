"""Hold what is written against a reference: what only one of both has, other shapes, and what is allowed by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from ckpttool.errors import Problem, UsageError
from ckpttool.formats.folding import folded, numbered
from ckpttool.naming.reference import Reference
from ckpttool.plan import Target
from ckpttool.tensors import CASTABLE

_COUNTED = {"layers": r"(?:.*\.)?layers\.", "experts": r".*\.experts\."}


ANY = "*"
"""The pattern that allows whatever there is, be it nothing."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may be missing or extra all the same: names, or patterns with ``*`` for any characters."""

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Match:
    """Names that only the reference has or only the output, those of them that are allowed, and what is wrong.

    ``sizes`` say in words where the two are of another size: that is what all else comes from; ``of`` is the model type
    of the reference.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    other_shapes: dict[str, list[str]] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    of: str | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def data(self) -> dict[str, Any]:
        """Every name, for programs."""
        names = {"only_in_reference": list(self.missing), "not_in_reference": list(self.extra)}
        return {**names, "other_shapes": self.other_shapes}


def match(targets: Iterable[Target], like: Reference, wanted: Iterable[str], allowed: Allowed, hint: str = "") -> Match:
    """Compare targets with a reference, which has to have its ``wanted`` names written; ``hint`` is for extra ones.

    Raises :class:`UsageError` for a name that is allowed and is neither missing nor extra: it is a misspelt one.
    """
    written = {target.name: target for target in targets}
    only_there = sorted(set(wanted) - written.keys())
    only_here = [name for name in written if not like.has(name)]
    missing, lacking = _sorted_out(only_there, allowed.missing, "--allow-missing")
    extra, surplus = _sorted_out(only_here, allowed.extra, "--allow-extra")
    others: dict[str, list[str]] = {}
    kinds: dict[str, list[str]] = {}
    for name, target in written.items():
        shape = like.shape(name)
        if shape is not None and shape != target.shape:
            others.setdefault(f"{list(target.shape)} here, {list(shape)} in the reference", []).append(name)
        there = like.tensors.get(name)
        if there is not None and _are_of_two_kinds(target.dtype, there[0]):
            kinds.setdefault(f"{target.dtype} here, {there[0]} in the reference", []).append(name)
    where = f"The reference is {like.path} (--like)."
    found = [
        *_folded("only-in-reference", "in the reference only", missing, where),
        *_folded("not-in-reference", "not in the reference", extra, hint or where),
        *(Problem(code="shapes-disagree", message=f"{text}: {_together(names)}") for text, names in others.items()),
        *(Problem(code="dtypes-disagree", message=f"{text}: {_together(names)}") for text, names in kinds.items()),
    ]
    sizes = tuple(_counts(like.tensors, written)) if found else ()
    found[:0] = [Problem(code="reference-disagrees", message=text) for text in sizes]
    return Match(tuple(missing), tuple(extra), (*lacking, *surplus), others, sizes, like.model_type, tuple(found))


_WHOLE = frozenset({"int64", "int32", "bool"})
"""What counters, positions and masks are; smaller integers may be quantised weights."""


def _are_of_two_kinds(dtype: str, other: str) -> bool:
    """Tell whether one is a float and the other an integer, which no cast and no quantisation makes the same."""
    return (dtype in _WHOLE and other in CASTABLE) or (dtype in CASTABLE and other in _WHOLE)


def _sorted_out(names: Sequence[str], patterns: Sequence[str], option: str) -> tuple[list[str], list[str]]:
    """Split names into those that are wrong and those that are allowed."""
    for pattern in patterns:
        if pattern != ANY and not any(_fits(name, pattern) for name in names):
            what = "missing" if option.endswith("missing") else "extra"
            raise UsageError(f"{option} {pattern}: no such name is {what}")
    good = {name: None for name in names if any(_fits(name, pattern) for pattern in patterns)}
    return [name for name in names if name not in good], list(good)


_RANGES = re.compile(r"\[(\d{1,9}(?:-\d{1,9})?(?:,\d{1,9}(?:-\d{1,9})?)*)\]")
"""Numbers as they are folded in what is told: ``[0-3,7]``."""


def _fits(name: str, pattern: str) -> bool:
    """Tell whether a name is meant: as it is, by ``*``, ``?`` and ``[ab]``, or folded as problems are told."""
    if name == pattern or fnmatchcase(name, pattern):
        return True
    parts = _RANGES.split(pattern)
    if len(parts) == 1:
        return False
    texts = (re.escape(text).replace(r"\*", ".*").replace(r"\?", ".") for text in parts[::2])
    found = re.fullmatch(r"(\d{1,9})".join(texts), name)
    return found is not None and all(map(_is_in, map(int, found.groups()), parts[1::2]))


def _is_in(number: int, spans: str) -> bool:
    ends = (span.split("-") for span in spans.split(","))
    return any(int(span[0]) <= number <= int(span[-1]) for span in ends)


def _together(names: Iterable[str]) -> str:
    return ", ".join(text for text, _ in folded(names))


def _folded(code: str, what: str, names: Iterable[str], hint: str) -> Iterator[Problem]:
    for text, count in folded(names):
        times = f", {count:,} of them" if count > 1 else ""
        yield Problem(code=code, message=f"{what}{times}: {text}", hint=hint)


def _counts(theirs: Iterable[str], ours: Iterable[str]) -> Iterator[str]:
    """Yield where a reference is of another size: that is what all the other lines come from."""
    theirs, ours = list(theirs), list(ours)
    for what, prefix in _COUNTED.items():
        there, here = numbered(theirs, prefix), numbered(ours, prefix)
        if there and here and there != here:
            yield f"the reference has {len(there)} {what}, the checkpoint {len(here)}"
