"""Settings from a file, TOML or JSON, whose keys are the options of ``watch``; every problem of it told at once."""

from __future__ import annotations

import importlib
import json
import math
import stat
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ckpttool.errors import Problem, UsageError
from ckpttool.watching.durations import seconds
from ckpttool.watching.settings import Settings

MOST = 1 << 20
"""Bytes of the largest file of settings that is read."""

Reader = Callable[[Any, Path], Any]
"""Returns the value of a field from that of a key and the directory of the file; raises ``ValueError``."""


def read_settings(path: Path) -> Settings:
    """Return the settings in a file that ends in ``.toml`` or ``.json``.

    Keys are the long options of ``watch`` with ``-`` or ``_``: ``exec``, ``callback`` and ``role`` take a string or a
    list, ``callback-config`` a table; times are seconds or text such as ``"2h"``. Directories and the file of the state
    are relative to the directory of the file. A value of ``null`` is that of a key that is absent. Raises
    :class:`UsageError` with every unknown key, wrong type and number out of range.
    """
    fields: dict[str, Any] = {}
    problems = []
    for key, value in _parsed(path).items():
        try:
            field, read = _field_of(key)
            if field in fields:
                raise ValueError("is there twice, with - and with _")
            if value is not None:
                fields[field] = read(value, path.absolute().parent)
        except ValueError as error:
            problems.append(Problem(code="bad-setting", message=f"{key}: {error}", path=str(path)))
    if problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise UsageError(f"{path}: {count} in the settings", hint=_KEYS, code="bad-settings", problems=problems)
    return Settings(**fields)


def _parsed(path: Path) -> Mapping[str, Any]:
    """Return what a file holds; the parsers of the standard library execute nothing."""
    parse = {".toml": _toml, ".json": _json}.get(path.suffix.lower())
    if parse is None:
        raise UsageError(f"{path}: settings are read from TOML or JSON", hint="Name a file .toml or .json.")
    try:
        value = parse(_text(path))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint="Name a file with settings.") from error
    except RecursionError as error:
        raise UsageError(f"{path}: nested too deeply", hint="Correct the file.") from error
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint="Correct the file.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a table of settings, but {_kind(value)}", hint=_KEYS)
    return value


def _text(path: Path) -> str:
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("not a file")
    with path.open("rb") as file:
        raw = file.read(MOST + 1)
    if len(raw) > MOST:
        raise ValueError(f"more than {MOST:,} bytes of settings, which is more than is read")
    return raw.decode()


def _toml(text: str) -> Any:
    try:
        tomllib = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise ValueError("TOML is read by Python 3.11 and later; here, write the same settings as JSON") from None
    return tomllib.loads(text)


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise ValueError(f"{', '.join(twice)}: there twice")
    return dict(pairs)


def _field_of(key: str) -> tuple[str, Reader]:
    name = key.replace("_", "-")
    if name not in READERS:
        close = get_close_matches(name, READERS, 1, 0.7)
        raise ValueError(f"no such setting{f'; did you mean {close[0]}?' if close else ''}")
    return READERS[name]


def _kind(value: Any) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return "nothing" if value is None else kinds.get(type(value), "a date or time")


def _wanted(what: str, value: Any) -> ValueError:
    shown = json.dumps(value) if isinstance(value, bool | int | float | str) else _kind(value)
    return ValueError(f"{what} is wanted, not {shown if len(shown) < 60 else _kind(value)}")


def _flag(value: Any, _: Path) -> bool:
    if not isinstance(value, bool):
        raise _wanted("true or false", value)
    return value


def _text_of(value: Any, _: Path) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _wanted("text", value)
    return value


def _texts(value: Any, folder: Path) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    return tuple(_text_of(each, folder) for each in values)


def _place(value: Any, folder: Path) -> str:
    try:
        return str(folder / Path(_text_of(value, folder)).expanduser())
    except RuntimeError as error:
        raise ValueError(f"{value}: {error}") from error


def _table(value: Any, _: Path) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _wanted("a table", value)
    return value


def _count(least: int) -> Reader:
    def read(value: Any, _: Path) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise _wanted("a whole number", value)
        if value < least:
            raise ValueError(f"{value} is too small; at least {least} is wanted")
        return value

    return read


def _time(least: float, most: float = 1e9) -> Reader:
    def read(value: Any, _: Path) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise _wanted('seconds, or a time such as "30s" or "2h",', value)
        number = seconds(value) if isinstance(value, str) else value
        if not (math.isfinite(number) and least <= number <= most):
            raise ValueError(f"{value} is out of range; from {least:g} to {most:g} seconds are wanted")
        return float(number)

    return read


READERS: Mapping[str, tuple[str, Reader]] = {
    "verify": ("verify", _flag),
    "migrate": ("migrate", _flag),
    "to-hf": ("to_hf", _place),
    "dtype": ("dtype", _text_of),
    "lora": ("lora", _text_of),
    "hf-config": ("hf_config", _place),
    "callback": ("callbacks", _texts),
    "callback-config": ("callback_config", _table),
    "exec": ("exec", _texts),
    "shell": ("shell", _flag),
    "keep-last": ("keep_last", _count(1)),
    "keep-every": ("keep_every", _count(1)),
    "yes": ("yes", _flag),
    "pin": ("pin", _flag),
    "retries": ("retries", _count(0)),
    "keep-going": ("keep_going", _flag),
    "role": ("roles", _texts),
    "state": ("state", _place),
    "interval": ("interval", _time(0.01)),
    "background": ("background", _flag),
    "patience": ("patience", _time(0)),
}
"""By key: the field of the settings, and what reads it."""

_KEYS = f"Settings are: {', '.join(READERS)}."
