"""Adapters in Megatron archives that cannot be fused, or of which the user has to say something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckpttool.errors import BrokenCheckpoint, Unmapped, UsageError
from tests.conversions import Role, codes, done, make, only, refused
from tests.merged import tensors_in

ALPHA = 16
FC2 = "decoder.layers.mlp.linear_fc2"
QKV = "decoder.layers.self_attention.linear_qkv"
DOWN, UP = f"{FC2}.adapter.linear_in.weight", f"{FC2}.adapter.linear_out.weight"


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def write_meta(folder: Path, **values: object) -> None:
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 8, "lora_alpha": ALPHA, **values}))


@pytest.fixture
def role(tmp_path: Path) -> Role:
    """A LLaMA with an adapter on one projection of every layer."""
    made = make(tmp_path)
    made.put_all({DOWN: drawn(3, 8, 48), UP: drawn(3, 32, 8)})
    write_meta(made.path)
    return made


# What the user has to say


def test_without_lora_it_is_explained_what_was_found(role: Role) -> None:
    error = refused(role, UsageError)
    assert error.exit_code == 2
    assert "LoRA of rank 8 (2 tensors) on decoder.layers.mlp.linear_fc2" in error.message
    assert "--lora fuse" in error.hint


@pytest.mark.parametrize("way", ["adapter", "both"])
def test_adapters_are_not_written_alone(way: str, role: Role) -> None:
    error = refused(role, UsageError, lora=way)
    assert "only the fused model is written" in error.message


def test_lora_of_a_model_that_has_none(tmp_path: Path) -> None:
    assert "has no adapters" in refused(make(tmp_path), UsageError, lora="fuse").message


def test_an_alpha_without_anything_to_fuse(role: Role) -> None:
    assert "--lora-alpha without --lora" in refused(role, UsageError, lora_alpha=3.0).message


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("inf"), float("nan")])
def test_an_alpha_that_is_none(alpha: float, role: Role) -> None:
    refused(role, UsageError, lora="fuse", lora_alpha=alpha)


@pytest.mark.parametrize(
    "config", [None, "peft: null\n", "model:\n  alpha: 3\n", "peft:\n  dim: 8\n", "peft:\n  alpha: 0\n"]
)
def test_an_alpha_that_nobody_says(config: str | None, role: Role) -> None:
    (role.path / "lora_train_meta.json").unlink()
    if config is not None:
        (role.archive / "run_config.yaml").write_text(config)
    error = refused(role, UsageError, lora="fuse")
    assert error.exit_code == 2
    assert "--lora-alpha" in error.hint
    result = done(role, lora="fuse", lora_alpha=ALPHA)
    assert (result.adapters[0].alpha, result.adapters[0].settings) == (ALPHA, "--lora-alpha")


def test_an_alpha_that_is_said_counts_for_the_weights(role: Role) -> None:
    weight = role.entries[f"{FC2}.weight"].value
    done(role, lora="fuse", lora_alpha=4.0)
    exact = weight.double() + 4 / 8 * (role.entries[UP].value.double() @ role.entries[DOWN].value.double())
    found = tensors_in(role.output)["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(found, exact[1].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["role", "step"])
def test_where_verl_keeps_its_file(where: str, role: Role) -> None:
    (role.path / "lora_train_meta.json").unlink()
    folder = role.path if where == "role" else role.path.parent
    write_meta(folder)
    assert done(role, lora="fuse").adapters[0].settings == str(folder / "lora_train_meta.json")


SECTION = """\
peft:
  _target_: a.LoRA
  alpha: {alpha}
  canonical_mapping:
    alpha: 1

  # of B
  dim: 8
rest:
  alpha: 2
