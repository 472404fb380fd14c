"""What the adapters in an archive are added to: weights by their stored keys, in the coordinates of those.

B has the rows of the stored weight (query groups interleaved, all of the gate before all of the up projection), so
weight maps cut the fused rows as they cut the stored ones. All layers may lie in one tensor, and all experts; an
adapter has the same axes in front, or none for experts that share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ckpttool.architectures.model import Model
from ckpttool.architectures.slots import common_prefix
from ckpttool.converting.adapters import Layer, halved, take_apart
from ckpttool.converting.opening import Opened
from ckpttool.converting.peft import Weighed, read_weighed
from ckpttool.converting.result import Options
from ckpttool.converting.settings import Settings
from ckpttool.converting.wrapped import Placement, Weight, doubts, find_weight, fits, place
from ckpttool.errors import BrokenCheckpoint, Unmapped
from ckpttool.export.result import Fused
from ckpttool.formats.findings import Findings
from ckpttool.lowrank import Fusion, LowRank
from ckpttool.plan import Dropped


@dataclass(frozen=True, slots=True)
class Fusions:
    """What is fused into which key, what is told of it, and what is left out by a rule."""

    by_source: Mapping[str, Fusion] = field(default_factory=dict)
    told: tuple[Fused, ...] = ()
    dropped: tuple[Dropped, ...] = ()


def find_fusions(opened: Opened, model: Model, run: Settings, options: Options) -> Fusions:
    """Find what every adapter is added to.

    Raises :class:`BrokenCheckpoint` with everything that does not fit, :class:`Unmapped` with what is sound and cannot
    be fused, and what :func:`~ckpttool.converting.peft.read_weighed` raises.
    """
    layers, dropped = _layers(opened, options)
    if not layers:
        return Fusions(dropped=tuple(dropped))
    found = _Found(opened, model, run, read_weighed(opened.source.root, options.lora_alpha))
    halved(layers, found.broken)
    for layer in layers:
        if layer.down and layer.up:
            found.add(layer)
    found.refuse()
    return Fusions(found.by_source, (found.told(layers),), tuple(dropped))


def _layers(opened: Opened, options: Options) -> tuple[list[Layer], list[Dropped]]:
    """Return the adapters that count, and what goes with the blocks of multi-token prediction."""
    prefix = common_prefix([*opened.tensors, *opened.adapters])
    layers = list(take_apart(opened.adapters).layers.values())
    left = [] if options.mtp else [layer for layer in layers if layer.module.removeprefix(prefix).startswith("mtp.")]
    reason = "--no-mtp: no multi-token prediction in the output"
    dropped = [Dropped(name, "no-mtp", reason) for layer in left for name in layer.tensors]
    return [layer for layer in layers if layer not in left], dropped


@dataclass(slots=True)
class _Found:
    """What is fused into what, as far as it is known, and what does not fit; ``matrices`` counts those of modules."""

    opened: Opened
    model: Model
    run: Settings
    weighed: Weighed
    by_source: dict[str, Fusion] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)
    matrices: dict[str, int] = field(default_factory=dict)
    broken: Findings = field(default_factory=lambda: Findings(most=1 << 30))
    unmapped: Findings = field(default_factory=lambda: Findings(most=1 << 30))

    def add(self, layer: Layer) -> None:
        """Add a layer to the weight of its module, or tell why that cannot be."""
        weight = find_weight(layer.module, self.opened.tensors)
        if weight is None:
            self.broken.group("adapter-misfit", "the archive has no weight that it can be added to", layer.down)
            return
        placed = place(layer, weight, self.model)
        if placed is None or not fits(layer, weight, placed, self.opened.adapters):
            shapes = " and ".join(str(list(self.opened.adapters[name].shape)) for name in layer.tensors)
            stored = [*weight.front, weight.rows, weight.columns]
            self.broken.group("adapter-misfit", f"{shapes} do not fit a weight of {stored}", layer.down)
            return
        for code, text in doubts(layer, weight, self.opened.adapters, self.run):
            self.unmapped.group(code, text, layer.down)
        if self._is_said(layer):
            self._put(layer, weight, placed)

    def _is_said(self, layer: Layer) -> bool:
        """Tell whether a layer has the rank that settings say; of experts it may be a part of that."""
        rank, settings = self.opened.adapters[layer.down].shape[-2], self.weighed.settings
        said = settings.rank
        if said is None or said == rank or (self.weighed.normalised and ".experts." in layer.module and rank < said):
            return True
        self.broken.group("settings-disagree", f"of rank {rank}, {settings.where} says {said}", layer.down)
        return False

    def _put(self, layer: Layer, weight: Weight, placed: Placement) -> None:
        rank = self.opened.adapters[layer.down].shape[-2]
        scale = self.weighed.settings.scale(layer.module, rank)
        update = LowRank(layer.up, layer.down, scale, start=placed.start, block=placed.block, step=placed.step)
        self.ranks.add(rank)
        self.matrices[layer.module] = math.prod(weight.front)
        for part in weight.parts:
            known = self.by_source.get(part.source)
            updates = (*known.updates, update) if known is not None else (update,)
            stacked = len(weight.front) - len(part.lead)
            self.by_source[part.source] = Fusion(part.source, updates, layer.magnitude, part.lead, part.first, stacked)

    def refuse(self) -> None:
        """Raise with everything that was found to be wrong."""
        root = self.opened.source.root
        if problems := self.broken.all():
            raise BrokenCheckpoint(
                f"{root}: its adapters do not fit; nothing was written", code=problems[0].code, problems=problems
            )
        if problems := self.unmapped.all():
            raise Unmapped(
                f"{root}: its adapters cannot be fused; nothing was written",
                hint="Merge them into the model with the trainer that wrote them, and save again.",
                code=problems[0].code,
                problems=problems,
            )

    def told(self, layers: list[Layer]) -> Fused:
        """Say what is fused: an archive has one adapter, without a name."""
        settings = self.weighed.settings
        return Fused(
            name="default",
            layers=sum(self.matrices.values()),
            tensors=sum(len(layer.tensors) for layer in layers),
            ranks=tuple(sorted(self.ranks)),
            alpha=settings.alpha,
            alphas={},
            rslora=settings.rslora,
            dora=any(layer.magnitude for layer in layers),
            task_type=settings.task_type,
            copies=(),
            settings=settings.where,
        )
