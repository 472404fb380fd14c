"""Which stored tensor an adapter's factors are added to, and how they lie: by shapes, where shapes say it.

PEFT 0.15 to 0.21: a linear layer has A ``[r, in]`` and B ``[out, r]``; a convolution A ``[r, in, k...]`` and B
``[out, r, 1...]``; an embedding A ``[r, vocabulary]`` and B ``[width, r]``; packed experts ``[E, x, y]`` have A
``[E * r, in]`` and B ``[out, r * E]``, where ``in`` is the last axis of the parameter, or the middle one where the
module says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckpttool.adapters.found import Adapter, Layer
from ckpttool.adapters.settings import Settings
from ckpttool.formats.findings import Findings
from ckpttool.lowrank import Fusion, LowRank
from ckpttool.tensors import Index, TensorInfo

CONV1D_NAMES = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
"""Modules that may be stored so, where no config says what model it is."""

CONV1D = frozenset({"gpt2", "openai-gpt", "ctrl", "decision_transformer", "imagegpt", "gpt-sw3"})
"""Model types whose linear layers are stored ``[in, out]``, which a square weight does not show."""


@dataclass(frozen=True, slots=True)
class Part:
    """Where a parameter of training is stored, or a part of it: see :class:`~ckpttool.lowrank.Fusion`."""

    source: str
    lead: Index = ()
    first: int = 0


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter as it was trained: its shape, and the stored tensors that it consists of."""

    shape: Index
    parts: tuple[Part, ...]


Parameters = Callable[[str], "Parameter | None"]
"""Finds a parameter by the name that it has in training."""


@dataclass(slots=True)
class Fusions:
    """What is fused into which source, and what does not fit.

    By the name of A, which is of one layer of one adapter: ``ranks``, ``experts`` (the parameter that is adapted
    directly), and in ``turned`` the linear layers stored ``[in, out]``.
    """

    by_source: dict[str, Fusion] = field(default_factory=dict)
    problems: Findings = field(default_factory=lambda: Findings(most=1 << 30))
    ranks: dict[str, int] = field(default_factory=dict)
    experts: dict[str, str] = field(default_factory=dict)
    turned: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Fit:
    """How the factors of a layer lie against a parameter."""

    name: str
    parameter: Parameter
    turned: bool
    experts: int = 0


def fusions(
    adapters: Sequence[tuple[Adapter, Settings]],
    tensors: Mapping[str, TensorInfo],
    parameters: Parameters,
    below: Callable[[str], Iterable[str]],
    *,
    conv1d: bool | None,
) -> Fusions:
    """Find what every layer of these adapters is added to.

    ``below`` lists the parameters right below a module, for layers on parameters that are no ``weight``; ``conv1d`` is
    whether square weights are stored ``[in, out]``, ``None`` where that is not known.
    """
    found = Fusions()
    several = len(adapters) > 1
    for adapter, settings in adapters:
        fits = {
            layer.path: _fits(layer, tensors, parameters, below) for layer in adapter.layers.values() if _whole(layer)
        }
        linear = [fits[layer.path] for layer in adapter.layers.values() if _whole(layer) and not layer.embedding]
        doubt = conv1d is None and any(
            layer.plain.rpartition(".")[2] in CONV1D_NAMES for layer in adapter.layers.values()
        )
        turned = _is_turned(linear, settings, conv1d=None if doubt else bool(conv1d))
        for layer in adapter.layers.values():
            if not _whole(layer):
                continue  # told of with the names
            if layer.magnitude and several:
                found.problems.group(
                    "dora-and-others", "DoRA cannot be fused together with another adapter", layer.magnitude
                )
            fit = _decided(layer, fits[layer.path], turned, tensors, found)
            if fit is not None:
                _add(layer, fit, settings, tensors, parameters, found)
    return found


def _whole(layer: Layer) -> bool:
    return bool(layer.down and layer.up)


def _fits(
    layer: Layer, tensors: Mapping[str, TensorInfo], parameters: Parameters, below: Callable[[str], Iterable[str]]
) -> list[_Fit]:
    """Return every way in which the factors fit a parameter of their module."""
    down, up = tensors[layer.down].shape, tensors[layer.up].shape
    name = f"{layer.plain}.weight"
    parameter = parameters(name)
    if parameter is not None:
        return [_Fit(name, parameter, turned) for turned in _ways(down, up, parameter.shape, embedding=layer.embedding)]
    fits = []
    for name in below(layer.plain):
        parameter = parameters(name)
        if parameter is not None and len(parameter.shape) == 3:
            experts = parameter.shape[0]
            ways = _expert_ways(down, up, parameter.shape)
            fits += [_Fit(name, parameter, turned, experts) for turned in ways]
        elif parameter is not None and len(parameter.shape) == 2:
            fits += [_Fit(name, parameter, turned) for turned in _ways(down, up, parameter.shape, embedding=False)]
    return fits


def _ways(down: Index, up: Index, shape: Index, *, embedding: bool) -> Iterator[bool]:
    """Yield whether the weight is turned, for each of both that fits."""
    if len(down) < 2 or len(up) < 2 or up[1] != down[0] or any(n != 1 for n in up[2:]):
        return
    if not embedding and (up[0], *down[1:]) == shape:
        yield False
    if len(shape) == 2 and len(down) == 2 and (down[1], up[0]) == shape:
        yield True


def _expert_ways(down: Index, up: Index, shape: Index) -> Iterator[bool]:
    experts = shape[0]
    if len(down) != 2 or len(up) != 2 or not experts or down[0] != up[1] or down[0] % experts:
        return
    if (up[0], down[1]) == shape[1:]:
        yield False
    if (down[1], up[0]) == shape[1:]:
        yield True


