"""Which directories the writer of Megatron checkpoints with adapters makes."""

from __future__ import annotations

RANK = 4
ALPHA = 6

LAYOUTS: dict[str, tuple[str, ...]] = {
    "llama": ("tp1", "tp2", "tp2-pp2", "indexed", "singleton"),
    "qwen3-moe": ("tp1", "tp2-ep2", "etp", "singleton"),
    "llama-dora": ("tp1", "tp2"),
    "llama-attention-dora": ("tp1", "tp2-pp2"),
    "llama-canonical": ("tp1", "tp2"),
    "llama-attention-canonical": ("tp1", "tp2"),
}
"""The layouts of each model; the directory is `MODEL-LAYOUT`, what the model answers `expected/MODEL.safetensors`."""

SCRAMBLED = ("llama-dora-tp2", "llama-canonical-tp2")
"""Those whose adapters of gate and up have their rows rank by rank, which is not how the weight lies."""

VARIANTS = {f"{model}-{layout}": model for model, layouts in LAYOUTS.items() for layout in layouts}
"""Every directory and the model whose weights it holds."""
