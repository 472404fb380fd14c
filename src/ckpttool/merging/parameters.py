"""Where a parameter of training is stored: in the shards, or under the names and in the form of a base model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ckpttool.adapters import fusion
from ckpttool.adapters.fusion import Parameter, Part
from ckpttool.naming import experts
from ckpttool.naming.rules import candidates, moves_for
from ckpttool.tensors import Index, TensorInfo


def finders(
    model: Mapping[str, TensorInfo], kinds: tuple[str, ...]
) -> tuple[fusion.Parameters, Callable[[str], Iterable[str]]]:
    """Return what finds a parameter of training among these tensors, and what lists those right below a module."""
    moves = moves_for(kinds)
    modules: dict[str, list[str]] = {}
    for name in model:
        modules.setdefault(name.rpartition(".")[0], []).append(name)

    def parameters(name: str) -> Parameter | None:
        for candidate in candidates(name, moves):
            if candidate.name in model:
                return Parameter(model[candidate.name].shape, (Part(candidate.name),))
            packed = experts.packed(candidate.name)
            naming = experts.naming_of(packed.prefix, model) if packed is not None else None
            if packed is not None and naming is not None:
                return _one_by_one(packed, naming, model)
        return None

    def below(module: str) -> list[str]:
        return [*modules.get(module, ()), *(f"{module}.{name}" for name in (experts.GATE_UP, experts.DOWN))]

    return parameters, lambda module: dict.fromkeys(below(module))


def _one_by_one(
    packed: experts.Packed, naming: tuple[str, str, str], model: Mapping[str, TensorInfo]
) -> Parameter | None:
    """Return packed experts of training that are stored one by one."""
    parts: list[Part] = []
    count = len(list(experts.numbered(packed.prefix, model, naming)))
    shape: Index = ()
    for expert in range(count):
        for half in range(packed.halves):
            tensor = model.get(packed.single(naming, expert, half))
            if tensor is None or len(tensor.shape) != 2 or (shape and tensor.shape != shape):
                return None
            shape = tensor.shape
            parts.append(Part(tensor.name, (expert,), half * shape[0]))
    return Parameter((count, packed.halves * shape[0], shape[1]), tuple(parts)) if parts else None
