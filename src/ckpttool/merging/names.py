"""Names of wrappers inside names of tensors: what FSDP1, activation checkpointing, compile, DDP and trl leave there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from ckpttool.errors import Problem
from ckpttool.formats.findings import listing

ANYWHERE = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
LEADING = "module"
"""What ``DataParallel`` puts in front; further inside it may be a name that the model has given."""

TRL, VALUE_HEAD = "pretrained_model.", "v_head."
"""Where trl's classes with a value head keep the model, and that head; trl loads the model without its prefix."""


def unwrapped(name: str) -> tuple[str, tuple[str, ...]]:
    """Return a name without the segments of wrappers, and those segments."""
    parts = name.split(".")
    last = parts.pop()
    kept = [part for part in parts if part not in ANYWHERE]
    gone = [part for part in parts if part in ANYWHERE]
    while kept and kept[0] == LEADING:
        gone.append(kept.pop(0))
    return ".".join([*kept, last]), tuple(gone)


def unwrap(names: Iterable[str]) -> tuple[Mapping[str, str], Mapping[str, int], tuple[Problem, ...]]:
    """Return new names by old ones, how many tensors lost each segment, and the names that would collide."""
    new: dict[str, str] = {}
    lost: Counter[str] = Counter()
    for name in names:
        short, gone = unwrapped(name)
        new[name] = short if gone else name
        lost.update(set(gone))
    _unwrap_trl(new, lost)
    return new, dict(lost), tuple(_collisions(new))


def _unwrap_trl(new: dict[str, str], lost: Counter[str]) -> None:
    """Take trl's prefix out of names, where all of them are of the model or of the value head around it."""
    inside = [name for name, short in new.items() if short.startswith(TRL)]
    around = [name for name, short in new.items() if short.startswith(VALUE_HEAD)]
    if inside and around and len(inside) + len(around) == len(new):
        new.update({name: new[name].removeprefix(TRL) for name in inside})
        lost[TRL.rstrip(".")] += len(inside)


def _collisions(new: Mapping[str, str]) -> Iterator[Problem]:
    if len(set(new.values())) == len(new):
        return
    old: dict[str, list[str]] = {}
    for name, short in new.items():
        old.setdefault(short, []).append(name)
    for short, several in old.items():
        if len(several) > 1:
            yield Problem(code="names-collide", message=f"{listing(several)} would all be written as {short}")
