"""The stored logits belong to the stored weights: a model that was never sharded answers the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.writers.reading import expected

ROLES = (
    "fsdp2",
    "hsdp",
    "critic",
    "tied-bf16",
    "llama",
    "qwen3-moe",
    "gemma4",
    "fsdp1",
    "fsdp1-hsdp",
    "fsdp1-shardedtensor",
    "single",
)


def model_of(root: Path, name: str) -> Any:
    """Built from the configuration beside the shards and the weights that torch gathered."""
    config = transformers.AutoConfig.from_pretrained(root / name / "huggingface", attn_implementation="eager")
    weights = expected(root, name)
    model = getattr(transformers, config.architectures[0])(config).to(weights["model.norm.weight"].dtype)
    assert not model.load_state_dict(weights, strict=False).missing_keys
    return model.eval()


def answer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def test_every_role_that_can_answer_is_here(fsdp_checkpoints: Path) -> None:
    found = {path.name.removesuffix(".logits.safetensors") for path in fsdp_checkpoints.glob("expected/*.logits.*")}
    assert found == set(ROLES)


@pytest.mark.parametrize("name", ROLES)
def test_the_weights_give_the_logits(fsdp_checkpoints: Path, name: str) -> None:
    stored = expected(fsdp_checkpoints, f"{name}.logits")
    assert stored["input_ids"].shape == (2, 12)
    torch.testing.assert_close(answer(model_of(fsdp_checkpoints, name), stored["input_ids"]), stored["logits"])


def test_the_scalar_of_a_layer_counts(fsdp_checkpoints: Path) -> None:
    """Who drops the buffers of Gemma 4 changes what it says."""
    stored = expected(fsdp_checkpoints, "gemma4.logits")
    model = model_of(fsdp_checkpoints, "gemma4")
    for layer in model.model.layers:
        layer.layer_scalar.fill_(1.0)
    assert (answer(model, stored["input_ids"]) - stored["logits"]).abs().max() > 0.1
