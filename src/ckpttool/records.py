"""What the pickles of torch may name: the allow-lists, and readers for the records that they become.

Sources: files written by torch 2.6 to 2.13 and megatron-core 0.12 to 0.19. Device names are never looked at, so
shards written on CUDA or NPU machines read the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

from ckpttool.errors import BrokenCheckpoint
from ckpttool.tensors import DTYPE_BITS, MOST_DIMENSIONS, Index
from ckpttool.unpickle import Record, said

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "QInt32Storage": "qint32",
    "QInt8Storage": "qint8",
    "QUInt8Storage": "quint8",
}

_TENSORS = {
    *(("torch", name) for name in _STORAGE_DTYPES),
    *(("torch", name) for name in DTYPE_BITS),
    ("torch", "Size"),
    ("torch", "device"),
    ("torch.storage", "UntypedStorage"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch._utils", "_rebuild_wrapper_subclass"),
    ("torch._tensor", "_rebuild_from_type_v2"),
    ("torch", "Tensor"),
    ("torch.nn.parameter", "Parameter"),
    ("torch.nn.parameter", "Buffer"),
    ("collections", "OrderedDict"),
}


def _at(modules: str, *names: str) -> set[tuple[str, str]]:
    return {(module, name) for module in modules.split() for name in names}


_DTENSOR_HOMES = (
    "torch.distributed.tensor torch.distributed.tensor._api torch.distributed._tensor torch.distributed._tensor.api"
)
_SPEC_HOMES = (
    "torch.distributed.tensor._dtensor_spec torch.distributed._tensor._dtensor_spec "
    "torch.distributed._tensor.placement_types"
)
_PLACEMENT_HOMES = "torch.distributed.tensor.placement_types torch.distributed._tensor.placement_types"
_SHARD = "torch.distributed._shard"

SHARD_NAMES: frozenset[tuple[str, str]] = frozenset(
    _TENSORS
    | _at(_DTENSOR_HOMES, "DTensor")
    | _at(_SPEC_HOMES, "DTensorSpec", "TensorMeta", "ShardOrderEntry")
    | _at(_PLACEMENT_HOMES, "Shard", "Replicate", "Partial", "_Partial", "_StridedShard")
    | _at("torch.distributed.device_mesh torch.distributed._tensor.device_mesh", "DeviceMesh")
    | _at("torch.distributed._mesh_layout", "_MeshLayout", "_FlatLayout")
    | _at(f"{_SHARD}.sharded_tensor.api", "ShardedTensor", "ShardedTensorBase")
    | _at(
        f"{_SHARD}.sharded_tensor.metadata",
        "ShardedTensorMetadata",
        "TensorProperties",
        "MEM_FORMAT_ENCODING",
    )
    | _at(f"{_SHARD}.sharded_tensor.shard", "Shard")
    | _at(f"{_SHARD}.metadata", "ShardMetadata")
    | _at(f"{_SHARD}.sharding_spec.api", "EnumerableShardingSpec")
    | _at(f"{_SHARD}.sharding_spec.chunk_sharding_spec", "ChunkShardingSpec")
    | _at("torch.distributed.remote_device", "_remote_device")
    | _at("builtins", "getattr")
)
"""Everything a ``.pt`` shard or a ``.distcp`` record may name."""

METADATA_NAMES: frozenset[tuple[str, str]] = frozenset(
    _TENSORS
    | _at(
        "torch.distributed.checkpoint.metadata",
        *("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata"),
        *("BytesStorageMetadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
    )
    | _at("torch.distributed.checkpoint.filesystem", "_StorageInfo")
    | _at("torch.distributed.checkpoint.planner", "SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    | _at("pathlib pathlib._local", "PosixPath")
    | _at("builtins", "getattr", "set", "frozenset")
)
"""What ``.metadata`` and ``common.pt`` name; their other classes become inert records."""


class StoredTensor(NamedTuple):
    """A tensor as ``torch.save`` writes it: a strided view (in elements) into a named storage."""

    dtype: str
    storage: str
    storage_bytes: int
    start: int
    size: Index
    strides: Index


def dtype_name(value: object) -> str:
    """Return torch's name of a dtype record; raises :class:`BrokenCheckpoint` for anything else."""
    if isinstance(value, type) and issubclass(value, Record) and value.module == "torch" and value.name in DTYPE_BITS:
        return value.name
    raise BrokenCheckpoint(f"{said(value)} stands where a dtype should", code="unreadable-pickle")


