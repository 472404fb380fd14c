"""What transformers 4 looks for under other names than transformers 5 writes: added, and 5 reads on as before."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    ApertusConfig,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MllamaConfig,
    ModernBertDecoderConfig,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    VipLlavaConfig,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ckpttool.formats.families4 import ALIASES, DEFAULT_SCALING, KNOWN, LAYERED, NEEDING, PARTIAL, SCALINGS, THETA
from tests.earlier import (
    BASE,
    DYNAMIC,
    LINEAR,
    LLAMA3,
    LOCAL,
    LONG,
    MROPE,
    PLAIN,
    SIZES,
    YARN,
    based,
    converted,
    layered,
    written,
)
from tests.looking import write_json
from tests.writers.fsdp_logits import FIRST, LENGTH, PROMPTS


def added(config: Any, folder: Path) -> dict[str, Any]:
    """The fields that are new in what is written of a config, by the way to them; nothing else has changed."""
    before = json.loads((written(config, folder) / "config.json").read_text())
    return dict(_new(before, converted(folder)[0]))


def _new(before: Mapping[str, Any], after: Mapping[str, Any], way: str = "") -> Iterator[tuple[str, Any]]:
    assert list(before) == list(after)[: len(before)]
    for name, value in after.items():
        if name not in before:
            yield way + name, value
        elif value != before[name]:
            yield from _new(before[name], value, f"{way}{name}.")


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "base": (Qwen2Config(**based(PLAIN)), {"rope_theta": BASE}),
    "dtype": (Qwen2Config(**based(PLAIN), dtype="bfloat16"), {"torch_dtype": "bfloat16", "rope_theta": BASE}),
    "yarn": (Qwen2Config(**SIZES, **based(YARN)), {"rope_theta": BASE, "rope_scaling": YARN}),
    "llama3": (LlamaConfig(**SIZES, **based(LLAMA3)), {"rope_theta": BASE, "rope_scaling": LLAMA3}),
    "linear": (LlamaConfig(**based(LINEAR)), {"rope_theta": BASE, "rope_scaling": LINEAR}),
    "dynamic": (LlamaConfig(**based(DYNAMIC)), {"rope_theta": BASE, "rope_scaling": DYNAMIC}),
    "part": (Glm4MoeConfig(**based(PLAIN)), {"rope_theta": BASE, "partial_rotary_factor": 0.5}),
    "part-next": (
        Qwen3NextConfig(**based(PLAIN, partial_rotary_factor=0.125)),
        {"rope_theta": BASE, "partial_rotary_factor": 0.125},
    ),
    "names-of-its-own": (
        GPTNeoXConfig(**based(PLAIN, partial_rotary_factor=0.75)),
        {"rotary_emb_base": BASE, "rotary_pct": 0.75},
    ),
    "phi3": (Phi3Config(**based(PLAIN)), {"rope_theta": BASE}),
    "sections": (
        Qwen2VLConfig(text_config=based(MROPE)),
        {"text_config.rope_theta": BASE, "text_config.rope_scaling": MROPE},
    ),
    "sections-by-default": (
        Qwen3VLConfig(text_config=based(PLAIN)),
        {"text_config.rope_theta": BASE, "text_config.rope_scaling": {"rope_type": "default"}},
    ),
    "scaling-is-expected": (
        MllamaConfig(text_config=based(PLAIN)),
        {"text_config.rope_theta": BASE, "text_config.rope_scaling": {"rope_type": "default"}},
    ),
    "no-scaling-is-said": (ApertusConfig(**based(PLAIN)), {"rope_theta": BASE, "rope_scaling": None}),
    "no-scaling-is-said-2": (GptOssConfig(**based(PLAIN)), {"rope_theta": BASE, "rope_scaling": None}),
    "two-bases": (
        Gemma3Config(text_config=layered(LINEAR)),
        {
            "text_config.rope_theta": BASE,
            "text_config.rope_local_base_freq": 5555.5,
            "text_config.rope_scaling": LINEAR,
        },
    ),
    "two-bases-of-text": (
        Gemma3TextConfig(**layered(PLAIN)),
        {"rope_theta": BASE, "rope_local_base_freq": 5555.5},
    ),
    "other-two-names": (
        ModernBertDecoderConfig(**layered(PLAIN)),
        {"global_rope_theta": BASE, "local_rope_theta": 5555.5},
    ),
    "one-base-for-both": (
        Olmo3Config(**SIZES, **layered(YARN, PLAIN)),
        {"rope_theta": BASE, "rope_scaling": YARN},
    ),
    "experts": (
        Qwen3MoeConfig(num_experts=6, **based(PLAIN)),
        {"num_experts": 6, "rope_theta": BASE},
    ),
    "experts-of-a-part": (
        Qwen3VLMoeConfig(text_config={"num_experts": 6, **based(MROPE)}),
        {"text_config.num_experts": 6, "text_config.rope_theta": BASE, "text_config.rope_scaling": MROPE},
    ),
    "layers-of-a-tower": (
        VipLlavaConfig(vision_feature_layer=[-1, 2], text_config={"model_type": "llama", **based(PLAIN)}),
        {"vision_feature_layers": [-1, 2], "text_config.rope_theta": BASE},
    ),
}
"""Configs of transformers 5, and what transformers 4 has to find in them."""


@contextmanager
def warnings_of_transformers() -> Iterator[list[str]]:
    """What the library logs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def read_by_5(folder: Path) -> tuple[dict[str, Any], set[str]]:
    """What transformers 5 makes of the config in a folder, and what it warns of."""
    with warnings_of_transformers() as said:
        values = AutoConfig.from_pretrained(folder).to_dict()
    return values, set(said)


