"""``config.json``: the few words in it that a conversion changes, and where it is looked for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint, Problem
from ckpttool.formats.findings import listing
from ckpttool.formats.hfconfig import (
    CONFIG,
    DTYPE_KEYS,
    GENERATES,
    QUANTIZATION,
    TEXT,
    TIE,
    ModelConfig,
    nested,
    read_config,
)
from ckpttool.formats.hfearlier import Addition, additions, part_of, value_of
from ckpttool.formats.jsonfile import parse_object
from ckpttool.formats.quantised import Stored, is_quantised

__all__ = ["CONFIG", "GENERATES", "QUANTIZATION", "TIE", "Edits", "ModelConfig", "edited", "read_config"]
__all__ += ["read_side_config", "unquantised"]

_LITERAL = "\0"
_ESCAPED = "\\u0000"
MANY, LONG = 9, 60
"""Fields that are named in one line, and letters of what is around them."""

_QUOTED_LITERAL = re.compile(r'"\\u0000([^"\\]*)\\u0000"')
"""Numbers with a fraction are carried through as they are written, marked by what hardly a config has."""


def read_side_config(folder: Path | None, *, given: bool) -> tuple[ModelConfig | None, tuple[Problem, ...]]:
    """Read the config of a folder of side files; a damaged one is a problem, one that is missing a note.

    Raises :class:`NotACheckpoint` when the folder was ``given`` by the user and has none.
    """
    try:
        config = read_config(folder) if folder is not None else None
    except CkpttoolError as error:
        return None, (Problem(code=error.code, message=error.message, path=str(folder), hint=error.hint),)
    if config is not None:
        return config, ()
    if given and folder is not None:
        inside = [folder / name for name in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE) if (folder / name).is_dir()]
        hint = f"Did you mean {inside[0]}?" if inside else ""
        raise NotACheckpoint(f"--hf-config {folder}: no config.json in it", hint=hint)
    message = "no config.json: what is written can be loaded as tensors only, not as a model"
    hint = "Give the directory of the model that was trained: --hf-config DIR."
    return None, (Problem(code="no-config", severity="note", message=message, hint=hint),)


@dataclass(frozen=True, slots=True)
class Edits:
    """What a conversion changes in a config: ``untie`` makes it say that the head is no alias of the embeddings.

    ``fields`` are set at the top, each with its reason; ``removed`` are taken away wherever they are, with theirs.
    """

    untie: bool = False
    fields: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)


def unquantised(written: Iterable[Stored]) -> Mapping[str, str]:
    """Return what is removed from the config of weights that are not quantised, each field with the reason."""
    return {} if is_quantised(written) else dict.fromkeys(QUANTIZATION, "the weights are not quantised")


def edited(config: ModelConfig, dtype: str | None, edits: Edits) -> tuple[bytes, tuple[str, ...]]:
    """Return the file's new content and what was changed in it, in words; the bytes as they were when nothing was.

    ``dtype`` (torch's name) is what the weights are written in: every dtype field is made to say it, and one is added
    where there is none.
    """
    keep = _ESCAPED.encode() not in config.raw
    values = json.loads(config.raw, parse_float=(lambda text: f"{_LITERAL}{text}{_LITERAL}") if keep else float)
    changes: list[str] = []
    if dtype is not None:
        changes += _set_dtype(values, dtype)
    if edits.untie:
        changes += _set_untied(values)
    changes += _set(values, edits)
    changes += _say_earlier(values, parse_object(_written(config, values), config.path) if changes else config.values)
    return (_written(config, values), tuple(changes)) if changes else (config.raw, ())


def _written(config: ModelConfig, values: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(values, indent=2, ensure_ascii=config.raw.isascii())
    except RecursionError as error:
        raise BrokenCheckpoint(f"{config.path}: nested too deeply", code="bad-json") from error
    text = text if _ESCAPED.encode() in config.raw else _QUOTED_LITERAL.sub(r"\1", text)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _say_earlier(values: dict[str, Any], plain: Mapping[str, Any]) -> Iterator[str]:
    """Add what earlier readers look for elsewhere; ``plain`` are the values with numbers that are numbers."""
    added: dict[str, list[str]] = {}
    for addition in additions(plain):
        if isinstance(addition, Addition):
            part = part_of(addition, values)
            part[addition.field] = value_of(addition, part)
            name = ".".join((*(key[:LONG] for key in addition.path), addition.field))
            added.setdefault(addition.source[0], []).append(name)
    for source, names in added.items():
        has = "has it" if len(names) == 1 else "has them"
        yield f"{listing(names, MANY)}: added as {source} {has}, for transformers 4"


def _set(values: dict[str, Any], edits: Edits) -> Iterator[str]:
    for name, (value, why) in edits.fields.items():
        if values.get(name) != value:
            was = json.dumps(values[name]).replace(_ESCAPED, "") if name in values else "not there"
            values[name] = value
            yield f"{name}: {json.dumps(value)} (was {was}): {why}"
    for name, part in [("", values), *list(nested(values))]:
        for gone, why in edits.removed.items():
            if part.pop(gone, None) is not None:
                yield f"{f'{name}.' if name else ''}{gone}: removed, {why}"


def _set_dtype(values: dict[str, Any], dtype: str) -> Iterator[str]:
    if not any(key in values for key in DTYPE_KEYS):
        recent = str(values.get("transformers_version", "")).startswith("5")
        key = "dtype" if recent else "torch_dtype"
        values[key] = dtype
        yield f"{key}: {dtype} (was not there)"
    inner = [(name, part) for name, part in nested(values) if name.endswith("config") and name not in QUANTIZATION]
    for name, part in [("", values), *inner]:
        for key in DTYPE_KEYS:
            wrong = key in part and str(part[key]).removeprefix("torch.") != dtype
            if wrong and (part is values or isinstance(part[key], str)):
                yield f"{f'{name}.' if name else ''}{key}: {dtype} (was {part[key]})"
                part[key] = dtype


def _set_untied(values: dict[str, Any]) -> Iterator[str]:
    inner = [(f"{name}.", part) for name, part in nested(values) if name in TEXT or TIE in part]
    for name, part in [("", values), *inner]:
        if part.get(TIE) is not False:
            yield f"{name}{TIE}: false (was {json.dumps(part[TIE]) if TIE in part else 'not there'})"
            part[TIE] = False
