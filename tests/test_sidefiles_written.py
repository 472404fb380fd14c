"""What small files say: told by the converters of what they write, of roles, and of damaged files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ckpttool.converting import Options as ConvertOptions
from ckpttool.converting import convert
from ckpttool.inspection import inspect
from ckpttool.merging import Options, merge
from tests.conversions import done, make
from tests.looking import codes, problem, save_dcp
from tests.merged import config_of, write_role
from tests.small_files import CONFIG, FP8, HEADLESS, QUANTISED, WEIGHTS, told, write_model
from tests.writers.side_files import tiny_tokenizer


@pytest.mark.parametrize("way", QUANTISED)
def test_quantised_weights_keep_their_quantisation(way: str, tmp_path: Path) -> None:
    """None of them is flagged, and none of them loses what says how to read it."""
    folder = write_model(tmp_path / "hf", {**WEIGHTS, **QUANTISED[way]}, quantization_config=FP8)
    assert inspect(folder).problems == ()
    role = write_role(tmp_path / "role", WEIGHTS, QUANTISED[way], config={**CONFIG, "quantization_config": FP8})
    result = merge(role, tmp_path / "out", Options())
    assert config_of(tmp_path / "out")["quantization_config"] == FP8
    assert result.config_changes == ()


def test_merge_takes_out_a_quantisation_that_the_weights_do_not_have_and_says_so(tmp_path: Path) -> None:
    text = {"tie_word_embeddings": False, "compression_config": {}}
    said = {**CONFIG, "text_config": text, "quantization_config": FP8}
    role = write_role(tmp_path / "role", WEIGHTS, config=said)
    seen = problem(inspect(role), "quantization-config")
    assert "has quantization_config, text_config.compression_config, but" in seen.message
    result = merge(role, tmp_path / "out", Options())
    assert config_of(tmp_path / "out") == {**CONFIG, "text_config": {"tie_word_embeddings": False}}
    assert result.config_changes == (
        "quantization_config: removed, the weights are not quantised",
        "text_config.compression_config: removed, the weights are not quantised",
    )
    assert "quantization-config" not in [note.code for note in result.notes]


def test_merge_tells_of_the_tie_that_it_writes(tmp_path: Path) -> None:
    said = {**CONFIG, "tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}
    role = write_role(tmp_path / "role", WEIGHTS, config=said)
    notes = {note.code: note.hint for note in merge(role, tmp_path / "out", Options(untie=True)).notes}
    assert "tie-disagrees" not in notes
    equal = write_role(tmp_path / "equal", dict.fromkeys(WEIGHTS, torch.ones(10, 4)), config=said)
    notes = {note.code: note.hint for note in merge(equal, tmp_path / "out2", Options()).notes}
    assert "Set both to false" in notes["tie-disagrees"]


def test_merge_says_it_in_a_sentence_and_not_of_a_critic(tmp_path: Path) -> None:
    role = write_role(tmp_path / "actor", WEIGHTS, config=CONFIG)
    result = merge(role, tmp_path / "out", Options())
    assert [note.code for note in result.notes] == ["no-generation-config"]
    assert "generation_config.json" in result.missing
    score = {**HEADLESS, "score.weight": torch.ones(1, 4), "score.bias": torch.ones(1)}
    said = {**CONFIG, "architectures": ["Qwen2ForTokenClassification"], "num_labels": 1}
    critic = write_role(tmp_path / "critic", score, config=said)
    notes = merge(critic, tmp_path / "out2", Options()).notes
    assert "no-generation-config" not in [note.code for note in notes]


def test_masters_of_a_trainer_are_no_lie(tmp_path: Path) -> None:
    """verl keeps float32 beside a config of bfloat16: told as what it is, and how to write the other."""
    role = write_role(tmp_path / "role", WEIGHTS, config={**CONFIG, "torch_dtype": "bfloat16"})
    note = problem(inspect(role), "dtype")
    assert (note.severity, note.path) == ("note", "huggingface/config.json")
    assert "trainers keep master weights so" in note.message
    assert "--dtype bf16" in note.hint
    assert inspect(role).whole


def test_shards_in_another_dtype_than_the_config_says(tmp_path: Path) -> None:
    halves = {name: value.bfloat16() for name, value in WEIGHTS.items()}
    role = write_role(tmp_path / "role", halves, config=CONFIG)
    assert "the weights are bfloat16" in problem(inspect(role), "config-dtype").message
    merge(role, tmp_path / "out", Options())
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert "config-dtype" not in codes(inspect(tmp_path / "out"))


@pytest.mark.parametrize("layout", ["dist_ckpt huggingface", "model/dist_ckpt model/huggingface"])
def test_roles_of_megatron_are_held_against_their_archive(layout: str, tmp_path: Path) -> None:
    archive, beside = layout.split()
    state = {
        "embedding.word_embeddings.weight": torch.ones(10, 4),
        "decoder.layers.mlp.linear_fc1.weight": torch.ones(2, 4),
    }
    save_dcp(tmp_path / archive, state, backend="torch_dist")
    write_model(
        tmp_path / beside, {}, generation=False, torch_dtype="bfloat16", quantization_config=FP8, tokenizer_class=3
    )
    notes = {p.code: p.path for p in inspect(tmp_path).problems if p.severity == "note"}
    for code, file in (
        ("dtype", "config.json"),
        ("quantization-config", "config.json"),
        ("no-generation-config", "generation_config.json"),
    ):
        assert notes[code] == f"{beside}/{file}"


def test_to_hf_tells_the_same(tmp_path: Path) -> None:
    role = make(tmp_path)
    assert done(role).notes == ()
    folder = role.path / "huggingface"
    role.say(tie_word_embeddings=False, text_config={"model_type": "gemma3_text"}, quantization_config=FP8)
    tiny_tokenizer(64).save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    result = convert(role.path, tmp_path / "again", ConvertOptions())
    told = [note.code for note in result.notes]
    assert [code for code in told if code != "tied"] == ["tokenizer-class", "no-generation-config", "tie-disagrees"]
    assert "quantization_config: removed, the weights are not quantised" in result.config_changes
    assert set(codes(inspect(tmp_path / "again"))) == {code for code in told if code != "tied"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff\xfe", b"null"])
def test_a_damaged_tokenizer_config_is_a_note_and_no_crash(content: bytes, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    (folder / "tokenizer_config.json").write_bytes(content)
    note = told(folder)
    assert (note.code, note.path) == ("bad-json", "tokenizer_config.json")
    role = write_role(tmp_path / "role", WEIGHTS, config=CONFIG)
    (role / "huggingface" / "tokenizer_config.json").write_bytes(content)
    result = merge(role, tmp_path / "out", Options())
    assert [note.code for note in result.notes] == ["bad-json", "no-generation-config"]
    assert (tmp_path / "out" / "tokenizer_config.json").read_bytes() == content


def test_a_pipe_instead_of_a_file_does_not_hold_inspect_up(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    (folder / "tokenizer_config.json").unlink()
    os.mkfifo(folder / "tokenizer_config.json")
    assert inspect(folder).problems == ()


def test_nested_without_end_is_a_problem_and_no_hang(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", WEIGHTS, {f"k{n}": {} for n in range(200_000)})
    assert inspect(folder).problems == ()


@pytest.mark.parametrize("value", [3, None, [], "x", {"a": []}, True])
def test_wrong_types_do_not_crash(value: object, tmp_path: Path) -> None:
    for field in ("model_type", "architectures", "tie_word_embeddings", "text_config", "quantization_config", "dtype"):
        found = inspect(write_model(tmp_path / field, WEIGHTS, {field: value}))
        assert found.state == "complete"
        json.dumps(found.as_json())


def test_notes_of_a_role_name_the_file_by_its_path(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", WEIGHTS, config={**CONFIG, "torch_dtype": "bfloat16"})
    found = inspect(role)
    assert problem(found, "no-generation-config").message.startswith("no huggingface/generation_config.json: ")
    assert problem(found, "dtype").message.startswith("huggingface/config.json says bfloat16 (torch_dtype), ")


@pytest.mark.parametrize("name", ["fsdp2", "critic", "fsdp-tp"])
def test_what_transformers_5_writes_has_one_doubt(name: str, fsdp_checkpoints: Path) -> None:
    """Config, generation config and dtypes are sound; the class of the tokenizer is one that only 5 has."""
    found = inspect(fsdp_checkpoints / name)
    assert {p.code for p in found.problems} - {"side-files-only"} == {"tokenizer-class"}


def test_a_config_with_many_lies_is_told_in_few_words(tmp_path: Path) -> None:
    part = {"quantization_config": FP8, "dtype": "float16"}
    folder = write_model(tmp_path / "hf", WEIGHTS, {f"{'x' * 1000}{n}_config": part for n in range(500)})
    found = inspect(folder)
    assert codes(found) == ["quantization-config", "config-dtype"]
    assert all(len(told.message) < 500 for told in found.problems)
