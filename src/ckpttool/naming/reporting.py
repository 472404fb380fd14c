"""What following a reference has done, in few lines: one a rule, names as patterns and none left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpttool.formats.folding import folded
from ckpttool.naming.following import ONE_BY_ONE, PACKED, STATED, TURNED, Followed
from ckpttool.naming.matching import Match
from ckpttool.naming.reference import Reference
from ckpttool.plan import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What one rule of names has done: to how many tensors, how many they have become, and that as patterns.

    ``kind`` is ``renamed``, ``split``, ``joined`` or ``turned``; ``stated`` says how experts are taken to lie.
    """

    rule: str
    kind: str
    tensors: int
    targets: int
    sources: tuple[str, ...]
    names: tuple[str, ...]
    stated: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How names and forms follow a reference: what rules did, and what is missing or extra and was allowed."""

    like: str
    rules: tuple[Rule, ...] = ()
    as_they_are: int = 0
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


_KINDS = {ONE_BY_ONE: "split", PACKED: "joined", TURNED: "turned"}


def names_told(like: Reference, followed: Followed, targets: Sequence[Target], unlike: Match) -> Names:
    """Tell what rules did to which names, and what is missing or extra and was allowed."""
    return _names(like, followed, {target.name for target in targets}, unlike)


def _names(like: Reference, followed: Followed, written: set[str], unlike: Match) -> Names:
    moved = {target for pairs in followed.pairs.values() for _, target in pairs}
    return Names(
        like=like.path,
        rules=tuple(_told(rule, pairs) for rule, pairs in followed.pairs.items()),
        as_they_are=len(written - moved),
        missing=tuple(name for name in unlike.allowed if name not in written),
        extra=tuple(name for name in unlike.allowed if name in written),
    )


def prefixed(like: Reference, targets: Sequence[Target], unlike: Match) -> Names:
    """Tell the same of targets that a weight map has named, for a reference with another prefix."""
    found = Followed()
    for target in targets:
        if target.name in like.renamed:
            found.pairs.setdefault("prefix", []).append((target.name, like.renamed[target.name]))
    renamed = [like.renamed.get(target.name, target.name) for target in targets]
    return _names(like, found, set(renamed), unlike)


def _told(rule: str, pairs: Sequence[tuple[str, str]]) -> Rule:
    sources, names = (tuple(dict.fromkeys(pair[side] for pair in pairs)) for side in (0, 1))
    return Rule(
        rule=rule,
        kind=_KINDS.get(rule, "renamed"),
        tensors=len(sources),
        targets=len(names),
        sources=tuple(text for text, _ in folded(sources)),
        names=tuple(text for text, _ in folded(names)),
        stated=STATED.get(rule, ""),
    )
