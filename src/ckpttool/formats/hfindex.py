"""The weight files of a Hugging Face model against each other and against their index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpttool.errors import CkpttoolError, Problem
from ckpttool.formats.findings import Findings, listing
from ckpttool.formats.jsonfile import INDEX_MOST, read_object
from ckpttool.tensors import TensorInfo

_NUMBERED = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.(safetensors|bin)")


def index_bytes(weight_map: Mapping[str, str], total_size: int, total_parameters: int) -> bytes:
    """Return the content of ``model.safetensors.index.json`` as transformers writes it; the size is in bytes."""
    metadata = {"total_parameters": total_parameters, "total_size": total_size}
    index = {"metadata": metadata, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def check_numbering(weights: list[str], found: Findings) -> None:
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


def check_index_there(weights: list[str], names: list[str], found: Findings) -> None:
    """Report shards without the index that says which tensor lies where: transformers does not load them."""
    for stem, index in (("model", "model.safetensors.index.json"), ("pytorch_model", "pytorch_model.bin.index.json")):
        shards = [name for name in weights if (match := _NUMBERED.fullmatch(name)) and match[1] == stem]
        if len(shards) > 1 and index not in names:
            message = f"{index} is missing; without it transformers does not load the {len(shards)} files"
            found.problems.append(Problem(code="index-missing", path=index, message=message))


def check_twice(by_file: Mapping[str, Mapping[str, TensorInfo]], found: Findings) -> None:
    """Report tensors that two files of one numbered set hold; other files that lie together need not be one model."""
    first: dict[tuple[str, str], str] = {}
    for file, tensors in by_file.items():
        match = _NUMBERED.fullmatch(file)
        for name in tensors if match else ():
            other = first.setdefault((match[1], name), file) if match else file
            if other != file:
                found.group("tensor-twice", f"stored in both {other} and {file}", name)


def check_index(
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
