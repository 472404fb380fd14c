"""`inspect` on distributed archives that are unfinished, cut short, contradict themselves, or would run code."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpttool.errors import Refused
from ckpttool.inspection import inspect
from tests import builders
from tests.looking import BOMBS, bombs, change_metadata, codes, faults, numel, problem, repack, weights


@pytest.fixture
def archive(tmp_path: Path, data: Path) -> Path:
    """A whole torch_dist directory of two ranks."""
    return builders.copy(data / "megatron/mcore0.16-dense-tp2", tmp_path / "archive")


def test_metadata_json_is_missing(archive: Path) -> None:
    """Case 60 a: Megatron writes it last."""
    (archive / "metadata.json").unlink()
    found = inspect(archive)
    assert (found.kind, found.state, faults(found)) == ("torch_dist", "incomplete", ["not-finalised"])
    told = problem(found, "not-finalised")
    assert told.path == "metadata.json"
    assert "interrupted" in told.message


def test_metadata_json_is_half_written(archive: Path) -> None:
    builders.truncate(archive / "metadata.json")
    found = inspect(archive)
    assert (found.kind, faults(found)) == ("torch_dist", ["bad-json"])
    assert "metadata.json" in problem(found, "bad-json").message


def test_the_index_is_missing(archive: Path) -> None:
    """Case 41: `.metadata` is what every other tool asks for; it lies on the coordinator's node."""
    (archive / ".metadata").unlink()
    found = inspect(archive)
    assert (found.kind, found.state) == ("torch_dist", "incomplete")
    assert faults(found) == ["metadata-missing"]
    assert "multi-node" in problem(found, "metadata-missing").hint
    assert found.parameters is None


def test_data_files_without_any_index(archive: Path) -> None:
    for name in (".metadata", "metadata.json", "common.pt"):
        (archive / name).unlink()
    found = inspect(archive)
    assert found.state == "incomplete"
    assert found.title == "distributed checkpoint without its index"
    assert faults(found) == ["metadata-missing"]


@pytest.mark.parametrize("size", [0, 1, 500])
def test_the_index_is_cut_short(archive: Path, size: int) -> None:
    with (archive / ".metadata").open("r+b") as file:
        file.truncate(size)
    found = inspect(archive)
    assert (found.state, faults(found)) == ("incomplete", ["unreadable-pickle"])
    assert ".metadata" in problem(found, "unreadable-pickle").message


@pytest.mark.parametrize("value", [{}, [1], "text"], ids=str)
def test_the_index_is_none(archive: Path, value: object) -> None:
    (archive / ".metadata").write_bytes(pickle.dumps(value))
    assert faults(inspect(archive)) == ["unreadable-pickle"]


def test_data_files_are_missing(archive: Path) -> None:
    for name in ("__1_0.distcp", "__1_1.distcp"):
        (archive / name).unlink()
    found = inspect(archive)
    assert (found.state, faults(found)) == ("incomplete", ["file-missing"])
    told = problem(found, "file-missing")
    assert "2 of 4" in told.message
    assert "__1_0.distcp, __1_1.distcp" in told.message
    assert "multi-node" in told.hint
    assert found.parameters == numel(weights(archive))


@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_a_data_file_is_cut_short(archive: Path, fraction: float) -> None:
    """Case 74 for archives: name and both sizes."""
    whole = (archive / "__0_1.distcp").stat().st_size
    builders.truncate(archive / "__0_1.distcp", fraction)
    found = inspect(archive)
    assert (found.state, faults(found)) == ("incomplete", ["truncated"])
    told = problem(found, "truncated")
    assert told.path == "__0_1.distcp"
    assert f"{(archive / '__0_1.distcp').stat().st_size:,} bytes" in told.message
    assert f"needs {whole:,}" in told.message


def test_a_data_file_that_the_index_does_not_name(archive: Path) -> None:
    (archive / "__7_0.distcp").write_bytes(b"of an earlier save")
    found = inspect(archive)
    assert (found.state, codes(found)) == ("complete", ["unknown-file"])
    assert "__7_0.distcp" in problem(found, "unknown-file").message


def test_leftovers_of_writing_the_index_are_ignored(archive: Path) -> None:
    for name in (".metadata.tmp", ".metadata.bck"):
        (archive / name).write_bytes(b"half")
    assert inspect(archive).problems == ()


def test_common_pt_is_missing(archive: Path) -> None:
    """Case 60: metadata.json of megatron-core to 0.18 promises it; the tensors do not need it."""
    (archive / "common.pt").unlink()
    found = inspect(archive)
    assert (found.kind, found.state, faults(found)) == ("torch_dist", "incomplete", ["common-missing"])
    assert problem(found, "common-missing").path == "common.pt"
    assert found.parameters == numel(weights(archive))


def test_common_pt_cannot_be_read(archive: Path) -> None:
    """Case 59: a cross-check only, so a note."""
    builders.truncate(archive / "common.pt")
    found = inspect(archive)
    assert (found.state, codes(found)) == ("complete", ["common-unreadable"])
    assert "common.pt" in problem(found, "common-unreadable").message
    assert "iteration" not in found.facts


