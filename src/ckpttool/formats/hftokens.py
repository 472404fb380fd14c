"""``tokenizer_config.json``: what transformers 5 writes into it that transformers 4 cannot load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpttool.errors import Problem
from ckpttool.formats.hfconfig import CONFIG, ModelConfig

TOKENIZER = "tokenizer_config.json"

FAST = "TokenizersBackend"
_ONLY_IN_5 = frozenset(
    {
        *(FAST, "PythonBackend", "SentencePieceBackend", "MistralCommonBackend"),
        *("EsmcTokenizer", "LasrTokenizer", "Qwen3_5Tokenizer", "Siglip2Tokenizer", "Tipsv2Tokenizer"),
        "VideoPrismTokenizer",
    }
)
"""Classes of transformers 5.24 that 4.57 has neither under this name nor with ``Fast`` behind it."""

_QWEN2 = (
    *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl"),
    *("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"),
)
_GEMMA = ("gemma", "gemma2", "gemma3", "gemma3_text")
_BY_FAMILY = {**dict.fromkeys(_QWEN2, "Qwen2Tokenizer"), **dict.fromkeys(_GEMMA, "GemmaTokenizer")}
"""Classes that both generations have; processors of transformers 4 take no other for their family."""

_ANY = "PreTrainedTokenizerFast"
"""What both generations load ``tokenizer.json`` with, whatever the family."""

_COPIED = "Converters copy it as it is"


def doubts(tokenizer: Mapping[str, Any], config: ModelConfig | None, *, has_fast: bool) -> Iterator[Problem]:
    """Yield notes on the class and the special tokens of a tokenizer; ``has_fast``: ``tokenizer.json`` is there."""
    where, said = TOKENIZER, tokenizer.get("tokenizer_class")
    if said is None and config is not None:
        where, said = CONFIG, config.values.get("tokenizer_class")
    if isinstance(said, str) and said in _ONLY_IN_5 and not _has_code(tokenizer):
        message = f"{where} has tokenizer_class {said}, which transformers 4 cannot load"
        yield Problem(
            code="tokenizer-class", message=message, path=where, hint=_hint(config, has_fast), severity="note"
        )
    tokens = tokenizer.get("extra_special_tokens")
    if isinstance(tokens, list):
        message = f"{TOKENIZER} has a list as extra_special_tokens, where transformers 4 fails for want of an object"
        hint = f"{_COPIED}; call the list additional_special_tokens, which both read."
        yield Problem(code="tokenizer-tokens", message=message, path=TOKENIZER, hint=hint, severity="note")


def _has_code(tokenizer: Mapping[str, Any]) -> bool:
    """Tell whether the class comes from a file of the model's own."""
    named = tokenizer.get("auto_map")
    return isinstance(named, list) or (isinstance(named, dict) and "AutoTokenizer" in named)


def _hint(config: ModelConfig | None, has_fast: bool) -> str:
    if not has_fast:
        return f"{_COPIED}; take the one of the model that was trained, or save it with transformers 4."
    types = config.model_types if config is not None else ()
    known = next((_BY_FAMILY[kind] for kind in types if kind in _BY_FAMILY), _ANY)
    return f"{_COPIED}; for servers on transformers 4 write {known}, which 5 loads as well."
