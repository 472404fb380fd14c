"""Damaged roles of every kind: each conversion ends in a code of the table, with the right tensors or with none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.merged import write_config
from tests.mutations import DATA
from tests.synthetic import write_role
from tests.synthetic.hub import write_hub
from tests.test_to_hf_fixtures import CONFIG, FAMILY

TIMES = 400
SYNTHETIC: Mapping[str, Mapping[str, Any]] = {
    "llama": {"padding": 5, "extra": True},
    "qwen2_moe": {"dialect": "indexed"},
    "qwen3_moe": {"dtype": torch.bfloat16, "extra": True},
    "mixtral": {"dialect": "singleton"},
    "deepseek_v3": {},
    "gpt_oss": {"config": {"num_hidden_layers": 1}},
    "gemma2": {"post_norms": "mbridge"},
    "qwen3_next": {"config": {"num_hidden_layers": 2}},
}
FIXTURES = ("mcore0.12-dense-tp2", "mcore0.16-bias-tp2", "mcore0.16-het-tp1", "mcore0.19-dense-tp2")
RUN = {
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "layernorm_epsilon": 1e-6,
    "moe_router_topk": 2,
    "moe_mlp_glu_interleave_size": None,
}


def write_roles(folder: Path) -> None:
    """Small roles of megatron-core and of the tests' own writer, some with a reference."""
    for family, options in SYNTHETIC.items():
        written = write_role(folder / family / "role", family, **options)
        if family in ("llama", "gemma2", "qwen2_moe"):
            (folder / family / "role" / "transformer_config.json").write_text(json.dumps(RUN))
        if family in ("qwen3_moe", "deepseek_v3"):
            config = folder / family / "role" / "huggingface" / "config.json"
            like = write_hub(folder / family / "like", config, written.state)
            names = {"weight_map": dict.fromkeys(written.state, "model.safetensors")}
            (like / "model.safetensors.index.json").write_text(json.dumps(names))
    for name in FIXTURES:
        role = folder / name / "role"
        shutil.copytree(DATA / "megatron" / name, role / "dist_ckpt")
        write_config(role, {**CONFIG, **FAMILY.get(name, {})})


def test_damaged_roles_end_in_an_error_or_in_the_right_tensors(tmp_path: Path) -> None:
    """And in less than 300 MiB, with the role as it was, and nothing beside the output."""
    roles, folder = tmp_path / "roles", tmp_path / "work"
    folder.mkdir()
    write_roles(roles)
    command = [sys.executable, "-m", "tests.damaging", str(roles), str(folder), "0", str(TIMES)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    seen = {int(line.split()[1].rstrip(":")) for line in done.stdout.splitlines() if not line.startswith("peak")}
    assert {0, 4, 5} <= seen <= {0, 2, 3, 4, 5, 6, 7}
