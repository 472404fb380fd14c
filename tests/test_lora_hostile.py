"""LoRA in `merge-fsdp`: adapters of other kinds are named, and files and names made to do harm do none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    FourierFTConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    VeraConfig,
    get_peft_model,
)

from tests.adapters import (
    CONFIG,
    LAYER,
    META,
    adapter_config,
    adapter_of,
    assert_fused,
    detached,
    refused,
    settings,
    whole,
)
from tests.conftest import Call
from tests.merged import QWEN2, write_role
from tests.writers.fsdp_models import plain_policy
from tests.writers.lora_models import ATTENTION
from tests.writers.reading import quiet

# The shards are read by one process to be written anew.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Run = Callable[..., Call]

# Other kinds of adapters

PROJECTIONS = {"target_modules": ATTENTION, "task_type": "CAUSAL_LM"}
KINDS: dict[str, tuple[PeftConfig, str]] = {
    "ia3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), "ia3_l"),
    "loha": (LoHaConfig(r=4, **PROJECTIONS), "hada_w1_a"),
    "lokr": (LoKrConfig(r=4, **PROJECTIONS), "lokr_w1"),
    "oft": (OFTConfig(oft_block_size=4, **PROJECTIONS), "oft_R"),
    "vera": (VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"), "vera_lambda_b"),
    "hra": (HRAConfig(r=4, **PROJECTIONS), "hra_u"),
    "fourierft": (FourierFTConfig(n_frequency=10, **PROJECTIONS), "fourierft_spectrum"),
    "adalora": (AdaLoraConfig(init_r=4, total_step=10, **PROJECTIONS), "lora_E"),
    "tokens": (LoraConfig(r=4, trainable_token_indices=[3, 5], **PROJECTIONS), "token_adapter"),
}


@pytest.mark.parametrize("how", ["fuse", "adapter", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_lora_is_named(merge_lora: Run, tmp_path: Path, kind: str, how: str) -> None:
    config, word = KINDS[kind]
    with quiet():
        state = detached(get_peft_model(plain_policy(), config))
    assert any(word in key for key in state)
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", how, "--lora-alpha", 8), 5, word)


def test_the_older_name_of_a_kind(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    state = {**whole(lora_checkpoints / "plain"), f"{LAYER}.oft_r.default": torch.ones(4, 2, 2)}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", "--lora-alpha", 8), 5, "oft_r")


def test_a_file_of_another_kind(merge_lora: Run, plain_lora: Path, lora_checkpoints: Path) -> None:
    settings(plain_lora / CONFIG, {**adapter_config(adapter_of(lora_checkpoints, "plain")), "peft_type": "LOHA"})
    refused(merge_lora(plain_lora, "--lora", "fuse"), 5, "LOHA", CONFIG)


# Hostile files and names

WRONG: dict[str, Mapping[str, Any]] = {
    "rank-text": {"r": "4"},
    "rank-fraction": {"r": 4.5},
    "rank-true": {"r": True},
    "rank-zero": {"r": 0},
    "alpha-text": {"lora_alpha": "8"},
    "alpha-list": {"lora_alpha": [8]},
    "alpha-nan": {"lora_alpha": float("nan")},
    "alpha-negative": {"lora_alpha": -8},
    "ranks-list": {"rank_pattern": [2]},
    "ranks-text": {"rank_pattern": {"q_proj": "2"}},
    "alphas-list": {"alpha_pattern": [2]},
    "alphas-none": {"alpha_pattern": {"q_proj": None}},
    "switch-text": {"use_rslora": "yes"},
    "expression": {"rank_pattern": {"q_proj(": 2}},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_fields_of_wrong_types(merge_lora: Run, plain_lora: Path, lora_checkpoints: Path, wrong: str) -> None:
    settings(plain_lora / CONFIG, {**adapter_config(adapter_of(lora_checkpoints, "plain")), **WRONG[wrong]})
    (plain_lora / META).unlink()
    refused(merge_lora(plain_lora, "--lora", "fuse"), 4, CONFIG, next(iter(WRONG[wrong])))


@pytest.mark.parametrize("name", [CONFIG, META])
@pytest.mark.parametrize("raw", [b"[]", b"8", b"null", b"{", b"\xff\xfe", b"[" * 100_000, b""])
def test_files_that_are_no_object(merge_lora: Run, plain_lora: Path, raw: bytes, name: str) -> None:
    (plain_lora / name).write_bytes(raw)
    refused(merge_lora(plain_lora, "--lora", "fuse"), 4, name)


@pytest.mark.parametrize("name", [CONFIG, META])
def test_a_file_without_end(merge_lora: Run, plain_lora: Path, name: str) -> None:
    """A hole of four gigabytes is not read."""
    (plain_lora / name).write_bytes(b"{")
    os.truncate(plain_lora / name, 4 << 30)
    refused(merge_lora(plain_lora, "--lora", "fuse"), 4, name)


@pytest.mark.parametrize(
    "key",
    ["(([a-z0-9._]+)*)*X", "(.*)*(.*)*(.*)*(.*)*(.*)*X", "(a|a|b|_|[a-z._0-9])*X", ".?" * 60 + "X", ".*.*.*.*X"],
)
def test_a_pattern_that_would_never_end(plain_lora: Path, lora_checkpoints: Path, tmp_path: Path, key: str) -> None:
    """PEFT reads the keys of patterns as regular expressions."""
    config = adapter_config(adapter_of(lora_checkpoints, "plain"))
    settings(plain_lora / CONFIG, {**config, "rank_pattern": {key: 2}})
    line = ["merge-fsdp", str(plain_lora), "-o", str(tmp_path / "out"), "--lora", "fuse"]
    python = [sys.executable, "-m", "ckpttool"]
    ended = subprocess.run([*python, *line], capture_output=True, timeout=60, check=False, text=True)
    assert ended.returncode in (0, 4), ended.stderr
    assert (tmp_path / "out").exists() == (ended.returncode == 0)


@pytest.mark.parametrize("name", ["../x", "{tmp}/x", "a/../../x", "..", "x\0y"])
@pytest.mark.parametrize("how", ["adapter", "both"])
def test_names_that_lead_out_of_the_output(
    merge_lora: Run, lora_checkpoints: Path, tmp_path: Path, name: str, how: str
) -> None:
    """Beside another adapter a name is that of a folder."""
    name = name.replace("{tmp}", str(tmp_path))
    state = whole(lora_checkpoints / "plain")
    hostile = {key.replace(".default", f".{name}"): value for key, value in state.items() if "lora_" in key}
    role = write_role(tmp_path / "role", {**state, **hostile}, config=QWEN2)
    before = sorted(tmp_path.parent.glob("*"))
    call = merge_lora(role, "--lora", how, "--lora-alpha", 8, "--adapter", "default", "--adapter", name)
    refused(call, call.code)
    assert call.code in (2, 4, 5, 7), call.err
    assert sorted(tmp_path.parent.glob("*")) == before


def test_a_name_with_a_dot_is_a_name(merge_lora: Run, lora_checkpoints: Path, tmp_path: Path) -> None:
    """PEFT takes none; if one is there, it is neither lost nor taken for something else."""
    state = whole(lora_checkpoints / "plain")
    dotted = {key.replace(".default", ".v1.5"): value for key, value in state.items()}
    config = json.loads((lora_checkpoints / "plain/huggingface/config.json").read_text())
    role = write_role(tmp_path / "role", dotted, config=config)
    call = merge_lora(role, "--lora", "fuse", "--lora-alpha", 8)
    if call.code == 0:
        assert_fused(tmp_path / "out", lora_checkpoints)
    else:
        refused(call, 5, "v1.5")
