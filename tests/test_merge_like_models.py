"""The oracle of `merge-fsdp --like`: the output has what transformers itself saves for the hub, and loads as the model.

Shards are of the names in memory; transformers wrote the references from the same models in one piece.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import Call
from tests.merged import Tensors, config_of, fingerprint, tensors_in, unequal, write_role
from tests.served import (
    ALL,
    HUBS,
    KEPT,
    RENAMED,
    TRANSPOSED,
    Run,
    answers,
    config_in,
    index_alone,
    load,
    merged_like,
    named,
    reference,
    refused_like,
    said,
    trained,
)

INDEXED = tuple(name for name in ALL if name not in TRANSPOSED)
"""Models of which names alone say everything: the index of a reference suffices."""


def saved(checkpoints: Path, name: str) -> dict[str, torch.Tensor]:
    return tensors_in(checkpoints / "expected" / name)


@pytest.mark.parametrize("name", ALL)
def test_the_output_is_what_transformers_saves(
    name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """Cases 27 and 29: names, dtypes, shapes and every bit; loaded, it answers as the model did that was sharded."""
    like = served_checkpoints / "expected" / name
    merged_like(ckpttool, served_checkpoints / name, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, name)) == set()
    model = load(tmp_path / "out")
    assert unequal(model.state_dict(), trained(served_checkpoints, name)) == set()
    torch.testing.assert_close(*answers(model, served_checkpoints, name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", HUBS)
def test_the_output_is_what_the_hub_has(name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """Case 28: a tower with its `vision_model`, experts the other way round, which transformers saves otherwise."""
    like = served_checkpoints / "expected" / f"{name}-hub"
    merged_like(ckpttool, served_checkpoints / name, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, f"{name}-hub")) == set()


def test_a_model_of_text_follows_the_one_that_sees(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """Its base is a model of vision and language: the tower is missing, which has to be allowed by name."""
    hub = saved(served_checkpoints, "qwen3.5-hub")
    text = config_in(served_checkpoints / "expected" / "qwen3.5")
    tower = {f"model.visual.blocks.{n}.attn.qkv.weight": torch.ones(48, 16) for n in range(2)}
    seeing = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    like = reference(tmp_path / "like", {**hub, **tower}, seeing)
    call = refused_like(ckpttool, served_checkpoints / "qwen3.5", tmp_path / "out", like)
    assert tower.keys() <= named(call)
    assert not named(call) & hub.keys()
    merged_like(ckpttool, served_checkpoints / "qwen3.5", tmp_path / "out", like, "--allow-missing", "model.visual.*")
    assert unequal(tensors_in(tmp_path / "out"), hub) == set()
    assert config_of(tmp_path / "out")["model_type"] == "qwen3_5_text"


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_and_a_config_suffice(name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    expected = saved(served_checkpoints, name)
    like = index_alone(tmp_path / "like", expected, config_in(served_checkpoints / "expected" / name))
    merged_like(ckpttool, served_checkpoints / name, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_an_index_of_several_files_that_transformers_wrote(
    ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    like = served_checkpoints / "expected" / "mixtral-index"
    merged_like(ckpttool, served_checkpoints / "mixtral", tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, "mixtral")) == set()


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "qwen2-vl"])
def test_in_several_files(name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    like = served_checkpoints / "expected" / name
    options = ["--max-shard-size", "20KB", "--threads", "2"]
    merged_like(ckpttool, served_checkpoints / name, tmp_path / "out", like, *options)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, name)) == set()
    assert unequal(load(tmp_path / "out").state_dict(), trained(served_checkpoints, name)) == set()


def test_a_training_in_fp32_becomes_the_bf16_of_its_base(
    ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    like = served_checkpoints / "expected" / "qwen3-moe-bf16"
    merged_like(ckpttool, served_checkpoints / "qwen3-moe", tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, "qwen3-moe-bf16")) == set()
    config = config_of(tmp_path / "out")
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    assert load(tmp_path / "out").dtype is torch.bfloat16


@pytest.mark.parametrize("name", ["qwen3-moe", "gemma3", "qwen3-vl-moe"])
def test_neither_side_is_changed(name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    role, like = served_checkpoints / name, served_checkpoints / "expected" / name
    before = fingerprint(role), fingerprint(like)
    merged_like(ckpttool, role, tmp_path / "out", like)
    assert (fingerprint(role), fingerprint(like)) == before


# Without --like


def plain(ckpttool: Run, role: Path, output: Path, *options: str) -> Call:
    call = ckpttool("merge-fsdp", role, "-o", output, *options)
    assert call.code == 0, call.err
    return call


@pytest.mark.parametrize("name", ALL)
def test_without_a_reference_the_names_of_training_are_kept(
    name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    call = plain(ckpttool, served_checkpoints / name, tmp_path / "out")
    expected = trained(served_checkpoints, name)
    if config_of(tmp_path / "out").get("tie_word_embeddings", name == "gemma3"):
        del expected["lm_head.weight"]
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()
    assert ("--like" in said(call)) is (name not in KEPT)


@pytest.mark.parametrize("name", [*RENAMED, *KEPT])
def test_programs_read_the_note_too(name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    call = plain(ckpttool, served_checkpoints / name, tmp_path / "out", "--json")
    assert ("--like" in call.out) is (name in RENAMED)


@pytest.mark.parametrize("name", [*RENAMED, "qwen3-vl-moe-hub"])
def test_shards_under_the_names_of_the_hub_need_no_note(
    name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    """transformers 4 trains under them."""
    like = served_checkpoints / "expected" / name
    role = write_role(tmp_path / "role", saved(served_checkpoints, name), config=config_in(like))
    call = plain(ckpttool, role, tmp_path / "out")
    assert "--like" not in said(call)
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, name)) == set()


# And back


def sharded(role: Path, tensors: Tensors, like: Path) -> Path:
    """Shards of these names, with the buffers of routers whole on every rank."""
    buffers = {name: value for name, value in tensors.items() if name.endswith("e_score_correction_bias")}
    return write_role(role, {n: v for n, v in tensors.items() if n not in buffers}, buffers, config=config_in(like))


@pytest.mark.parametrize("name", [*ALL, *(f"{name}-hub" for name in HUBS)])
def test_and_back(name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """Shards of the names of the hub, a reference of those in memory: experts are packed, prefixes put back."""
    hub = served_checkpoints / "expected" / name
    expected = trained(served_checkpoints, name.removesuffix("-hub"))
    if not any(name.endswith("lm_head.weight") for name in saved(served_checkpoints, name)):
        del expected["lm_head.weight"]  # tied, and left out on either side
    role = sharded(tmp_path / "role", saved(served_checkpoints, name), hub)
    like = reference(tmp_path / "like", expected, config_in(hub))
    merged_like(ckpttool, role, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


@pytest.mark.parametrize("name", ["qwen2-tied", *RENAMED, *(f"{name}-hub" for name in HUBS)])
def test_shards_under_the_names_of_the_reference_stay_as_they_are(
    name: str, ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    like = served_checkpoints / "expected" / name
    role = sharded(tmp_path / "role", saved(served_checkpoints, name), like)
    merged_like(ckpttool, role, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, name)) == set()


def test_experts_are_packed_across_ranks_of_two_kinds(ckpttool: Run, served_checkpoints: Path, tmp_path: Path) -> None:
    """Five ranks cut the rows of an expert where no half ends."""
    like = served_checkpoints / "expected" / "qwen3-moe"
    expected = trained(served_checkpoints, "qwen3-moe")
    hub = saved(served_checkpoints, "qwen3-moe")
    role = write_role(tmp_path / "role", hub, ranks=5, config=config_in(like))
    merged_like(ckpttool, role, tmp_path / "out", reference(tmp_path / "like", expected, config_in(like)))
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_the_config_of_the_reference_serves_where_training_left_none(
    ckpttool: Run, served_checkpoints: Path, tmp_path: Path
) -> None:
    role = shutil.copytree(served_checkpoints / "mixtral", tmp_path / "role")
    shutil.rmtree(role / "huggingface")
    merged_like(ckpttool, role, tmp_path / "out", served_checkpoints / "expected" / "mixtral")
    assert unequal(tensors_in(tmp_path / "out"), saved(served_checkpoints, "mixtral")) == set()
    assert unequal(load(tmp_path / "out").state_dict(), trained(served_checkpoints, "mixtral")) == set()
