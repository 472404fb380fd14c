"""What ``config.json`` as transformers 5 writes it does not say where earlier readers look.

Transformers 5 keeps all about rotary embeddings in ``rope_parameters``, and writes some fields under the name that
they are an alias of. Transformers 4 looks elsewhere and takes its defaults without a word. Both forms can stand side by
side: 5 reads a config with what is added here as it reads it without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckpttool.formats.families4 import ALIASES, DEFAULT_SCALING, KNOWN, LAYERED, NEEDING, PARTIAL, SCALINGS, THETA
from ckpttool.formats.hfconfig import TEXT

__all__ = ["Addition", "Found", "Unclear", "additions", "part_of", "value_of"]

ROPE, SCALING = "rope_parameters", "rope_scaling"
_FACTOR = "partial_rotary_factor"
_PLAIN = frozenset({"rope_theta", "rope_type", "type", _FACTOR})
"""What of the parameters is no part of a scaling."""

_UNSCALED, _SCALED = ("default", "axial"), ("linear", "dynamic", "yarn", "llama3")
_PHI = ("phi3", "phi4_multimodal")
_LONG = ("short_factor", "long_factor")
_ORIGINAL = "original_max_position_embeddings"
_NAMES = dict.fromkeys(("gpt_neox", "gpt_neox_japanese"), ("rotary_emb_base", "rotary_pct"))
_PARTS, _DEEPEST = (*TEXT, "encoder"), 3


@dataclass(frozen=True, slots=True)
class Addition:
    """A field that is missing: ``path`` leads to the configuration, ``source`` from there to what it is to say.

    Of a table, ``only`` says what is taken: its new keys, each with the old one; none at all is ``null``. ``taken`` is
    what transformers 4 has without the field, ``harmful`` whether that is something else.
    """

    path: tuple[str, ...]
    field: str
    source: tuple[str, ...]
    only: Mapping[str, str] | None = None
    taken: Any = None
    harmful: bool = False


@dataclass(frozen=True, slots=True)
class Unclear:
    """A configuration to which nothing is added, and why: no earlier form says it, or one is there that does not."""

    path: tuple[str, ...]
    why: str


Found = Iterator[Addition | Unclear]
_Path = tuple[str, ...]
_Table = Mapping[str, Any]


def additions(config: Mapping[str, Any]) -> Found:
    """Yield what a config lacks for earlier readers, and what cannot be said to them.

    Nothing for models that transformers 4 does not know, and for fields that are there and say the same.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KNOWN:
        return
    if isinstance(config.get("dtype"), str) and config.get("torch_dtype") is None:
        yield Addition((), "torch_dtype", ("dtype",))
    for path, part in _parts(config, ()):
        kind = part.get("model_type")
        if isinstance(kind, str):
            yield from _aliases(path, part, kind)
            yield from _rope(path, part, kind)


def part_of(addition: Addition, config: Mapping[str, Any]) -> Any:
    """Return the configuration within a config that an addition belongs to."""
    return _walk(config, addition.path)


def value_of(addition: Addition, part: Mapping[str, Any]) -> Any:
    """Return what an addition says; the configuration may be another parse of the same text."""
    found = _walk(part, addition.source)
    if addition.only is None:
        return found
    return {new: found[old] for new, old in addition.only.items()} or None


def _walk(table: Any, keys: _Path) -> Any:
    for key in keys:
        table = table[key]
    return table


def _parts(part: _Table, path: _Path) -> Iterator[tuple[_Path, _Table]]:
    yield path, part
    for key, inner in part.items() if len(path) < _DEEPEST else ():
        if isinstance(inner, dict) and (key.endswith("config") or key in _PARTS):
            yield from _parts(inner, (*path, key))


def _aliases(path: _Path, part: _Table, kind: str) -> Found:
    for old, new, taken in ALIASES.get(kind, ()):
        said = part.get(new)
        if type(said) is not int and not (isinstance(said, list) and all(type(item) is int for item in said)):
            continue
        if part.get(old) is None:
            yield Addition(path, old, (new,), None, taken, said != taken)
        elif part[old] != said:
            yield Unclear(path, f"{old} says something else than {new}")


def _rope(path: _Path, part: _Table, kind: str) -> Found:
    """Yield for the rotary embeddings of one configuration: all of it, or why nothing."""
    rope = part.get(ROPE)
    if not isinstance(rope, dict):
        return
    wanted = list(_layered(path, rope, kind) if kind in LAYERED else _flat(path, rope, kind))
    unclear = [found for found in wanted if isinstance(found, Unclear)]
    fields = [found for found in wanted if isinstance(found, Addition)]
    unclear += [Unclear(path, f"{name} says something else than {ROPE}") for name in _contradicting(part, fields)]
    if unclear:
        yield unclear[0]
        return
    yield from (
        field for field in fields if part.get(field.field) is None and (field.only != {} or SCALING not in part)
    )