def _is_turned(fits: Iterable[list[_Fit]], settings: Settings, *, conv1d: bool | None) -> dict[bool, bool]:
    """Decide for square weights, which fit both ways, by the others of the adapter: linear layers, and experts.

    By ``False`` the answer for linear layers, by ``True`` that for experts; neither where nothing tells. What others
    show comes before ``fan_in_fan_out``, which PEFT passes over for linear layers that are stored ``[out, in]``.
    """
    shown: dict[bool, list[bool]] = {False: [], True: []}
    for ways in fits:
        clear = {(bool(fit.experts), fit.turned) for fit in ways}
        if len(clear) == 1:
            experts, turned = clear.pop()
            if experts or len(ways[0].parameter.shape) == 2:
                shown[experts].append(turned)
    said = settings.config.get("fan_in_fan_out") is True and not shown[False]
    decided = {True: shown[True][-1]} if shown[True] else {}
    if conv1d is not None or said or shown[False]:
        decided[False] = bool(conv1d) or said or any(shown[False])
    return decided


def _decided(
    layer: Layer, fits: list[_Fit], turned: Mapping[bool, bool], tensors: Mapping[str, TensorInfo], found: Fusions
) -> _Fit | None:
    if not fits:
        shapes = f"A {list(tensors[layer.down].shape)} and B {list(tensors[layer.up].shape)}"
        found.problems.group("adapter-misfit", f"{shapes} fit no weight of the base model", layer.plain)
        return None
    if len(fits) == 1:
        return fits[0]
    wanted = turned.get(bool(fits[0].experts))
    chosen = [fit for fit in fits if fit.turned == wanted]
    if len(chosen) != 1:
        names = " or ".join(dict.fromkeys(fit.name for fit in fits))
        found.problems.group("adapter-misfit", f"which axis is which does not show in the square {names}", layer.plain)
        return None
    return chosen[0]


def _add(
    layer: Layer,
    fit: _Fit,
    settings: Settings,
    tensors: Mapping[str, TensorInfo],
    parameters: Parameters,
    found: Fusions,
) -> None:
    rank = tensors[layer.down].shape[0] // (fit.experts or 1)
    said = settings.rank_of(layer.plain)
    if not rank:
        found.problems.group("adapter-misfit", "of rank 0: its factors are empty", layer.plain)
        return
    if said is not None and said != rank:
        found.problems.group("settings-disagree", f"of rank {rank}, {settings.where} says {said}", layer.plain)
        return
    if layer.magnitude and fit.experts:
        found.problems.group("adapter-misfit", "DoRA on packed experts: which rows it is of is not known", layer.plain)
        return
    if layer.magnitude and tensors[layer.magnitude].numel != tensors[layer.up].shape[0]:
        found.problems.group("adapter-misfit", "as many magnitudes as rows are needed", layer.magnitude)
        return
    found.ranks[layer.down] = rank
    if fit.experts or not fit.name.endswith(".weight"):
        found.experts[layer.down] = fit.name
    if fit.turned and not fit.experts and not layer.embedding:
        found.turned.add(layer.down)
    update = LowRank(layer.up, layer.down, settings.scale(layer.plain, rank), fit.turned, fit.experts)
    for part in fit.parameter.parts:
        _put(found, part, update, layer.magnitude)
    if layer.bias:
        _add_bias(layer, settings.scale(layer.plain, rank), tensors, parameters, found)


def _add_bias(
    layer: Layer, scale: float, tensors: Mapping[str, TensorInfo], parameters: Parameters, found: Fusions
) -> None:
    bias = parameters(f"{layer.plain}.bias")
    if bias is None or bias.shape != tensors[layer.bias].shape:
        found.problems.group("adapter-misfit", "the base model has no bias that it can be added to", layer.bias)
        return
    for part in bias.parts:
        _put(found, part, LowRank(layer.bias, "", scale), "")


def _put(found: Fusions, part: Part, update: LowRank, magnitude: str) -> None:
    known = found.by_source.get(part.source)
    updates = (*known.updates, update) if known is not None else (update,)
    stacked = bool(update.experts) - len(part.lead)
    found.by_source[part.source] = Fusion(part.source, updates, magnitude, part.lead, part.first, stacked)


def alone(adapters: Sequence[tuple[Adapter, Settings]], tensors: Mapping[str, TensorInfo]) -> Fusions:
    """Check the factors of adapters against each other, where the base model is not known."""
    found = Fusions()
    for adapter, settings in adapters:
        for layer in filter(_whole, adapter.layers.values()):
            down, up = tensors[layer.down].shape, tensors[layer.up].shape
            said = settings.rank_of(layer.plain)
            if len(down) < 2 or len(up) < 2 or down[0] != up[1]:
                shapes = f"A {list(down)} and B {list(up)} have not the same rank"
                found.problems.group("adapter-misfit", shapes, layer.plain)
            elif down[0] != said and _is_parameter(layer) and not settings.config.get("target_parameters"):
                text = "packed experts, of which only adapter_config.json says what is adapted: --adapter-config"
                found.problems.group("adapter-misfit", text, layer.plain)
            elif said is not None and (down[0] % said or (down[0] != said and not _is_parameter(layer))):
                found.problems.group(
                    "settings-disagree", f"of rank {down[0]}, {settings.where} says {said}", layer.plain
                )
            else:
                found.ranks[layer.down] = said or down[0]
    return found


def _is_parameter(layer: Layer) -> bool:
    """Tell a layer on parameters of a module of experts from one on a module."""
    return layer.path != layer.plain or layer.plain.endswith("experts")
