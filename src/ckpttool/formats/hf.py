"""Hugging Face directories: safetensors (single, sharded), ``pytorch_model*.bin``, PEFT adapters, configs alone.

A safetensors file is 8 bytes of header length, a JSON header, then the elements. Only headers are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem, Refused
from ckpttool.formats import torchzip
from ckpttool.formats.findings import Findings, listing
from ckpttool.formats.hfindex import check_index, check_index_there, check_numbering, check_twice
from ckpttool.formats.jsonfile import INDEX_MOST, read_object
from ckpttool.formats.rank import Held, RankReader
from ckpttool.formats.safetensorsfile import read_safetensors
from ckpttool.records import SHARD_NAMES
from ckpttool.tensors import Place, TensorInfo
from ckpttool.unpickle import Record, loads, name_of

FORMAT = "huggingface"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")

_BIN_FILE = re.compile(r"(pytorch_model(-\d{5}-of-\d{5})?|adapter_model)\.bin")
_SIDE_FILE = re.compile(
    r"(config|generation_config|adapter_config|preprocessor_config|processor_config|video_preprocessor_config"
    r"|special_tokens_map|added_tokens|vocab|tokenizer|tokenizer_config|chat_template)\.json"
    r"|merges\.txt|vocab\.txt|.*\.model|.*\.tiktoken|.*\.jinja|.*\.py"
)
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_CONFIG_KEYS = ("model_type", "architectures", "_class_name", "auto_map")
_TOKENIZER = re.compile(r"tokenizer.*|vocab\.(json|txt)|.*\.model|.*\.tiktoken")


@dataclass(frozen=True, slots=True, kw_only=True)
class HfSource:
    """An opened Hugging Face directory. ``weights`` are the files that hold tensors, ``side_files`` the others."""

    root: Path
    config: Mapping[str, Any] | None
    weights: tuple[str, ...]
    side_files: tuple[str, ...]
    tensors: Mapping[str, TensorInfo]
    problems: tuple[Problem, ...]
    format: str = FORMAT

    objects: Mapping[str, Place] = field(default_factory=dict)
    unsharded: Mapping[str, Any] | None = None

    def part_of(self, name: str) -> str:
        """Return ``adapter`` for LoRA weights, ``model`` for the others."""
        return "adapter" if "lora_" in name else "model"

    @property
    def adapter(self) -> bool:
        """Whether it is a PEFT adapter without its base model."""
        return ADAPTER_CONFIG in self.side_files and not any(name.startswith("model") for name in self.weights)

    @property
    def has_tokenizer(self) -> bool:
        """Whether tokenizer files lie in it."""
        return any(_TOKENIZER.fullmatch(name) for name in self.side_files)


def detect(path: Path) -> tuple[str, ...] | None:
    """Return the evidence for a Hugging Face directory, by file names, or ``None``."""
    names = set(os.listdir(path))
    evidence = [name for name in (ADAPTER_CONFIG, *INDEXES) if name in names and (path / name).is_file()]
    if CONFIG in names and _is_model_config(path / CONFIG):
        evidence.insert(0, CONFIG)
    weights = [name for name in weight_files(names) if (path / name).is_file()]
    if weights:
        evidence.append(listing(weights, 2))
    if not evidence and names & {"tokenizer.json", "tokenizer_config.json"}:
        evidence.append("tokenizer files")
    return tuple(evidence) or None


def is_side_file(name: str) -> bool:
    """Tell by its name a file that lies beside the weights of a model: a configuration, a tokenizer, its code."""
    return bool(_SIDE_FILE.fullmatch(name))


def _is_model_config(path: Path) -> bool:
    """Tell a model's configuration from the many other files of that name; a damaged one may be either."""
    try:
        content = read_object(path)
    except BrokenCheckpoint:
        return True
    except CkpttoolError:
        return False
    return any(key in content for key in _CONFIG_KEYS)


def weight_files(names: Iterable[str]) -> list[str]:
    """Return those names that files of weights have, sorted."""
    return sorted(name for name in names if name.endswith(".safetensors") or _BIN_FILE.fullmatch(name))


