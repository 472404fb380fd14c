"""Which directories the writer of converted checkpoints makes, for whoever must know before they are made."""

from __future__ import annotations

EXPERTS = ("tp1", "tp2-ep2", "pp2-ep2", "te", "singleton")

LAYOUTS: dict[str, tuple[str, ...]] = {
    "llama": ("tp1", "tp2-pp2", "tp4", "indexed", "singleton"),
    "llama-mha": ("tp1", "tp4"),
    "llama-bias": ("tp1", "tp2-pp2", "singleton"),
    "llama-critic": ("tp1", "tp2-pp2"),
    "qwen2": ("tp1", "tp2", "pp2"),
    "qwen3": ("tp1", "tp2-pp2", "tp4", "indexed", "vpp"),
    "qwen3-moe": (*EXPERTS, "ep4", "etp", "indexed"),
    "qwen3-moe-mixed": ("tp1", "tp2-ep2", "te"),
    "mixtral": EXPERTS,
    "qwen2-moe": EXPERTS,
    "deepseek-v3": (*EXPERTS, "vpp"),
    "moonlight": ("tp1", "tp2-ep2", "te"),
}
"""The layouts of each model; the directory is `MODEL-LAYOUT`, what the model answers `expected/MODEL.safetensors`."""

VARIANTS = {f"{model}-{layout}": model for model, layouts in LAYOUTS.items() for layout in layouts}
"""Every directory and the model whose weights it holds."""
