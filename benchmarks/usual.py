"""What one does with torch to have a Hugging Face model of a Megatron archive: load it all, rename, save."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

Named = Iterator[tuple[str, Any]]

OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
LAYER = "decoder.layers."
SAME_ROWS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}


def convert(role: Path, out: Path) -> None:
    """Write one file of a Qwen2 or Qwen3-MoE, here with a ``fsync`` at the end."""
    from safetensors.torch import save_file

    config = json.loads((role / "huggingface" / "config.json").read_text())
    state = _load(role / "dist_ckpt")
    found: dict[str, Any] = {}
    for key in list(state):
        found.update(_converted(key, state.pop(key), config))
    out.mkdir()
    save_file(found, out / "model.safetensors", metadata={"format": "pt"})
    with (out / "model.safetensors").open("rb") as file:
        os.fsync(file.fileno())


def _load(archive: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(archive)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    _load_state_dict(state, reader, no_dist=True)
    return state


def _converted(key: str, tensor: Any, config: Any) -> Named:
    if key in OUTSIDE:
        yield OUTSIDE[key], tensor if key.startswith("decoder.") else tensor[: config["vocab_size"]]
        return
    name = key.removeprefix(LAYER)
    for number, layer in enumerate(tensor):
        for ending, part in _layer(name, layer, config):
            yield f"model.layers.{number}.{ending}", part


def _layer(name: str, tensor: Any, config: Any) -> Named:
    if name in SAME_ROWS:
        return iter([(SAME_ROWS[name], tensor)])
    module, kind = name.rsplit(".", 1)
    halves: dict[str, Callable[..., Named]] = {"linear_fc1": _gate_up, "linear_fc2": _down}
    if module == "self_attention.linear_qkv":
        return _qkv(kind, tensor, config)
    if module == "mlp.linear_fc1":
        return _gate_up("mlp", tensor)
    split = halves[module.removeprefix("mlp.experts.experts.")]
    return chain.from_iterable(split(f"mlp.experts.{number}", expert) for number, expert in enumerate(tensor))


def _gate_up(module: str, tensor: Any) -> Named:
    gate, up = tensor.chunk(2)
    yield f"{module}.gate_proj.weight", gate
    yield f"{module}.up_proj.weight", up


def _down(module: str, tensor: Any) -> Named:
    yield f"{module}.down_proj.weight", tensor


def _qkv(kind: str, tensor: Any, config: Any) -> Named:
    """Query heads of a group, then its key head, then its value head, group after group."""
    groups = config["num_key_value_heads"]
    heads = config["num_attention_heads"] // groups + 2
    grouped = tensor.reshape(groups, heads, -1, *tensor.shape[1:])
    for letter, part in (("q", grouped[:, :-2]), ("k", grouped[:, -2:-1]), ("v", grouped[:, -1:])):
        yield f"self_attn.{letter}_proj.{kind}", part.flatten(0, 2).contiguous()


def check_same(ours: Path, theirs: Path) -> None:
    """End with an error when two models differ in a tensor."""
    import torch
    from safetensors import safe_open

    with safe_open(theirs / "model.safetensors", framework="pt") as expected:
        missing = set(expected.keys())
        for path in sorted(ours.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dictionary
                    if not torch.equal(file.get_tensor(name), expected.get_tensor(name)):
                        sys.exit(f"{name} differs")
                    missing.discard(name)
    if missing:
        sys.exit(f"missing: {', '.join(sorted(missing)[:5])}")


if __name__ == "__main__":  # a process of its own: the measured one
    {"convert": convert, "same": check_same}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
