"""A distributed checkpoint written record by record, cut as parallel ranks of Megatron cut it."""

from __future__ import annotations

import io
import itertools
import json
import math
import pickle
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.synthetic.hub import Tensors

DIALECTS = ("stacked", "indexed", "singleton")
WRITERS = 4
_LAYER = re.compile(r"(decoder\.layers\.)(\d+)\.(.*)")
_GATED = re.compile(r".*\.linear_fc1\.(weight|bias)")
_OUT_OF = re.compile(r".*\.(linear_proj|linear_fc2|out_proj)\.weight")
_INTO = re.compile(
    r".*(\.(linear_(qkv|q_proj|q_up_proj|kv_up_proj|fc1)|in_proj|conv1d|eh_proj)\.(weight|bias)(\..*|_[wv])?"
    r"|\.(A_log|dt_bias|softmax_offset)|word_embeddings\.weight|output_layer\.weight)"
)


@dataclass(frozen=True)
class Entry:
    """A tensor under its key, and how many of its leading axes count layers or experts."""

    value: torch.Tensor
    leading: int = 0


Entries = dict[str, Entry]


def lay_out(tensors: Tensors, dialect: str) -> Entries:
    """Entries of an archive; layers that are not alike are indexed even where they should be stacked."""
    assert dialect in DIALECTS, dialect
    entries = {key: Entry(value, int(".experts.experts." in key)) for key, value in tensors.items()}
    if dialect == "singleton":
        return dict(itertools.chain.from_iterable(_singletons(key, entry) for key, entry in entries.items()))
    return _stacked(entries) if dialect == "stacked" else entries


def _stacked(entries: Entries) -> Entries:
    layers: dict[int, Entries] = {}
    out = {}
    for key, entry in entries.items():
        if found := _LAYER.fullmatch(key):
            layers.setdefault(int(found[2]), {})[found[1] + found[3]] = entry
        else:
            out[key] = entry
    if len({frozenset(layer) for layer in layers.values()}) > 1:
        return entries
    for key, first in layers[0].items():
        values = [layers[index][key].value for index in range(len(layers))]
        out[key] = Entry(torch.stack(values), first.leading + 1)
    return out


def _singletons(key: str, entry: Entry) -> Iterator[tuple[str, Entry]]:
    if entry.leading:
        for index, expert in enumerate(entry.value):
            yield from _singletons(key.replace(".experts.experts.", f".experts.experts.{index}."), Entry(expert))
    elif _GATED.fullmatch(key):
        gate, up = entry.value.chunk(2)
        yield f"{key}_w", Entry(gate)
        yield f"{key}_v", Entry(up)
    else:
        yield key, entry


def cuts(key: str, entry: Entry) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offset and size of every chunk: one a layer and an expert, in two over tensor ranks, gate and up apart."""
    shape = tuple(entry.value.shape)
    axes = [list(zip(range(size), itertools.repeat(1))) for size in shape[: entry.leading]]
    axes += [[(0, size)] for size in shape[entry.leading :]]
    if _OUT_OF.fullmatch(key):
        axes[-1] = _parts(shape[-1], 2)
    elif _INTO.fullmatch(key):
        size = shape[entry.leading]
        axes[entry.leading] = _parts(size, 4 if _GATED.fullmatch(key) else 2)
    return [(tuple(a for a, _ in chunk), tuple(b for _, b in chunk)) for chunk in itertools.product(*axes)]


def _parts(size: int, count: int) -> list[tuple[int, int]]:
    step = math.ceil(size / count)
    return [(start, min(step, size - start)) for start in range(0, size, step)]


class Archive:
    """Collects records, then writes the files and their index."""

    def __init__(self) -> None:
        self._files: dict[str, bytearray] = {}
        self._index: dict[MetadataIndex, _StorageInfo] = {}
        self._entries: dict[str, Any] = {}
        self._turn = itertools.count()

    def add(self, key: str, entry: Entry) -> None:
        """A tensor, chunk by chunk, over the files of all writers in turn."""
        chunks = []
        for offset, size in cuts(key, entry):
            part = entry.value[tuple(slice(a, a + b) for a, b in zip(offset, size, strict=True))]
            self._record(MetadataIndex(key, torch.Size(offset)), _saved(part.contiguous().clone()))
            chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
        properties = TensorProperties(dtype=entry.value.dtype)
        self._entries[key] = TensorStorageMetadata(properties, entry.value.shape, chunks)

    def add_bytes(self, key: str, content: bytes) -> None:
        """An object that is no tensor."""
        self._record(MetadataIndex(key), content)
        self._entries[key] = BytesStorageMetadata()

    def _record(self, index: MetadataIndex, content: bytes) -> None:
        turn = next(self._turn) % WRITERS
        name = f"__{turn // 2}_{turn % 2}.distcp"
        file = self._files.setdefault(name, bytearray())
        self._index[index] = _StorageInfo(name, len(file), len(content))
        file += content

    def write(self, folder: Path) -> None:
        """The files, the index, and last what says that they are whole."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        metadata = Metadata(state_dict_metadata=self._entries, planner_data=None, storage_data=self._index)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (folder / "metadata.json").write_text(json.dumps(marker))


def _saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_archive(folder: Path, entries: Entries, *, extra: bool) -> None:
    """An archive of a model; with extra, of what else a training keeps: optimizer, generators, states of modules."""
    archive = Archive()
    for key, entry in entries.items():
        archive.add(key, entry)
    if extra:
        _add_extra(archive, entries)
    archive.write(folder)


def _add_extra(archive: Archive, entries: Entries) -> None:
    junk = random.Random(0)
    generator = torch.Generator().manual_seed(1)
    for key, entry in entries.items():
        noise = torch.randn(entry.value.shape, generator=generator)
        archive.add(f"optimizer.state.exp_avg.{key}", Entry(noise, entry.leading))
        if not key.endswith(".weight") or ".linear_" not in key:
            continue
        for index in itertools.product(*(range(size) for size in entry.value.shape[: entry.leading])):
            whole = entry.value.shape[: entry.leading]
            shard = f"{_dotted(index or (0,))}_{_dotted(whole or (1,))}"
            archive.add_bytes(f"{key.removesuffix('weight')}_extra_state/shard_{shard}", junk.randbytes(64))
    archive.add_bytes("rng_state/shard_0_1", _saved([{"torch_rng_state": torch.get_rng_state()}]))
    archive.add_bytes("common_state/shard_0_1", _saved([{"iteration": 7, "checkpoint_version": 3.0}]))


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
