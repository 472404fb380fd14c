"""torch distributed checkpoints, and Megatron's ``torch_dist`` on top of them.

``.metadata`` says which chunk of which tensor lies in which ``.distcp`` file; each chunk is a ``torch.save`` archive
of its own inside that file. Megatron-Core 0.12 to 0.19 add ``metadata.json`` (written last: a finished save) and
keep everything that is not sharded in ``common.pt`` (to 0.18) or in the object ``common_state`` (0.19 on).
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem, Refused
from ckpttool.formats import torchzip
from ckpttool.formats.dcpkeys import COMMON_FILE, is_megatron_key, part_of, writer
from ckpttool.formats.findings import OTHER_NODES, SHOWN, Findings, listing
from ckpttool.formats.jsonfile import read_object
from ckpttool.records import METADATA_NAMES, dtype_name, is_record, shape_of
from ckpttool.tensors import Index, Piece, Place, TensorInfo, Wrap, dtype_bytes, tiling_faults
from ckpttool.unpickle import Record, collector_paused, loads, name_of, said

TORCH_DIST = "torch_dist"
PLAIN_DCP = "dcp"
METADATA_FILE = ".metadata"
BACKEND_FILE = "metadata.json"
COMMON_OBJECT = "common_state/shard_0_1"
METADATA_MOST = 4 << 30
"""Bytes of the largest index that we read; ten million chunks have about 3 GB."""

LARGE = 64 << 20
"""Bytes of an index of which the end is looked at first: a hole of gigabytes is not read into memory."""

_DATA_FILE = re.compile(r".*__(\d+)_(\d+)\.distcp")


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpSource:
    """An opened archive. ``objects`` are pickled values by key; ``unsharded`` is the common state, where readable.

    ``flattened`` are the tensors that megatron-core to 0.15 stored as ranges of a flattened one.
    """

    root: Path
    format: str
    tensors: Mapping[str, TensorInfo]
    objects: Mapping[str, Place]
    backend: Mapping[str, Any] | None
    unsharded: Mapping[str, Any] | None
    common_kind: str
    writer: str
    ranks: int
    flattened: frozenset[str]
    problems: tuple[Problem, ...]

    def part_of(self, name: str) -> str:
        """Return what a key belongs to; see :func:`ckpttool.formats.dcpkeys.part_of`."""
        return part_of(name)


def detect(path: Path) -> tuple[str, ...] | None:
    """Return the evidence for an archive, by file names and ``metadata.json`` alone, or ``None``."""
    names = os.listdir(path)
    data = [name for name in names if _DATA_FILE.fullmatch(name)]
    if METADATA_FILE not in names and not data:
        return None
    evidence = [METADATA_FILE] if METADATA_FILE in names else []
    if data:
        evidence.append(f"{len(data)} *.distcp")
    backend = _backend(path)
    if backend is not None:
        evidence.append(f"{BACKEND_FILE} ({backend.get('sharded_backend', 'no sharded_backend')})")
    if COMMON_FILE in names:
        evidence.append(COMMON_FILE)
    return tuple(evidence)


def open_(path: Path, *, named: int = SHOWN) -> DcpSource:
    """Open an archive; damage becomes :attr:`DcpSource.problems`, :class:`Refused` is raised.

    A problem names at most ``named`` tensors or files.
    """
    with collector_paused():
        return _open(path, Findings(most=named))


def _open(path: Path, found: Findings) -> DcpSource:
    backend = _backend(path, found)
    metadata, names = _metadata(path, found)
    storage = _storage(metadata, found)
    tensors: dict[str, TensorInfo] = {}
    objects: dict[str, Place] = {}
    for key, entry in _entries(metadata):
        if is_record(entry, "TensorStorageMetadata"):
            try:
                tensors[key] = _tensor(key, entry, storage, found)
            except BrokenCheckpoint as error:
                found.group(error.code, error.message, key)
        elif (key, None) in storage:
            objects[key] = storage[key, None]
        else:
            found.group("no-bytes", "not in the storage list of .metadata", key)
    mcore_data = metadata.get("mcore_data") if metadata is not None else None
    del metadata
    _check_files(path, storage, found)
    common, common_kind = _common(path, objects, found)
    is_megatron = backend is not None or common_kind != "" or any(map(is_megatron_key, (*tensors, *objects)))
    if is_megatron and backend is None:
        found.problems.append(_unfinished(path))
    if backend and "common_backend" in backend and not common_kind:
        found.problems.append(_COMMON_MISSING)
    return DcpSource(
        root=path,
        format=TORCH_DIST if is_megatron else PLAIN_DCP,
        tensors=MappingProxyType(tensors),
        objects=MappingProxyType(objects),
        backend=backend,
        unsharded=common,
        common_kind=common_kind,
        writer=writer(names, mcore_data is not None, common_kind) if is_megatron else "",
        ranks=len({_rank(place.file) for place in storage.values()} - {None}),
        flattened=_flattened(mcore_data),
        problems=found.all(),
    )


_COMMON_MISSING = Problem(
    code="common-missing",
    path=COMMON_FILE,
    message=f"{COMMON_FILE}, which {BACKEND_FILE} promises (megatron-core to 0.18), is missing",
    hint="Megatron refuses to load it; the tensors are not affected.",
)


def _flattened(mcore_data: object) -> frozenset[str]:
    """Return the keys whose shape on disk is not that of the tensor, as megatron-core notes beside the index."""
    entries = mcore_data.items() if isinstance(mcore_data, dict) else ()
    return frozenset(str(k) for k, v in entries if isinstance(v, dict) and "nd_reformulated_orig_global_shape" in v)


def _unfinished(path: Path) -> Problem:
    if not (path / METADATA_FILE).is_file():
        message = "metadata.json is missing too"
    else:
        message = "metadata.json, which Megatron writes last, is missing: the save was interrupted at its end"
    return Problem(
        code="not-finalised",
        path=BACKEND_FILE,
        message=message,
        hint="Megatron refuses to load it; take an older step.",
    )


def _backend(path: Path, found: Findings | None = None) -> dict[str, Any] | None:
    if not (path / BACKEND_FILE).is_file():
        return None
    try:
        return read_object(path / BACKEND_FILE)
    except CkpttoolError as error:
        if found is not None:
            found.of(error, BACKEND_FILE)
        return {}


def _metadata(path: Path, found: Findings) -> tuple[Record | None, set[str]]:
    file = path / METADATA_FILE
    if not file.is_file():
        found.problems.append(
            Problem(
                code="metadata-missing",
                path=METADATA_FILE,
                message=".metadata, the index of the archive, is missing: the save never finished, or it is elsewhere",
                hint=OTHER_NODES,
            )
        )
        return None, set()
    try:
        size = torchzip.file_size(file)
        if size > METADATA_MOST:
            raise BrokenCheckpoint(
                f"{METADATA_FILE}: {size:,} bytes, more than any index has", code="unreadable-pickle"
            )
        if size > LARGE and torchzip.read_range(file, size - 1, 1) != b".":
            raise BrokenCheckpoint(
                f"{METADATA_FILE}: {size:,} bytes that do not end as a pickle does", code="unreadable-pickle"
            )
        data = torchzip.read_range(file, 0, size)
        metadata, names = loads(data, METADATA_NAMES, where=METADATA_FILE, inert=True)
    except Refused:
        raise
    except CkpttoolError as error:
        found.of(error, METADATA_FILE)
        return None, set()
    if not is_record(metadata, "Metadata", "MCoreMetadata"):
        found.problems.append(
            Problem(code="unreadable-pickle", path=METADATA_FILE, message=f".metadata holds {said(metadata)}, no index")
        )
        return None, names
    for field in ("state_dict_metadata", "storage_data"):
        if not isinstance(metadata.get(field), dict):
            message = f".metadata holds {said(metadata.get(field))} for its {field}, no list"
            found.problems.append(Problem(code="unreadable-pickle", path=METADATA_FILE, message=message))
    return metadata, names


def _entries(metadata: Record | None) -> Iterator[tuple[str, Any]]:
    entries = metadata.get("state_dict_metadata") if metadata else None
    yield from ((name_of(key), entry) for key, entry in entries.items()) if isinstance(entries, dict) else ()


def _storage(metadata: Record | None, found: Findings) -> dict[tuple[str, Index | None], Place]:
    """Return where each (key, chunk offset) lies; the recorded index of a chunk adds nothing and varies."""
    entries = metadata.get("storage_data") if metadata else None
    storage: dict[tuple[str, Index | None], Place] = {}
    for index, info in entries.items() if isinstance(entries, dict) else ():
        if not is_record(index, "MetadataIndex") or not is_record(info, "_StorageInfo"):
            found.group("unreadable-pickle", "the storage list of .metadata holds something else", said(index))
            continue
        if info.get("transform_descriptors"):
            found.group(
                "compressed-item", "stored with a transform (compressed), which is not read", name_of(index.get("fqn"))
            )
        offset = index.get("offset")
        file = _inside(info.get("relative_path"))
        try:
            start, length = shape_of((info.get("offset"), info.get("length")))
            storage[name_of(index.get("fqn")), None if offset is None else shape_of(offset)] = Place(
                file, start, length, Wrap.ZIP_ARCHIVE
            )
        except BrokenCheckpoint as error:
            found.group(error.code, error.message, name_of(index.get("fqn")))
    return storage


def _inside(name: object) -> str:
    """Return a relative path that stays in the directory; raises :class:`Refused` for one that leaves it."""
    if isinstance(name, str) and _DATA_FILE.fullmatch(name) and "/" not in name and name.isprintable():
        return name
    if isinstance(name, str) and not name.isprintable():  # a NUL, or half of a surrogate pair
        raise BrokenCheckpoint(f".metadata: names the file {said(name)}", code="unreadable-pickle")
    if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        raise Refused(
            f".metadata: names the file {said(name)}, outside its directory",
            hint="Nothing was opened; find out who wrote this checkpoint.",
        )
    return name


def _tensor(key: str, entry: Record, storage: Mapping[tuple[str, Index | None], Place], found: Findings) -> TensorInfo:
    properties, chunks = entry.get("properties"), entry.get("chunks")
    fields = properties.state if is_record(properties, "TensorProperties") else None
    dtype = fields[0] if isinstance(fields, tuple) and fields else None
    shape, name = shape_of(entry.get("size")), dtype_name(dtype)
    pieces: dict[tuple[Index, Index], Piece] = {}
    for chunk in chunks if isinstance(chunks, list) else ():
        if not is_record(chunk, "ChunkStorageMetadata"):
            raise BrokenCheckpoint(f"{said(chunk)} stands where a chunk should", code="unreadable-pickle")
        offset, size = shape_of(chunk.get("offsets")), shape_of(chunk.get("sizes"))
        place = storage.get((key, offset))
        if place is None:
            found.group("no-bytes", "chunks that are not in the storage list of .metadata", key)
        elif 0 not in size:
            if place.length < dtype_bytes(name, math.prod(size)):
                found.group("storage-short", "stored in fewer bytes than the chunk has", key)
            pieces[offset, size] = Piece(offset, size, place, _rank(place.file))
    for fault in tiling_faults(shape, pieces):
        found.group("does-not-tile", fault, key)
    return TensorInfo(key, name, shape, tuple(pieces.values()), (), _chunks_in_words(len(pieces)))


def _chunks_in_words(count: int) -> str:
    return "1 chunk" if count == 1 else f"{count:,} chunks"


def _rank(file: str) -> int | None:
    match = _DATA_FILE.fullmatch(file)
    return int(match[1]) if match else None


def _check_files(path: Path, storage: Mapping[tuple[str, Index | None], Place], found: Findings) -> None:
    """Hold what ``.metadata`` promises against the files: absent ones, short ones, ones it does not know."""
    needed: dict[str, int] = defaultdict(int)
    for place in storage.values():
        needed[place.file] = max(needed[place.file], place.offset + place.length)
    missing = []
    for name, size in sorted(needed.items()):
        has = _size_of(path, name)
        if has is None:
            missing.append(name)
        elif has < size:
            found.problems.append(
                Problem(
                    code="truncated",
                    path=name,
                    message=f"{name}: truncated, {has:,} bytes where .metadata needs {size:,}",
                    hint="Copy the file again from where it was written.",
                )
            )
    if missing:
        found.problems.append(
            Problem(
                code="file-missing",
                message=f"{len(missing)} of {len(needed)} data files missing: {listing(missing, found.most)}",
                hint=OTHER_NODES,
            )
        )
    unknown = sorted(name for name in os.listdir(path) if _DATA_FILE.fullmatch(name) and name not in needed)
    if unknown and needed:
        found.problems.append(
            Problem(
                code="unknown-file",
                severity="note",
                message=f"{len(unknown)} data files that .metadata does not name: {listing(unknown)}",
                hint="They are left over from another save into this directory and are not read.",
            )
        )


def _size_of(path: Path, name: str) -> int | None:
    """Return the size of a regular file, or ``None`` (one look a file: archives have thousands)."""
    try:
        info = os.stat(f"{path}/{name}")  # noqa: PTH116
    except OSError:
        return None
    return info.st_size if stat.S_ISREG(info.st_mode) else None


def _common(path: Path, objects: Mapping[str, Place], found: Findings) -> tuple[Mapping[str, Any] | None, str]:
    """Return what Megatron keeps unsharded, and where it lay. It is a cross-check: unreadable is a note."""
    place = objects.get(COMMON_OBJECT)
    if (path / COMMON_FILE).is_file():
        kind, file, base, length = COMMON_FILE, path / COMMON_FILE, 0, None
    elif place is not None and (path / place.file).is_file():
        kind, file, base, length = "common_state", path / place.file, place.offset, place.length
    else:
        return None, "common_state" if place is not None else ""
    try:
        archive = torchzip.open_archive(file, base, length)
        value, _ = loads(archive.read("data.pkl"), METADATA_NAMES, where=kind, inert=True)
    except Refused:
        raise
    except CkpttoolError as error:
        found.problems.append(
            Problem(code="common-unreadable", path=kind, severity="note", message=error.message, hint=error.hint)
        )
        return None, kind
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return (value if isinstance(value, dict) else None), kind
