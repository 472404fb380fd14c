"""A single file: what it is, by its name and its first bytes."""

from __future__ import annotations

from pathlib import Path

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.formats import dcp, fsdp, hf, shardfiles, torchzip
from ckpttool.formats.dcpkeys import COMMON_FILE
from ckpttool.formats.safetensorsfile import read_safetensors
from ckpttool.inspection.draft import Draft
from ckpttool.inspection.result import Inspection
from ckpttool.inspection.sections import Section
from ckpttool.inspection.suggestions import inspect_command

_BY_NAME = {
    dcp.METADATA_FILE: "index of a torch distributed checkpoint",
    dcp.BACKEND_FILE: "Megatron's marker of a finished torch_dist save",
    COMMON_FILE: "unsharded state of a Megatron checkpoint",
    hf.CONFIG: "Hugging Face model configuration",
    hf.ADAPTER_CONFIG: "PEFT adapter configuration",
    shardfiles.CONFIG_FILE: "verl's note of FSDP version and world size",
    layout.TRACKER: "tracker: the step that a run saved last",
    layout.MANIFEST: "verl's manifest of a role directory",
    layout.TRANSFORMER_CONFIG: "Megatron transformer configuration, as verl writes it",
    layout.LORA_META: "rank and alpha of a LoRA checkpoint",
    "tokenizer.json": "tokenizer",
    "tokenizer_config.json": "tokenizer configuration",
    "generation_config.json": "generation configuration",
    "trainer_state.json": "state of transformers' Trainer",
    "integrity.json": "Megatron's list of file hashes",
}
_MAGIC = (
    (b"GGUF", "gguf", "GGUF model (llama.cpp)"),
    (b"\x89HDF\r\n\x1a\n", "hdf5", "HDF5 file (Keras, h5py)"),
    (b"\x93NUMPY", "npy", "numpy array"),
)


def inspect_file(path: Path, tensors: str | None = None) -> Inspection:
    """Say what a file is, and what it holds where that can be read without running anything.

    Raises :class:`NotACheckpoint` for a file that we cannot name.
    """
    size = torchzip.file_size(path)
    draft = Draft(path=path, kind="file", title="", evidence=(path.name,))
    draft.facts["size"] = f"{size:,} bytes"
    draft.next = (inspect_command(str(path.parent), "the directory that it belongs to"),)
    if match := shardfiles.SHARD_FILE.fullmatch(path.name):
        draft.title = f"one FSDP file ({match[1]}) of rank {match[3]} in a world of {match[2]}"
        _check_archive(draft, path, state=match[1] == "model")
    elif path.suffix == ".distcp":
        draft.title = "data file of a distributed checkpoint; its index is .metadata"
    elif path.name in _BY_NAME:
        draft.title = _BY_NAME[path.name]
        if not size:
            draft.fault("truncated", f"{path.name}: empty (0 bytes)")
    elif path.name in hf.INDEXES:
        draft.title = "index of a sharded Hugging Face model"
    elif path.suffix == ".safetensors":
        _safetensors(draft, path)
    else:
        _by_magic(draft, path)
    return draft.finish(tensors)


def _check_archive(draft: Draft, path: Path, *, state: bool) -> None:
    """Look at an archive's end; of model weights, the names as well, which refuses what would run code."""
    try:
        archive = torchzip.open_archive(path)
        if state:
            draft.facts["entries"] = f"{fsdp.count_entries(archive):,}"
    except BrokenCheckpoint as error:
        draft.fault(error.code, error.message, hint=error.hint)
        return
    draft.facts["records"] = f"{len(archive.entries):,} (torch.save archive)"


def _safetensors(draft: Draft, path: Path) -> None:
    draft.kind, draft.title = "safetensors", "safetensors file"
    draft.next = ()
    try:
        tensors = read_safetensors(path)
    except BrokenCheckpoint as error:
        draft.fault(error.code, error.message, hint=error.hint)
        return
    source = hf.HfSource(
        root=path.parent, config=None, weights=(path.name,), side_files=(), tensors=tensors, problems=()
    )
    draft.add(Section("", source))


def _by_magic(draft: Draft, path: Path) -> None:
    head = torchzip.read_range(path, 0, 16)
    for magic, kind, title in _MAGIC:
        if head.startswith(magic):
            draft.kind, draft.title = kind, title
            return
    try:
        archive = torchzip.open_archive(path)
    except BrokenCheckpoint as error:
        if error.code == "not-torch-save":
            raise NotACheckpoint(
                f"{path}: no file that ckpttool recognises", hint="Give the directory of a checkpoint."
            ) from error
        draft.title = "file written by torch"
        draft.fault(error.code, error.message, hint=error.hint)
        return
    draft.title = "file written by torch.save (not unpickled)"
    draft.facts["records"] = f"{len(archive.entries):,}"
    draft.facts["stored"] = f"{sum(entry.size for entry in archive.entries.values()):,} bytes"
