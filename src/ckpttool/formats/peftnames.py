"""What PEFT leaves in names: ``base_model.model.<module>.lora_A.<adapter>.weight`` and its relatives (0.15 to 0.21).

A module with adapters keeps its own weights under ``base_layer``; a parameter that is adapted directly (packed experts)
has one more ``base_layer`` a parameter, the first one innermost. ``modules_to_save`` are copies that were trained as
they are, ``original_module`` what they replace.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

PREFIX = "base_model.model."
BASE_LAYER = "base_layer"

_LORA = re.compile(
    r"(?:(?P<path>.+)\.)?(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)"
    r"\.(?P<adapter>[^.]+)(?:\.(?P<field>weight|bias))?"
)
_SAVED = re.compile(r"(?P<path>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<field>.+)")
_ORIGINAL = re.compile(r"(?P<path>.+)\.original_module\.(?P<field>.+)")
_FOREIGN = re.compile(
    r"(^|\.)(lora_\w+|token_adapter|trainable_tokens_\w+|ia3_l|lokr_\w+|hada_\w+|oft_\w+|boft_\w+|hra_\w+|vera_\w+"
    r"|randlora_\w+|fourierft_spectrum|vblora_\w+|bone_\w+|miss_\w+|road_\w+|ln_tuning_layers|waveft_\w+|shira_\w+"
    r"|delora_\w+|gralora_\w+|osf_\w+|poly_lora_\w+|adaption_prompt|adaption_gate|prompt_encoder|prompt_embeddings)"
    r"(\.|$)"
)

DOWN, UP, BIAS, MAGNITUDE = "down", "up", "bias", "magnitude"
SAVED, ORIGINAL, FOREIGN, BASE = "saved", "original", "foreign", "base"

_KINDS = {
    ("lora_A", "weight"): DOWN,
    ("lora_embedding_A", None): DOWN,
    ("lora_B", "weight"): UP,
    ("lora_B", "bias"): BIAS,
    ("lora_embedding_B", None): UP,
    ("lora_magnitude_vector", "weight"): MAGNITUDE,
    ("lora_magnitude_vector", None): MAGNITUDE,
}


@dataclass(frozen=True, slots=True)
class Part:
    """What a tensor is to an adapter.

    ``path`` is the adapted module as it is named in the state dict, without ``PREFIX``; of a base tensor, a copy or
    what that replaces it is the plain name that the tensor itself has without an adapter.
    """

    kind: str
    path: str
    adapter: str = ""
    embedding: bool = False

    @property
    def plain(self) -> str:
        """The path as the model names it where it has no adapter."""
        return plain(self.path)


def part(name: str) -> Part:
    """Say what a tensor of a PEFT model is, by its name (wrappers already taken out of it)."""
    name = name.removeprefix(PREFIX)
    if match := _LORA.fullmatch(name):
        kind = _KINDS.get((match["kind"], match["field"]))
        if kind is not None:
            return Part(kind, match["path"] or "", match["adapter"], "embedding" in match["kind"])
    if match := _SAVED.fullmatch(name):
        return Part(SAVED, plain(f"{match['path']}.{match['field']}"), match["adapter"])
    if match := _ORIGINAL.fullmatch(name):
        return Part(ORIGINAL, plain(f"{match['path']}.{match['field']}"))
    if _FOREIGN.search(name):
        return Part(FOREIGN, name)
    return Part(BASE, plain(name))


def plain(path: str) -> str:
    """Return a path without the segments of adapted modules."""
    return ".".join(segment for segment in path.split(".") if segment != BASE_LAYER)


def is_adapter(name: str) -> bool:
    """Tell a tensor of an adapter: a factor, a magnitude, a whole copy, what other kinds of adapters store."""
    kind = part(name).kind
    return kind not in (BASE, ORIGINAL, FOREIGN) or (kind == FOREIGN and name.startswith(PREFIX))


def saved_module(name: str) -> str:
    """Return the module, as the model names it, that a tensor of a whole copy is of."""
    match = _SAVED.fullmatch(name.removeprefix(PREFIX))
    return plain(match["path"]) if match else ""


def has_adapters(names: Iterable[str]) -> bool:
    """Tell whether a state dict is one of a PEFT model."""
    return any(name.startswith(PREFIX) or part(name).kind in (DOWN, UP, BIAS, MAGNITUDE, SAVED) for name in names)
