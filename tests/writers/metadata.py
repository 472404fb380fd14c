"""The `.metadata` of a job with many ranks, without its data."""

from __future__ import annotations

import gc
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

ROWS = 32
WIDTH = 4096


def write_metadata(path: Path, ranks: int, chunks: int) -> Path:
    """Each tensor is cut along its rows, one chunk a rank, until there are `chunks` of them."""
    gc.disable()  # a million small objects, none of them garbage
    metadata = Metadata(state_dict_metadata={}, planner_data=None, storage_data={}, storage_meta=StorageMeta())
    plans: list[list[WriteItem]] = [[] for _ in range(ranks)]
    for first in range(0, chunks, ranks):
        _add_tensor(metadata, plans, first // ranks, min(ranks, chunks - first))
    # Megatron keeps the plans of all ranks here: the larger part of a real file.
    metadata.all_local_plans = [SavePlan(items=items) for items in plans]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(metadata))
    gc.enable()
    return path


def _add_tensor(metadata: Metadata, plans: list[list[WriteItem]], number: int, pieces: int) -> None:
    key = f"decoder.layers.{number}.mlp.linear_fc1.weight"
    size = torch.Size([ROWS * pieces, WIDTH])
    found = [_chunk(rank) for rank in range(pieces)]
    metadata.state_dict_metadata[key] = TensorStorageMetadata(_properties(), size, found)
    for rank in range(pieces):
        index = MetadataIndex(key, _chunk(rank).offsets)
        place = _StorageInfo(f"__{rank}_{number % 2}.distcp", number * 300_000, 300_000)
        metadata.storage_data[index] = place
        plans[rank].append(_write_item(key, size, rank))


def _write_item(key: str, size: torch.Size, rank: int) -> WriteItem:
    """Nothing is shared between items: each came from another process."""
    chunk = _chunk(rank)
    data = TensorWriteData(chunk, _properties(), torch.Size(list(size)))
    index = MetadataIndex(key, torch.Size(list(chunk.offsets)), rank)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _chunk(rank: int) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size([rank * ROWS, 0]), torch.Size([ROWS, WIDTH]))


def _properties() -> TensorProperties:
    return TensorProperties(dtype=torch.bfloat16)
