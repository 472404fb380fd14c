"""Names and forms on the hub that `save_pretrained` gives back to a loaded model only, or not at all."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

Change = Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]


def with_vision_model(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """CLIP and SigLIP towers have a `vision_model` on the hub that is gone in memory."""
    tower = "vision_tower."
    return (f"{tower}vision_model.{name.removeprefix(tower)}" if name.startswith(tower) else name), value


def transposed_experts(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The packed experts of Qwen3-VL lie the other way round on the hub."""
    packed = name.endswith(("mlp.experts.gate_up_proj", "mlp.experts.down_proj"))
    return name, value.transpose(1, 2).contiguous() if packed else value


def of_a_model_that_sees(name: str, value: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A model of text was taken out of one of vision and language, and stands there under its name."""
    return re.sub(r"^model\.", "model.language_model.", name), value


HUBS: dict[str, Change] = {
    "gemma3": with_vision_model,
    "llava": with_vision_model,
    "llava-next": with_vision_model,
    "qwen3.5": of_a_model_that_sees,
    "qwen3-vl-moe": transposed_experts,
    "qwen3-vl-moe-square": transposed_experts,
}
