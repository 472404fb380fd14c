"""Adapters in an archive: which keys belong together, and what is no LoRA as Megatron Bridge keeps it.

A module that was wrapped keeps its own keys (``MODULE.weight``), and its adapter lies below them:
``MODULE.adapter.linear_in.weight`` is A ``[r, in]``, ``MODULE.adapter.linear_out.weight`` B ``[out, r]``, with DoRA
``MODULE.adapter.weight_magnitude`` ``[out]``. Canonical LoRA has one adapter for each projection that a module unites:
``MODULE.adapter.adapter_q.linear_in.weight``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool import layout
from ckpttool.converting.choosing import has_weights
from ckpttool.converting.peft import trained_from
from ckpttool.converting.result import Options
from ckpttool.errors import Unmapped, UsageError
from ckpttool.formats.findings import Findings, counted, listing, ranges
from ckpttool.formats.folding import folded
from ckpttool.tensors import TensorInfo

_FACTOR = re.compile(r"(.+)\.adapter\.(?:adapter_(q|k|v|gate|up)\.)?linear_(in|out)\.weight")
_MAGNITUDE = re.compile(r"(.+)\.adapter\.()weight_(magnitude)")
_KINDS = {"in": "down", "out": "up", "magnitude": "magnitude"}


@dataclass(slots=True)
class Layer:
    """The adapter of a module, or of one projection of it (``of``: q, k, v, gate, up): keys, empty where there is none.

    ``down`` is A and ``up`` is B.
    """

    module: str
    of: str = ""
    down: str = ""
    up: str = ""
    magnitude: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """All keys that there are."""
        return tuple(filter(None, (self.down, self.up, self.magnitude)))


@dataclass(slots=True)
class Adapted:
    """The adapters of an archive: layers by module and projection, and keys that belong to none."""

    layers: dict[tuple[str, str], Layer] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)


def take_apart(names: Iterable[str]) -> Adapted:
    """Sort the keys of adapters by the module that they are on."""
    found = Adapted()
    for name in names:
        match = _FACTOR.fullmatch(name) or _MAGNITUDE.fullmatch(name)
        if match is None:
            found.foreign.append(name)
            continue
        module, of, kind = match.groups(default="")
        setattr(found.layers.setdefault((module, of), Layer(module, of)), _KINDS[kind], name)
    return found


def halved(layers: Iterable[Layer], found: Findings) -> None:
    """Record every factor without its other half."""
    for layer in layers:
        for kind, other in ((layer.down, "linear_out"), (layer.up, "linear_in")):
            if kind and not (layer.down and layer.up):
                found.group("adapter-halved", f"its {other} is missing", kind)
        if layer.magnitude and not (layer.down or layer.up):
            found.group("adapter-halved", "its linear_in and linear_out are missing", layer.magnitude)


def check_choice(
    root: Path, adapters: Mapping[str, TensorInfo], model: Mapping[str, TensorInfo], options: Options
) -> None:
    """Raise where adapters cannot be fused, or the user has not said that they are to be.

    :class:`UsageError` for a choice that is missing or not to be had, :class:`Unmapped` for adapters that are no LoRA
    or lie there without their base model.
    """
    if not adapters:
        if options.lora is not None:
            raise UsageError(f"--lora {options.lora}: {root} has no adapters")
        return
    parts = take_apart(adapters)
    if parts.foreign:
        foreign = listing([text for text, _ in folded(parts.foreign)])
        raise Unmapped(
            f"{root}: holds adapters that are no LoRA as Megatron Bridge keeps it: {foreign}",
            hint="Merge them into the model with the trainer that wrote them, and save again.",
            code="adapter-kind",
        )
    if not model:
        raise _alone(root, parts, adapters)
    if options.lora is None:
        raise UsageError(
            f"{root}: {_summary(parts, adapters)} beside the model; say that it is to be fused: --lora",
            hint="--lora fuse  a whole model with the adapter in its weights (the training is in it)\n"
            "The base model alone would lose the training, and is not written.",
        )
    if options.lora != "fuse":
        raise UsageError(
            f"--lora {options.lora}: of a Megatron archive only the fused model is written",
            hint="--lora fuse. Its adapters are on united projections (linear_qkv, linear_fc1), which have no adapter "
            "of the same rank in Hugging Face form.",
        )


def _summary(parts: Adapted, adapters: Mapping[str, TensorInfo]) -> str:
    """Say what the adapters are: how many tensors, their ranks, their modules."""
    layers = parts.layers.values()
    shapes = (adapters[layer.down].shape for layer in layers if layer.down)
    kind = "DoRA" if any(layer.magnitude for layer in layers) else "LoRA"
    modules = listing([text for text, _ in folded(dict.fromkeys(layer.module for layer in layers))], 4)
    rank = ranges({shape[-2] for shape in shapes if len(shape) > 1})
    return f"{kind} of rank {rank or '?'} ({counted(len(adapters), 'tensor')}) on {modules}"


def _alone(root: Path, parts: Adapted, adapters: Mapping[str, TensorInfo]) -> Unmapped:
    """Return the error for adapters without their base model: where that is, and who can unite them."""
    folders = (root.parent / layout.V1_HUGGINGFACE, root.parent.parent / layout.HUGGINGFACE)
    beside = next((folder for folder in folders if has_weights(folder)), None)
    trained = trained_from(root)
    if beside is not None:
        where = f"The base model is beside it: {beside}. "
    else:
        where = f"The run was started from {trained}. " if trained else ""
    base = f" --pretrained {shlex.quote(trained)}" if trained else ""
    return Unmapped(
        f"{root}: adapters without their base model: {_summary(parts, adapters)}",
        hint=f"{where}Unite them with the trainer, then convert what it writes; with Megatron Bridge:\n"
        f"  python examples/peft/merge_lora.py --lora-checkpoint {shlex.quote(str(root))}{base} "
        "--hf-model-path MODEL --output MERGED",
        code="adapters-alone",
    )
