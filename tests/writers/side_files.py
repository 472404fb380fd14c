"""What lies in a `huggingface/` folder beside the weights: configuration, tokenizer, templates."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

SPECIAL = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def write_side_files(folder: Path, config: Any) -> None:
    """Everything verl puts beside the weights, with two end tokens: a merge must keep both."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    GenerationConfig(eos_token_id=[1, 2], pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer(config.vocab_size).save_pretrained(folder)
    # transformers 5 no longer writes this file; checkpoints of version 4 have it.
    (folder / "special_tokens_map.json").write_text(json.dumps(SPECIAL, indent=2) + "\n")


def tiny_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges, the kind that Qwen classes load: one letter an id."""
    letters = ["\u0120", *string.ascii_letters, *string.digits, *string.punctuation]
    words = [*SPECIAL.values(), *letters][:vocab_size]
    model = Tokenizer(BPE({word: index for index, word in enumerate(words)}, []))
    model.pre_tokenizer = ByteLevel(add_prefix_space=False)
    model.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **SPECIAL)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
