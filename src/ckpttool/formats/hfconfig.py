"""``config.json``: what it says about a model, at the top and in the configurations nested in it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.formats.hf import CONFIG
from ckpttool.formats.jsonfile import parse_object, read_raw

__all__ = ["CONFIG", "DTYPE_KEYS", "GENERATES", "HEADS", "QUANTIZATION", "TEXT", "TIE"]
__all__ += ["ModelConfig", "is_head", "is_weight_of", "nested", "read_config"]

TIE = "tie_word_embeddings"
DTYPE_KEYS = ("dtype", "torch_dtype")
QUANTIZATION = ("quantization_config", "compression_config")
"""Fields that say how weights are quantised."""

TEXT = ("text_config", "llm_config", "language_config", "decoder", "thinker_config", "text_cfg")
"""Where nested configurations of language models are kept."""

GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel", "ForImageTextToText")
"""How the names of classes end that write text, and so need a head over the vocabulary."""


HEADS = ("lm_head", "embed_out", "proj_out", "output_layer", "output")
"""Modules that are heads over the vocabulary."""

_OTHER_TOWERS = re.compile(r"(^|[._])(vision|visual|audio|speech|image|video|mtp)([._]|$)")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A ``config.json`` as it lies on the disk. ``path`` says where; ``raw`` are its bytes."""

    path: str
    raw: bytes
    values: Mapping[str, Any]

    @property
    def model_types(self) -> tuple[str, ...]:
        """The model's type, then those of its text configurations."""
        types = [part.get("model_type") for part in (self.values, *self.text_parts())]
        return tuple(name for name in types if isinstance(name, str))

    @property
    def architectures(self) -> tuple[str, ...]:
        """The classes that the model may be loaded as."""
        names = self.values.get("architectures")
        return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()

    @property
    def dtype(self) -> str | None:
        """The dtype that the weights are said to have, by torch's name."""
        said = next((self.values[key] for key in DTYPE_KEYS if self.values.get(key)), None)
        return said.removeprefix("torch.") if isinstance(said, str) else None

    @property
    def generates(self) -> bool:
        """Whether the model writes text, and so needs a head over the vocabulary."""
        return any(name.endswith(GENERATES) for name in self.architectures)

    @property
    def vocab_sizes(self) -> frozenset[int]:
        """Sizes of the vocabulary that it names."""
        sizes = (part.get("vocab_size") for part in (self.values, *self.text_parts()))
        return frozenset(size for size in sizes if type(size) is int)

    @property
    def said_ties(self) -> frozenset[bool]:
        """What it says about tying, at the top and in text configurations; empty when it does not say."""
        said = (part.get(TIE) for part in (self.values, *self.text_parts()))
        return frozenset(value for value in said if isinstance(value, bool))

    def text_parts(self) -> Iterator[Mapping[str, Any]]:
        """Yield the nested configurations of language models."""
        yield from (part for name, part in nested(self.values) if name in TEXT)


def read_config(folder: Path) -> ModelConfig | None:
    """Read the ``config.json`` of a folder, ``None`` without one; :class:`BrokenCheckpoint` for a damaged one."""
    path = folder / CONFIG
    if not path.is_file():
        return None
    raw = read_raw(path)
    return ModelConfig(str(path), raw, parse_object(raw, path.name))


def nested(values: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every nested configuration with its key, outer ones first."""
    pending = deque((name, value) for name, value in values.items() if isinstance(value, dict))
    while pending:
        name, value = pending.popleft()
        yield name, value
        pending.extend((inner, part) for inner, part in value.items() if isinstance(part, dict))


def is_weight_of(modules: Collection[str], name: str) -> bool:
    """Tell by its name the weight of a module of these names in a language model; not that of a layer's own."""
    parts = name.split(".")
    return (
        len(parts) >= 2
        and parts[-1] == "weight"
        and parts[-2] in modules
        and not _OTHER_TOWERS.search(name)
        and not any(part.isdecimal() for part in parts)
    )


def is_head(name: str, shape: tuple[int, ...]) -> bool:
    """Tell the weight of a head over the vocabulary."""
    return len(shape) == 2 and is_weight_of(HEADS, name)
