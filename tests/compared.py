"""Comparisons as `diff` would find them, made up: what a training step leaves, without the checkpoints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpttool.comparison.result import Cell, Comparison, Half, Metrics, Renamed, Side, State, Strip, TensorDiff
from ckpttool.tensors import Index

Movement = Mapping[str, float]
"""By what part of its length each tensor moves; those that are not named stay."""

DENSE = {
    "self_attn.q_proj.weight": (512, 512),
    "self_attn.k_proj.weight": (128, 512),
    "self_attn.v_proj.weight": (128, 512),
    "self_attn.o_proj.weight": (512, 512),
    "mlp.gate_proj.weight": (1536, 512),
    "mlp.up_proj.weight": (1536, 512),
    "mlp.down_proj.weight": (512, 1536),
    "input_layernorm.weight": (512,),
    "post_attention_layernorm.weight": (512,),
}
OUTSIDE = {"model.embed_tokens.weight": (32000, 512), "model.norm.weight": (512,), "lm_head.weight": (32000, 512)}
ROUTED = {
    **{name: shape for name, shape in DENSE.items() if not name.startswith("mlp.")},
    "mlp.gate.weight": (64, 512),
    "mlp.shared_experts.gate_proj.weight": (256, 512),
    "mlp.shared_experts.up_proj.weight": (256, 512),
    "mlp.shared_experts.down_proj.weight": (512, 256),
}


def metrics(shape: Index, moved: float, rng: np.random.Generator) -> Metrics:
    """What a tensor of some weight, moved by a part of its length, is measured to be."""
    elements = math.prod(shape)
    part = float(np.clip(rng.normal(0.5, 0.1), 0.05, 1)) if moved else 0.0
    changed = max(1, int(part * elements)) if moved else 0
    tail = changed - int(changed * 0.8) - int(changed * 0.12)
    histogram = (0, int(changed * 0.8), int(changed * 0.12), tail - tail // 4, tail // 4) if moved else ()
    return Metrics(
        elements=elements,
        changed=changed,
        max_abs=moved * 0.2,
        mean_abs=moved * 0.013,
        rel_l2=moved,
        cosine=1 - moved**2 / 2,
        ulps=histogram,
    )


def tensor(name: str, shape: Index, moved: float, rng: np.random.Generator) -> TensorDiff:
    """A tensor of both sides, and how far it moved."""
    parts = name.split(".")
    at = parts.index("layers") + 1 if "layers" in parts else None
    words = parts if at is None else parts[at + 1 :]
    half = Half(dtype="bfloat16", shape=shape)
    return TensorDiff(
        name=name,
        state="differs" if moved else "equal",
        a=half,
        b=half,
        metrics=metrics(shape, moved, rng),
        layer=int(parts[at]) if at is not None else None,
        module=".".join("*" if word.isdigit() else word for word in words),
    )


def one_sided(whole: TensorDiff, state: State) -> TensorDiff:
    """The same tensor where only one side has it."""
    a, b = (None, whole.b) if state == "only in B" else (whole.a, None)
    return replace(whole, state=state, a=a, b=b, metrics=None)


def reshaped(whole: TensorDiff, shape: Index) -> TensorDiff:
    """The same tensor where B has it in another shape."""
    assert whole.b is not None
    return replace(whole, state="differs", why="shape", b=replace(whole.b, shape=shape), metrics=None)


def summed(tensors: Iterable[TensorDiff]) -> Cell:
    """All these tensors as one: each counts by its size, as if all weights were of one scale."""
    found = list(tensors)
    known = [one.metrics for one in found if one.metrics is not None]
    elements = sum(one.elements for one in known)
    top = max((one.rel_l2 or 0.0 for one in known), default=0.0) or 1.0
    square = sum(((one.rel_l2 or 0.0) / top) ** 2 * one.elements for one in known)
    lost = any(one.rel_l2 is None for one in known)
    return Cell(
        tensors=len(found),
        elements=elements,
        changed=sum(one.changed for one in known),
        max_abs=max((one.max_abs for one in known), default=0.0),
        rel_l2=None if lost else top * math.sqrt(square / elements) if elements else 0.0,
        missing=len(found) - len(known),
    )


def comparison(tensors: Sequence[TensorDiff], renamed: Sequence[Renamed] = ()) -> Comparison:
    """A comparison of these tensors, summed up by layer and module."""
    modules: dict[str, list[TensorDiff]] = {}
    layers: dict[int, list[TensorDiff]] = {}
    for one in tensors:
        modules.setdefault(one.module, []).append(one)
        if one.layer is not None:
            layers.setdefault(one.layer, []).append(one)
    side = Side(path="runs/a", root="runs/a", kind="fsdp", title="FSDP2 shards of 8 ranks", tensors=len(tensors))
    return Comparison(
        a=side,
        b=replace(side, path="runs/b", root="runs/b"),
        tensors=tuple(tensors),
        strips=tuple(_strip(module, found) for module, found in modules.items()),
        layers={layer: summed(found) for layer, found in sorted(layers.items())},
        renamed=tuple(renamed),
        bytes_read=sum(one.metrics.elements * 4 for one in tensors if one.metrics),
        seconds=12.5,
    )


def _strip(module: str, tensors: Sequence[TensorDiff]) -> Strip:
    by_layer: dict[int | None, list[TensorDiff]] = {}
    for one in tensors:
        by_layer.setdefault(one.layer, []).append(one)
    return Strip(module=module, whole=summed(tensors), layers={n: summed(found) for n, found in by_layer.items()})


def dense(layers: int = 32, seed: int = 0) -> Comparison:
    """A dense model after one training step: everything moves a little, later layers more."""
    rng = np.random.default_rng(seed)
    found = []
    for name, shape in OUTSIDE.items():
        found.append(tensor(name, shape, 0.0 if "norm" in name else 2e-4 * float(rng.lognormal(0, 0.2)), rng))
    for layer in range(layers):
        for name, shape in DENSE.items():
            still = "layernorm" in name and rng.random() < 0.6
            moved = 0.0 if still else 1.5e-4 * (1 + 3 * layer / layers) * float(rng.lognormal(0, 0.35))
            found.append(tensor(f"model.layers.{layer}.{name}", shape, moved, rng))
    return comparison(found)


def routed(layers: int = 48, experts: int = 64, seed: int = 1) -> Comparison:
    """A mixture of experts after some steps: the router stands out, one layer lost an expert, one name is new."""
    rng = np.random.default_rng(seed)
    found = [tensor(name, shape, 1e-4, rng) for name, shape in OUTSIDE.items()]
    for layer in range(layers):
        for name, shape in ROUTED.items():
            scale = 2e-2 if name == "mlp.gate.weight" else 8e-4
            found.append(tensor(f"model.layers.{layer}.{name}", shape, scale * float(rng.lognormal(0, 0.5)), rng))
        for expert in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                moved = 0.0 if rng.random() < 0.3 else 3e-4 * float(rng.lognormal(0, 0.8))
                name = f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
                one = tensor(name, (64, 512), moved, rng)
                found.append(one_sided(one, "only in A") if (layer, expert) == (17, 5) else one)
    found.append(one_sided(tensor("model.layers.17.mlp.extra.weight", (64, 512), 0.0, rng), "only in B"))
    return comparison(found, [Renamed(a="model.layers.17.mlp.experts.5.up_proj.weight", b=found[-1].name)])


def patched(layers: int = 24, moved: Sequence[int] = (3, 11, 20), seed: int = 2) -> Comparison:
    """A model of which three layers were trained, and a head of another size."""
    rng = np.random.default_rng(seed)
    found = [tensor(name, shape, 0.0, rng) for name, shape in OUTSIDE.items()]
    found[-1] = reshaped(found[-1], (32064, 512))
    for layer in range(layers):
        for name, shape in DENSE.items():
            by = 10.0 ** float(rng.uniform(-4, -0.5)) if layer in moved else 0.0
            found.append(tensor(f"model.layers.{layer}.{name}", shape, by, rng))
    return comparison(found)