"""


@pytest.mark.parametrize("values", [{"r": 4}, {"lora_alpha": 17}])
def test_files_that_contradict_one_another(values: dict[str, int], role: Role) -> None:
    (role.archive / "run_config.yaml").write_text(SECTION.format(alpha=ALPHA))
    write_meta(role.path, **values)
    error = refused(role, BrokenCheckpoint, lora="fuse")
    assert (error.exit_code, error.code) == (4, "settings-disagree")
    assert all(name in error.message for name in ("run_config.yaml", "lora_train_meta.json"))


@pytest.mark.parametrize("alpha", ["16", "16.0", "1.6e1", "16  # of the run"])
def test_the_section_of_the_run_says_it(alpha: str, role: Role) -> None:
    (role.archive / "run_config.yaml").write_text(SECTION.format(alpha=alpha))
    told = done(role, lora="fuse").adapters[0]
    assert (told.alpha, told.settings) == (ALPHA, str(role.archive / "run_config.yaml"))


@pytest.mark.parametrize(
    "text",
    [
        SECTION.format(alpha="sixteen"),
        SECTION.format(alpha="-16"),
        SECTION.format(alpha=".inf"),
        SECTION.format(alpha="16") + "peft:\n  alpha: 3\n",
        "peft: {alpha: 16, dim: 8}\n",
        "peft: &a\n  alpha: 16\n",
        "peft:\n  alpha: 16\n  alpha: 17\n",
        "peft:\n  alpha: 16\n  dim: 8.5\n",
        "peft:\n  alpha: 16\n  normalize_moe_lora: yes\n",
    ],
)
def test_a_section_that_is_not_understood(text: str, role: Role) -> None:
    (role.archive / "run_config.yaml").write_text(text)
    error = refused(role, BrokenCheckpoint, lora="fuse")
    assert (error.exit_code, error.code) == (4, "settings-unreadable")


@pytest.mark.parametrize("extra", [{"alpha_pattern": {"fc2": 3}}, {"rank_pattern": {"fc2": 3}}, {"use_qalora": True}])
def test_settings_that_are_of_other_names(extra: dict[str, object], role: Role) -> None:
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": ALPHA, **extra}
    (role.path / "adapter_config.json").write_text(json.dumps(config))
    assert refused(role, lora="fuse").code == "adapter-kind"


# What does not fit


def test_another_rank_than_is_said(role: Role) -> None:
    write_meta(role.path, r=4)
    problem = only(refused(role, BrokenCheckpoint, lora="fuse"), "settings-disagree")
    assert "of rank 8" in problem.message
    assert DOWN in problem.message


@pytest.mark.parametrize(("missing", "other"), [(DOWN, "linear_in"), (UP, "linear_out")])
def test_half_an_adapter(missing: str, other: str, role: Role) -> None:
    role.put_all({missing: None})
    problem = only(refused(role, BrokenCheckpoint, lora="fuse"), "adapter-halved")
    assert f"its {other} is missing" in problem.message


def test_a_magnitude_without_factors(role: Role) -> None:
    role.put_all({f"{QKV}.adapter.weight_magnitude": drawn(3, 96)})
    only(refused(role, BrokenCheckpoint, lora="fuse"), "adapter-halved")


@pytest.mark.parametrize(
    "tensors",
    [
        {DOWN: drawn(3, 8, 47)},
        {UP: drawn(3, 31, 8)},
        {UP: drawn(3, 32, 7)},
        {DOWN: drawn(2, 8, 48), UP: drawn(2, 32, 8)},
        {DOWN: drawn(8, 48), UP: drawn(32, 8)},
        {DOWN: drawn(48), UP: drawn(32)},
        {f"{FC2}.adapter.weight_magnitude": drawn(3, 31)},
        {f"{FC2}.adapter.weight_magnitude": drawn(32)},
    ],
)
def test_shapes_that_do_not_fit(tensors: dict[str, torch.Tensor], role: Role) -> None:
    role.put_all(tensors)
    error = refused(role, BrokenCheckpoint, lora="fuse")
    assert codes(error) == ["adapter-misfit"]
    assert error.exit_code == 4


@pytest.mark.parametrize("module", ["decoder.layers.mlp.linear_fc3", "output_layer.more"])
def test_an_adapter_on_nothing(module: str, role: Role) -> None:
    names = (f"{module}.adapter.linear_in.weight", f"{module}.adapter.linear_out.weight")
    role.put_all({names[0]: drawn(3, 8, 48), names[1]: drawn(3, 32, 8)})
    assert module in only(refused(role, BrokenCheckpoint, lora="fuse"), "adapter-misfit").message


@pytest.mark.parametrize("part", ["q", "gate"])
def test_a_projection_that_the_module_does_not_have(part: str, role: Role) -> None:
    below = f"{FC2}.adapter.adapter_{part}"
    role.put_all({f"{below}.linear_in.weight": drawn(3, 8, 48), f"{below}.linear_out.weight": drawn(3, 8, 8)})
    assert "adapter-misfit" in codes(refused(role, BrokenCheckpoint, lora="fuse"))


def test_values_that_are_not_finite(role: Role) -> None:
    down = drawn(3, 8, 48)
    down[2, 7, 47] = float("nan")
    role.put_all({DOWN: down})
    assert refused(role, BrokenCheckpoint, lora="fuse").code == "not-finite"


# What is sound and not fused


@pytest.mark.parametrize(
    "name", ["lora_A.default.weight", "adapter.linear_in.bias", "adapter.adapter_x.linear_in.weight"]
)
def test_adapters_of_other_kinds(name: str, role: Role) -> None:
    role.put_all({f"{QKV}.{name}": drawn(3, 8, 32)})
    error = refused(role, lora="fuse")
    assert (error.exit_code, error.code) == (5, "adapter-kind")
    assert f"{QKV}.{name}" in error.message


@pytest.mark.parametrize("said", [{}, {"expert_model_parallel_size": 2}])
def test_experts_that_share_one_on_each_of_several_ranks(said: dict[str, int], tmp_path: Path) -> None:
    role = make(tmp_path, "mixtral")
    below = "decoder.layers.mlp.experts.experts.linear_fc2.adapter"
    role.put_all({f"{below}.linear_in.weight": drawn(3, 8, 48), f"{below}.linear_out.weight": drawn(3, 32, 8)})
    write_meta(role.path)
    (role.path / "transformer_config.json").write_text(json.dumps(said))
    error = refused(role, Unmapped, lora="fuse")
    assert (error.exit_code, codes(error)) == (5, ["adapter-shared"])


def test_adapters_on_embeddings(role: Role) -> None:
    below = "embedding.word_embeddings.adapter"
    role.put_all({f"{below}.linear_in.weight": drawn(8, 32), f"{below}.linear_out.weight": drawn(96, 8)})
    assert f"{below}.linear_in.weight" in only(refused(role, lora="fuse"), "adapter-kind").message


def alone(role: Role) -> None:
    role.entries = {key: entry for key, entry in role.entries.items() if ".adapter." in key}
    role.put()


@pytest.mark.parametrize("lora", [None, "fuse"])
def test_adapters_without_their_base_model(lora: str | None, role: Role) -> None:
    alone(role)
    (role.archive / "run_config.yaml").write_text(
        "checkpoint:\n  pretrained_checkpoint: /models/base\npeft:\n  dim: 8\n"
    )
    error = refused(role, lora=lora)
    assert (error.exit_code, error.code) == (5, "adapters-alone")
    assert "The run was started from /models/base." in error.hint
    assert f"merge_lora.py --lora-checkpoint {role.archive} --pretrained /models/base" in error.hint


def test_a_base_model_beside_adapters_is_named(role: Role) -> None:
    alone(role)
    (role.path / "huggingface" / "model.safetensors").write_bytes(b"")
    assert f"The base model is beside it: {role.path / 'huggingface'}." in refused(role).hint


# Ties


def test_a_head_with_an_adapter_is_no_alias(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen2")
    role.say(tie_word_embeddings=True)
    embedding = role.entries["embedding.word_embeddings.weight"].value
    below = "output_layer.adapter"
    role.put_all(
        {
            "output_layer.weight": embedding,
            f"{below}.linear_in.weight": drawn(8, 32),
            f"{below}.linear_out.weight": drawn(96, 8),
        }
    )
    write_meta(role.path)
    problem = only(refused(role, BrokenCheckpoint, lora="fuse"), "tied-differ")
    assert "an adapter is fused into lm_head.weight" in problem.message
    done(role, lora="fuse", untie=True)
    found = tensors_in(role.output)
    assert torch.equal(found["model.embed_tokens.weight"], embedding)
    assert not torch.equal(found["lm_head.weight"], embedding)


def test_what_the_head_has_learned_is_not_dropped(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen2")
    role.say(tie_word_embeddings=True)
    below = "output_layer.adapter"
    role.put_all({f"{below}.linear_in.weight": drawn(8, 32), f"{below}.linear_out.weight": drawn(96, 8)})
    write_meta(role.path)
    only(refused(role, BrokenCheckpoint, lora="fuse", drop_lm_head=True), "fused-into-nothing")
    role.put_all({"output_layer.weight": None})
    assert below in only(refused(role, BrokenCheckpoint, lora="fuse"), "adapter-misfit").message
