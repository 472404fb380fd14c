"""The adapters of a state dict: which factors belong together, what is the base model, and what is no LoRA."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ckpttool.errors import Problem
from ckpttool.formats import peftnames
from ckpttool.formats.findings import Findings, counted, listing, ranges
from ckpttool.formats.peftnames import Part, part
from ckpttool.tensors import TensorInfo


@dataclass(slots=True)
class Layer:
    """The tensors of one adapter on one module or parameter, by their names; empty where it has none."""

    path: str
    down: str = ""
    up: str = ""
    bias: str = ""
    magnitude: str = ""
    embedding: bool = False

    @property
    def plain(self) -> str:
        """The module as the model names it."""
        return peftnames.plain(self.path)

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that there are."""
        return tuple(filter(None, (self.down, self.up, self.bias, self.magnitude)))


@dataclass(slots=True)
class Adapter:
    """One adapter: its layers by the paths of modules, and whole copies (``modules_to_save``) by plain names."""

    name: str
    layers: dict[str, Layer] = field(default_factory=dict)
    saved: dict[str, str] = field(default_factory=dict)

    @property
    def tensors(self) -> Iterator[str]:
        """All of its tensors."""
        for layer in self.layers.values():
            yield from layer.tensors
        yield from self.saved.values()

    @property
    def dora(self) -> bool:
        """Whether it has magnitudes."""
        return any(layer.magnitude for layer in self.layers.values())


@dataclass(slots=True)
class Adapted:
    """A state dict of a PEFT model, taken apart. ``base`` and ``original`` are plain names by names of tensors."""

    adapters: dict[str, Adapter] = field(default_factory=dict)
    base: dict[str, str] = field(default_factory=dict)
    original: dict[str, str] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)

    @property
    def alone(self) -> bool:
        """Whether the adapters were saved without their base model."""
        return not self.base and not self.original

    @property
    def count(self) -> int:
        """How many tensors the adapters have."""
        return sum(len(list(adapter.tensors)) for adapter in self.adapters.values())


def take_apart(tensors: Iterable[str]) -> Adapted:
    """Sort the tensors of a PEFT model by what they are to its adapters."""
    found = Adapted()
    for name in tensors:
        _put(found, name, part(name))
    return found


def _put(found: Adapted, name: str, what: Part) -> None:
    if what.kind == peftnames.BASE:
        found.base[name] = what.path
    elif what.kind == peftnames.ORIGINAL:
        found.original[name] = what.path
    elif what.kind == peftnames.FOREIGN:
        found.foreign.append(name)
    else:
        adapter = found.adapters.setdefault(what.adapter, Adapter(what.adapter))
        if what.kind == peftnames.SAVED:
            adapter.saved[what.path] = name
            return
        layer = adapter.layers.setdefault(what.path, Layer(what.path))
        layer.embedding = layer.embedding or what.embedding
        setattr(layer, what.kind, name)


def faults(found: Adapted, adapters: Collection[Adapter], *, fuse: bool) -> list[Problem]:
    """Return what is wrong with the names: factors without their other half, two of one name.

    With ``fuse`` several whole copies of one tensor are that, too, and copies of what another adapter is on.
    """
    problems = Findings(most=1 << 30)
    for adapter in adapters:
        for layer in adapter.layers.values():
            for kind, other in ((layer.down, "lora_B"), (layer.up, "lora_A")):
                if kind and not (layer.down and layer.up):
                    problems.group("adapter-halved", f"its {other} is missing", kind)
            if not (layer.down or layer.up):
                for name in layer.tensors:
                    problems.group("adapter-halved", "its lora_A and lora_B are missing", name)
    base = Counter([*found.base.values(), *found.original.values()])
    for plain in (plain for plain, count in base.items() if count > 1):
        problems.group("names-collide", f"{base[plain]} tensors would be written as one", plain)
    if fuse:
        _find_clashes(found, adapters, problems)
    return list(problems.all())


def summary(adapter: Adapter, tensors: Mapping[str, TensorInfo]) -> str:
    """Say in a line what an adapter is: its rank, its modules; experts that are packed have all of theirs in one."""
    layers = adapter.layers.values()
    found = {tensors[layer.down].shape[0] for layer in layers if layer.down and tensors[layer.down].shape}
    modules = dict.fromkeys(layer.plain.rpartition(".")[2] for layer in layers)
    kind, counts = "DoRA" if adapter.dora else "LoRA", counted(len(layers), "module")
    shown = [f"{kind} of rank {ranges(found)} on {counts} ({listing(modules)})"] if layers else []
    shown += [f"a copy of {listing(sorted(adapter.saved), 3)}"] if adapter.saved else []
    return f"{adapter.name}: {' and '.join(shown)}"


def _find_clashes(found: Adapted, adapters: Collection[Adapter], problems: Findings) -> None:
    """Find the whole copies of which more than one would be written, or into which something would be fused."""
    base, copies = set(found.base.values()), Counter(plain for adapter in adapters for plain in adapter.saved)
    adapted = {layer.plain for adapter in adapters for layer in adapter.layers.values()}
    for plain, count in copies.items():
        if count > 1:
            problems.group("copies-clash", f"trained whole in {count} of the adapters: --adapter one of them", plain)
        if plain in base:
            problems.group("names-collide", "both of the base model and a trained copy of what is there", plain)
        if plain.rpartition(".")[0] in adapted:
            problems.group("copies-clash", "trained whole, and an adapter is on it, too", plain)
