"""How much an adapter weighs: rank, alpha and what else PEFT's ``adapter_config.json`` or verl's own file say of it.

A weight is scaled by ``alpha / r``, with ``use_rslora`` by ``alpha / sqrt(r)``; ``rank_pattern`` and ``alpha_pattern``
say other values for modules whose path a key matches at its end. What nobody says is never made up.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint, Unmapped, UsageError
from ckpttool.formats.hf import ADAPTER_CONFIG
from ckpttool.formats.jsonfile import read_object

DEFAULT = "default"
FOLDER = "lora_adapter"
"""Where verl writes adapters inside other directories, and where they are written beside a fused model."""

_UNKNOWN_ALPHA = "Say it: --lora-alpha NUMBER. It is what the run was configured with (verl: lora_alpha)."

_NOT_FUSED = ("layer_replication", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config")
_NOT_FUSED_EITHER = ("kasa_config", "velora_config", "monteclora_config", "trainable_token_indices", "megatron_config")
"""Fields of ``adapter_config.json`` with which an adapter is more than ``B @ A``, or is not to be fused at all."""

_LONGEST = 256
"""Characters of a module's name up to which patterns are held against it: the time grows with their third power."""

_CHANGES_BASE = re.compile(r"(pissa|corda|olora|loftq|lora_ga)")
"""Ways to begin (``init_lora_weights``) that take out of the base what the adapter begins with."""


Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Settings:
    """What is said of one adapter.

    ``config`` is a whole ``adapter_config.json``, where there is one; ``where`` says which file the numbers are from.
    """

    alpha: float
    rank: int | None = None
    task_type: str | None = None
    rslora: bool = False
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""

    def alpha_of(self, path: str) -> float:
        """Return the alpha of a module."""
        return _matching(self.alphas, path, self.alpha)

    def rank_of(self, path: str) -> int | None:
        """Return the rank that a module is said to have."""
        return _matching(self.ranks, path, self.rank)

    def scale(self, path: str, rank: int) -> float:
        """Return what the product of a module's factors of this rank is multiplied by."""
        return self.alpha_of(path) / (math.sqrt(rank) if self.rslora else rank)

    @property
    def changed_base(self) -> str:
        """The way of beginning that has changed the base model, if it has."""
        begun = self.config.get("init_lora_weights")
        return begun if isinstance(begun, str) and _CHANGES_BASE.match(begun.lower()) else ""

    @property
    def unusual(self) -> tuple[str, ...]:
        """Fields by which this is no plain LoRA."""
        return tuple(name for name in (*_NOT_FUSED, *_NOT_FUSED_EITHER) if self.config.get(name))


def _matching(values: Mapping[str, Value], path: str, otherwise: Value) -> Value:
    """Return the value whose key, a regular expression, is the end of a path."""
    if values and len(path) > _LONGEST:
        message = f"a module has a name of {len(path):,} characters: {path[:60]}..."
        raise BrokenCheckpoint(message, hint="Patterns are not held against such names.", code="settings-unreadable")
    return next((value for key, value in values.items() if _ends_with(path, key)), otherwise)


def _ends_with(path: str, key: str) -> bool:
    return path == key or path.endswith(f".{key}") or _expression(key).match(path) is not None


@lru_cache(maxsize=1 << 16)
def _expression(key: str) -> re.Pattern[str]:
    """Compile a key once: there may be one a module, which is more than ``re`` itself keeps."""
    return re.compile(rf"(.*\.)?({key})$")


def _check_key(key: str, what: str, where: str) -> None:
    """Raise for a regular expression that is none, or that may take for ever."""
    usual = len(key) <= 200 and re.fullmatch(r"[\w.\\*+|()\[\]^$?:-]+", key) and not re.search(r"[*+?)][*+?{]", key)
    repeated, groups = key.count("*") + key.count("+"), key.count("(")
    optional = key.count("?") - key.count("(?")
    try:
        if not usual or repeated > 2 or repeated + optional + groups > 4:  # each of them multiplies what is tried
            raise re.error("too much of an expression")
        re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        message = f"{where}: {what} has a key that is not understood: {key[:60]!r}"
        raise BrokenCheckpoint(
            message, hint="Write the paths of modules instead.", code="settings-unreadable"
        ) from error


@dataclass(frozen=True, slots=True)
class Given:
    """What the user says of the adapters, and where to look: ``--lora-alpha``, ``--adapter-config``, the role.

    ``also`` says for people where else was looked.
    """

    alpha: float | None
    config: str | None
    roles: Sequence[Path]
    also: str = ""


def check_alpha(alpha: float | None) -> None:
    """Raise :class:`UsageError` for a ``--lora-alpha`` that is not above 0, or not finite."""
    if alpha is not None and not 0 < alpha < math.inf:
        raise UsageError(f"--lora-alpha {alpha:g}: not above 0")


def read_settings(given: Given, name: str, *, several: bool) -> Settings:
    """Return what is said of an adapter; with ``several`` in the checkpoint a file without a name is of ``default``.

    Raises :class:`UsageError` naming ``--lora-alpha`` where nothing says alpha, :class:`BrokenCheckpoint` for files
    that are damaged or contradict one another, :class:`Unmapped` for adapters of other kinds.
    """
    config, where = _find_config(given, name, several=several)
    meta, meta_where = (None, None) if several else _find_meta(given.roles)
    found = _of_config(config, str(where)) if config is not None and where is not None else None
    if meta is not None and meta_where is not None:
        other = _of_meta(meta, str(meta_where))
        if found is not None and given.config is None:
            check_same(found, other)
        found = found or other
    if found is None:
        if given.alpha is None:
            raise UsageError(f"the alpha of the adapter {name} is not known: {_looked(given)}", hint=_UNKNOWN_ALPHA)
        return Settings(given.alpha, where="--lora-alpha")
    if given.alpha is not None:
        return Settings(
            given.alpha, found.rank, found.task_type, found.rslora, {}, found.ranks, found.config, "--lora-alpha"
        )
    unknown = [key for key, alpha in (("lora_alpha", found.alpha), *found.alphas.items()) if not alpha]
    if unknown:
        message = f"{found.where}: {unknown[0]} is 0 or missing: with that the adapter would do nothing"
        raise UsageError(message, hint=_UNKNOWN_ALPHA)
    return found


