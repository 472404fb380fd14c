"""Random weights in Megatron's own coordinates: each depends on its name alone, however a layout keeps it."""

from __future__ import annotations

import re
import zlib
from functools import lru_cache
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories

LAYER = re.compile(r"^(?P<stack>.*?layers)\.(?:(?P<layer>\d+)\.)?(?P<rest>.*)$")
EXPERT = re.compile(r"(?P<before>.*\.experts\.experts)\.(?:(?P<expert>\d+)\.)?(?P<rest>.*)$")
PADDING = 9.0
GATED = ("linear_fc1.weight", "linear_fc1.bias")
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
# What Transformer Engine fuses into the projection that follows has a module of its own elsewhere.
FUSED = {
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "linear_q_up_proj.layer_norm_": "q_layernorm.",
    "linear_kv_up_proj.layer_norm_": "kv_layernorm.",
}
SPREAD = {"embedding.word_embeddings.weight": 0.5, "mlp.router.weight": 0.5, "output_layer.weight": 0.3}


def fill(chunks: list[Any], metadata: dict[str, Any], vocab_size: int) -> None:
    """Give every tensor of this rank its part of the whole."""
    with torch.no_grad():
        for chunk in chunks:
            sharded = chunk.sharded_state_dict(metadata=metadata)
            apply_factories(sharded)
            for piece in nested_values(sharded):
                if isinstance(piece, ShardedTensor):
                    piece.data.copy_(part(piece, vocab_size))


def part(piece: Any, vocab_size: int) -> torch.Tensor:
    """What one piece of a state dict holds."""
    prepended = list(piece.global_offset[: piece.prepend_axis_num])
    name = plain_name(piece.key, prepended)
    whole = value(name, tuple(piece.global_shape[piece.prepend_axis_num :]), vocab_size)
    return whole[piece.global_slice()[piece.prepend_axis_num :]]


def plain_name(key: str, prepended: list[int]) -> str:
    """One name for every dialect: the numbers of layer and expert may be axes in front instead."""
    for fused, own in FUSED.items():
        key = key.replace(fused, own)
    if layer := LAYER.match(key):
        number = layer["layer"] or str(prepended.pop(0))
        key = f"{layer['stack']}.{number}.{layer['rest']}"
    if expert := EXPERT.match(key):
        number = expert["expert"] or str(prepended.pop(0))
        key = f"{expert['before']}.{number}.{expert['rest']}"
    if prepended:
        raise AssertionError(f"{key}: axes {prepended} in front that nobody knows")
    return key


@lru_cache(maxsize=4096)
def value(name: str, shape: tuple[int, ...], vocab_size: int) -> torch.Tensor:
    """The whole tensor. A gated projection is two: the archive may hold them as one or apart."""
    if name.endswith(GATED):
        half = (shape[0] // 2, *shape[1:])
        return torch.cat([value(f"{name}_{letter}", half, vocab_size) for letter in "wv"])
    if name in VOCABULARY:
        rows = drawn(name, (min(vocab_size, shape[0]), *shape[1:]))
        return torch.cat([rows, torch.full((shape[0] - len(rows), *shape[1:]), PADDING)])
    return drawn(name, shape)


def drawn(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms around one, everything else around zero."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    noise = torch.randn(shape, generator=generator)
    if "norm" in name.rpartition("layers.")[2]:
        return 1 + 0.1 * noise
    spread = next((spread for end, spread in SPREAD.items() if name.endswith(end)), 0.2)
    return spread * noise