def open_(path: Path) -> HfSource:
    """Open a directory; damage becomes :attr:`HfSource.problems`, :class:`Refused` is raised."""
    names = os.listdir(path)
    found = Findings()
    on_disk = weight_files(names)
    weights, others = _of_the_model(path, on_disk, names, found)
    by_file: dict[str, dict[str, TensorInfo]] = {}
    for name in weights:
        try:
            by_file[name] = read_weights(path / name)
        except Refused:
            raise
        except CkpttoolError as error:
            found.of(error, name)
    check_numbering(weights, found)
    check_twice(by_file, found)
    check_index_there(on_disk, names, found)
    for index in INDEXES:
        if index in names:
            check_index(path, index, on_disk, by_file, found)
    config = None
    if CONFIG in names:
        try:
            config = read_object(path / CONFIG)
        except CkpttoolError as error:
            found.of(error, CONFIG)
    return HfSource(
        root=path,
        config=config,
        weights=tuple(weights),
        side_files=tuple(sorted([*others, *(name for name in names if _SIDE_FILE.fullmatch(name))])),
        tensors=MappingProxyType({name: info for tensors in by_file.values() for name, info in tensors.items()}),
        problems=found.all(),
    )


def _of_the_model(path: Path, weights: list[str], names: Iterable[str], found: Findings) -> tuple[list[str], list[str]]:
    """Split weight files into the model's and others: a second copy in another format, files no index names."""
    safetensors = [name for name in weights if name.endswith(".safetensors")]
    others = [name for name in weights if safetensors and not name.endswith(".safetensors")]
    if others:
        message = f"{listing(others)}: a second copy of the weights, not opened"
        found.problems.append(Problem(code="second-copy", severity="note", message=message))
    if safetensors and INDEXES[0] in names:
        named = _named_files(path / INDEXES[0])
        strays = [n for n in safetensors if named and n not in named and not _MODEL_FILE.fullmatch(n)]
        if strays:
            message = f"{listing(strays)}: not in {INDEXES[0]}, not part of the model"
            found.problems.append(Problem(code="file-not-in-index", severity="note", message=message))
        others += strays
    return [name for name in weights if name not in others], others


def _named_files(index: Path) -> set[str]:
    try:
        weight_map = read_object(index, INDEX_MOST).get("weight_map")
    except CkpttoolError:
        return set()
    return {file for file in weight_map.values() if isinstance(file, str)} if isinstance(weight_map, dict) else set()


def read_weights(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one weight file, from its header or zip index alone."""
    return read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)


def read_torch(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a ``torch.save`` file that holds a flat state dict.

    Raises :class:`BrokenCheckpoint` for anything else, a dict of other values among it.
    """
    archive = torchzip.open_archive(path)
    state, _ = loads(archive.read("data.pkl"), SHARD_NAMES, where=path.name)
    if not isinstance(state, dict):
        raise BrokenCheckpoint(f"{path.name}: holds no state dict", code="no-state-dict")
    reader = RankReader(archive, 0)
    deep = [name_of(name) for name, value in state.items() if not isinstance(value, Record) and _has_tensors(value)]
    if deep:
        raise BrokenCheckpoint(
            f"{path.name}: {listing(deep)} holds tensors of its own: no flat state dict", code="no-state-dict"
        )
    held = {name_of(name): _held(reader, path.name, name_of(name), value) for name, value in state.items()}
    if len(held) != len(state):
        raise BrokenCheckpoint(f"{path.name}: keys of its state dict that are one name as text", code="no-state-dict")
    if held and not any(held.values()):
        raise BrokenCheckpoint(f"{path.name}: no value of its state dict is a tensor", code="no-state-dict")
    return {name: TensorInfo(name, h.dtype, h.shape, tuple(h.pieces), (), "whole") for name, h in held.items() if h}


def _has_tensors(value: Any) -> bool:
    """Tell whether a value is a tensor or a container that has some, however deep."""
    open_, seen = [value], set()
    while open_:
        one = open_.pop()
        if isinstance(one, Record) and one.name.startswith("_rebuild"):
            return True
        if isinstance(one, (dict, list, tuple)) and id(one) not in seen:
            seen.add(id(one))
            open_ += one.values() if isinstance(one, dict) else one
    return False


def _held(reader: RankReader, file: str, name: str, value: Any) -> Held | None:
    try:
        return reader.held(value)
    except BrokenCheckpoint as error:
        raise BrokenCheckpoint(f"{file}: {name}: {error.message}", hint=error.hint, code=error.code) from error
