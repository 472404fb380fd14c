"""Under which names a model is served, and what a configuration says of the sizes that show which axis is which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpttool.errors import Problem
from ckpttool.export.config import ModelConfig
from ckpttool.naming import experts
from ckpttool.naming.following import Sizes
from ckpttool.naming.rules import MIXTRAL_EXPERTS, TURNED_ON_HUB, served, style_of
from ckpttool.tensors import TensorInfo

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size", "ffn_hidden_size")
_EXPERTS = ("n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts")


def sizes_of(config: ModelConfig | None) -> Sizes:
    """Return what a configuration says of width and experts, at the top and in text configurations."""
    if config is None:
        return Sizes()
    parts = [config.values, *config.text_parts()]
    style = style_of(config.model_types)
    local = style is not None and style.experts == MIXTRAL_EXPERTS  # these have the other name as an alias
    counts = _EXPERTS[::-1] if local else _EXPERTS
    inner, many = (next(filter(None, (_numbers(parts, [name]) for name in names)), None) for names in (_INNER, counts))
    return Sizes(config.model_types, _numbers(parts, _HIDDEN), inner or frozenset(), many or frozenset())


def _numbers(parts: Iterable[Mapping[str, Any]], names: Iterable[str]) -> frozenset[int]:
    found = (part.get(name) for part in parts for name in names)
    return frozenset(value for value in found if type(value) is int)


def served_note(tensors: Mapping[str, TensorInfo], config: ModelConfig | None) -> Iterator[Problem]:
    """Tell when a model of this type is served under other names than those of its training."""
    kinds = config.model_types if config is not None else ()
    style = style_of(kinds)
    if style is None:
        return
    changed = next(((name, served(name, style)) for name in tensors if served(name, style) != name), None)
    packed = next((name for name in tensors if experts.packed(name) is not None), None)
    ways = []
    if changed is not None:
        ways.append(f"{changed[0]} is {changed[1]} there")
    if packed is not None and style.experts is not None:
        ways.append("experts are one tensor each, not packed")
    turned = packed is not None and any(kind in TURNED_ON_HUB for kind in kinds)
    if turned and _is_as_trained(tensors, sizes_of(config)):
        ways.append("packed experts have their last two axes exchanged")
    if ways:
        yield Problem(
            code="served-otherwise",
            severity="note",
            message=f"these are the names of training; on the hub, {kinds[0]} has others, which servers may want: "
            f"{'; '.join(ways)}",
            hint="To write those: --like MODEL, the directory of the base model (its small files suffice).",
        )


def _is_as_trained(tensors: Mapping[str, TensorInfo], sizes: Sizes) -> bool:
    """Tell whether packed experts lie as they do in memory: the first whose shape shows it decides."""
    for name, tensor in tensors.items():
        packed = experts.packed(name)
        if packed is not None and len(tensor.shape) == 3 and tensor.shape[1] != tensor.shape[2]:
            return tensor.shape[2 if packed.projection == experts.GATE_UP else 1] in sizes.hidden
    return True
