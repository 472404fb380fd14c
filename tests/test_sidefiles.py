"""What small files say that weights and loaders do not bear out: told by `inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Gemma3Config, LlavaConfig, Qwen2VLConfig, Qwen3VLConfig

from ckpttool.formats.hftokens import _ONLY_IN_5
from ckpttool.inspection import inspect
from tests.looking import change_json, codes, problem
from tests.small_files import FP8, HEADLESS, WEIGHTS, told, write_model
from tests.writers.side_files import tiny_tokenizer


def test_a_sound_model_gives_no_note(tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "hf")).problems == ()


# tokenizer_class


def test_a_tokenizer_of_transformers_5_is_told_of_with_the_class_of_its_family(tmp_path: Path) -> None:
    """Case 33."""
    folder = write_model(tmp_path / "hf")
    tiny_tokenizer(10).save_pretrained(folder)
    note = told(folder)
    assert (note.code, note.path) == ("tokenizer-class", "tokenizer_config.json")
    assert "tokenizer_class TokenizersBackend" in note.message
    assert "write Qwen2Tokenizer," in note.hint


def test_what_the_hint_says_loads_to_the_same_tokens(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", model_type="llama", architectures=["LlamaForCausalLM"])
    tokenizer = tiny_tokenizer(64)
    tokenizer.save_pretrained(folder)
    assert "write PreTrainedTokenizerFast," in told(folder).hint
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    assert inspect(folder).problems == ()
    assert AutoTokenizer.from_pretrained(folder)("hello there").input_ids == tokenizer("hello there").input_ids


@pytest.mark.parametrize("name", sorted(_ONLY_IN_5))
def test_every_class_that_only_transformers_5_has_is_told_of(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    change_json(folder / "tokenizer_config.json", tokenizer_class=name)
    assert f"tokenizer_class {name}," in told(folder).message


def test_without_a_fast_tokenizer_no_class_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    change_json(folder / "tokenizer_config.json", tokenizer_class="SentencePieceBackend")
    (folder / "tokenizer.json").unlink()
    assert "take the one of the model that was trained" in told(folder).hint


@pytest.mark.parametrize("said", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "OurOwn", 3, None, [], {"a": 1}])
def test_other_classes_and_other_types_are_passed_over(said: object, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    change_json(folder / "tokenizer_config.json", tokenizer_class=said)
    assert inspect(folder).problems == ()


def test_a_class_of_the_models_own_code_is_passed_over(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    own = {"AutoTokenizer": ["tokenization_x.X", None]}
    change_json(folder / "tokenizer_config.json", tokenizer_class="TokenizersBackend", auto_map=own)
    assert inspect(folder).problems == ()


def test_the_class_may_stand_in_the_config_of_the_model(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", tokenizer_class="TokenizersBackend")
    assert inspect(folder).problems == ()
    (folder / "tokenizer_config.json").unlink()
    assert (told(folder).code, told(folder).path) == ("tokenizer-class", "config.json")


def test_special_tokens_in_a_list_are_told_of(tmp_path: Path) -> None:
    """With a class that both have, transformers 4 still fails: 'list' object has no attribute 'keys'."""
    folder = write_model(tmp_path / "hf")
    tokenizer = tiny_tokenizer(10)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>"]})
    tokenizer.save_pretrained(folder)
    change_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    note = told(folder)
    assert (note.code, "additional_special_tokens" in note.hint) == ("tokenizer-tokens", True)
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace("extra_special_tokens", "additional_special_tokens"))
    assert inspect(folder).problems == ()
    assert AutoTokenizer.from_pretrained(folder)("<|x|>").input_ids == tokenizer("<|x|>").input_ids


# quantization_config


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_a_quantisation_that_the_weights_do_not_have(field: str, tmp_path: Path) -> None:
    note = told(write_model(tmp_path / "hf", WEIGHTS, {field: FP8}))
    assert (note.code, note.path) == ("quantization-config", "config.json")
    assert f"{field}, but the weights are not quantised" in note.message


def test_a_nested_quantisation_is_named_with_its_place(tmp_path: Path) -> None:
    text = {"quantization_config": FP8, "tie_word_embeddings": False}
    assert "text_config.quantization_config" in told(write_model(tmp_path / "hf", text_config=text)).message


def test_positions_and_masks_are_no_quantised_weights(tmp_path: Path) -> None:
    buffers = {"model.position_ids": torch.arange(4)[None], "model.mask": torch.ones(2, 2, dtype=torch.bool)}
    folder = write_model(tmp_path / "hf", {**WEIGHTS, **buffers}, quantization_config=FP8)
    assert told(folder).code == "quantization-config"


# tie_word_embeddings


def test_top_and_text_configuration_disagree(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf", tie_word_embeddings=True, text_config={"tie_word_embeddings": False})
    note = told(folder)
    assert (note.code, note.path) == ("tie-disagrees", "config.json")
    assert "is true at the top of config.json and false in text_config" in note.message
    assert "Set both to false" in note.hint


def test_the_hint_goes_by_the_head_that_is_there_or_not(tmp_path: Path) -> None:
    text = {"tie_word_embeddings": True}
    folder = write_model(tmp_path / "hf", HEADLESS, text_config=text)
    assert "Set both to true" in told(folder).hint
    (folder / "model.safetensors").unlink()
    assert problem(inspect(folder), "tie-disagrees").hint == "Make both say the same."


def test_only_the_nested_one_says_it(tmp_path: Path) -> None:
    """What transformers 4 writes of Qwen3-VL: 5 asks the top, where the default is false."""
    text = {"tie_word_embeddings": True, "model_type": "qwen3_vl_text"}
    changes = {"model_type": "qwen3_vl", "tie_word_embeddings": ..., "text_config": text}
    note = told(write_model(tmp_path / "hf", HEADLESS, changes))
    assert "is not said (false by default) at the top of config.json and true in text_config" in note.message


def test_only_the_top_says_it(tmp_path: Path) -> None:
    """What transformers 5 writes of a tied Qwen2-VL: 4 asks the text configuration, where the default is false."""
    folder = write_model(tmp_path / "hf", HEADLESS)
    Qwen2VLConfig(tie_word_embeddings=True, architectures=["Qwen2VLForConditionalGeneration"]).save_pretrained(folder)
    assert "is true at the top of config.json and not said (false by default) in text_config" in told(folder).message


@pytest.mark.parametrize(
    "config",
    [
        Qwen2VLConfig(architectures=["Qwen2VLForConditionalGeneration"]),
        Qwen3VLConfig(architectures=["Qwen3VLForConditionalGeneration"]),
        LlavaConfig(architectures=["LlavaForConditionalGeneration"]),
        Gemma3Config(architectures=["Gemma3ForConditionalGeneration"]),
    ],
    ids=lambda config: str(config.model_type),
)
def test_configs_as_transformers_writes_them_agree(config: Any, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "hf")
    config.save_pretrained(folder)
    earlier = {"config-of-5"} if config.model_type == "qwen3_vl" else set()  # what its text has for pictures
    assert set(codes(inspect(folder))) == earlier


@pytest.mark.parametrize(
    "changes",
    [
        {"text_config": {"tie_word_embeddings": False}},
        {"text_config": {"tie_word_embeddings": "yes"}},
        {"text_config": {}},
        {"text_config": 3},
        {"vision_config": {"tie_word_embeddings": True}},
        {"model_type": "gemma3", "tie_word_embeddings": ..., "text_config": {"model_type": "gemma3_text"}},
        {"model_type": "qwen2_vl", "tie_word_embeddings": ..., "text_config": {"tie_word_embeddings": True}},
        {"model_type": "my_own", "text_config": {"model_type": "my_own_text"}},
        {"architectures": ["X"], "tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
    ],
)
def test_what_both_take_alike_is_not_told(changes: dict[str, Any], tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "hf", WEIGHTS, changes)).problems == ()


def test_a_family_that_forwards_the_nested_word_is_told_of_where_the_top_contradicts_it(tmp_path: Path) -> None:
    text = {"tie_word_embeddings": True}
    assert told(write_model(tmp_path / "hf", model_type="qwen2_vl", text_config=text)).message.endswith("takes true")


def test_a_head_in_the_storage_of_the_embeddings_is_none_of_its_own(tmp_path: Path) -> None:
    """One storage under two names: the hint must not ask for two tensors."""
    shared = torch.ones(10, 4)
    weights = {"model.embed_tokens.weight": shared, "lm_head.weight": shared}
    text = {"tie_word_embeddings": False}
    folder = write_model(tmp_path / "hf", {}, tie_word_embeddings=True, text_config=text)
    torch.save(weights, folder / "pytorch_model.bin")
    assert "Set both to true" in told(folder).hint


# generation_config.json


def test_no_generation_config(tmp_path: Path) -> None:
    note = told(write_model(tmp_path / "hf", generation=False))
    assert note.code == "no-generation-config"
    assert "does not say it" not in note.message
    silent = told(write_model(tmp_path / "silent", generation=False, eos_token_id=...))
    assert "config.json, which does not say it, and the tokenizer" in silent.message


@pytest.mark.parametrize("name", ["Qwen2ForTokenClassification", "Qwen2Model", "Qwen2ForSequenceClassification"])
def test_critics_and_classifiers_need_no_generation_config(name: str, tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "hf", generation=False, architectures=[name])).problems == ()


# dtype fields


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_a_dtype_that_the_weights_do_not_have(field: str, tmp_path: Path) -> None:
    note = told(write_model(tmp_path / "hf", WEIGHTS, {"torch_dtype": ..., field: "bfloat16"}))
    assert (note.code, note.path) == ("config-dtype", "config.json")
    assert note.message == f"config.json says bfloat16 ({field}), the weights are float32"


def test_most_bytes_decide(tmp_path: Path) -> None:
    mixed = {"model.a.weight": torch.ones(9, 9, dtype=torch.bfloat16), "model.norm.weight": torch.ones(9)}
    note = told(write_model(tmp_path / "hf", mixed))
    assert note.message == "config.json says float32 (torch_dtype), most of the weights are bfloat16"
    assert inspect(write_model(tmp_path / "other", mixed, torch_dtype="torch.bfloat16")).problems == ()


def test_nested_dtypes_lie_too_but_a_tower_may_have_its_own(tmp_path: Path) -> None:
    nested = {
        "text_config": {"dtype": "float16", "tie_word_embeddings": False},
        "vision_config": {"torch_dtype": "bfloat16"},
    }
    tower = {"model.visual.a.weight": torch.ones(2, 2, dtype=torch.bfloat16)}
    assert (
        "says float16 (text_config.dtype)" in told(write_model(tmp_path / "hf", {**WEIGHTS, **tower}, nested)).message
    )
    found = inspect(write_model(tmp_path / "no-tower", WEIGHTS, nested))
    assert codes(found) == ["config-dtype", "config-dtype"]
    assert "says bfloat16 (vision_config.torch_dtype)" in found.problems[1].message


@pytest.mark.parametrize("said", ["auto", "", 3, None, {"": "bfloat16"}, "float8_e4m3fn", "bf16"])
def test_what_is_no_dtype_is_passed_over(said: object, tmp_path: Path) -> None:
    assert inspect(write_model(tmp_path / "hf", torch_dtype=said)).problems == ()
