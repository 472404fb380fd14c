"""Families that Megatron-Core does not build on a CPU: known weights of transformers in Megatron's order, and back.

The archives are written by code that shares nothing with the product, after the maps that the trainers publish.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import logging as transformers_logging

from ckpttool.converting import Options, convert
from tests.merged import tensors_in, unequal
from tests.synthetic import FAMILIES, Written, write_role
from tests.synthetic.hub import load, logits


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def assert_back(role: Path, written: Written, options: Options | None = None) -> None:
    """Every tensor bit by bit, and the logits of the model that had the weights."""
    output = role.parent / "out"
    convert(role, output, options or Options())
    assert unequal(tensors_in(output), written.state) == set()
    model, _ = load(output, written.model_class)
    torch.testing.assert_close(logits(model, written.input_ids), written.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back(family: str, tmp_path: Path) -> None:
    assert_back(tmp_path / "role", write_role(tmp_path / "role", family))


@pytest.mark.parametrize("dialect", ["indexed", "singleton"])
@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe", "gemma2", "deepseek_v2", "qwen3_next"])
def test_in_every_dialect(family: str, dialect: str, tmp_path: Path) -> None:
    assert_back(tmp_path / "role", write_role(tmp_path / "role", family, dialect=dialect))


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe", "gemma3_text", "kimi_k2", "seed_oss"])
def test_with_the_names_of_the_local_spec_padding_and_what_a_trainer_keeps_beside(family: str, tmp_path: Path) -> None:
    written = write_role(tmp_path / "role", family, norms="local", padding=7, extra=True, dtype=torch.bfloat16)
    assert_back(tmp_path / "role", written)


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_norms_of_gemma_under_the_names_of_mbridge(family: str, tmp_path: Path) -> None:
    assert_back(tmp_path / "role", write_role(tmp_path / "role", family, post_norms="mbridge"))


@pytest.mark.parametrize("producer", ["nvidia", "swift", "slime"])
@pytest.mark.parametrize("norms", ["te", "local"])
def test_delta_nets_of_every_producer(producer: str, norms: str, tmp_path: Path) -> None:
    """The order of rows is told by the keys."""
    written = write_role(tmp_path / "role", "qwen3_next", producer=producer, norms=norms)
    assert_back(tmp_path / "role", written)


@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "moonlight", "qwen3_next", "seed_oss"])
def test_critics(family: str, tmp_path: Path) -> None:
    assert_back(tmp_path / "role", write_role(tmp_path / "role", family, head="value"))
