"""Readers of the frameworks: ``torch.load``, torch's reader of distributed checkpoints, safetensors' for torch.

The only module that imports torch, inside of functions, and only when a second opinion is asked for. Nothing of a
checkpoint is executed here either:

- A pickle reaches torch only after our own reader has accepted it, and then with ``weights_only=True``. What it names
  of ``torch.distributed`` becomes a stand-in that keeps what it is given: no mesh is made, no process group is needed,
  and shards of every torch since 2.6 can be read, also those of ``ShardedTensor``.
- torch unpickles the ``.metadata`` of a distributed checkpoint without an allow-list. It never sees that file: where
  an item lies is told from our own index, and torch's reader opens the item, ``weights_only=True`` again. So it is a
  second opinion on the items, not on the index.
- megatron-core reads ``torch_dist`` through torch's ``FileSystemReader``, behind that same ``.metadata`` and a process
  group; what it adds are names and layouts, no bytes. So torch's reader is asked in its place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from ckpttool.elements import Array
from ckpttool.errors import BrokenCheckpoint, UsageError
from ckpttool.formats import torchzip
from ckpttool.formats.rank import RankReader
from ckpttool.records import SHARD_NAMES
from ckpttool.tensors import Box, Index, Piece, TensorInfo, Wrap
from ckpttool.unpickle import loads, name_of

OLDEST = (2, 6)
"""The first torch whose ``weights_only`` takes stand-ins and is not known to run code (CVE-2025-32434)."""


class Part(NamedTuple):
    """A box (in the tensor's coordinates) of one stored piece of a tensor."""

    tensor: TensorInfo
    piece: Piece
    box: Box

    @property
    def local(self) -> Box:
        """The same box in the coordinates of the piece."""
        return tuple(o - p for o, p in zip(self.box[0], self.piece.offset, strict=True)), self.box[1]


class NotPossible(Exception):
    """A framework has no way to read this; the text says why. That says nothing against the checkpoint."""


def find_torch() -> str:
    """Return the version of torch; raises :class:`UsageError` naming the extra where it is absent or too old."""
    hint = "pip install 'ckpttool[torch]'"
    try:
        version = metadata.version("torch")
        import torch  # noqa: F401
    except ImportError as error:
        raise UsageError("a second opinion needs torch, which is not installed", hint=hint) from error
    numbers = tuple(int(number) for number in version.split(".")[:2] if number.isdecimal())
    if numbers < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise UsageError(f"a second opinion needs torch {wanted} or newer; this is {version}", hint=hint)
    return version


class Frameworks:
    """Reads parts of the files below ``root`` by the reader that fits; one file is open at a time.

    Files are mapped: of a file that shrinks meanwhile, no framework can be asked safely.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._file: Path | None = None
        self._opened: Any = None
        self.used: set[str] = set()

    def read(self, part: Part) -> Array:
        """Return the bytes of a part in C order, as its framework reads them.

        Raises :class:`NotPossible` where that cannot be asked for, :class:`~ckpttool.errors.Refused` and
        :class:`BrokenCheckpoint` for a file that our own reader does not accept, and whatever the framework raises:
        the same error again for every part of a file that cannot be opened.
        """
        import torch

        dtype = getattr(torch, part.tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise NotPossible(f"torch has no dtype {part.tensor.dtype}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self._read(part, dtype)
        if (found.dtype, tuple(found.shape)) != (dtype, part.box[1]):
            wanted = f"{part.tensor.dtype} {list(part.box[1])}"
            raise BrokenCheckpoint(f"{str(found.dtype)[6:]} {list(found.shape)} where we find {wanted}")
        raw: Array = found.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return raw

    def _read(self, part: Part, dtype: Any) -> Any:
        place = part.piece.place
        path = self._root / place.file
        if place.wrap is Wrap.ZIP_ARCHIVE:
            self.used.add("torch")
            return _read_item(self._root, part, dtype)
        if path != self._file:
            self._file, self._opened = path, None  # the old one goes before the new one comes
            self._opened = _open(path, part.piece)
        if isinstance(self._opened, Exception):
            raise self._opened
        if place.wrap is Wrap.RAW:
            self.used.add("safetensors")
            return _slice_of(self._opened, part)
        self.used.add("torch")
        return _local(self._opened, part)[_slices(part.local)]


def _open(path: Path, piece: Piece) -> Any:
    """Open the file of a piece, or return why that fails: one error for everything that is asked of it."""
    try:
        return _open_safetensors(path) if piece.place.wrap is Wrap.RAW else _load(path, piece.rank or 0)
    except Exception as error:  # noqa: BLE001 - it is raised where the file is read
        return error


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


# safetensors


def _open_safetensors(path: Path) -> Any:
    from safetensors import safe_open

    torchzip.file_size(path)  # a regular file
    return safe_open(path, framework="pt", device="cpu")


def _slice_of(file: Any, part: Part) -> Any:
    """Return a part of a tensor; a slice is of at least one dimension there."""
    name = part.tensor.name
    return file.get_slice(name)[_slices(part.local)] if part.tensor.shape else file.get_tensor(name)


# torch.save


def vet(path: Path, base: int = 0, length: int | None = None, rank: int = 0) -> None:
    """Hold an archive against our own reader, and every tensor in it against its storage, before torch sees it.

    Raises :class:`~ckpttool.errors.Refused` and :class:`BrokenCheckpoint` as opening it does. A record that is
    compressed may become anything, also where no tensor uses it.
    """
    archive = torchzip.open_archive(path, base, length)
    for name, entry in archive.entries.items():
        if not entry.stored:
            raise torchzip.compressed(path, name)
    value, _ = loads(archive.read("data.pkl"), SHARD_NAMES, where=path.name)
    reader = RankReader(archive, rank)
    for one in value.values() if isinstance(value, dict) else (value,):
        reader.held(one)


def _load(path: Path, rank: int) -> dict[str, Any]:
    """Return the state dict of a file, by torch; its storages are mapped, so that only what is looked at is read."""
    import torch

    vet(path, rank=rank)
    with _allowed():
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return {name_of(key): value for key, value in state.items()}


def _local(state: dict[str, Any], part: Part) -> Any:
    """Return the tensor that torch finds for a piece: of a sharded one, what this rank holds of it."""
    name, piece = part.tensor.name, part.piece
    if name not in state:
        raise BrokenCheckpoint("no such tensor is in the file")
    value = state[name]
    if tuple(value.shape) != part.tensor.shape:
        raise BrokenCheckpoint(f"a tensor of {list(value.shape)} where we find {list(part.tensor.shape)}")
    kept = getattr(value, "kept", None)
    if isinstance(kept, tuple):
        local = _shard_at(kept[0], piece.offset)
    else:
        local = value if kept is None else kept["_local_tensor"]
    if tuple(local.shape) != piece.size:
        raise BrokenCheckpoint(f"{list(local.shape)} at {list(piece.offset)} where we find {list(piece.size)}")
    return local


def _shard_at(shards: list[Any], offset: Index) -> Any:
    """Return the shard of a ``ShardedTensor`` that begins there."""
    found = [shard.kept["tensor"] for shard in shards if tuple(shard.kept["metadata"].kept["shard_offsets"]) == offset]
    if len(found) != 1:
        raise BrokenCheckpoint(f"{len(found)} shards at {list(offset)}, where we find one")
    return found[0]


@contextmanager
def _allowed() -> Iterator[None]:
    """Let torch make stand-ins for what shards name of ``torch.distributed``, and allow nothing else meanwhile.

    Importing ``torch.distributed.tensor`` allows the real classes, of which torch takes any of two with one name.
    """
    from torch import serialization

    before = serialization.get_safe_globals()
    try:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(_stand_ins())
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(before)


def _stand_ins() -> list[tuple[Any, str]]:
    """Return what stands for which name, as torch takes it."""
    import torch

    names = [name for name in SHARD_NAMES if name[0].startswith("torch.distributed")]
    made: list[tuple[Any, str]] = [(_stand_in(torch, name), f"{module}.{name}") for module, name in names]
    return [*made, (_Kept, "a nested class"), (_attribute, "builtins.getattr")]


_WRAPPERS = ("DTensor", "ShardedTensor", "ShardedTensorBase")


def _stand_in(torch: Any, name: str) -> type:
    """Make a class that keeps the state it is given; torch makes a tensor without elements of those that wrap some."""
    if name not in _WRAPPERS:
        return type(name, (_Kept,), {})
    return type(name, (torch.Tensor,), {"__setstate__": _keep, "__torch_dispatch__": classmethod(_computes_nothing)})


class _Kept:
    """An object of a pickle that only remembers what it was given."""

    kept: Any = None

    def __new__(cls, *_: Any) -> _Kept:
        return object.__new__(cls)

    def __init__(self, *_: Any) -> None:
        """Forget the arguments: all that is looked at comes as state."""

    def __setstate__(self, state: Any) -> None:
        _keep(self, state)


def _keep(value: Any, state: Any) -> None:
    """Take a state, or the (dict, slots) pair that some classes write."""
    value.kept = state[1] if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict) else state


def _computes_nothing(*_: Any, **__: Any) -> Any:
    return NotImplemented


def _attribute(*_: Any) -> type[_Kept]:
    """Stand in for ``getattr``, by which nested classes and the enums of some Pythons are pickled."""
    return _Kept


# .distcp


def _read_item(root: Path, part: Part, dtype: Any) -> Any:
    """Return a part of an item of a distributed checkpoint, by torch's own reader, without the index beside it."""
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

    place = part.piece.place
    vet(root / place.file, place.offset, place.length)
    index = MetadataIndex(part.tensor.name, part.piece.offset)
    storage = {index: _StorageInfo(place.file, place.offset, place.length)}
    local, out = part.local, torch.empty(part.box[1], dtype=dtype)
    request = ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=index,
        dest_offsets=torch.Size((0,) * out.ndim),
        storage_index=index,
        storage_offsets=torch.Size(local[0]),
        lengths=torch.Size(local[1]),
    )
    reader = FileSystemReader(root)
    reader.set_up_storage_reader(Metadata(state_dict_metadata={}, storage_data=storage), is_coordinator=True)
    planner = SimpleNamespace(resolve_tensor=lambda _: out, commit_tensor=lambda *_: None)
    with _allowed():
        reader.read_data(LoadPlan([request]), planner).wait()
    return out
