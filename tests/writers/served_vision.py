"""Tiny models that see: their language model and their tower have other places in memory than on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SiglipVisionConfig,
)

TEXT: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 46,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TOKENS = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
ROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
UNTIED = {"tie_word_embeddings": False, "attn_implementation": "eager"}


def qwen2_vl() -> Any:
    """`model.language_model.` and `model.visual.` in memory, `model.` and `visual.` on disk."""
    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | {"rope_parameters": ROPE}
    vision = {"depth": 2, "embed_dim": 16, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, **TOKENS, **UNTIED)
    return Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> Any:
    """The same with another tower."""
    text = {name: value for name, value in TEXT.items() if name != "head_dim"} | {"rope_parameters": ROPE}
    vision: dict[str, Any] = {"depth": 2, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"intermediate_size": 20, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision, **TOKENS, **UNTIED)
    return Qwen2_5_VLForConditionalGeneration(config)


SEEING: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}


def qwen3_vl() -> Any:
    """Its names are the same in memory and on disk."""
    text = {**TEXT, "rope_parameters": ROPE}
    config = Qwen3VLConfig(text_config=text, vision_config=SEEING, **TOKENS, **UNTIED)
    return Qwen3VLForConditionalGeneration(config)


def qwen3_vl_moe() -> Any:
    """Experts are packed in memory and on disk, and on disk transposed."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
    text = {**TEXT, **experts, "rope_parameters": ROPE, "tie_word_embeddings": False}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=SEEING, **TOKENS, **UNTIED)
    config.text_config._experts_implementation = "eager"
    return Qwen3VLMoeForConditionalGeneration(config)


def qwen3_vl_moe_square() -> Any:
    """Twice the rows of an expert are the hidden size, and on disk they are transposed all the same."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = {**TEXT, **experts, "rope_parameters": ROPE, "tie_word_embeddings": False}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=SEEING, **TOKENS, **UNTIED)
    config.text_config._experts_implementation = "eager"
    return Qwen3VLMoeForConditionalGeneration(config)


def gemma3() -> Any:
    """`language_model.model.` on disk; tied."""
    text = Gemma3TextConfig(**TEXT, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    tower = SiglipVisionConfig(**TOWER)
    config = Gemma3Config(text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_id=90)
    config._attn_implementation = "eager"
    return Gemma3ForConditionalGeneration(config)


def llava() -> Any:
    """`language_model.lm_head`, and a tower whose `vision_model` is only on disk."""
    text = LlamaConfig(**TEXT, tie_word_embeddings=False)
    config = LlavaConfig(text_config=text, vision_config=CLIPVisionConfig(**TOWER), image_token_id=90, **UNTIED)
    return LlavaForConditionalGeneration(config)


def llava_next() -> Any:
    """The same with `image_newline`, a parameter at the root."""
    text = LlamaConfig(**TEXT, tie_word_embeddings=False)
    config = LlavaNextConfig(text_config=text, vision_config=CLIPVisionConfig(**TOWER), image_token_id=90, **UNTIED)
    return LlavaNextForConditionalGeneration(config)


PICTURE = {"image_grid_thw": torch.tensor([[1, 4, 4]]), "pixel_values": torch.linspace(-1, 1, 16 * 96).view(16, 96)}
SENTENCE = [5, 6, 92, 90, 90, 90, 90, 93, 7, 8]
"""Sixteen patches, four tokens: what the tower makes of them stands between the words."""


def inputs(name: str) -> dict[str, torch.Tensor]:
    """A question about a picture, for the models whose names move with their tower."""
    if name not in ("qwen2-vl", "qwen2.5-vl", "qwen3-vl"):
        return {}
    ids = torch.tensor([SENTENCE])
    return {"input_ids": ids, "mm_token_type_ids": (ids == TOKENS["image_token_id"]).int(), **PICTURE}


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2-vl": qwen2_vl,
    "qwen2.5-vl": qwen2_5_vl,
    "qwen3-vl": qwen3_vl,
    "qwen3-vl-moe": qwen3_vl_moe,
    "qwen3-vl-moe-square": qwen3_vl_moe_square,
    "gemma3": gemma3,
    "llava": llava,
    "llava-next": llava_next,
}
