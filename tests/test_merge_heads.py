"""Heads in `merge-fsdp`: what scores is kept, and the config names a class that loads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, GPT2Config, PretrainedConfig, Qwen2Config

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem, Unmapped, UsageError
from ckpttool.merging import Merge, Options, merge
from tests.conftest import Call
from tests.merged import Tensors, config_of, leftovers, tensors_in, unequal, write_config, write_role

IDS = torch.arange(3, 23).view(2, 10)
LABELS = ("id2label", "label2id", "num_labels")


def qwen2(name: str, **changes: Any) -> Any:
    """A tiny Qwen2 in one of its classes, with a head that says something."""
    return built(
        name,
        Qwen2Config(
            vocab_size=48,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            **changes,
        ),
    )


def gpt2(name: str, **changes: Any) -> Any:
    """A tiny GPT2 in one of its classes."""
    return built(name, GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, **changes))


def built(name: str, config: PretrainedConfig) -> Any:
    torch.manual_seed(5)
    model = getattr(transformers, name)(config).eval()
    for value in (v for n, v in model.named_parameters() if n.startswith(("score.", "classifier."))):
        torch.nn.init.normal_(value)
    return model


def said(model: Any, **changes: Any) -> dict[str, Any]:
    """The config that a trainer leaves beside a critic: that of the language model; `...` takes a field out."""
    values = {**model.config.to_dict(), **dict.fromkeys(LABELS, ...), **changes}
    return {name: value for name, value in values.items() if value is not ...}


def merged(tmp_path: Path, weights: Tensors, config: Mapping[str, Any] | None, **options: Any) -> Merge:
    role = tmp_path / "role"
    if not role.exists():
        write_role(role, weights)
    if config is not None:
        write_config(role, config)
    return merge(role, tmp_path / "out", Options(**options))


def refused(
    tmp_path: Path,
    weights: Tensors,
    config: Mapping[str, Any] | None,
    kind: type[CkpttoolError] = Unmapped,
    **options: Any,
) -> Problem:
    """The one problem; nothing is written."""
    with pytest.raises(CkpttoolError) as caught:
        merged(tmp_path, weights, config, **options)
    assert type(caught.value) is kind, caught.value
    assert leftovers(tmp_path / "out") == []
    assert not (tmp_path / "out").exists()
    (problem,) = caught.value.problems
    return problem


def assert_loads_as(name: str, output: Path, model: Any) -> None:
    """The class that the config names takes every tensor and makes up none, and says what the model said."""
    assert config_of(output)["architectures"] == [name]
    kind = getattr(transformers, name)
    loaded, told = kind.from_pretrained(output, dtype="auto", attn_implementation="eager", output_loading_info=True)
    assert [told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")] == [set(), set(), set()]
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def note(result: Merge, code: str) -> Problem:
    (found,) = [problem for problem in result.notes if problem.code == code]
    assert found.severity == "note"
    return found


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_critic_under_the_config_of_its_language_model(rows: int, bias: bool, tie: bool, tmp_path: Path) -> None:
    """Case 30."""
    model = qwen2("Qwen2ForTokenClassification", num_labels=rows, token_classification_bias=bias)
    config = said(model, architectures=["Qwen2ForCausalLM"], token_classification_bias=..., tie_word_embeddings=tie)
    result = merged(tmp_path, model.state_dict(), config)
    assert unequal(tensors_in(tmp_path / "out"), model.state_dict()) == set()
    assert_loads_as("Qwen2ForTokenClassification", tmp_path / "out", model)
    assert AutoConfig.from_pretrained(tmp_path / "out").num_labels == rows
    assert result.model == "qwen2, Qwen2ForTokenClassification"
    assert any(f"{rows} row" in change and "Qwen2ForCausalLM" in change for change in result.config_changes)
    assert ("token_classification_bias" in config_of(tmp_path / "out")) is not bias
    other = "--architecture Qwen2ForSequenceClassification"
    assert (other in "".join(n.hint for n in result.notes)) is not bias  # which has no bias


def test_a_config_that_says_what_is_stored_stays(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    result = merge(fsdp_checkpoints / "critic", tmp_path / "out", Options())
    before = config_of(fsdp_checkpoints / "critic" / "huggingface")
    assert before["architectures"] == ["Qwen2ForTokenClassification"]
    earlier = {"torch_dtype": "float32", "rope_theta": before["rope_parameters"]["rope_theta"]}
    assert config_of(tmp_path / "out") == {**before, "dtype": "float32", **earlier}
    assert [n.code for n in result.notes] == ["tokenizer-class"]


def test_labels_that_contradict_each_other_are_made_to_agree(tmp_path: Path) -> None:
    """transformers 4 and 5 take the names before the number, and others the number."""
    model = qwen2("Qwen2ForTokenClassification", num_labels=1)
    merged(tmp_path, model.state_dict(), said(model, num_labels=1, id2label={"0": "a", "1": "b"}))
    assert_loads_as("Qwen2ForTokenClassification", tmp_path / "out", model)
    assert "num_labels" not in config_of(tmp_path / "out")


def test_names_of_labels_are_kept(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForTokenClassification", num_labels=1)
    names = {"id2label": {"0": "value"}, "label2id": {"value": 0}}
    merged(tmp_path, model.state_dict(), said(model, architectures=["Qwen2ForCausalLM"], **names))
    assert config_of(tmp_path / "out")["id2label"] == {"0": "value"}


def test_a_bias_that_the_config_denies(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForTokenClassification", num_labels=1)
    config = said(model, id2label={"0": "value"}, token_classification_bias=False)
    merged(tmp_path, model.state_dict(), config)
    assert_loads_as("Qwen2ForTokenClassification", tmp_path / "out", model)


@pytest.mark.parametrize("names", [..., [], ["Qwen2Model"], ["Qwen2ForSequenceClassification"]])
def test_a_class_that_would_lose_the_head_or_its_bias(names: Any, tmp_path: Path) -> None:
    model = qwen2("Qwen2ForTokenClassification", num_labels=1)
    merged(tmp_path, model.state_dict(), said(model, architectures=names))
    assert_loads_as("Qwen2ForTokenClassification", tmp_path / "out", model)


def test_a_reward_model_of_sequences(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForSequenceClassification", num_labels=1)
    config = said(model, architectures=["Qwen2ForCausalLM"])
    result = merged(tmp_path, model.state_dict(), config, architecture="Qwen2ForSequenceClassification")
    assert_loads_as("Qwen2ForSequenceClassification", tmp_path / "out", model)
    assert any("--architecture" in change for change in result.config_changes)
    assert "token_classification_bias" not in config_of(tmp_path / "out")


def test_a_class_of_sequences_in_the_config_stays(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForSequenceClassification", num_labels=1)
    merged(tmp_path, model.state_dict(), said(model, architectures=["Qwen2ForSequenceClassification"]))
    assert_loads_as("Qwen2ForSequenceClassification", tmp_path / "out", model)


@pytest.mark.parametrize("name", ["GPT2ForTokenClassification", "GPT2ForSequenceClassification"])
def test_the_head_of_gpt2_has_a_name_in_each_class(name: str, tmp_path: Path) -> None:
    model = gpt2(name, num_labels=1)
    merged(tmp_path, model.state_dict(), said(model, architectures=["GPT2LMHeadModel"]))
    assert_loads_as(name, tmp_path / "out", model)


def test_a_score_in_a_class_that_calls_it_otherwise(tmp_path: Path) -> None:
    """GPT2ForTokenClassification would make up a classifier and pass over the score."""
    model = gpt2("GPT2ForSequenceClassification", num_labels=1)
    merged(tmp_path, model.state_dict(), said(model, architectures=["GPT2ForTokenClassification"]))
    assert_loads_as("GPT2ForSequenceClassification", tmp_path / "out", model)


def trl(prefix: str = "", tie: bool = False) -> tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A language model in trl's class with a value head: the model, what its shards hold, what is to be written."""
    model = qwen2("Qwen2ForCausalLM", tie_word_embeddings=tie)
    head = {"v_head.summary.weight": torch.randn(1, 32), "v_head.summary.bias": torch.randn(1)}
    held = {**{f"{prefix}{name}": value for name, value in model.state_dict().items()}, **head}
    written = {**model.state_dict(), **head}
    if tie:
        del written["lm_head.weight"]
    return model, held, written


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("prefix", ["", "pretrained_model.", "_fsdp_wrapped_module.pretrained_model."])
def test_the_value_head_of_trl_is_kept_bit_for_bit(prefix: str, tie: bool, tmp_path: Path) -> None:
    """Case 30."""
    model, held, written = trl(prefix, tie)
    config = said(model, architectures=["Qwen2ForCausalLM"])
    result = merged(tmp_path, held, config)
    assert unequal(tensors_in(tmp_path / "out"), written) == set()
    assert config_of(tmp_path / "out")["architectures"] == ["Qwen2ForCausalLM"]
    assert not {"id2label", "token_classification_bias"} & config_of(tmp_path / "out").keys()
    told = note(result, "value-head").message
    assert all(words in told for words in ("v_head.summary.weight", "AutoModelForCausalLMWithValueHead"))
    assert result.renamed.get("pretrained_model", 0) == (len(model.state_dict()) if prefix else 0)
    with torch.no_grad():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
        torch.testing.assert_close(loaded.eval()(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


def test_the_prefix_of_trl_is_a_name_like_any_other_without_its_head(tmp_path: Path) -> None:
    held = {"pretrained_model.model.norm.weight": torch.ones(4)}
    result = merged(tmp_path, held, None)
    assert (set(tensors_in(tmp_path / "out")), result.renamed) == (set(held), {})


def test_the_prefix_of_trl_beside_names_that_trl_does_not_have(tmp_path: Path) -> None:
    held = {f"{name}.weight": torch.ones(4) for name in ("pretrained_model.norm", "v_head.summary", "q_head")}
    merged(tmp_path, held, None)
    assert set(tensors_in(tmp_path / "out")) == set(held)


def test_a_model_around_which_trl_lies_needs_its_own_head(tmp_path: Path) -> None:
    model, held, _ = trl()
    del held["lm_head.weight"]
    config = said(model, architectures=["Qwen2ForCausalLM"])
    assert refused(tmp_path, held, config, BrokenCheckpoint).code == "head-missing"


def test_the_value_head_of_trl_is_not_that_of_a_class_that_classifies(tmp_path: Path) -> None:
    model, held, written = trl()
    problem = refused(tmp_path, held, said(model, architectures=["Qwen2ForTokenClassification"]))
    assert all(words in problem.message for words in ("no v_head.summary.bias", "needs score.bias"))
    merged(tmp_path, held, None, architecture="Qwen2ForCausalLM")
    assert unequal(tensors_in(tmp_path / "out"), written) == set()


def two_heads(tie: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    model = qwen2("Qwen2ForCausalLM", tie_word_embeddings=tie)
    return model, {**model.state_dict(), "score.weight": torch.randn(1, 32)}


def test_two_heads_are_both_kept_and_the_class_stays(tmp_path: Path) -> None:
    model, held = two_heads()
    result = merged(tmp_path, held, said(model, architectures=["Qwen2ForCausalLM"]))
    assert unequal(tensors_in(tmp_path / "out"), held) == set()
    assert config_of(tmp_path / "out")["architectures"] == ["Qwen2ForCausalLM"]
    assert not {"id2label", "token_classification_bias"} & config_of(tmp_path / "out").keys()
    told = note(result, "two-heads")
    assert "Qwen2ForCausalLM loads lm_head.weight alone" in told.message
    assert "--architecture" in told.hint


def test_of_two_heads_the_other_one_is_a_choice(tmp_path: Path) -> None:
    model, held = two_heads()
    config = said(model, architectures=["Qwen2ForCausalLM"])
    result = merged(tmp_path, held, config, architecture="Qwen2ForTokenClassification")
    assert unequal(tensors_in(tmp_path / "out"), held) == set()
    assert "Qwen2ForTokenClassification loads score.weight alone" in note(result, "two-heads").message
    assert AutoConfig.from_pretrained(tmp_path / "out").num_labels == 1


def test_of_two_heads_one_may_be_an_alias(tmp_path: Path) -> None:
    model, held = two_heads(tie=True)
    result = merged(tmp_path, held, said(model, architectures=["Qwen2ForCausalLM"]))
    assert [(drop.name, drop.rule) for drop in result.dropped] == [("lm_head.weight", "tied-alias")]
    assert torch.equal(tensors_in(tmp_path / "out")["score.weight"], held["score.weight"])


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("name", ["Qwen2ForTokenClassification", "Qwen2ForSequenceClassification", "MyRewardModel"])
def test_a_classifier_without_its_head_is_refused(name: str, there: bool, tmp_path: Path) -> None:
    model = qwen2("Qwen2ForCausalLM" if there else "Qwen2Model")
    weights = model.state_dict() if there else {f"model.{n}": v for n, v in model.state_dict().items()}
    problem = refused(tmp_path, weights, said(model, architectures=[name]))
    assert problem.code == "head-disagrees"
    assert (name in problem.message, "score.weight" in problem.message) == (True, True)
    assert ("over the vocabulary" in problem.message) is there
    assert "--architecture" in problem.hint
    merged(tmp_path, weights, None, architecture="Qwen2ForCausalLM" if there else "Qwen2Model")


@pytest.mark.parametrize("tie", [False, True])
def test_a_critic_cannot_become_a_language_model(tie: bool, tmp_path: Path) -> None:
    model = qwen2("Qwen2ForTokenClassification", num_labels=1, tie_word_embeddings=tie)
    problem = refused(tmp_path, model.state_dict(), said(model), architecture="Qwen2ForCausalLM")
    assert problem.code == "head-disagrees"
    assert "made up" in problem.message


def test_a_bias_is_not_given_to_a_class_that_has_none(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForTokenClassification", num_labels=1)
    problem = refused(tmp_path, model.state_dict(), said(model), architecture="Qwen2ForSequenceClassification")
    assert problem.message.endswith("Qwen2ForSequenceClassification has no score.bias (--architecture)")


def test_half_of_a_head_is_no_head(tmp_path: Path) -> None:
    """transformers would make up the other half."""
    model = gpt2("GPT2ForTokenClassification", num_labels=1)
    weights = {name: value for name, value in model.state_dict().items() if name != "classifier.bias"}
    problem = refused(tmp_path, weights, said(model, architectures=["GPT2ForTokenClassification"]))
    assert "needs classifier.bias" in problem.message


def test_a_model_without_a_class_that_can_hold_the_head(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForTokenClassification", num_labels=1)
    config = said(model, model_type="glm4_moe", architectures=["Glm4MoeForCausalLM"])
    problem = refused(tmp_path, model.state_dict(), config)
    assert problem.code == "head-disagrees"
    assert all(words in problem.message for words in ("1 row", "Glm4MoeForCausalLM"))
    assert all(words in problem.hint for words in ("glm4_moe", "--architecture"))
    merged(tmp_path, model.state_dict(), None, architecture="MyGlm4MoeCritic")
    assert unequal(tensors_in(tmp_path / "out"), model.state_dict()) == set()
    assert config_of(tmp_path / "out")["architectures"] == ["MyGlm4MoeCritic"]


def test_a_model_type_of_other_code_in_a_class_of_transformers(tmp_path: Path) -> None:
    """Kimi-K2 names the classes of DeepSeek-V3."""
    weights = {"model.norm.weight": torch.ones(4), "score.weight": torch.randn(1, 4)}
    config = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "torch_dtype": "float32"}
    merged(tmp_path, weights, config)
    assert config_of(tmp_path / "out")["architectures"] == ["DeepseekV3ForTokenClassification"]


@pytest.mark.parametrize("head", ["value_head.weight", "v_head.weight", "score.2.weight"])
def test_a_head_that_no_class_knows(head: str, tmp_path: Path) -> None:
    model = qwen2("Qwen2Model")
    weights = {**{f"model.{name}": value for name, value in model.state_dict().items()}, head: torch.randn(1, 32)}
    problem = refused(tmp_path, weights, said(model, architectures=["Qwen2ForCausalLM"]))
    assert (problem.code, head in problem.message) == ("head-disagrees", True)
    merged(tmp_path, weights, None, architecture="Qwen2ForRewardModel")
    assert torch.equal(tensors_in(tmp_path / "out")[head], weights[head])
    assert "id2label" not in config_of(tmp_path / "out")


def test_rows_that_no_config_can_name(tmp_path: Path) -> None:
    """A shape without bytes may claim any number of them."""
    weights = {"model.norm.weight": torch.ones(4), "score.weight": torch.empty(1 << 40, 0)}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert "1,099,511,627,776 rows" in refused(tmp_path, weights, config).message


@pytest.mark.parametrize("head", ["score.2.weight", "v_head.weight", "regression.weight"])
def test_a_class_of_its_own_is_believed(head: str, tmp_path: Path) -> None:
    """What the code of a model calls its head, no table knows."""
    weights = {"model.norm.weight": torch.ones(4), head: torch.randn(1, 4)}
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForProcessRewardModel"], "torch_dtype": "float32"}
    result = merged(tmp_path, weights, config)
    assert (set(tensors_in(tmp_path / "out")), result.config_changes) == (set(weights), ())


def test_what_is_called_score_further_inside_is_no_head(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForCausalLM")
    weights = {**model.state_dict(), "model.layers.0.score.weight": torch.randn(1, 32)}
    result = merged(tmp_path, weights, said(model, architectures=["Qwen2ForCausalLM"]))
    assert [n.code for n in result.notes] == ["no-generation-config"]


def test_architecture_of_a_model_without_a_further_head(tmp_path: Path) -> None:
    model = qwen2("Qwen2ForCausalLM")
    merged(tmp_path, model.state_dict(), said(model, architectures=["Other"]), architecture="Qwen2ForCausalLM")
    assert_loads_as("Qwen2ForCausalLM", tmp_path / "out", model)


def test_architecture_decides_whether_a_head_is_missing(tmp_path: Path) -> None:
    model = qwen2("Qwen2Model")
    weights = {f"model.{name}": value for name, value in model.state_dict().items()}
    config = said(model, architectures=["Qwen2ForCausalLM"])
    assert refused(tmp_path, weights, config, BrokenCheckpoint).code == "head-missing"
    merged(tmp_path, weights, config, architecture="Qwen2Model")


def test_architecture_needs_a_config_to_name_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--architecture Qwen2ForCausalLM: there is no config\.json"):
        merged(tmp_path, {"model.norm.weight": torch.ones(4)}, None, architecture="Qwen2ForCausalLM")
    assert not (tmp_path / "out").exists()


def test_on_the_command_line(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    model = qwen2("Qwen2ForSequenceClassification", num_labels=1)
    role = write_role(tmp_path / "role", model.state_dict(), config=said(model, architectures=["Qwen2ForCausalLM"]))
    command = ("merge-fsdp", role, "-o", tmp_path / "out", "--architecture")
    assert ckpttool(*command, "no class").code == 2
    assert ckpttool(*command, "Qwen2ForCausalLM").code == 5
    dry = ckpttool(*command, "Qwen2ForSequenceClassification", "--dry-run")
    assert dry.code == 0
    assert dry.out.splitlines()[-1].endswith(" --architecture Qwen2ForSequenceClassification")
    assert not (tmp_path / "out").exists()
    assert ckpttool(*command, "Qwen2ForSequenceClassification").code == 0
    assert_loads_as("Qwen2ForSequenceClassification", tmp_path / "out", model)


def test_architecture_of_adapters_alone(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """They are written without a config that could name it."""
    options = Options(lora="adapter", lora_alpha=16, architecture="Qwen2ForCausalLM")
    with pytest.raises(UsageError, match="--architecture Qwen2ForCausalLM: an adapter has no"):
        merge(fsdp_checkpoints / "lora-only", tmp_path / "out", options)
    assert not (tmp_path / "out").exists()
