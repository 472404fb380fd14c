"""What does not fit a weight map or a reference: told in few lines, with every name in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttool.architectures.family import HEAD, Family
from ckpttool.architectures.model import Model
from ckpttool.architectures.slots import NUMBERS, Slot
from ckpttool.converting.folding import folded
from ckpttool.converting.mapping import Mapped, numbered
from ckpttool.converting.opening import Opened
from ckpttool.converting.reference import Reference
from ckpttool.errors import Problem, Unmapped


def refuse_if_any(
    opened: Opened,
    family: Family,
    problems: list[Problem],
    data: Mapping[str, Any] | None = None,
    *,
    fitting: tuple[str, ...] = (),
) -> None:
    """Raise :class:`Unmapped` with all problems, if there are any; ``data`` has every name for programs.

    ``fitting`` are weight maps that would fit.
    """
    if not problems:
        return
    hint = "" if any(problem.hint for problem in problems) else _WHICH_CONFIG
    if fitting:
        hint = f"The keys are those of {' or '.join(fitting)}. {_WHICH_CONFIG}"
    error = Unmapped(
        f"{opened.source.root}: does not fit the weight map {family.name}; nothing was written",
        hint=hint,
        code=problems[0].code,
        problems=problems,
    )
    error.data = data
    raise error


_WHICH_CONFIG = "Is it the config.json of this model? Give the directory of the right one: --hf-config DIR."


def listed(mapped: Mapped) -> dict[str, Any]:
    """Return every name that does not fit, for programs."""
    return {
        "missing": list(mapped.missing),
        "unknown": [slot.stored_as for slot in mapped.unknown],
        "contradictions": [{"message": text, "names": names} for text, names in mapped.contradictions.items()],
    }


VISION = ("language_model.", "vision_model.", "visual.", "vision_tower.", "vision_projection.", "mm_projector.")


def of_vision(slots: Iterable[Slot]) -> Iterator[Problem]:
    """Yield the tensors of models of vision and language: the text alone would be half of the model."""
    for text, count in folded(slot.stored_as for slot in slots):
        hint = "A model of vision and language: only models of text are converted."
        yield Problem(code="weight-unknown", message=f"unknown{_times(count)}: {text}", hint=hint)


def misfits(mapped: Mapped) -> Iterator[Problem]:
    """Yield everything that is missing, unknown or contradictory: few lines, but every name is in one of them."""
    for text, names in mapped.contradictions.items():
        yield Problem(code="shapes-disagree", message=f"{text}: {', '.join(name for name, _ in folded(names))}")
    by_keys: dict[tuple[str, ...], list[str]] = {}
    for name, keys in mapped.missing.items():
        alike = tuple(NUMBERS.sub("*", key) for key in keys) if len(keys) == 1 else keys
        by_keys.setdefault(alike, []).append(name)
    for keys, names in by_keys.items():
        lacking = " and ".join(key for key, _ in folded(keys))
        for text, count in folded(names):
            yield Problem(code="weight-missing", message=f"missing{_times(count)}: {text} (from {lacking})")
    for text, count in folded(slot.stored_as for slot in mapped.unknown):
        yield Problem(code="weight-unknown", message=f"unknown{_times(count)}: {text}", hint=_hint(text))


def _times(count: int) -> str:
    return f", {count:,} of them" if count > 1 else ""


def _hint(name: str) -> str:
    if ".self_attention.linear_qgkv." in name:
        return "Written by Pai-Megatron-Patch, whose layers are not mapped."
    return ""


def refuse_unlike(opened: Opened, family: Family, mapped: Mapped, like: Reference, model: Model, *, mtp: bool) -> None:
    """Raise with the names that only the reference has, and those that it does not have, and other shapes.

    A head that is missing here is an alias by now.
    """
    written = {target.name: target for target in mapped.targets}
    wanted = like.wanted - written.keys() - {HEAD.name}
    if not mtp:
        wanted = frozenset(name for name in wanted if not _is_of_mtp(name, model))
    extra = [name for name in written if not like.has(name)]
    others: dict[str, list[str]] = {}
    for name, target in written.items():
        shape = like.shape(name)
        if shape is not None and shape != target.shape:
            others.setdefault(f"{list(target.shape)} here, {list(shape)} in the reference", []).append(name)
    no_mtp = bool(extra) and not wanted and all(_is_of_mtp(name, model) for name in extra)
    where = f"The reference is {like.path} (--like)."
    hint = "The reference has no multi-token prediction: to leave it out, --no-mtp." if no_mtp else ""
    found = [
        *_folded("only-in-reference", "in the reference only", sorted(wanted), where),
        *_folded("not-in-reference", "not in the reference", extra, hint or where),
    ]
    for text, names in others.items():
        shown = ", ".join(name for name, _ in folded(names))
        found.append(Problem(code="shapes-disagree", message=f"{text}: {shown}"))
    if found:
        found[:0] = _counts(like.tensors, written)
    data = {"only_in_reference": sorted(wanted), "not_in_reference": extra, "other_shapes": others}
    refuse_if_any(opened, family, found, data)


_COUNTED = {"layers": r"model\.layers\.", "experts": r".*\.experts\."}


def _counts(theirs: Iterable[str], ours: Iterable[str]) -> Iterator[Problem]:
    """Yield where a reference is of another size: that is what all the other lines come from."""
    theirs, ours = list(theirs), list(ours)
    for what, prefix in _COUNTED.items():
        there, here = numbered(theirs, prefix), numbered(ours, prefix)
        if there and here and there != here:
            message = f"the reference has {len(there)} {what}, the checkpoint {len(here)}"
            yield Problem(code="reference-disagrees", message=message)


def _folded(code: str, what: str, names: Iterable[str], hint: str) -> Iterator[Problem]:
    for text, count in folded(names):
        yield Problem(code=code, message=f"{what}{_times(count)}: {text}", hint=hint)


def _is_of_mtp(name: str, model: Model) -> bool:
    """Tell the tensors of multi-token prediction by their names on the hub: layers behind the last one."""
    return name.startswith("mtp.") or any(n >= model.size("layers") for n in numbered([name], r"model\.layers\."))