@pytest.mark.parametrize("name", CASES)
def test_earlier_fields_are_added_with_their_values(name: str, tmp_path: Path) -> None:
    config, expected = CASES[name]
    assert added(config, tmp_path) == expected


@pytest.mark.parametrize("name", CASES)
def test_transformers_5_reads_it_as_before(name: str, tmp_path: Path) -> None:
    folder = written(CASES[name][0], tmp_path)
    before = read_by_5(folder)
    assert converted(folder)[1]
    assert read_by_5(folder) == before


@pytest.mark.parametrize("name", CASES)
def test_what_was_written_is_not_changed_again(name: str, tmp_path: Path) -> None:
    folder = written(CASES[name][0], tmp_path)
    converted(folder)
    raw = (folder / "config.json").read_bytes()
    assert converted(folder)[1] == ()
    assert (folder / "config.json").read_bytes() == raw


def every_class(kind: Any = transformers.PreTrainedConfig) -> Iterator[Any]:
    """The configuration classes that have been imported; every one, once the mapping has been gone through."""
    list(CONFIG_MAPPING.values())
    yield kind
    for inner in kind.__subclasses__():
        yield from every_class(inner)


TYPES = {one.model_type: one for one in every_class() if one.__module__.startswith("transformers.")}


def of_every_scaling(kind: str) -> Iterator[Any]:
    """Configs of a model type with every scaling that its class bears."""
    sliding = PLAIN if kind == "olmo3" else LOCAL
    scaled = (PLAIN, YARN, LLAMA3, LINEAR)
    ropes = [layered(rope, sliding) if kind in LAYERED else based(rope) for rope in scaled]
    for rope in json.loads(json.dumps(ropes)):
        with suppress(ValueError, TypeError, AttributeError, KeyError, StrictDataclassError):
            config = TYPES[kind](**rope)
            if hasattr(config, "time_step_limit"):
                config.time_step_limit = (0.0, 1.0)  # infinity has a form of its own on disk
            yield config


@pytest.mark.parametrize("kind", sorted({*THETA, *LAYERED}))
def test_transformers_5_reads_every_family_as_before(kind: str, tmp_path: Path) -> None:
    several = list(of_every_scaling(kind))
    assert several
    for config in several:
        before = json.loads(config.to_json_string())
        write_json(tmp_path / "config.json", {"model_type": "llava", "text_config": before})
        after, changes = converted(tmp_path)
        assert changes or config is not several[0]
        with warnings_of_transformers() as said:
            one = TYPES[kind].from_dict(before).to_dict()
        with warnings_of_transformers() as now_said:
            other = TYPES[kind].from_dict(after["text_config"]).to_dict()
        assert (other, set(now_said)) == (one, set(said))


def test_every_table_speaks_of_types_that_transformers_5_has() -> None:
    assert {*THETA, *LAYERED, *ALIASES, *SCALINGS, *DEFAULT_SCALING, *PARTIAL, *NEEDING} <= set(TYPES)
    assert set(CONFIG_MAPPING) >= KNOWN


# Phi-3 has a form of its own, in which 5 keeps what it does not need: what it computes is the same


@pytest.mark.parametrize("rope", [{"rope_type": "default", "partial_rotary_factor": 0.5}, {"rope_type": "longrope"}])
def test_phi3_has_a_form_of_its_own(rope: dict[str, Any], tmp_path: Path) -> None:
    long = rope["rope_type"] == "longrope"
    said = based(rope, **(LONG if long else {}))
    config = Phi3Config(
        **SIZES, original_max_position_embeddings=16, **said, intermediate_size=40, vocab_size=90, pad_token_id=0
    )
    folder = written(config, tmp_path)
    before = AutoConfig.from_pretrained(folder)
    values, _ = converted(folder)
    if long:
        assert values["rope_scaling"] == {"type": "longrope", **LONG}
    else:
        assert values["partial_rotary_factor"] == 0.5
    assert torch.equal(answers(AutoConfig.from_pretrained(folder)), answers(before))


def answers(config: Any) -> torch.Tensor:
    """What a model of this config, with weights that are always the same, says to words that are."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        words = torch.arange(FIRST, FIRST + PROMPTS * LENGTH).view(PROMPTS, LENGTH) % 90
        logits: torch.Tensor = model(input_ids=words, use_cache=False).logits
    return logits


TINY: dict[str, Any] = {
    **SIZES,
    "vocab_size": 90,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(
    "config",
    [
        Qwen2Config(**TINY, **based(YARN)),
        LlamaConfig(**TINY, **based(LLAMA3)),
        Qwen3MoeConfig(**TINY, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=16, **based(PLAIN)),
        Gemma3TextConfig(**TINY, **layered(LINEAR), layer_types=["sliding_attention", "full_attention"]),
    ],
    ids=lambda config: str(config.model_type),
)
def test_models_of_transformers_5_answer_as_before(config: Any, tmp_path: Path) -> None:
    folder = written(config, tmp_path)
    before = answers(AutoConfig.from_pretrained(folder))
    assert converted(folder)[1]
    assert torch.equal(answers(AutoConfig.from_pretrained(folder)), before)
