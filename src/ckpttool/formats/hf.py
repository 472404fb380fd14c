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
from ckpttool.formats.jsonfile import INDEX_MOST, parse_json, read_object
from ckpttool.formats.rank import RankReader
from ckpttool.records import SHARD_NAMES
from ckpttool.tensors import DTYPE_BITS, Piece, Place, TensorInfo, Wrap, dtype_bytes
from ckpttool.unpickle import loads, name_of

FORMAT = "huggingface"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
HEADER_MOST = 100_000_000  # the safetensors library's own limit

_BIN_FILE = re.compile(r"(pytorch_model(-\d{5}-of-\d{5})?|adapter_model)\.bin")
_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")
_SIDE_FILE = re.compile(
    r"(config|generation_config|adapter_config|preprocessor_config|processor_config|video_preprocessor_config"
    r"|special_tokens_map|added_tokens|vocab|tokenizer|tokenizer_config|chat_template)\.json"
    r"|merges\.txt|vocab\.txt|.*\.model|.*\.tiktoken|.*\.jinja|.*\.py"
)
_MODEL_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_CONFIG_KEYS = ("model_type", "architectures", "_class_name", "auto_map")
_TOKENIZER = re.compile(r"tokenizer.*|vocab\.(json|txt)|.*\.model|.*\.tiktoken")

DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "BOOL": "bool",
        "U64": "uint64",
        "U32": "uint32",
        "U16": "uint16",
        "U8": "uint8",
        "C64": "complex64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "F6_E2M3": "float6_e2m3fn",
        "F6_E3M2": "float6_e3m2fn",
        "F4": "float4_e2m1fn",
    }
)
"""torch's names for the dtypes of safetensors headers."""


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
    weights = [name for name in _weight_files(names) if (path / name).is_file()]
    if weights:
        evidence.append(listing(weights, 2))
    if not evidence and names & {"tokenizer.json", "tokenizer_config.json"}:
        evidence.append("tokenizer files")
    return tuple(evidence) or None


def _is_model_config(path: Path) -> bool:
    """Tell a model's configuration from the many other files of that name; a damaged one may be either."""
    try:
        content = read_object(path)
    except BrokenCheckpoint:
        return True
    except CkpttoolError:
        return False
    return any(key in content for key in _CONFIG_KEYS)


def _weight_files(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.endswith(".safetensors") or _BIN_FILE.fullmatch(name))


def open_(path: Path) -> HfSource:
    """Open a directory; damage becomes :attr:`HfSource.problems`, :class:`Refused` is raised."""
    names = os.listdir(path)
    found = Findings()
    on_disk = _weight_files(names)
    weights, others = _of_the_model(path, on_disk, names, found)
    by_file: dict[str, dict[str, TensorInfo]] = {}
    for name in weights:
        try:
            by_file[name] = read_weights(path / name)
        except Refused:
            raise
        except CkpttoolError as error:
            found.of(error, name)
    _check_numbering(weights, found)
    _check_twice(by_file, found)
    for index in INDEXES:
        if index in names:
            _check_index(path, index, on_disk, by_file, found)
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


