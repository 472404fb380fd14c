"""Weight maps from Megatron to Hugging Face: a table a family, chosen by the model type of ``config.json``.

The maps follow those that Megatron-LM, verl, slime and NVIDIA's bridges write and read; see ``docs/to-hf.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from ckpttool.architectures.dense import INTERNLM3, LLAMA, MISTRAL, QWEN2, QWEN3, SEED_OSS
from ckpttool.architectures.experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from ckpttool.architectures.family import Family
from ckpttool.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from ckpttool.architectures.gpt_oss import GPT_OSS
from ckpttool.architectures.latent import DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE
from ckpttool.architectures.qwen3_next import QWEN3_NEXT
from ckpttool.errors import Unmapped, UsageError

FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, SEED_OSS, INTERNLM3),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN3_NEXT),
    *(DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE),
    *(GPT_OSS, GEMMA, GEMMA2, GEMMA3),
)

_BY_NAME = {name: family for family in FAMILIES for name in (family.name, *family.model_types)}
NAMES = tuple(sorted(_BY_NAME))


def named(name: str) -> Family:
    """Return the family of a name or model type; raises :class:`UsageError` for one that is not known."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    close = get_close_matches(name, NAMES, 1)
    hint = f"Did you mean {close[0]}? " if close else ""
    raise UsageError(f"--arch {name}: not one of {', '.join(NAMES)}", hint=f"{hint}{LIST}")


LIST = "All of them: ckpttool to-hf --list-architectures."


def find(model_type: str | None, classes: Sequence[str], where: str) -> Family:
    """Return the family of the model type that the config at ``where`` names; without one, of the class it names.

    Raises :class:`Unmapped` that lists what is known, and what can be done.
    """
    if model_type is None:
        model_type = next((name for name in NAMES if _class_of(name) in map(_base, classes[:1])), None)
    if model_type is not None and model_type in _BY_NAME:
        return _BY_NAME[model_type]
    what = (
        f"no weight map is known for the model type {model_type!r}"
        if model_type is not None
        else "no model_type, and no class that is known"
    )
    raise Unmapped(
        f"{where}: {what}",
        hint=f"Known are {', '.join(NAMES)}.\n"
        "If its weights are laid out like one of these: --arch NAME. How to add a map: docs/to-hf.md.",
        code="unknown-architecture",
    )


def _class_of(model_type: str) -> str:
    """Return how the names of a family's classes begin, in small letters: ``qwen2moe``."""
    return model_type.removesuffix("_text").replace("_", "")


def _base(name: str) -> str:
    """Return the same of the name of a class: ``Qwen2MoeForCausalLM``."""
    return name.partition("For")[0].lower()
