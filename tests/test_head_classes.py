"""The table of classes with heads is what transformers has."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from ckpttool.export import classes

MAPPINGS = {
    classes.EACH: modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    classes.ALL: modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
OTHERWISE = {
    *("cohere_compass_text", "ctrl", "deberta", "deberta-v2", "distilbert", "eurobert", "flaubert", "funnel"),
    *("layoutlmv2", "modernbert", "modernbert-decoder", "modernvbert", "perceiver", "qwen3_asr", "t5gemma", "t5gemma2"),
    *("xlm", "xlnet"),
}
"""Model types with heads of more or other parts, or by more than the type: they are left out of the table."""

SMALL = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 2),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
}
MISSING = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64}


def small(model_type: str) -> Any:
    """A config of few layers, with sizes where the type has none of its own."""
    config = AutoConfig.for_model(model_type)
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        for name, value in SMALL.items():
            if isinstance(part.__dict__.get(name), int):
                setattr(part, name, value)
        for name, value in MISSING.items():
            if getattr(part, name, value) is None:
                setattr(part, name, value)
        if isinstance(part.__dict__.get("layer_types"), list):
            part.layer_types = part.layer_types[:2]
    return config


def head_of(name: str, model_type: str) -> frozenset[str]:
    """The tensors that a class of transformers has beside its base model."""
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = getattr(transformers, name)(small(model_type))
    return frozenset(key for key in model.state_dict() if not key.startswith(f"{model.base_model_prefix}."))


@pytest.mark.parametrize("end", [classes.EACH, classes.ALL])
def test_every_class_has_the_head_that_the_table_says(end: str) -> None:
    table = {model_type: known for model_type, known in classes.every() if known.name.endswith(end)}
    wrong = {
        known.name: head
        for model_type, known in table.items()
        if (head := head_of(known.name, model_type)) != known.tensors
    }
    assert wrong == {}
    assert {model_type: known.name for model_type, known in table.items()}.items() <= MAPPINGS[end].items()


@pytest.mark.parametrize("end", [classes.EACH, classes.ALL])
def test_no_class_is_left_out_without_a_word(end: str) -> None:
    table = {model_type for model_type, known in classes.every() if known.name.endswith(end)}
    assert MAPPINGS[end].keys() - table - OTHERWISE == set()
