"""Tied embeddings: nothing is lost, nothing is written twice without a word."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from ckpttool.errors import BrokenCheckpoint, UsageError
from ckpttool.formats.families import TIED, UNTIED
from ckpttool.merging import Merge, Options, merge
from tests.merged import QWEN2, config_of, tensors_in, unequal, write_generation, write_role

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TABLE = torch.randn(10, 4)
OTHER = TABLE.clone()
OTHER[3, 1] += 1
EQUAL = {EMBED: TABLE, HEAD: TABLE.clone(), "model.norm.weight": torch.ones(4)}
DIFFERENT = {**EQUAL, HEAD: OTHER}
ALONE = {EMBED: TABLE, "model.norm.weight": torch.ones(4)}


def config(**changes: Any) -> dict[str, Any]:
    """qwen2 (untied by its family) with these changes; `...` takes a key out."""
    merged = {**QWEN2, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def merged(tmp_path: Path, weights: Mapping[str, torch.Tensor], said: dict[str, Any], **options: Any) -> Merge:
    role = write_role(tmp_path / "role", weights, config=said)
    write_generation(role / "huggingface")
    return merge(role, tmp_path / "out", Options(**options))


def refusal(tmp_path: Path, weights: Mapping[str, torch.Tensor], said: dict[str, Any], **options: Any) -> str:
    """Code and message of the one problem; nothing is written."""
    with pytest.raises(BrokenCheckpoint) as caught:
        merged(tmp_path, weights, said, **options)
    assert not (tmp_path / "out").exists()
    (problem,) = caught.value.problems
    return f"{problem.code}: {problem.message} {problem.hint}"


def test_an_equal_alias_is_left_out_and_said(tmp_path: Path) -> None:
    """Case 19."""
    result = merged(tmp_path, EQUAL, config(tie_word_embeddings=True))
    assert unequal(tensors_in(tmp_path / "out"), ALONE) == set()
    assert [(drop.name, drop.rule) for drop in result.dropped] == [(HEAD, "tied-alias")]
    assert config_of(tmp_path / "out")["tie_word_embeddings"] is True


def test_a_diverged_head_is_refused_with_the_difference(tmp_path: Path) -> None:
    """Case 20: dropping one loses training, keeping both confuses loaders."""
    told = refusal(tmp_path, DIFFERENT, config(tie_word_embeddings=True))
    assert told.startswith("tied-differ: ")
    assert all(words in told for words in ("1 of 40 elements differ, by up to 1", "--untie", "--drop-lm-head"))


def test_untie_writes_both_and_says_so_in_every_config(tmp_path: Path) -> None:
    """Case 20; nested text configurations too."""
    said = config(tie_word_embeddings=True, text_config={"tie_word_embeddings": True}, vision_config={"x": 1})
    merged(tmp_path, DIFFERENT, said, untie=True)
    assert unequal(tensors_in(tmp_path / "out"), DIFFERENT) == set()
    found = config_of(tmp_path / "out")
    assert (found["tie_word_embeddings"], found["text_config"]) == (False, {"tie_word_embeddings": False})
    assert found["vision_config"] == {"x": 1}


def test_drop_lm_head_takes_the_embeddings(tmp_path: Path) -> None:
    result = merged(tmp_path, DIFFERENT, config(tie_word_embeddings=True), drop_lm_head=True)
    assert unequal(tensors_in(tmp_path / "out"), ALONE) == set()
    assert [drop.rule for drop in result.dropped] == ["drop-lm-head"]


def test_an_untied_model_keeps_both(tmp_path: Path) -> None:
    """Equal values are no reason to drop a head of a model that is not tied."""
    result = merged(tmp_path, EQUAL, config())
    assert unequal(tensors_in(tmp_path / "out"), EQUAL) == set()
    assert (result.dropped, result.notes) == ((), ())


@pytest.mark.parametrize(
    ("family", "weights", "left", "words"),
    [
        ("gemma3_text", EQUAL, ALONE, "gemma3_text ties by default"),
        ("gemma3_text", ALONE, ALONE, "gemma3_text ties by default"),
        ("qwen2", EQUAL, EQUAL, "qwen2 does not tie by default"),
        ("qwen2", DIFFERENT, DIFFERENT, "qwen2 does not tie by default"),
        ("of_my_own", ALONE, ALONE, "there is no head of its own"),
        ("of_my_own", EQUAL, EQUAL, "its tensors are no aliases"),
        ("of_my_own", DIFFERENT, DIFFERENT, "its tensors are no aliases"),
    ],
)
def test_a_config_that_does_not_say(
    family: str, weights: dict[str, torch.Tensor], left: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    """transformers 4 leaves the key out where it is the default: the family's default counts, else the tensors."""
    result = merged(tmp_path, weights, config(tie_word_embeddings=..., model_type=family))
    assert unequal(tensors_in(tmp_path / "out"), left) == set()
    assert [note.message for note in result.notes] == [f"config.json does not say tie_word_embeddings: {words}"]


