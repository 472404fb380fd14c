"""Files beside the weights: which are taken along byte for byte, which are not, and what one would miss."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpttool.errors import NotACheckpoint
from ckpttool.export.config import CONFIG, ModelConfig
from ckpttool.formats.hf import is_side_file
from ckpttool.plan import SideFile

_TAKEN = re.compile(r".*\.(json|jsonl|jinja|txt|model|tiktoken|py|vocab|spm|bpe|yaml|yml)|LICENSE.*|NOTICE.*")
_WEIGHTS = re.compile(
    r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|gguf|onnx|ot)(\.index\.json)?|.*\.index\.json|adapter_config\.json"
    r"|integrity\.json"
)
"""What is not taken along: weights, what tells where they lie, and hashes, which are of other files then."""

_FOLDERS = ("additional_chat_templates",)
_WANTED = {
    "generation_config.json": ("generation_config.json",),
    "tokenizer_config.json": ("tokenizer_config.json",),
    "a tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"),
}


@dataclass(frozen=True, slots=True)
class SideFiles:
    """What lies beside the weights: taken along, left where it is, and wanted but not found."""

    copied: tuple[SideFile, ...] = ()
    left: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def find_side_files(folder: Path | None, config: ModelConfig | None, *, crowded: bool = False) -> SideFiles:
    """Look into a folder of side files. Weights and their indexes are left; ``config.json`` is not listed here.

    In a ``crowded`` folder, which is the checkpoint itself, only what is known to belong to a model is seen.
    """
    if folder is None:
        return SideFiles(missing=(CONFIG, *_WANTED))
    try:
        names = [name for name in _names(folder) if name != CONFIG and (not crowded or is_side_file(name))]
        found = {name: _taken(folder, name) for name in names}
    except PermissionError as error:
        raise NotACheckpoint(f"{error.filename}: permission denied", code="unreadable") from error
    copied = tuple(file for file in found.values() if file is not None)
    left = tuple(name for name, file in found.items() if file is None)
    return SideFiles(copied, left, tuple(_missing({file.name for file in copied}, config)))


def side_paths(folder: Path | None, *, crowded: bool = False) -> list[Path]:
    """Return where :func:`find_side_files` looks by their names, and the config: what must not change meanwhile."""
    try:
        names = _names(folder) if folder is not None else []
    except OSError:  # told of by whoever reads it
        return []
    taken = (name for name in names if _TAKEN.fullmatch(name) and (not crowded or is_side_file(name)))
    return [Path(str(folder), name) for name in taken if not _WEIGHTS.fullmatch(name)]


def _taken(folder: Path, name: str) -> SideFile | None:
    """Return a file to copy; ``None`` for weights, for what we do not know, for what is no readable regular file."""
    if not _TAKEN.fullmatch(name) or _WEIGHTS.fullmatch(name):
        return None
    try:
        info = (folder / name).stat()
    except PermissionError:
        raise
    except OSError:  # a link that leads nowhere, or around in a circle
        return None
    if stat.S_ISREG(info.st_mode) and not os.access(folder / name, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / name))
    return SideFile(name, str(folder / name), info.st_size) if stat.S_ISREG(info.st_mode) else None


def is_of_a_model(name: str) -> bool:
    """Tell by its name what may lie in a directory that was written here: weights, side files, nothing of a user."""
    return bool(_WEIGHTS.fullmatch(name)) or is_side_file(name) or name in (*_FOLDERS, "LICENSE", "NOTICE")


def _names(folder: Path) -> list[str]:
    nested = [f"{sub}/{name}" for sub in _FOLDERS if (folder / sub).is_dir() for name in os.listdir(folder / sub)]
    return sorted([name for name in os.listdir(folder) if name not in _FOLDERS] + nested)


def _missing(names: set[str], config: ModelConfig | None) -> Iterable[str]:
    if config is None:
        yield CONFIG
    for what, files in _WANTED.items():
        if not names.intersection(files):
            yield what
    yield from sorted(_modules(config.values if config is not None else {}) - names)


def _modules(values: Mapping[str, Any]) -> set[str]:
    """Return the files of Python code that ``auto_map`` names: ``modeling_x.Class`` is in ``modeling_x.py``."""
    named = values.get("auto_map")
    classes: list[Any] = []
    for value in named.values() if isinstance(named, dict) else ():
        classes += value if isinstance(value, list) else [value]
    return {f"{name.rpartition('.')[0]}.py" for name in classes if isinstance(name, str) and "--" not in name}
