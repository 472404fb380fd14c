"""The synthetic checkpoints say the truth: their states are hub files, and torch reads what is in their archives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.synthetic import FAMILIES, Written, write_role
from tests.synthetic.hub import load, logits, write_hub


def is_mtp(name: str, layers: int) -> bool:
    """Whether transformers passes over a tensor because only prediction of further tokens needs it."""
    return name.startswith(("mtp.", *(f"model.layers.{layers + index}." for index in range(3))))


def check(role: Path, written: Written, hub: Path) -> None:
    """Transformers gives the recorded logits from the state, and misses no name."""
    write_hub(hub, role / "huggingface" / "config.json", written.state)
    model, info = load(hub, written.model_class)
    assert set(info["missing_keys"]) <= {"score.bias"}
    assert all(is_mtp(name, model.config.num_hidden_layers) for name in info["unexpected_keys"]), info
    assert not info["mismatched_keys"]
    torch.testing.assert_close(logits(model, written.input_ids), written.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_state_is_what_files_of_the_hub_have(family: str, tmp_path: Path) -> None:
    written = write_role(tmp_path / "role", family)
    assert torch.isfinite(written.logits).all()
    assert written.logits.std() > 0.05
    check(tmp_path / "role", written, tmp_path / "hub")
