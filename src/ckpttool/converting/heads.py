"""Heads: whether the class that the config names can hold the one that is stored, and what is changed if not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.architectures.family import HEAD, Family
from ckpttool.converting.mapping import OUTPUT_LAYER, SCORE, Mapped
from ckpttool.errors import Problem
from ckpttool.export.config import GENERATES, ModelConfig

CLASSIFIES = ("ForTokenClassification", "ForSequenceClassification", "ForRewardModel", "RewardModel", "ForTextEncoding")


@dataclass(frozen=True, slots=True)
class Head:
    """What the config has to say of the head: fields to set and to remove with their reasons, and what is refused."""

    config: ModelConfig
    fields: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()


def labels_of(config: ModelConfig) -> int:
    """Return how many labels a config gives a classification; 2 is what transformers takes without a word of it."""
    said = config.values.get("num_labels")
    names = config.values.get("id2label")
    if type(said) is int:
        return said
    return len(names) if isinstance(names, dict) and names else 2


def decide(mapped: Mapped, config: ModelConfig, family: Family, architecture: str | None) -> Head:
    """Decide which class the output is to be loaded as, by the head that is stored."""
    named = architecture or next(iter(config.architectures), "")
    if mapped.value_head:
        return _value_head(mapped, config, family, named, given=architecture is not None)
    written = {target.name for target in mapped.targets}
    if named.endswith(CLASSIFIES) and SCORE not in written:
        stored = (
            f"{OUTPUT_LAYER} is a head over the vocabulary" if HEAD.name in written else f"no {OUTPUT_LAYER} is here"
        )
        message = f"{named} needs a head that classifies ({SCORE}), but {stored}"
        hint = "Name the class that the checkpoint is of: --architecture NAME."
        return Head(config, problems=(Problem(code="head-disagrees", message=message, hint=hint),))
    return _with_class(Head(config), named, "--architecture") if architecture is not None else Head(config)


def _with_class(head: Head, name: str, why: str) -> Head:
    values = {**head.config.values, "architectures": [name]}
    return replace(
        head, config=replace(head.config, values=values), fields={**head.fields, "architectures": ([name], why)}
    )


def _value_head(mapped: Mapped, config: ModelConfig, family: Family, named: str, *, given: bool) -> Head:
    rows = mapped.value_head
    what = f"the head has {rows} row{'s' * (rows != 1)}: a value head"
    fields: dict[str, tuple[Any, str]] = {}
    if labels_of(config) != rows:
        names = [f"LABEL_{n}" for n in range(rows)]
        fields["id2label"] = ({str(n): name for n, name in enumerate(names)}, what)
        fields["label2id"] = ({name: n for n, name in enumerate(names)}, what)
    head = Head(config, fields, {"num_labels": f"id2label names {rows}"} if fields else {})
    if given and named.endswith(GENERATES):
        message = f"{what}, and {named} (--architecture) has none: its head over the vocabulary would be made up"
        return replace(head, problems=(Problem(code="head-disagrees", message=message),))
    if given:
        head = _with_class(head, named, "--architecture")
    elif not named.endswith(CLASSIFIES):
        base = next((named.removesuffix(end) for end in GENERATES if named.endswith(end)), "")
        if not base or not family.classifies:
            message = f"{what}, and {named or 'a config without architectures'} cannot hold it"
            hint = (
                "transformers has no class of it that classifies tokens. Name one that you have: --architecture NAME."
            )
            return replace(head, problems=(Problem(code="head-disagrees", message=message, hint=hint),))
        head = _with_class(head, f"{base}ForTokenClassification", f"{what}, which {named} cannot hold")
    name = head.config.architectures[0]
    if name.endswith("ForTokenClassification") and "score.bias" not in {target.name for target in mapped.targets}:
        bias = {"token_classification_bias": (False, "no score.bias is stored")}
        head = replace(head, fields={**head.fields, **bias})
    return head