def is_record(value: object, *names: str) -> TypeGuard[Record]:
    """Tell whether this is a record of one of these class names."""
    return isinstance(value, Record) and value.name in names


_REBUILT = ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_tensor")


@lru_cache(maxsize=1 << 14)
def _is_shape(*sizes: object) -> bool:
    return len(sizes) <= MOST_DIMENSIONS and all(type(n) is int and 0 <= n < 1 << 63 for n in sizes)


def shape_of(value: object) -> Index:
    """Return a shape, given as a tuple or list of sizes; raises :class:`BrokenCheckpoint` for anything else."""
    try:
        if isinstance(value, (tuple, list)) and _is_shape(*value):
            return tuple(value)
    except TypeError:  # an unhashable size
        pass
    raise BrokenCheckpoint(f"{said(value)} stands where a shape should", code="unreadable-pickle")


def stored_tensor(value: Any) -> StoredTensor:
    """Return where a plain tensor's elements lie, looking through ``Parameter``.

    Raises :class:`BrokenCheckpoint` when the record is no tensor, or its view reaches out of its storage.
    """
    record = value if is_record(value, *_REBUILT) else _unwrapped(value)
    if not is_record(record, *_REBUILT) or len(record.args) < 4:
        raise BrokenCheckpoint(f"{said(value)} stands where a tensor should", code="unreadable-pickle")
    if len(record.args) > 6 and isinstance(record.args[6], dict) and any(record.args[6].values()):
        raise BrokenCheckpoint(
            f"a lazy view ({', '.join(sorted(map(str, record.args[6])))}): its elements are not those that are stored",
            hint="Save tensors after resolve_conj() and resolve_neg().",
            code="lazy-view",
        )
    kind, key, storage_bytes = _storage(record.args[0])
    if record.name == "_rebuild_tensor_v3":
        dtype = dtype_name(record.args[6] if len(record.args) > 6 else None)
    else:
        dtype = _STORAGE_DTYPES.get(kind, "")
    if dtype not in DTYPE_BITS:
        raise BrokenCheckpoint(f"storage type {kind} is not known", code="unknown-dtype")
    if kind != "UntypedStorage":
        storage_bytes *= DTYPE_BITS[dtype] // 8
    start = record.args[1]
    if type(start) is not int or start < 0:
        raise BrokenCheckpoint(f"storage offset {said(start)} of a tensor", code="unreadable-pickle")
    size, strides = shape_of(record.args[2]), shape_of(record.args[3])
    if len(size) != len(strides):
        raise BrokenCheckpoint(f"a tensor of size {size} has strides {strides}", code="unreadable-pickle")
    return StoredTensor(dtype, key, storage_bytes, start, size, strides)


def _unwrapped(value: Any) -> Any:
    if is_record(value, "_rebuild_parameter") and value.args:
        return value.args[0]
    if is_record(value, "_rebuild_from_type_v2") and len(value.args) >= 3:
        function, _, args = value.args[:3]
        if isinstance(function, type) and issubclass(function, Record) and isinstance(args, tuple):
            return function(*args)
    return value


def _storage(value: Any) -> tuple[str, str, int]:
    """Return (type name, key, number of elements) of a persistent id."""
    pid = value.args[0] if is_record(value, "persistent id") else None
    if isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage":
        _, kind, key, _, count = pid
        named = isinstance(kind, type) and issubclass(kind, Record) and type(key) is str
        if named and type(count) is int and count >= 0:
            return kind.name, key, count
    raise BrokenCheckpoint("a tensor without a storage", code="unreadable-pickle")
