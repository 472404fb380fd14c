"""An adapter as a directory that ``peft`` loads: ``adapter_model.safetensors`` and ``adapter_config.json``.

Names are those of ``PeftModel.save_pretrained`` (0.21): ``base_model.model.<module>.lora_A.weight``, without the name
of the adapter; a magnitude has no ``.weight``, a whole copy stands under the name of its module.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from ckpttool.adapters.found import Adapted, Adapter, Layer
from ckpttool.adapters.fusion import Fusions
from ckpttool.adapters.settings import Settings
from ckpttool.formats.peftnames import PREFIX, saved_module

WEIGHTS = "adapter_model.safetensors"
KEPT_WITH = ("embed_tokens", "lm_head")
"""Modules that PEFT saves with their own weights, where an adapter is on them."""

_SHORT_MOST = 100
"""Whole copies up to which it is looked for short names of theirs."""


def tensors(adapter: Adapter, found: Adapted, settings: Settings) -> dict[str, str]:
    """Return the names in the file by those of the checkpoint, sorted by the former."""
    names: dict[str, str] = {}
    for layer in adapter.layers.values():
        names |= _of_layer(layer)
    names |= {source: f"{PREFIX}{plain}" for plain, source in adapter.saved.items()}
    modules = {layer.plain for layer in adapter.layers.values()}
    for source, plain in found.base.items():
        if _is_kept(plain, modules, settings):
            names[source] = _stored(source)
    return dict(sorted(names.items(), key=lambda item: item[1]))


def _of_layer(layer: Layer) -> Iterator[tuple[str, str]]:
    lora = ("lora_embedding_A", "lora_embedding_B") if layer.embedding else ("lora_A.weight", "lora_B.weight")
    for source, end in (
        (layer.down, lora[0]),
        (layer.up, lora[1]),
        (layer.bias, "lora_B.bias"),
        (layer.magnitude, "lora_magnitude_vector"),
    ):
        if source:
            yield source, f"{PREFIX}{layer.path}.{end}"


def _stored(name: str) -> str:
    """Return the name of a base tensor as PEFT has it."""
    return name if name.startswith(PREFIX) else PREFIX + name


def _is_kept(plain: str, modules: Collection[str], settings: Settings) -> bool:
    """Tell what of the base model belongs to an adapter: embeddings that it is on, biases that were trained."""
    module, _, field = plain.rpartition(".")
    bias = settings.config.get("bias")
    if field == "bias" and (bias == "all" or (bias == "lora_only" and module in modules)):
        return True
    return module.rpartition(".")[2] in KEPT_WITH and module in modules


def config_bytes(adapter: Adapter, found: Adapted, settings: Settings, fits: Fusions, base: str | None) -> bytes:
    """Return ``adapter_config.json``: the one that was found, or one made of what the tensors and settings show.

    ``fits`` has ranks and what is adapted directly, ``base`` is what model the adapter belongs on, where it is known.
    """
    if settings.config:
        values = dict(settings.config)
        values["inference_mode"] = True
        if not values.get("base_model_name_or_path") and base:
            values["base_model_name_or_path"] = base
        if settings.where == "--lora-alpha":
            values |= {"lora_alpha": _plain_number(settings.alpha), "alpha_pattern": {}}
    else:
        values = _made(adapter, found, settings, fits) | {"base_model_name_or_path": base}
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode("utf-8", "surrogatepass")


def _made(adapter: Adapter, found: Adapted, settings: Settings, fits: Fusions) -> dict[str, Any]:
    ranks = {layer.plain: fits.ranks.get(layer.down, 0) for layer in adapter.layers.values()}
    layers = [layer for layer in adapter.layers.values() if layer.down not in fits.experts]
    direct = (fits.experts[layer.down] for layer in adapter.layers.values() if layer.down in fits.experts)
    usual = settings.rank or next((rank for rank, _ in Counter(ranks.values()).most_common(1)), 1)
    return {
        "peft_type": "LORA",
        "task_type": settings.task_type,
        "inference_mode": True,
        "r": usual,
        "lora_alpha": _plain_number(settings.alpha),
        "rank_pattern": {module: rank for module, rank in ranks.items() if rank != usual},
        "alpha_pattern": {},
        "use_rslora": settings.rslora,
        "use_dora": adapter.dora,
        "lora_bias": any(layer.bias for layer in layers),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(layer.down in fits.turned for layer in layers),
        "init_lora_weights": True,
        "target_modules": _targets([layer.plain for layer in layers], found.base.values()),
        "target_parameters": sorted({_end(name, 3) for name in direct}) or None,
        "modules_to_save": _saved({saved_module(name) for name in adapter.saved.values()}, found) or None,
    }


def _plain_number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _end(name: str, segments: int) -> str:
    return ".".join(name.split(".")[-segments:])


def _targets(adapted: list[str], base: Iterable[str]) -> list[str]:
    """Return what PEFT finds the adapted modules by: their last names, where these mean no other module as well."""
    ends = {name.rpartition(".")[2] for name in adapted}
    modules = {plain.rpartition(".")[0] for plain in base if plain.endswith(".weight")}
    others = {module for module in modules if module.rpartition(".")[2] in ends} - set(adapted)
    return sorted(ends) if not others else sorted(adapted)


def _saved(modules: Collection[str], found: Adapted) -> list[str]:
    """Return what PEFT finds whole copies by: any module is meant whose path ends with it, be it ``10`` and ``0``."""
    short = {module: module.rpartition(".")[2] for module in modules}
    if found.alone or len(short) > _SHORT_MOST:
        return sorted(short)
    others = {path for plain in found.base.values() for path in _paths(plain)}
    shared = {end for end in short.values() if any(path.endswith(end) for path in others)}
    return sorted({module if end in shared else end for module, end in short.items()})


def _paths(plain: str) -> Iterator[str]:
    """Yield the modules that a tensor is in."""
    while "." in plain:
        plain = plain.rpartition(".")[0]
        yield plain
