"""Tiny models of transformers with random weights, their logits, and their tensors as files of the hub have them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.synthetic.families import LENGTH, VOCAB, Family

Tensors = dict[str, torch.Tensor]
ALWAYS_FLOAT32 = "e_score_correction_bias"


@dataclass(frozen=True)
class Random:
    """Draws tensors that suit their names: norms about their neutral value, matrices by their width."""

    generator: torch.Generator
    zero_centred: bool
    dtype: torch.dtype

    def draw(self, name: str, shape: torch.Size) -> torch.Tensor:
        """A tensor, in float32, that its dtype on disk represents exactly."""
        noise = torch.randn(shape, generator=self.generator)
        value = self._scaled(name, noise)
        return value if name.endswith(ALWAYS_FLOAT32) else value.to(self.dtype).float()

    def _scaled(self, name: str, noise: torch.Tensor) -> torch.Tensor:
        if name == "score.bias":
            return torch.zeros_like(noise)
        if noise.ndim == 1 and "norm" in name:
            neutral = 0.0 if self.zero_centred and ".linear_attn." not in name else 1.0
            return neutral + (0.15 * noise).clamp(-0.45, 0.45)
        if noise.ndim == 1:
            return noise if name.endswith(("sinks", "A_log")) else 0.3 * noise
        if "embed_tokens" in name:
            return noise
        width = noise.shape[-2] if re.search(r"experts\.(gate_up|down)_proj$", name) else noise.shape[-1]
        return noise * (1.5 / width**0.5)


def configuration(family: Family, changes: Mapping[str, Any], head: str) -> Any:
    """The configuration of a model of this family."""
    labels = {"num_labels": 1} if head == "value" else {}
    fields = {"attention_dropout": 0.0, **family.config, **labels, **changes}
    return transformers.AutoConfig.for_model(family.model_type, **fields)


def build(config: Any, head: str, random: Random) -> Any:
    """A model in float32 whose every parameter and buffer is random."""
    kinds = {"lm": transformers.AutoModelForCausalLM, "value": transformers.AutoModelForTokenClassification}
    model = kinds[head].from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(random.draw(name, value.shape))
    return model


def run(model: Any, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens and the logits for them."""
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    return ids, logits(model, ids)


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """What a model answers."""
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def hub_state(model: Any, dtype: torch.dtype) -> Tensors:
    """The tensors of a model as files of the hub have them: one entry an expert, nothing that is tied, no zero bias."""
    tied = model.config.tie_word_embeddings
    state = {}
    for name, value in model.state_dict().items():
        if name == "score.bias" or (tied and name == "lm_head.weight"):
            continue
        for hub_name, part in _unfused(name, value, model.config.model_type):
            state[hub_name] = stored(hub_name, part, dtype)
    return state


def stored(name: str, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the dtype that files have it in."""
    return value.detach().to(torch.float32 if name.endswith(ALWAYS_FLOAT32) else dtype).contiguous().clone()


def _unfused(name: str, value: torch.Tensor, model_type: str) -> Iterator[tuple[str, torch.Tensor]]:
    gate, up, down = ("w1", "w3", "w2") if model_type == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    hub_name = name.replace(".mlp.", ".block_sparse_moe.") if model_type == "mixtral" else name
    head, _, last = hub_name.rpartition(".")
    if model_type == "gpt_oss" or not head.endswith(".experts"):
        yield hub_name, value
        return
    for index, expert in enumerate(value):
        if last == "down_proj":
            yield f"{head}.{index}.{down}.weight", expert
        else:
            half = len(expert) // 2
            yield f"{head}.{index}.{gate}.weight", expert[:half]
            yield f"{head}.{index}.{up}.weight", expert[half:]


def mtp_state(family: Family, config: Any, state: Tensors, random: Random, layers: int) -> Tensors:
    """Random tensors for layers of multi-token prediction, which transformers passes over when it loads."""
    if family.mtp == "layers":
        count = config.num_hidden_layers
        prefixes = [f"model.layers.{count + index}." for index in range(layers)]
        own = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "final": "shared_head.norm"}
    else:
        prefixes = ["mtp.layers.0."] if layers else []
        own = {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden"}
        own |= {"eh_proj": "mtp.fc", "final": "mtp.norm"}
    width = config.hidden_size
    shapes: dict[str, torch.Size] = {}
    for prefix in prefixes:
        start = prefix if family.mtp == "layers" else ""
        shapes |= {f"{start}{name}.weight": torch.Size([width]) for role, name in own.items() if role != "eh_proj"}
        shapes[f"{start}{own['eh_proj']}.weight"] = torch.Size([width, 2 * width])
        shapes |= {prefix + name: shape for name, shape in _last_layer(state).items()}
    return {name: stored(name, random.draw(name, shape), random.dtype) for name, shape in shapes.items()}


def _last_layer(state: Tensors) -> dict[str, torch.Size]:
    last = max(int(found[1]) for name in state if (found := re.match(r"model\.layers\.(\d+)\.", name)))
    prefix = f"model.layers.{last}."
    return {name.removeprefix(prefix): value.shape for name, value in state.items() if name.startswith(prefix)}


def write_config(folder: Path, model: Any, family: Family, dtype: torch.dtype, **changes: Any) -> None:
    """The configuration beside an archive, and what a model generates by if it does."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**model.config.to_dict(), "architectures": [type(model).__name__], **family.in_config, **changes}
    fields["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def write_hub(folder: Path, config: Path, state: Tensors) -> Path:
    """A directory as `to-hf` should write it, from a state and the configuration beside an archive."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_bytes(config.read_bytes())
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, model_class: str) -> tuple[Any, Mapping[str, Any]]:
    """A model that transformers loads in float32 from a directory, and what it says about the names it found."""
    cls = getattr(transformers, model_class)
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("model_type")  # Kimi K2 is loaded as what it is, a DeepSeek V3: transformers has no type of its name
    config = cls.config_class(**fields)
    model, info = cls.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), info
