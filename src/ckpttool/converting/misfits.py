"""What does not fit a weight map or a reference: told in few lines, with every name in one of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttool.architectures.family import HEAD, Family
from ckpttool.architectures.model import Model
from ckpttool.architectures.slots import NUMBERS, Slot
from ckpttool.converting.mapping import Mapped
from ckpttool.converting.opening import Opened
from ckpttool.errors import Problem, Unmapped
from ckpttool.formats.folding import folded, numbered
from ckpttool.naming.matching import Allowed, Match, match
from ckpttool.naming.reference import Reference


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


def refuse_unlike(
    opened: Opened, family: Family, mapped: Mapped, like: Reference, model: Model, *, mtp: bool, allowed: Allowed
) -> Match:
    """Raise with the names that only the reference has, and those that it does not have, and other shapes.

    A head that is missing here is an alias by now.
    """
    wanted = like.wanted - {HEAD.name}
    if not mtp:
        wanted = frozenset(name for name in wanted if not _is_of_mtp(name, model))
    extra = [target.name for target in mapped.targets if not like.has(target.name)]
    no_mtp = bool(extra) and all(_is_of_mtp(name, model) for name in extra)
    hint = "The reference has no multi-token prediction: to leave it out, --no-mtp." if no_mtp else ""
    found = match(mapped.targets, like, wanted, allowed, hint)
    refuse_if_any(opened, family, list(found.problems), found.data)
    return found


def _is_of_mtp(name: str, model: Model) -> bool:
    """Tell the tensors of multi-token prediction by their names on the hub: layers behind the last one."""
    return name.startswith("mtp.") or any(n >= model.size("layers") for n in numbered([name], r"model\.layers\."))
