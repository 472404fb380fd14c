"""Heads in `to-hf`: tied or not, over the vocabulary or of values, and the blocks that predict further tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from ckpttool.errors import BrokenCheckpoint
from tests.conversions import Role, codes, done, make, only, refused, wrong
from tests.merged import config_of, tensors_in

EMBEDDING, HEAD, BIAS = "embedding.word_embeddings.weight", "output_layer.weight", "output_layer.bias"
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def with_head(tmp_path: Path, family: str = "llama", *, same: bool, padding: int = 0) -> Role:
    """A tied model in whose archive there is a head, too."""
    role = make(tmp_path, family, config={"tie_word_embeddings": True}, padding=padding)
    head = role.entries[EMBEDDING].value.clone()
    if not same:
        head[3, 1] += 1
    role.put_all({HEAD: head})
    return role


def rules(role: Role, /, **options: Any) -> list[tuple[str, str]]:
    return [(drop.name, drop.rule) for drop in done(role, **options).dropped]


def test_an_equal_head_is_left_out_and_said(tmp_path: Path) -> None:
    role = with_head(tmp_path, same=True)
    assert rules(role) == [(HEAD, "tied-alias")]
    assert wrong(role) == set()
    assert config_of(role.output)["tie_word_embeddings"] is True


def test_padding_is_no_difference(tmp_path: Path) -> None:
    """Rows behind the vocabulary mean nothing."""
    role = with_head(tmp_path, same=True, padding=32)
    head = role.entries[HEAD].value.clone()
    head[96:] = 5
    role.put_all({HEAD: head})
    assert sorted(rules(role)) == [(EMBEDDING, "vocabulary-padding"), (HEAD, "tied-alias")]
    assert wrong(role) == set()


@pytest.mark.parametrize("said", [True, ...])
@pytest.mark.parametrize("family", ["gemma2", "gemma3_text"])
def test_a_family_that_ties_without_saying_so(family: str, said: Any, tmp_path: Path) -> None:
    role = with_head(tmp_path, family, same=True)
    role.say(tie_word_embeddings=said)
    assert rules(role) == [(HEAD, "tied-alias")]
    assert wrong(role) == set()


def test_a_family_that_ties_needs_no_head(tmp_path: Path) -> None:
    role = make(tmp_path, "gemma2")
    role.say(tie_word_embeddings=...)
    assert "gemma2 ties by default" in next(note.message for note in done(role).notes)
    assert wrong(role) == set()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_diverged_head_is_refused_with_the_difference(family: str, tmp_path: Path) -> None:
    role = with_head(tmp_path, family, same=False)
    if family == "gemma2":
        role.say(tie_word_embeddings=...)
    error = refused(role, BrokenCheckpoint)
    problem = only(error, "tied-differ")
    assert error.exit_code == 4
    assert "1 of 3,072 elements differ, by up to 1" in problem.message
    assert "--untie" in problem.hint
    assert "--drop-lm-head" in problem.hint


def test_untie_writes_both_and_the_config_says_so(tmp_path: Path) -> None:
    role = with_head(tmp_path, same=False)
    role.state[LM_HEAD] = role.entries[HEAD].value
    assert rules(role, untie=True) == []
    assert wrong(role) == set()
    assert config_of(role.output)["tie_word_embeddings"] is False


def test_drop_lm_head_takes_the_embeddings(tmp_path: Path) -> None:
    role = with_head(tmp_path, same=False)
    assert rules(role, drop_lm_head=True) == [(HEAD, "drop-lm-head")]
    assert wrong(role) == set()


def test_an_untied_model_keeps_an_equal_head(tmp_path: Path) -> None:
    role = with_head(tmp_path, same=True)
    role.say(tie_word_embeddings=False)
    role.state[LM_HEAD] = role.state[EMBED]
    assert rules(role) == []
    assert wrong(role) == set()


@pytest.mark.parametrize("said", [False, ...])
def test_an_untied_model_without_a_head_is_refused(said: Any, tmp_path: Path) -> None:
    role = make(tmp_path, config={"tie_word_embeddings": True})
    role.say(tie_word_embeddings=said)
    problem = only(refused(role), "head-missing")
    assert "LlamaForCausalLM" in problem.message


def test_without_mtp_the_blocks_are_dropped_by_rule(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    result = done(role, mtp=False)
    role.state = {n: value for n, value in role.state.items() if not n.startswith("model.layers.3.")}
    assert wrong(role) == set()
    assert {(d.name, d.rule) for d in result.dropped} == {(k, "no-mtp") for k in role.entries if k.startswith("mtp.")}
    assert config_of(role.output)["num_nextn_predict_layers"] == 0
    assert any(change.startswith("num_nextn_predict_layers: 0 (was 1)") for change in result.config_changes)


def test_without_mtp_a_config_that_does_not_say_is_made_to(tmp_path: Path) -> None:
    """A class may take one block for granted: what is loaded then has a block of noise."""
    role = make(tmp_path, "deepseek_v3")
    role.say(num_nextn_predict_layers=...)
    done(role, mtp=False)
    taken = AutoConfig.for_model("deepseek_v3").to_dict().get("num_nextn_predict_layers", 0)
    assert config_of(role.output).get("num_nextn_predict_layers", taken) == 0


def test_mtp_of_a_config_that_does_not_say_is_written(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    role.say(num_nextn_predict_layers=...)
    done(role)
    assert wrong(role) == set()


def test_mtp_of_a_family_that_has_none_is_not_lost(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({"mtp.layers.0.enorm.weight": torch.ones(32)})
    assert set(codes(refused(role))) == {"weight-unknown"}
    assert rules(role, mtp=False) == [("mtp.layers.0.enorm.weight", "no-mtp")]


def test_mtp_under_the_name_it_has_in_memory(tmp_path: Path) -> None:
    role = make(tmp_path, "glm4_moe")
    role.entries = {k.replace(".transformer_layer.", ".mtp_model_layer."): v for k, v in role.entries.items()}
    role.put_all({})
    done(role)
    assert wrong(role) == set()


def value_head(tmp_path: Path, family: str = "llama", rows: int = 1) -> Role:
    """A critic of a run whose config is that of the language model."""
    role = make(tmp_path, family, head="value")
    head = torch.randn(rows, 32)
    role.put_all({HEAD: head})
    role.state["score.weight"] = head
    causal = config_of(role.path / "huggingface")["architectures"][0].replace("TokenClassification", "CausalLM")
    role.say(architectures=[causal], id2label=..., label2id=..., num_labels=...)
    return role


def labels(role: Role) -> int:
    """How many transformers understands."""
    return int(AutoConfig.from_pretrained(role.output).num_labels)


@pytest.mark.parametrize("tie", [False, True])
def test_a_head_of_one_row_makes_a_classifier(tie: bool, tmp_path: Path) -> None:
    role = value_head(tmp_path)
    role.say(tie_word_embeddings=tie)
    result = done(role)
    assert wrong(role) == set()
    assert config_of(role.output)["architectures"] == ["LlamaForTokenClassification"]
    assert labels(role) == 1
    assert any("LlamaForTokenClassification" in change and "1 row" in change for change in result.config_changes)


def test_a_head_of_as_many_rows_as_labels(tmp_path: Path) -> None:
    role = value_head(tmp_path, "qwen3", 3)
    role.say(id2label={"0": "bad", "1": "fair", "2": "good"}, label2id={"bad": 0, "fair": 1, "good": 2})
    done(role)
    assert wrong(role) == set()
    assert config_of(role.output)["architectures"] == ["Qwen3ForTokenClassification"]
    assert config_of(role.output)["id2label"]["2"] == "good"


def test_a_head_of_other_rows_is_none(tmp_path: Path) -> None:
    role = value_head(tmp_path, rows=5)
    error = refused(role)
    assert error.exit_code == 5
    assert all(words in str(error) for words in (f"{HEAD} has 5 rows", "vocab_size 96"))


def test_a_value_head_with_a_bias(tmp_path: Path) -> None:
    role = value_head(tmp_path)
    role.put_all({BIAS: torch.tensor([0.25])})
    role.state["score.bias"] = torch.tensor([0.25])
    done(role)
    assert wrong(role) == set()


def test_a_bias_of_a_head_over_the_vocabulary_is_not_lost(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({BIAS: torch.ones(96)})
    assert refused(role).data["unknown"] == [BIAS]


@pytest.mark.parametrize("name", ["LlamaForTokenClassification", "LlamaForSequenceClassification"])
def test_a_class_that_classifies_stays(name: str, tmp_path: Path) -> None:
    role = value_head(tmp_path)
    role.say(architectures=[name], id2label={"0": "value"}, label2id={"value": 0})
    done(role)
    assert wrong(role) == set()
    assert config_of(role.output)["architectures"] == [name]
    assert config_of(role.output)["id2label"] == {"0": "value"}


def test_architecture_decides_otherwise(tmp_path: Path) -> None:
    role = value_head(tmp_path)
    result = done(role, architecture="LlamaForSequenceClassification")
    assert wrong(role) == set()
    assert config_of(role.output)["architectures"] == ["LlamaForSequenceClassification"]
    assert any("--architecture" in change for change in result.config_changes)


@pytest.mark.parametrize("tie", [False, True])
def test_a_value_head_cannot_become_a_language_model(tie: bool, tmp_path: Path) -> None:
    role = value_head(tmp_path)
    role.say(tie_word_embeddings=tie)
    assert codes(refused(role, architecture="LlamaForCausalLM")) == ["head-disagrees"]


def test_a_family_without_a_class_that_classifies(tmp_path: Path) -> None:
    role = make(tmp_path, "glm4_moe", mtp=0)
    role.say(num_nextn_predict_layers=0)
    role.put_all({HEAD: torch.ones(1, 32)})
    problem = only(refused(role), "head-disagrees")
    assert "Glm4MoeForCausalLM" in problem.message
    assert "--architecture" in problem.hint
    done(role, architecture="MyGlm4MoeCritic")
    assert tensors_in(role.output)["score.weight"].tolist() == [[1.0] * 32]
    assert config_of(role.output)["architectures"] == ["MyGlm4MoeCritic"]


@pytest.mark.parametrize(("family", "stem"), [("deepseek_v2", "DeepseekV2"), ("gemma3_text", "Gemma3Text")])
def test_a_family_with_a_class_of_sequences_alone(family: str, stem: str, tmp_path: Path) -> None:
    role = make(tmp_path, family)
    role.state.pop(LM_HEAD, None)
    role.state["score.weight"] = torch.randn(1, 32)
    role.put_all({HEAD: role.state["score.weight"]})
    done(role)
    assert wrong(role) == set()
    assert config_of(role.output)["architectures"] == [f"{stem}ForSequenceClassification"]
    assert labels(role) == 1


def test_a_config_without_architectures_gets_the_class_that_holds_the_head(tmp_path: Path) -> None:
    role = value_head(tmp_path)
    role.say(architectures=...)
    result = done(role)
    assert wrong(role) == set()
    assert config_of(role.output)["architectures"] == ["LlamaForTokenClassification"]
    assert "--architecture LlamaForSequenceClassification" in "".join(note.hint for note in result.notes)


def test_a_bias_is_not_given_to_a_class_that_has_none(tmp_path: Path) -> None:
    role = value_head(tmp_path)
    role.put_all({BIAS: torch.tensor([0.25])})
    problem = only(refused(role, architecture="LlamaForSequenceClassification"), "head-disagrees")
    assert "LlamaForSequenceClassification has no score.bias" in problem.message


@pytest.mark.parametrize("there", [True, False])
def test_a_classifier_without_its_head(there: bool, tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(architectures=["LlamaForTokenClassification"])
    if not there:
        role.put_all({HEAD: None})
    problem = only(refused(role), "head-disagrees")
    assert ("over the vocabulary" in problem.message) == there
    if there:
        done(role, architecture="LlamaForCausalLM")
        assert wrong(role) == set()
