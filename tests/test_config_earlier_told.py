"""Configs for transformers 4: what a merge says of them, what `inspect` tells, what is left as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, Qwen3MoeConfig

from ckpttool.inspection import inspect
from ckpttool.merging import Options, merge
from tests.earlier import (
    BASE,
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
from tests.looking import problem, write_json
from tests.merged import config_of, write_role
from tests.small_files import WEIGHTS, write_model


def test_merge_adds_them_and_says_so_in_one_line_a_kind(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(num_experts=6, **SIZES, **based(YARN), architectures=["Qwen3MoeForCausalLM"])
    role = write_role(tmp_path / "role", WEIGHTS)
    written(config, role / "huggingface")
    result = merge(role, tmp_path / "out", Options())
    assert result.config_changes == (
        "dtype: float32 (was not there)",
        "torch_dtype: added as dtype has it, for transformers 4",
        "num_experts: added as num_local_experts has it, for transformers 4",
        "rope_theta, rope_scaling: added as rope_parameters has them, for transformers 4",
    )
    assert config_of(tmp_path / "out")["rope_scaling"] == YARN
    assert "config-of-5" not in [note.code for note in result.notes]


def test_numbers_are_carried_as_they_are_written(tmp_path: Path) -> None:
    raw = b'{"model_type": "llama", "rope_parameters": {"rope_theta": 1.50E+6, "rope_type": "linear", "factor": 2.50}}'
    (tmp_path / "config.json").write_bytes(raw)
    converted(tmp_path)
    after = (tmp_path / "config.json").read_text()
    assert after.count('"rope_theta": 1.50E+6') == 2
    assert '"rope_scaling": {\n    "rope_type": "linear",\n    "factor": 2.50\n  }' in after


OLD: dict[str, dict[str, Any]] = {
    "old-form": {"model_type": "qwen2", "rope_theta": 1e6, "rope_scaling": None, "torch_dtype": "bfloat16"},
    "old-scaling": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
    "unknown-type": {"model_type": "my_own", "dtype": "bfloat16", **based(YARN)},
    "unknown-to-4": {"model_type": "minimax_m2", "dtype": "bfloat16", **based(PLAIN)},
    "unknown-around": {"model_type": "my_own", "text_config": {"model_type": "llama", **based(PLAIN)}},
    "unknown-inside": {"model_type": "llava", "text_config": {"model_type": "my_own", **based(PLAIN)}},
    "no-type": {"dtype": "bfloat16", **based(PLAIN)},
    "both-forms": {"model_type": "llama", "rope_theta": BASE, "rope_scaling": YARN, **based(YARN)},
    "both-unscaled": {"model_type": "llama", "rope_theta": BASE, "rope_scaling": {"type": "default"}, **based(PLAIN)},
    "both-by-type": {"model_type": "llama", "rope_theta": BASE, "rope_scaling": {"type": "linear", "factor": 2.5}}
    | based(LINEAR),
}


@pytest.mark.parametrize("name", OLD)
def test_other_configs_stay_byte_for_byte_and_are_not_told_of(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", architectures=...)
    write_json(folder / "config.json", {**OLD[name], "vocab_size": 10})
    before = (folder / "config.json").read_bytes()
    assert "config-of-5" not in [found.code for found in inspect(folder).problems]
    assert converted(folder)[1] == ()
    assert (folder / "config.json").read_bytes() == before


HOSTILE: dict[str, Any] = {
    "text": "x",
    "number": 3,
    "list": [{"rope_theta": 1.0}],
    "nothing": None,
    "empty": {},
    "base-is-text": {"rope_theta": "10000", "rope_type": "default"},
    "base-is-true": {"rope_theta": True, "rope_type": "default"},
    "base-is-nan": {"rope_theta": float("nan"), "rope_type": "default"},
    "base-is-infinite": {"rope_theta": float("inf"), "rope_type": "default"},
    "base-is-negative": {"rope_theta": -1.0, "rope_type": "default"},
    "type-is-missing": {"rope_theta": 1e6},
    "type-is-a-list": {"rope_theta": 1e6, "rope_type": ["yarn"]},
    "nested-lists": {"rope_theta": 1e6, "rope_type": "linear", "factor": [[2.0]]},
    "layers-are-text": {"full_attention": "x", "sliding_attention": {}},
}


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_parameters_are_left_as_they_are(name: str, kind: str, tmp_path: Path) -> None:
    said = {"model_type": kind, "rope_parameters": HOSTILE[name], "num_local_experts": "x"}
    write_json(tmp_path / "config.json", said)
    before = (tmp_path / "config.json").read_bytes()
    assert converted(tmp_path)[1] == ()
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize("said", [["llama"], {"a": 1}, 3, None, True])
def test_a_type_that_is_no_name_is_passed_over(said: object, tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"model_type": said, "dtype": "bfloat16", "text_config": {"model_type": said}})
    assert converted(tmp_path)[1] == ()


def test_a_name_around_a_field_is_cut(tmp_path: Path) -> None:
    part = {"model_type": "llama", **based(PLAIN)}
    write_json(tmp_path / "config.json", {"model_type": "llava", "x" * 5000 + "config": part})
    (change,) = converted(tmp_path)[1]
    assert change == f"{'x' * 60}.rope_theta: added as rope_parameters has it, for transformers 4"


# what has no earlier form, and what is said twice


UNCLEAR: dict[str, tuple[dict[str, Any], str]] = {
    "another-base": ({"model_type": "llama", "rope_theta": 1e4, **based(YARN)}, "rope_theta says something else"),
    "another-scaling": ({"model_type": "llama", "rope_scaling": LINEAR, **based(YARN)}, "rope_scaling says something"),
    "old-scaling-alone": ({"model_type": "llama", "rope_scaling": YARN, **based(YARN)}, "rope_scaling says something"),
    "old-scaling-of-none": (
        {"model_type": "llama", "rope_theta": BASE, "rope_scaling": YARN, **based(PLAIN)},
        "rope_scaling says something else than rope_parameters",
    ),
    "scaling-is-text": ({"model_type": "llama", "rope_scaling": "yarn", **based(YARN)}, "rope_scaling says something"),
    "new-scaling": ({"model_type": "llama", **based({"rope_type": "proportional"})}, "proportional has no earlier"),
    "long": ({"model_type": "llama", **based({"rope_type": "longrope"}, **LONG)}, "longrope has no earlier form"),
    "not-in-4": ({"model_type": "olmo2", **based(LINEAR)}, "rope_type linear has no earlier form"),
    "layers": ({"model_type": "qwen2", **layered(PLAIN)}, "by types of layers has no earlier form"),
    "sliding": ({"model_type": "gemma3_text", **layered(PLAIN, {**LOCAL, **LINEAR})}, "more of sliding_attention"),
    "two-bases": ({"model_type": "olmo3", **layered(PLAIN)}, "two of rope_theta have no earlier form"),
    "no-scaling": ({"model_type": "modernbert-decoder", **layered(LINEAR)}, "rope_type linear has no earlier form"),
    "experts": (
        {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8},
        "num_experts says something else than num_local_experts",
    ),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_cannot_be_said_in_both_forms_is_told_and_left(name: str, tmp_path: Path) -> None:
    said, why = UNCLEAR[name]
    folder = write_model(tmp_path / "hf", architectures=...)
    write_json(folder / "config.json", {**said, "vocab_size": 10})
    before = (folder / "config.json").read_bytes()
    note = problem(inspect(folder), "config-of-5")
    assert why in note.message
    assert (note.severity, note.path) == ("note", "config.json")
    assert converted(folder)[1] == ()
    assert (folder / "config.json").read_bytes() == before


# told by inspect


TOLD: dict[str, tuple[dict[str, Any], str]] = {
    "base": ({"model_type": "llama", **based(PLAIN)}, "rope_theta 777777.5 and takes 10000"),
    "scaling": ({"model_type": "llama", **based(YARN)}, "rope_scaling yarn and takes none"),
    "no-scaling": ({"model_type": "apertus", **based(PLAIN)}, "rope_scaling none and takes llama3"),
    "part": (
        {"model_type": "glm4_moe", **based(PLAIN, partial_rotary_factor=0.25)},
        "partial_rotary_factor 0.25 and takes 0.5",
    ),
    "experts": ({"model_type": "qwen3_moe", "num_local_experts": 8}, "num_experts 8 and takes 128"),
    "inside": (
        {"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", **based(MROPE)}},
        "text_config.rope_theta 777777.5 and takes 1000000, text_config.rope_scaling mrope and takes none",
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_inspect_tells_what_transformers_4_would_take(name: str, tmp_path: Path) -> None:
    said, what = TOLD[name]
    folder = write_model(tmp_path / "hf", architectures=...)
    write_json(folder / "config.json", {**said, "vocab_size": 10})
    note = problem(inspect(folder), "config-of-5")
    assert "transformers 4 does not see " in note.message
    assert what in note.message
    assert "merge-fsdp and to-hf write" in note.hint
    converted(folder)
    assert "config-of-5" not in [found.code for found in inspect(folder).problems]


def test_inspect_tells_it_of_the_config_of_a_role(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", WEIGHTS)
    written(LlamaConfig(**based(PLAIN), vocab_size=10), role / "huggingface")
    note = problem(inspect(role), "config-of-5")
    assert note.message.startswith("huggingface/config.json is written for transformers 5")


def test_what_transformers_4_takes_anyway_is_not_told(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", architectures=...)
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    write_json(folder / "config.json", {"model_type": "llama", "rope_parameters": rope, "vocab_size": 10})
    assert inspect(folder).problems == ()
    assert converted(folder)[1] == ("rope_theta: added as rope_parameters has it, for transformers 4",)
