"""Rules by which names in memory become names on the hub, each with a name of its own; nothing is matched loosely.

They are those of transformers 5.24 (``conversion_mapping``): models are moved in memory (``model.language_model.``),
and experts are packed; ``save_pretrained`` takes that back. Which rules a checkpoint needs, a reference decides: a rule
holds where the name that it gives is one of the reference's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Move:
    """One part of a name for another one: at its beginning, or (``inside``) of whole segments anywhere behind it."""

    rule: str
    trained: str
    served: str
    inside: bool = False

    def forward(self, name: str) -> str | None:
        """Return the served name, or ``None`` for one that the rule says nothing of."""
        return _moved(name, self.trained, self.served, inside=self.inside)

    def back(self, name: str) -> str | None:
        """Return the name of training for a served one."""
        return _moved(name, self.served, self.trained, inside=self.inside)


def _moved(name: str, old: str, new: str, *, inside: bool) -> str | None:
    if not inside:
        return new + name.removeprefix(old) if name.startswith(old) else None
    parts = re.split(rf"(?<=\.){re.escape(old)}(?=\.|$)", name, maxsplit=1)
    return new.join(parts) if len(parts) == 2 else None


LANGUAGE, VISION, PROJECTOR = "language-model-prefix", "vision-prefix", "projector-prefix"


@dataclass(frozen=True, slots=True)
class Style:
    """How a group of model types is named: ``moves``, and whether packed experts are written one by one.

    ``experts`` are the served names of a gate, an up and a down projection; packed ones lie ``[E, 2I, H]`` (gate rows,
    then up rows) and ``[E, H, I]`` in memory.
    """

    types: tuple[str, ...]
    moves: tuple[Move, ...] = ()
    experts: tuple[str, str, str] | None = None


USUAL_EXPERTS = ("gate_proj", "up_proj", "down_proj")
MIXTRAL_EXPERTS = ("w1", "w3", "w2")

_LLAVA = (
    Move(LANGUAGE, "model.language_model.", "language_model.model."),
    Move("head-prefix", "lm_head.", "language_model.lm_head."),
    Move(VISION, "model.vision_tower.", "vision_tower."),
    Move("vision-model-prefix", "model.vision_tower.", "vision_tower.vision_model."),
    Move(VISION, "model.vision_model.", "vision_model."),
    Move("audio-prefix", "model.audio_tower.", "audio_tower."),
    Move(PROJECTOR, "model.multi_modal_projector.", "multi_modal_projector."),
    Move("image-newline", "model.image_newline", "image_newline"),
    Move("vision-embeddings-prefix", "model.vision_embed_tokens.", "vision_embed_tokens."),
    Move("image-tower-prefix", "model.image_tower.", "image_tower."),
    Move("video-tower-prefix", "model.video_tower.", "video_tower."),
)
_MIXTRAL = (
    Move("sparse-moe", "mlp.experts", "block_sparse_moe.experts", inside=True),
    Move("sparse-moe", "mlp.gate", "block_sparse_moe.gate", inside=True),
    Move("sparse-moe", "mlp.e_score_correction_bias", "block_sparse_moe.e_score_correction_bias", inside=True),
)

STYLES = (
    Style(
        ("qwen2_vl", "qwen2_5_vl"),
        (Move(LANGUAGE, "model.language_model.", "model."), Move(VISION, "model.visual.", "visual.")),
    ),
    Style(
        (
            *(
                "llava",
                "llava_next",
                "llava_next_video",
                "llava_onevision",
                "paligemma",
                "gemma3",
                "aya_vision",
                "aria",
            ),
            *(
                "got_ocr2",
                "internvl",
                "vipllava",
                "mistral3",
                "mllama",
                "fuyu",
                "video_llava",
                "qwen2_audio",
                "voxtral",
            ),
        ),
        _LLAVA,
    ),
    Style(("mixtral", "minimax", "minimax_m2"), _MIXTRAL, MIXTRAL_EXPERTS),
    Style(
        ("ernie4_5_moe",),
        (Move("router-bias", "mlp.gate.moe_statics", "mlp.moe_statics", inside=True),),
        USUAL_EXPERTS,
    ),
    Style(
        ("exaone_moe",),
        (Move("router-bias", "mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias", inside=True),),
        USUAL_EXPERTS,
    ),
    Style(("lfm2_moe",), (), MIXTRAL_EXPERTS),
    Style(
        ("phimoe",),
        (Move("sparse-moe", "mlp.router", "block_sparse_moe.gate", inside=True), _MIXTRAL[0]),
        MIXTRAL_EXPERTS,
    ),
    Style(("gpt_neox",), (Move("head-name", "lm_head.", "embed_out."),)),
    Style(
        (
            *("qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "afmoe", "beam"),
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "glm4_moe", "glm4_moe_lite"),
            *("glm_moe_dsa", "glm4v_moe", "longcat_flash", "solar_open", "mellum", "hunyuan_v1_moe", "flex_olmo"),
            *("olmoe", "sarvam_mla", "jamba", "cohere2_moe"),
        ),
        (),
        USUAL_EXPERTS,
    ),
    Style(("qwen3_vl_moe",)),
)

TURNED_IN_MEMORY = frozenset({"gpt_oss", "llama4", "llama4_text"})
"""Types whose packed experts lie ``[E, H, 2I]`` in memory, and on the hub: they are never taken apart by halves."""

TURNED_ON_HUB = frozenset({"qwen3_vl_moe"})
"""Types whose packed experts have their last two axes exchanged on the hub, under the same names."""


def style_of(types: Iterable[str]) -> Style | None:
    """Return how the first of these model types that is known is served."""
    return next((style for name in types for style in STYLES if name in style.types), None)


def moves_for(types: Sequence[str]) -> tuple[Move, ...]:
    """Return the moves of a model's type; of a type that nobody knows, those of all."""
    known = [style for style in STYLES if any(name in style.types for name in types)]
    return tuple(dict.fromkeys(move for style in known or STYLES for move in style.moves))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A name that rules allow, and those rules; none for the name as it is."""

    name: str
    rules: tuple[str, ...] = field(default=())


def candidates(name: str, moves: Sequence[Move]) -> Iterator[Candidate]:
    """Yield the names that a tensor may have in a reference: its own, then those that one move of each kind gives."""
    begun = [Candidate(name), *_each(Candidate(name), (move for move in moves if not move.inside))]
    yield from begun
    inside = [move for move in moves if move.inside]
    for candidate in begun:
        yield from _each(candidate, inside)


def _each(candidate: Candidate, moves: Iterable[Move]) -> Iterator[Candidate]:
    for move in moves:
        for new in (move.forward(candidate.name), move.back(candidate.name)):
            if new is not None:
                yield Candidate(new, (*candidate.rules, move.rule))


def served(name: str, style: Style) -> str:
    """Return the name that a tensor is served under, as far as moves say."""
    for move in style.moves:
        new = move.forward(name)
        if new is not None:
            return new
    return name
