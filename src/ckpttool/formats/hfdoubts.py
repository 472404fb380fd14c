"""What the small files of a model say that its weights, or those who load it, will not bear out.

Everything here is a note: the files are those of the user, and are copied as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.errors import CkpttoolError, Problem
from ckpttool.formats import hftokens
from ckpttool.formats.families import TIED, UNTIED
from ckpttool.formats.findings import listing
from ckpttool.formats.hfconfig import CONFIG, DTYPE_KEYS, QUANTIZATION, TEXT, TIE, ModelConfig, is_head, nested
from ckpttool.formats.hfearlier import Addition, Unclear, additions, part_of, value_of
from ckpttool.formats.hftokens import TOKENIZER
from ckpttool.formats.jsonfile import read_object
from ckpttool.formats.quantised import Stored, is_quantised
from ckpttool.tensors import CASTABLE

GENERATION = "generation_config.json"

FEW, LONG = 4, 60
"""Fields that are named, and letters of what is around them: a hostile file has many and long ones."""

_FORWARDING = """
fast_vlm glm4v glm4v_moe glm_ocr hunyuan_vl llava llava_next_video llava_onevision minimax_m3_vl paddleocr_vl
perception_lm qwen2_5_vl qwen2_vl shieldgemma2 vibevoice video_llama_3
"""
"""Model types of which transformers 5 takes ``true`` from the nested configuration, too."""


__all__ = ["GENERATION", "TOKENIZER", "Beside", "Weights", "doubts", "read_tokenizer", "weights_of"]


@dataclass(frozen=True, slots=True)
class Weights:
    """What is known of the weights: bytes of floating-point parameters by dtype, what else they show.

    ``masters`` tells that they are those of a trainer, beside which the config is that of the model to come.
    """

    dtypes: Mapping[str, int]
    quantised: bool
    head: bool
    masters: bool = False

    @property
    def main(self) -> str | None:
        """The dtype that most bytes have; ``None`` where none is a plain float."""
        return max(self.dtypes, key=lambda dtype: self.dtypes[dtype]) if self.dtypes else None


def weights_of(tensors: Iterable[Stored], *, masters: bool = False) -> Weights | None:
    """Return what tensors show; ``None`` for none at all. ``nbytes`` of a tensor are counted once."""
    every = list(tensors)
    held: Counter[str] = Counter()
    for tensor in every:
        if tensor.dtype in CASTABLE:
            held[tensor.dtype] += tensor.nbytes
    head = any(is_head(tensor.name, tensor.shape) for tensor in every)
    return Weights(held, is_quantised(every), head, masters) if every else None


@dataclass(frozen=True, slots=True)
class Beside:
    """The small files of a model; ``tokenizer`` is ``None`` where there is none, or none that can be read."""

    config: ModelConfig | None
    tokenizer: Mapping[str, Any] | None
    names: frozenset[str]


def read_tokenizer(path: Path) -> tuple[Mapping[str, Any] | None, tuple[Problem, ...]]:
    """Read a ``tokenizer_config.json``; a damaged one is a note, for the weights are sound without it."""
    try:
        return read_object(path), ()
    except CkpttoolError as error:
        message = error.message if TOKENIZER in error.message else f"{TOKENIZER}: {error.message}"
        return None, (Problem(code=error.code, message=message, path=TOKENIZER, severity="note"),)


def doubts(beside: Beside, weights: Weights | None) -> Iterator[Problem]:
    """Yield a note for everything in the files that is doubtful; paths are relative to their directory."""
    config = beside.config
    yield from hftokens.doubts(beside.tokenizer or {}, config, has_fast="tokenizer.json" in beside.names)
    if config is None:
        return
    if config.generates and GENERATION not in beside.names:
        yield _no_generation(config)
    yield from _tie(config, weights)
    yield from _earlier(config)
    if weights is not None and weights.main is not None and not weights.quantised:
        yield from _quantisation(config, weights)
        yield from _dtypes(config, weights)


def _note(code: str, message: str, hint: str) -> Problem:
    return Problem(code=code, message=message, path=CONFIG, hint=hint, severity="note")


def _no_generation(config: ModelConfig) -> Problem:
    says = any("eos_token_id" in part for part in (config.values, *config.text_parts()))
    mute = "" if says else ", which does not say it,"
    message = f"no {GENERATION}: where a text ends is then for {CONFIG}{mute} and the tokenizer to say, and chat "
    message += "models often end at another token"
    hint = "Copy it from the model that was trained; without it, generation may not stop."
    return Problem(code="no-generation-config", message=message, path=GENERATION, hint=hint, severity="note")


def _quantisation(config: ModelConfig, weights: Weights) -> Iterator[Problem]:
    parts = [("", config.values), *nested(config.values)]
    fields = [_dotted(name, key) for name, part in parts for key in QUANTIZATION if part.get(key) is not None]
    if fields:
        message = f"{CONFIG} has {listing(fields, FEW)}, but the weights are not quantised"
        then = "merge-fsdp and to-hf do" if weights.masters else "a loader would look for scales that are not there"
        yield _note("quantization-config", message, f"Take it out: {then}.")


def _dotted(name: str, key: str) -> str:
    return f"{name[:LONG]}.{key}" if name else key


def _dtypes(config: ModelConfig, weights: Weights) -> Iterator[Problem]:
    """Yield where fields say another dtype than the weights have; towers may have their own."""
    lies: dict[str, list[str]] = {}
    for name, part in [("", config.values), *nested(config.values)]:
        for key, said in _said_dtypes(name, part):
            own = name and name not in TEXT and weights.dtypes.get(said)
            if said != weights.main and not own:
                lies.setdefault(said, []).append(_dotted(name, key))
    for said, fields in lies.items():
        yield _lie(said, fields, weights)


def _said_dtypes(name: str, part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if name and (not name.endswith("config") or name in QUANTIZATION) and name not in TEXT:
        return
    for key in DTYPE_KEYS:
        said = part.get(key)
        dtype = said.removeprefix("torch.") if isinstance(said, str) else ""
        if dtype in CASTABLE:
            yield key, dtype


def _lie(said: str, fields: list[str], weights: Weights) -> Problem:
    main, narrow = weights.main, ("bfloat16", "float16")
    where = f"{CONFIG} says {said} ({listing(fields, FEW)})"
    if weights.masters and main == "float32" and said in narrow:
        message = f"{where}, the weights here are float32: trainers keep master weights so"
        short = {"bfloat16": "bf16", "float16": "fp16"}[said]
        return _note("dtype", message, f"What is converted stays float32; to write {said}: --dtype {short}.")
    most = "" if len(weights.dtypes) == 1 else "most of "
    message = f"{where}, {most}the weights are {main}"
    if weights.masters:
        return _note("config-dtype", message, f"What is converted is {main}, and its {CONFIG} says so.")
    hint = f"transformers 5 and vLLM cast to what it says. To load the weights as they are, write {main} there."
    return _note("config-dtype", message, hint)


def _earlier(config: ModelConfig) -> Iterator[Problem]:
    """Yield one note where readers before transformers 5 take other values, or would whatever is added for them."""
    found = list(additions(config.values))
    for unclear in (one for one in found if isinstance(one, Unclear)):
        where = f"{CONFIG}, {'.'.join(unclear.path)[:LONG]}" if unclear.path else CONFIG
        hint = "Load it with transformers 5, or with what reads rope_parameters."
        yield _note("config-of-5", f"{where}: {unclear.why}; transformers 4 makes another model of it", hint)
        return
    harm = [_taken(one, part_of(one, config.values)) for one in found if isinstance(one, Addition) and one.harmful]
    if harm:
        message = f"{CONFIG} is written for transformers 5; transformers 4 does not see {listing(harm, FEW)}"
        hint = (
            "It loads without an error and writes nonsense, or not at all. merge-fsdp and to-hf write what both read."
        )
        yield _note("config-of-5", message, hint)


def _taken(addition: Addition, part: Mapping[str, Any]) -> str:
    """Return the field with what it says and what is taken instead, in short."""
    name = _dotted(".".join(addition.path), addition.field)
    said, taken = (_brief(value) for value in (value_of(addition, part), addition.taken))
    return f"{name} {said} and takes {taken}"


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "mrope" if "mrope_section" in value else str(value.get("rope_type", value.get("type")))[:20]
    return "none" if value is None else f"{value:.12g}" if isinstance(value, float) else str(value)[:20]


def _tie(config: ModelConfig, weights: Weights | None) -> Iterator[Problem]:
    """Yield where transformers 4, which asks the text configuration, and 5, which asks the top, hear different things.

    Of a family that forwards a nested ``true`` to the top, only a contradiction in so many words is told.
    """
    inner = [(name, part) for name, part in nested(config.values) if name in TEXT]
    if not inner or (config.architectures and not config.generates):
        return
    name, part = next(((n, p) for n, p in inner if _bool(p) is not None), inner[0])
    top, below = _bool(config.values), _bool(part)
    new, old = (_default(said) if word is None else word for said, word in ((config.values, top), (part, below)))
    forwarded = below is True and config.values.get("model_type") in _FORWARDING.split()
    known = {top, below} == {True, False} or (top is None and below is not None and not forwarded)
    if new == old or not (known or (below is None and top is not None and old is not None)):
        return
    asked = "transformers takes true" if forwarded else "transformers 5 asks the one, transformers 4 the other"
    message = f"{TIE} is {_word(top, new)} at the top of {CONFIG} and {_word(below, old)} in {name}: {asked}"
    yield _note("tie-disagrees", message, _tie_hint(weights))


def _bool(part: Mapping[str, Any]) -> bool | None:
    said = part.get(TIE)
    return said if isinstance(said, bool) else None


def _default(part: Mapping[str, Any]) -> bool | None:
    """Return whether a family ties where nothing is said; ``None`` where that is not known."""
    kind = part.get("model_type")
    kinds = {kind, kind.removesuffix("_text")} if isinstance(kind, str) else set()
    return True if kinds & TIED else False if kinds & UNTIED else None


def _word(said: bool | None, taken: bool | None) -> str:
    if said is not None:
        return str(said).lower()
    return "not said" if taken is None else f"not said ({str(taken).lower()} by default)"


def _tie_hint(weights: Weights | None) -> str:
    if weights is None:
        return "Make both say the same."
    if weights.head:
        return "Set both to false: a head is among the weights, and is then loaded as it is."
    return "Set both to true: no head is among the weights, and where it is not tied one is made up."