def _looked(given: Given) -> str:
    return f"neither {ADAPTER_CONFIG} nor {layout.LORA_META} lies in {given.roles[0]} or above it{given.also}"


def _places(given: Given, name: str, *, several: bool) -> Iterator[Path]:
    """Yield where an ``adapter_config.json`` may be, in the order in which it is looked for."""
    for role in given.roles:
        for folder in (role, role / FOLDER, role / layout.V1_HUGGINGFACE, role / layout.V1_HUGGINGFACE / FOLDER):
            if is_name(name) and name != DEFAULT:
                yield folder / name
            if name == DEFAULT or not several:
                yield folder


def is_name(name: str) -> bool:
    """Tell whether a name is one of a folder, and of none elsewhere."""
    return Path(name).name == name and name not in ("", ".", "..") and "\0" not in name and len(os.fsencode(name)) < 256


def _find_config(given: Given, name: str, *, several: bool) -> tuple[dict[str, Any] | None, Path | None]:
    if given.config is not None:
        path = Path(given.config)
        if path.is_dir():
            nested = path / name / ADAPTER_CONFIG
            path = nested if is_name(name) and nested.is_file() else path / ADAPTER_CONFIG
        if not path.is_file():
            raise NotACheckpoint(f"--adapter-config {given.config}: no {ADAPTER_CONFIG} there")
        return _read(path), path
    for folder in _places(given, name, several=several):
        if (folder / ADAPTER_CONFIG).is_file():
            return _read(folder / ADAPTER_CONFIG), folder / ADAPTER_CONFIG
    return None, None


def _find_meta(roles: Sequence[Path]) -> tuple[dict[str, Any] | None, Path | None]:
    for folder in (*roles, *(role.parent for role in roles)):
        path = folder / layout.LORA_META
        if path.is_file():
            return _read(path), path
    return None, None


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_object(path)
    except BrokenCheckpoint as error:
        raise BrokenCheckpoint(f"{path.parent}/{error.message}", hint=error.hint, code=error.code) from error


def _of_meta(meta: Mapping[str, Any], where: str) -> Settings:
    """Read verl's ``{"r": int, "lora_alpha": int, "task_type": str}``."""
    return Settings(_alpha(meta, where), _rank(meta, where), _text(meta, "task_type"), where=where)


def _of_config(config: Mapping[str, Any], where: str) -> Settings:
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise Unmapped(f"{where}: adapters of kind {kind!r} are no LoRA", hint=_BY_PEFT, code="adapter-kind")
    return Settings(
        alpha=_alpha(config, where),
        rank=_rank(config, where),
        task_type=_text(config, "task_type"),
        rslora=_switch(config, "use_rslora", where),
        alphas={
            key: _number(value, f"alpha_pattern of {key}", where)
            for key, value in _pattern(config, "alpha_pattern", where)
        },
        ranks={
            key: _whole(value, f"rank_pattern of {key}", where)
            for key, value in _pattern(config, "rank_pattern", where)
        },
        config=config,
        where=where,
    )


_BY_PEFT = "Only LoRA and DoRA are known here. PEFT itself can fuse others: merge_and_unload()."


def _alpha(values: Mapping[str, Any], where: str) -> float:
    """Return alpha, 0 where it is not said."""
    alpha = values.get("lora_alpha")
    return 0.0 if alpha is None else _number(alpha, "lora_alpha", where)


def _rank(values: Mapping[str, Any], where: str) -> int | None:
    rank = values.get("r")
    return None if rank is None else _whole(rank, "r", where)


def _number(value: Any, what: str, where: str) -> float:
    if type(value) in (int, float) and math.isfinite(value) and value >= 0:
        return float(value)
    raise BrokenCheckpoint(
        f"{where}: {what} is {str(value)[:40]!r}, no number", hint=_UNKNOWN_ALPHA, code="settings-unreadable"
    )


def _whole(value: Any, what: str, where: str) -> int:
    if type(value) is int and value > 0:
        return value
    raise BrokenCheckpoint(f"{where}: {what} is {str(value)[:40]!r}, no rank", code="settings-unreadable")


def _switch(values: Mapping[str, Any], name: str, where: str) -> bool:
    value = values.get(name, False)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise BrokenCheckpoint(f"{where}: {name} is neither true nor false", code="settings-unreadable")


def _pattern(values: Mapping[str, Any], name: str, where: str) -> list[tuple[str, Any]]:
    pattern = values.get(name) or {}
    if not isinstance(pattern, dict):
        raise BrokenCheckpoint(f"{where}: {name} is no object", code="settings-unreadable")
    for key in pattern:
        _check_key(key, name, where)
    return list(pattern.items())


def _text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) else None


def check_same(config: Settings, meta: Settings) -> None:
    """Raise where the two files that say rank and alpha are not of one adapter."""
    for what, ours, theirs in (("r", config.rank, meta.rank), ("lora_alpha", config.alpha, meta.alpha)):
        if ours and theirs and ours != theirs:
            raise BrokenCheckpoint(
                f"{what} is {ours:g} in {config.where} and {theirs:g} in {meta.where}",
                hint="Which one is right? --adapter-config FILE, or --lora-alpha NUMBER.",
                code="settings-disagree",
            )