def test_a_family_that_ties_but_has_diverged(tmp_path: Path) -> None:
    said = config(tie_word_embeddings=..., model_type="gemma3_text")
    assert refusal(tmp_path, DIFFERENT, said).startswith("tied-differ: ")


@pytest.mark.parametrize("top", [True, ...])
def test_a_vision_model_says_it_in_its_text_config(top: Any, tmp_path: Path) -> None:
    """D17: a VLM may keep it in `text_config`."""
    names = {"model.language_model.embed_tokens.weight": TABLE, "lm_head.weight": TABLE.clone()}
    names["model.visual.embed.weight"] = torch.randn(10, 4)
    said = config(tie_word_embeddings=top, text_config={"tie_word_embeddings": True})
    said["architectures"] = ["Qwen2VLForConditionalGeneration"]
    result = merged(tmp_path, names, said)
    assert [drop.name for drop in result.dropped] == ["lm_head.weight"]


@pytest.mark.parametrize(("weights", "code"), [(EQUAL, None), (DIFFERENT, "tied-differ")])
def test_a_config_that_says_both(weights: dict[str, torch.Tensor], code: str | None, tmp_path: Path) -> None:
    """The bytes decide: equal ones are both written, which is right for either reader."""
    said = config(tie_word_embeddings=False, text_config={"tie_word_embeddings": True})
    if code is not None:
        assert refusal(tmp_path, weights, said).startswith(code)
        return
    result = merged(tmp_path, weights, said)
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()
    assert "says both" in result.notes[0].message


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen2VLForConditionalGeneration"])
@pytest.mark.parametrize("tie", [False, ...])
def test_a_model_that_writes_text_needs_a_head(architecture: str, tie: Any, tmp_path: Path) -> None:
    told = refusal(tmp_path, ALONE, config(tie_word_embeddings=tie, architectures=[architecture]))
    assert told.startswith("head-missing: ")
    assert architecture in told


@pytest.mark.parametrize(
    "architecture", ["Qwen2Model", "Qwen2ForTokenClassification", "Qwen2ForSequenceClassification"]
)
def test_critics_and_base_models_have_none(architecture: str, tmp_path: Path) -> None:
    weights = {**ALONE, "score.weight": torch.randn(1, 4)}
    merged(tmp_path, weights, config(architectures=[architecture]))
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


@pytest.mark.parametrize("name", ["embed_out.weight", "transformer.output_layer.weight", "model.odd_head.weight"])
def test_a_head_of_another_name(name: str, tmp_path: Path) -> None:
    """GPT-NeoX, ChatGLM, or a matrix of as many rows as the vocabulary: it is a head."""
    weights = {**ALONE, name: torch.randn(10, 4)}
    merged(tmp_path, weights, config())
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


def test_a_tied_model_of_which_only_the_head_is_here(tmp_path: Path) -> None:
    weights = {HEAD: TABLE, "model.norm.weight": torch.ones(4)}
    assert refusal(tmp_path, weights, config(tie_word_embeddings=True)).startswith("embedding-missing: ")


def test_other_shapes_are_no_alias(tmp_path: Path) -> None:
    """A head with padded rows, or in another dtype, is not equal."""
    weights = {**EQUAL, HEAD: torch.randn(12, 4)}
    assert "[12, 4]" in refusal(tmp_path, weights, config(tie_word_embeddings=True))


@pytest.mark.parametrize(
    ("options", "weights", "said", "code"),
    [
        ({"untie": True}, ALONE, config(tie_word_embeddings=True), "not-both"),
        ({"drop_lm_head": True}, ALONE, config(tie_word_embeddings=True), "not-both"),
        ({"drop_lm_head": True}, EQUAL, config(), "not-tied"),
    ],
)
def test_options_that_do_not_apply(
    options: dict[str, bool], weights: dict[str, torch.Tensor], said: dict[str, Any], code: str, tmp_path: Path
) -> None:
    assert refusal(tmp_path, weights, said, **options).startswith(f"{code}: --")


def test_opposite_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        merged(tmp_path, EQUAL, config(), untie=True, drop_lm_head=True)


def test_families_tie_as_transformers_says() -> None:
    """The lists are those of the configuration classes."""
    wrong = {}
    for name in sorted(TIED | UNTIED):
        if name not in CONFIG_MAPPING:
            continue
        built = CONFIG_MAPPING[name]()
        said = {getattr(part, "tie_word_embeddings", None) for part in (built, built.get_text_config(decoder=True))}
        if said - {None} != {name in TIED}:
            wrong[name] = said
    assert (wrong, TIED & UNTIED) == ({}, frozenset())