def read_safetensors(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors that a safetensors header lists, after holding it against the file's size.

    Raises :class:`BrokenCheckpoint` for a header that is none, gaps or overlaps, and a file that is short or long.
    """
    size = torchzip.file_size(path)
    length = int.from_bytes(torchzip.read_range(path, 0, 8), "little")
    if size < 8 or length > min(size - 8, HEADER_MOST):
        raise BrokenCheckpoint(
            f"{path.name}: truncated or no safetensors file ({size:,} bytes, the header alone claims {length:,})",
            code="truncated",
        )
    header = parse_json(torchzip.read_range(path, 8, length), path.name)
    if not isinstance(header, dict):
        raise BrokenCheckpoint(f"{path.name}: its header is no JSON object", code="bad-header")
    begin, meta = 8 + length, header.get("__metadata__")
    if isinstance(meta, dict) and "DCP_SHARDING_INFO" in meta:
        raise BrokenCheckpoint(
            f"{path.name}: parts of tensors, as torch's DCP writes them in safetensors form",
            hint="torch joins them: torch.distributed.checkpoint._consolidate_hf_safetensors.",
            code="dcp-sharded",
        )
    tensors = {str(k): _entry(path, str(k), v, begin) for k, v in header.items() if k != "__metadata__"}
    _check_coverage(path, tensors, begin, size)
    return tensors


def _entry(path: Path, name: str, value: Any, begin: int) -> TensorInfo:
    try:
        dtype, shape = DTYPES[value["dtype"]], tuple(value["shape"])
        first, last = value["data_offsets"]
        wanted = dtype_bytes(dtype, 1)
        if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
            raise ValueError
    except (KeyError, TypeError, ValueError) as error:
        raise BrokenCheckpoint(f"{path.name}: the header entry of {name} is damaged", code="bad-header") from error
    piece = Piece((0,) * len(shape), shape, Place(path.name, begin + first, last - first, Wrap.RAW))
    info = TensorInfo(name, dtype, shape, (piece,), (), "whole")
    wanted = info.nbytes
    if last - first != wanted:
        raise BrokenCheckpoint(f"{path.name}: {name} has {last - first:,} bytes, {wanted:,} wanted", code="bad-header")
    return info


def _check_coverage(path: Path, tensors: Mapping[str, TensorInfo], begin: int, size: int) -> None:
    """Every byte after the header belongs to one tensor; the format forbids holes."""
    at = begin
    for place in sorted((t.pieces[0].place for t in tensors.values()), key=lambda p: (p.offset, p.length)):
        if place.offset != at:
            raise BrokenCheckpoint(f"{path.name}: the data has a gap or overlap at byte {at:,}", code="bad-header")
        at += place.length
    if at > size:
        raise BrokenCheckpoint(f"{path.name}: truncated, {size:,} bytes where {at:,} are needed", code="truncated")
    if at < size:
        raise BrokenCheckpoint(f"{path.name}: {size - at:,} bytes after the last tensor", code="bad-header")


def read_torch(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a ``torch.save`` file that holds a flat state dict."""
    archive = torchzip.open_archive(path)
    state, _ = loads(archive.read("data.pkl"), SHARD_NAMES, where=path.name)
    if not isinstance(state, dict):
        raise BrokenCheckpoint(f"{path.name}: holds no state dict", code="no-state-dict")
    reader = RankReader(archive, 0)
    held = {name_of(name): reader.held(value) for name, value in state.items()}
    return {name: TensorInfo(name, h.dtype, h.shape, tuple(h.pieces), (), "whole") for name, h in held.items() if h}


def _check_numbering(weights: list[str], found: Findings) -> None:
    """Report files that the names of the others promise (``00001-of-00003``)."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(_NUMBERED.fullmatch, weights)):
        sets.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (stem, total, suffix), present in sets.items():
        start = 0 if 0 in present else 1
        missing = [n for n in range(start, start + min(int(total), len(present) + 1000)) if n not in present]
        if missing:
            names = [f"{stem}-{n:05d}-of-{total}.{suffix}" for n in missing]
            found.problems.append(
                Problem(
                    code="file-missing",
                    message=f"{len(names)} of {int(total)} weight files missing: {listing(names)}",
                )
            )


def _check_twice(by_file: Mapping[str, Mapping[str, TensorInfo]], found: Findings) -> None:
    """Report tensors that two files of one numbered set hold; other files that lie together need not be one model."""
    first: dict[tuple[str, str], str] = {}
    for file, tensors in by_file.items():
        match = _NUMBERED.fullmatch(file)
        for name in tensors if match else ():
            other = first.setdefault((match[1], name), file) if match else file
            if other != file:
                found.group("tensor-twice", f"stored in both {other} and {file}", name)


def _check_index(
    path: Path, index: str, weights: list[str], by_file: Mapping[str, Mapping[str, TensorInfo]], found: Findings
) -> None:
    """Hold the index against the files, both ways."""
    try:
        content = read_object(path / index, INDEX_MOST)
    except CkpttoolError as error:
        found.of(error, index)
        return
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        message = f"{index}: no weight_map from tensors to files"
        found.problems.append(Problem(code="bad-index", path=index, message=message))
        return
    absent = sorted(set(weight_map.values()) - set(weights))
    if absent:
        message = f"{index} names {len(absent)} files that are not here: {listing(absent)}"
        found.problems.append(Problem(code="file-missing", path=index, message=message))
    for name, file in weight_map.items():
        if file in by_file and name not in by_file[file]:
            found.group("index-disagrees", f"{index} promises in {file} what that file does not hold", name)
    named = set(weight_map.values())
    suffix = ".safetensors" if "safetensors" in index else ".bin"
    for file, tensors in by_file.items():
        if file.endswith(suffix) and file not in named:
            found.problems.append(
                Problem(
                    code="file-not-in-index",
                    path=file,
                    message=f"{file} is not in {index}: loaders may take it for the whole model, or ignore it",
                    hint="It is left over from another save: look at the dates, move it away.",
                )
            )
        elif file in named:
            for name in tensors.keys() - weight_map.keys():
                found.group("index-disagrees", f"{index} does not know what {file} holds", name)
    _check_total(content, index, by_file, named, found)


def _check_total(
    content: Mapping[str, Any],
    index: str,
    by_file: Mapping[str, Mapping[str, TensorInfo]],
    named: set[Any],
    found: Findings,
) -> None:
    meta = content.get("metadata")
    said = meta.get("total_size") if isinstance(meta, dict) else None
    tensors = [t for file, infos in by_file.items() if file in named for t in infos.values()]
    actual, elements = sum(t.nbytes for t in tensors), sum(t.numel for t in tensors)
    if said in (None, actual) or len(by_file.keys() & named) != len(named):
        return
    what = "the number of elements, not of bytes" if said == elements else f"{said:,}" if type(said) is int else said
    found.problems.append(
        Problem(
            code="total-size",
            severity="note",
            path=index,
            message=f"{index}: total_size is {what}; the tensors have {actual:,} bytes",
        )
    )


assert set(DTYPES.values()) <= DTYPE_BITS.keys()