def _contradicting(part: _Table, fields: list[Addition]) -> Iterator[str]:
    """Yield the fields that are there and say something else.

    Where there is an old scaling, 5 takes it for the whole of the parameters, with what else is there in the old form:
    what is missing then is not what the new form says of it, and may not be added.
    """
    meant = {field.field: value_of(field, part) for field in fields}
    for name, value in meant.items():
        if part.get(name) is not None and _bare(part[name]) != _bare(value):
            yield name
    if part.get(SCALING) is not None and fields:
        unscaled = SCALING not in meant and _bare(part[SCALING]) != _bare({"rope_type": "default"})
        if unscaled or any(part.get(name) is None for name in meant):
            yield SCALING


def _bare(said: Any) -> Any:
    """Return a value in a form that compares: a scaling without what is said elsewhere, too."""
    if not isinstance(said, dict):
        return said
    kind = said.get("rope_type", said.get("type"))
    return {
        **{key: value for key, value in said.items() if key not in _PLAIN},
        "": "default" if kind == "mrope" else kind,
    }


def _layered(path: _Path, rope: _Table, kind: str) -> Found:
    """Yield for parameters by type of layers: those of full attention may be scaled, those of the others not."""
    full, sliding = rope.get("full_attention"), rope.get("sliding_attention")
    if not isinstance(full, dict) or not isinstance(sliding, dict) or not (_is_sound(full) and _is_sound(sliding)):
        return
    theta, local, scales = LAYERED[kind]
    one = theta == local
    if _FACTOR in full or set(sliding) - {"rope_theta", "rope_type"} or sliding["rope_type"] != "default":
        yield Unclear(path, f"{ROPE} says more of sliding_attention than has an earlier form")
    elif one and full["rope_theta"] != sliding["rope_theta"]:
        yield Unclear(path, f"two of {theta[0]} have no earlier form")
    elif not scales and full["rope_type"] != "default":
        yield Unclear(path, f"rope_type {full['rope_type'][:20]} has no earlier form")
    else:
        yield _theta(path, full, *theta, "full_attention")
        if not one:
            yield _theta(path, sliding, *local, "sliding_attention")
        yield from _scaling(path, full, kind, (ROPE, "full_attention"))


def _flat(path: _Path, rope: _Table, kind: str) -> Found:
    theta, factor = _NAMES.get(kind, ("rope_theta", _FACTOR))
    if kind not in THETA:
        return
    if any(isinstance(value, dict) for value in rope.values()):
        yield Unclear(path, f"{ROPE} by types of layers has no earlier form")
    elif _is_sound(rope):
        yield _theta(path, rope, theta, THETA[kind])
        said = rope.get(_FACTOR)
        if _is_number(said) and (kind not in _PHI or said != 1):
            taken = PARTIAL.get(kind, 1.0)
            yield Addition(path, factor, (ROPE, _FACTOR), None, taken, said != taken)
        yield from _scaling(path, rope, kind, (ROPE,))


def _theta(path: _Path, rope: _Table, field: str, taken: float, *layers: str) -> Addition:
    return Addition(path, field, (ROPE, *layers, "rope_theta"), None, taken, rope["rope_theta"] != taken)


def _scaling(path: _Path, rope: _Table, kind: str, source: _Path) -> Found:
    """Yield the scaling, in which the sections of the head for pictures are kept, too."""
    scaling, taken = rope["rope_type"], DEFAULT_SCALING.get(kind)
    keys = {key: key for key in rope if key not in _PLAIN}
    if scaling in _UNSCALED and "mrope_section" not in keys:
        if kind in NEEDING:
            yield Addition(path, SCALING, source, {"rope_type": "rope_type"}, None, harmful=True)
        elif taken and taken["rope_type"] not in _UNSCALED:
            yield Addition(path, SCALING, source, {}, taken, harmful=True)
    elif scaling == "longrope" and kind in _PHI and set(_LONG) <= set(keys) <= {*_LONG, _ORIGINAL}:
        yield Addition(path, SCALING, source, {"type": "rope_type", **{key: key for key in _LONG}}, None, harmful=True)
    elif scaling not in (*SCALINGS.get(kind, _SCALED), "default"):
        yield Unclear(path, f"rope_type {scaling[:20]} has no earlier form")
    else:
        only = {"rope_type": "rope_type", **keys}
        yield Addition(path, SCALING, source, only, taken, _bare(rope) != _bare(taken))


def _is_sound(rope: _Table) -> bool:
    """Tell parameters as 5 writes them: plain values and lists of such, a base that is a number, a type by name."""
    lists = (value for value in rope.values() if isinstance(value, list))
    return (
        _is_number(rope.get("rope_theta"))
        and isinstance(rope.get("rope_type"), str)
        and not any(isinstance(value, dict) for value in rope.values())
        and not any(isinstance(item, list | dict) for several in lists for item in several)
    )


def _is_number(said: Any) -> bool:
    return type(said) in (int, float) and said > 0 and (type(said) is int or math.isfinite(said))
