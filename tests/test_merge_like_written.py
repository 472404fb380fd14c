"""What `merge-fsdp --like` writes and says: aliases and dtypes are those of the reference."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.merged import Tensors, tensors_in, unequal, write_role
from tests.served import (
    ODD,
    Run,
    config_in,
    index_alone,
    merged_like,
    named,
    reference,
    refused_like,
    said,
    trained,
    without,
)

# Tied weights


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_the_alias_of_tied_embeddings_is_where_the_reference_has_it(
    stored: bool, wanted: bool, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    whole = trained(served_checkpoints, "qwen2-tied")
    config = config_in(served_checkpoints / "expected" / "qwen2-tied")
    few = without(whole, "lm_head")
    role = write_role(tmp_path / "role", whole if stored else few, config=config)
    like = reference(tmp_path / "like", whole if wanted else few, config)
    merged_like(ckpttool, role, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), whole if wanted else few) == set()


def test_an_alias_under_another_prefix(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """Gemma's reference has its head beside its language model."""
    saved = served_checkpoints / "expected" / "gemma3"
    table = tensors_in(saved)["language_model.model.embed_tokens.weight"]
    expected = {**tensors_in(saved), "language_model.lm_head.weight": table.clone()}
    like = reference(tmp_path / "like", expected, config_in(saved))
    merged_like(ckpttool, served_checkpoints / "gemma3", tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_a_head_of_its_own_is_not_lost(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    like = reference(tmp_path / "like", without(mixtral_hub, "lm_head"), mixtral_config)
    assert "lm_head.weight" in named(refused_like(ckpttool, mixtral, tmp_path / "out", like))


def test_a_tied_head_that_has_diverged_is_not_lost(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    whole = trained(served_checkpoints, "qwen2-tied")
    like = served_checkpoints / "expected" / "qwen2-tied"
    other = {**whole, "lm_head.weight": whole["lm_head.weight"] + 1}
    role = write_role(tmp_path / "role", other, config=config_in(like))
    call = refused_like(ckpttool, role, tmp_path / "out", like, code=4)
    assert "lm_head.weight" in call.out


# Dtypes


def test_dtypes_are_those_of_the_reference_one_by_one(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    expected = {
        name: value if "norm" in name or "gate" in name else value.bfloat16() for name, value in mixtral_hub.items()
    }
    merged_like(ckpttool, mixtral, tmp_path / "out", reference(tmp_path / "like", expected, mixtral_config))
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_packed_experts_have_one_dtype_each(
    ckpttool: Run,
    mixtral_hub: Tensors,
    mixtral: Path,
    served_checkpoints: Path,
    mixtral_config: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Gate and up come of one tensor and are cast each as the reference has them."""
    expected = {name: value.bfloat16() if ".w3." in name else value for name, value in mixtral_hub.items()}
    merged_like(ckpttool, mixtral, tmp_path / "out", reference(tmp_path / "like", expected, mixtral_config))
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_buffers_of_integers_are_not_touched(
    ckpttool: Run, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    buffers = {"model.step": torch.tensor(7), "model.mask": torch.tensor([True, False])}
    role = write_role(tmp_path / "role", mixtral_hub, buffers, config=mixtral_config)
    half = {name: value.bfloat16() for name, value in mixtral_hub.items()}
    like = reference(tmp_path / "like", {**half, **buffers}, mixtral_config)
    merged_like(ckpttool, role, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), {**half, **buffers}) == set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bias_of_a_router_is_cast_where_the_reference_says_so(
    dtype: torch.dtype, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    saved = served_checkpoints / "expected" / "minimax-m2"
    expected = {
        name: value.to(dtype if name.endswith("correction_bias") else torch.bfloat16)
        for name, value in tensors_in(saved).items()
    }
    assert any(name.endswith("block_sparse_moe.e_score_correction_bias") for name in expected)
    like = reference(tmp_path / "like", expected, config_in(saved))
    merged_like(ckpttool, served_checkpoints / "minimax-m2", tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


@pytest.mark.parametrize(("word", "dtype"), [("fp32", torch.float32), ("fp16", torch.float16)])
def test_an_asked_dtype_wins(
    word: str, dtype: torch.dtype, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    like = served_checkpoints / "expected" / "qwen3-moe-bf16"
    expected = tensors_in(served_checkpoints / "expected" / "qwen3-moe")
    merged_like(ckpttool, served_checkpoints / "qwen3-moe", tmp_path / "out", like, "--dtype", word)
    assert unequal(tensors_in(tmp_path / "out"), {name: v.to(dtype) for name, v in expected.items()}) == set()


def test_a_cast_that_a_reference_asks_for_may_not_overflow(
    ckpttool: Run, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    role = write_role(
        tmp_path / "role", {**mixtral_hub, "model.norm.weight": torch.full((32,), 1e6)}, config=mixtral_config
    )
    like = reference(tmp_path / "like", {name: value.half() for name, value in mixtral_hub.items()}, mixtral_config)
    assert "model.norm.weight" in refused_like(ckpttool, role, tmp_path / "out", like, code=4).out


def test_a_reference_of_eight_bits_is_followed_in_names(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    """As those of DeepSeek: scales are not missing, and nothing becomes fp8."""
    whole = {name for name, value in mixtral_hub.items() if value.ndim == 2 and "layers" in name and "gate" not in name}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in whole}
    tensors = {name: value.to(torch.float8_e4m3fn) if name in whole else value for name, value in mixtral_hub.items()}
    quantised = {**mixtral_config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    like = reference(tmp_path / "like", {**tensors, **scales}, quantised)
    merged_like(ckpttool, mixtral, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), mixtral_hub) == set()
    assert "quantization_config" not in config_in(tmp_path / "out")


def test_a_reference_of_four_bits_is_followed_in_names(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """As that of GPT-OSS: the experts are there under two other names each."""
    saved = served_checkpoints / "expected" / "gpt-oss"
    expected = tensors_in(saved)
    names = set()
    for name in expected:
        packed = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        names |= {f"{name}_blocks", f"{name}_scales"} if packed else {name}
    like = index_alone(tmp_path / "like", dict.fromkeys(names), config_in(saved))
    merged_like(ckpttool, served_checkpoints / "gpt-oss", tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


# What a run says


def test_a_merge_tells_what_it_renamed_and_split(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    like = served_checkpoints / "expected" / "mixtral"
    call = ckpttool("merge-fsdp", served_checkpoints / "mixtral", "-o", tmp_path / "out", "--like", like)
    assert call.code == 0
    told = said(call)
    assert re.search(r"\brenamed\b", told)
    assert re.search(r"\bsplit\b", told)
    assert "block_sparse_moe" in told
    assert "expected/mixtral" in told


def test_programs_read_every_name(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    like = reference(tmp_path / "like", {**mixtral_hub, **ODD}, mixtral_config)
    call = merged_like(ckpttool, mixtral, tmp_path / "out", like, "--allow-missing", "*.odd.*")
    told = json.dumps(call.json["data"])
    assert [word for word in ("renamed", "split", "missing", "extra") if f'"{word}"' not in told] == []


def test_a_dry_run_writes_nothing(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    like = served_checkpoints / "expected" / "mixtral"
    call = ckpttool("merge-fsdp", served_checkpoints / "mixtral", "-o", tmp_path / "out", "--like", like, "--dry-run")
    assert call.code == 0
    assert "block_sparse_moe" in said(call)
    assert list(tmp_path.iterdir()) == []