def _key_without_bytes(metadata: Metadata) -> None:
    for index in [i for i in metadata.storage_data if i.fqn == "decoder.final_layernorm.weight"]:
        del metadata.storage_data[index]


def _object_without_bytes(metadata: Metadata) -> None:
    first = next(i for i in metadata.storage_data if i.fqn.startswith("rng_state/"))
    metadata.storage_data = {i: v for i, v in metadata.storage_data.items() if i.fqn != first.fqn}


def _chunk_without_bytes(metadata: Metadata) -> None:
    first = next(i for i in metadata.storage_data if i.fqn == "embedding.word_embeddings.weight")
    del metadata.storage_data[first]


def _chunk_gone(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks.pop()


def _chunk_twice(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.size = torch.Size((entry.size[0] // 2, entry.size[1]))


def _no_chunks(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.chunks = [3]


def _negative_size(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.size = (-1, 32)


def _no_offset(metadata: Metadata) -> None:
    info: Any = next(v for k, v in metadata.storage_data.items() if k.fqn == "decoder.final_layernorm.weight")
    info.offset = -1


def _no_dtype(metadata: Metadata) -> None:
    entry: Any = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    entry.properties = None


@pytest.mark.parametrize(
    ("change", "code", "key"),
    [
        (_key_without_bytes, "no-bytes", "decoder.final_layernorm.weight"),
        (_object_without_bytes, "no-bytes", "rng_state/shard_0.0_1.2"),
        (_chunk_without_bytes, "no-bytes", "embedding.word_embeddings.weight"),
        (_chunk_gone, "does-not-tile", "embedding.word_embeddings.weight"),
        (_chunk_twice, "does-not-tile", "embedding.word_embeddings.weight"),
        (_no_chunks, "unreadable-pickle", "embedding.word_embeddings.weight"),
        (_negative_size, "unreadable-pickle", "embedding.word_embeddings.weight"),
        (_no_offset, "unreadable-pickle", "decoder.final_layernorm.weight"),
        (_no_dtype, "unreadable-pickle", "embedding.word_embeddings.weight"),
    ],
)
def test_the_index_contradicts_itself(archive: Path, change: Any, code: str, key: str) -> None:
    change_metadata(archive, change)
    found = inspect(archive)
    assert found.state == "incomplete"
    assert code in faults(found)
    assert all(told.message.endswith(f": {key}") for told in found.faults)


def test_the_storage_list_holds_something_else(archive: Path) -> None:
    def change(metadata: Any) -> None:
        metadata.storage_data["key"] = 3

    change_metadata(archive, change)
    found = inspect(archive)
    assert (found.state, faults(found)) == ("incomplete", ["unreadable-pickle"])
    assert "storage list" in problem(found, "unreadable-pickle").message


@pytest.mark.parametrize("name", ["../__0_0.distcp", "/etc/passwd", "a/../../b", "", 7])
def test_the_index_points_outside_the_directory(archive: Path, name: Any) -> None:
    def change(metadata: Metadata) -> None:
        next(iter(metadata.storage_data.values())).relative_path = name

    change_metadata(archive, change)
    with pytest.raises(Refused, match="outside its directory") as refused:
        inspect(archive)
    assert refused.value.exit_code == 7


@pytest.mark.parametrize("way", BOMBS)
@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_a_hostile_archive_is_refused_and_nothing_runs(archive: Path, tmp_path: Path, file: str, way: str) -> None:
    marker = tmp_path / "it-ran"
    if file == ".metadata":
        (archive / file).write_bytes(bombs(marker)[way])
    else:
        repack(archive / file, lambda _: bombs(marker)[way])
    with pytest.raises(Refused, match=file) as refused:
        inspect(archive)
    assert refused.value.exit_code == 7
    assert not marker.exists()


@pytest.mark.parametrize("way", BOMBS)
def test_a_hostile_common_state_is_refused(tmp_path: Path, data: Path, way: str) -> None:
    """Where 0.19 keeps what was common.pt: an object inside a data file."""
    archive = builders.copy(data / "megatron/mcore0.19-dense-tp2", tmp_path / "archive")
    marker, record = tmp_path / "it-ran", io.BytesIO()
    with zipfile.ZipFile(record, "w") as zipped:
        zipped.writestr("archive/data.pkl", bombs(marker)[way])

    def change(metadata: Metadata) -> None:
        (place,) = [v for k, v in metadata.storage_data.items() if k.fqn == "common_state/shard_0_1"]
        file = archive / place.relative_path
        place.offset, place.length = file.stat().st_size, len(record.getvalue())
        file.write_bytes(file.read_bytes() + record.getvalue())

    change_metadata(archive, change)
    with pytest.raises(Refused, match="common_state"):
        inspect(archive)
    assert not marker.exists()
