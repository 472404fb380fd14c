"""What `to-hf` refuses of an archive: all reasons at once, and nothing is written."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from ckpttool import sink
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint, Refused, Unmapped, UsageError
from tests import builders
from tests.conftest import Call
from tests.conversions import Role, codes, done, make, only, refused, wrong
from tests.looking import BOMBS, bombs, change_metadata, repack, save_dcp, write_json
from tests.synthetic import archive
from tests.writers.reading import read_metadata

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

EMBEDDING = "embedding.word_embeddings.weight"


@pytest.fixture
def role(tmp_path: Path) -> Role:
    return make(tmp_path)


def dropping_chunks(metadata: Metadata, *keys: str) -> None:
    """The last chunk of each key is gone from the list."""
    for key in keys:
        entry = metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.pop()


def test_chunks_that_do_not_tile_are_all_named(tmp_path: Path) -> None:
    role = make(tmp_path, dialect="indexed", config={"num_hidden_layers": 10})
    keys = [key for key in role.entries if key.endswith(".linear_qkv.weight")]
    change_metadata(role.archive, lambda metadata: dropping_chunks(metadata, *keys))
    error = refused(role, BrokenCheckpoint)
    assert (error.exit_code, set(codes(error))) == (4, {"does-not-tile"})
    told = str(error)
    assert [key for key in keys if key not in told] == []


def test_chunks_that_overlap_are_refused(role: Role) -> None:
    def double(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[EMBEDDING]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks[1].offsets = torch.Size([40, 0])
        assert metadata.storage_data is not None
        metadata.storage_data[MetadataIndex(EMBEDDING, torch.Size([40, 0]))] = metadata.storage_data.pop(
            MetadataIndex(EMBEDDING, torch.Size([48, 0]))
        )

    change_metadata(role.archive, double)
    error = refused(role, BrokenCheckpoint)
    assert set(codes(error)) == {"does-not-tile"}
    assert EMBEDDING in str(error)


def test_missing_and_short_files_are_told_together(role: Role) -> None:
    (role.archive / "__0_1.distcp").unlink()
    (role.archive / "__1_0.distcp").unlink()
    builders.truncate(role.archive / "__1_1.distcp")
    error = refused(role, BrokenCheckpoint)
    assert (error.exit_code, sorted(codes(error))) == (4, ["file-missing", "truncated"])
    assert "2 of 4 data files missing: __0_1.distcp, __1_0.distcp" in str(error)
    assert "__1_1.distcp: truncated" in str(error)
    assert all(problem.hint for problem in error.problems)


def test_every_missing_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "WRITERS", 24)
    role = make(tmp_path)
    files = sorted(path.name for path in role.archive.glob("*.distcp"))
    assert len(files) == 24
    for name in files[1:]:
        (role.archive / name).unlink()
    told = str(refused(role, BrokenCheckpoint))
    assert [name for name in files[1:] if name not in told] == []


def test_files_that_do_not_tile_and_are_missing_are_told_together(role: Role) -> None:
    change_metadata(role.archive, lambda metadata: dropping_chunks(metadata, EMBEDDING))
    (role.archive / "__0_0.distcp").unlink()
    assert sorted(codes(refused(role, BrokenCheckpoint))) == ["does-not-tile", "file-missing"]


def test_an_unknown_model_type_lists_those_that_are_known(role: Role) -> None:
    role.say(model_type="my_llama")
    error = refused(role)
    assert (error.exit_code, error.code) == (5, "unknown-architecture")
    assert "'my_llama'" in error.message
    for word in ("llama", "qwen3_moe", "kimi_k2", "gemma3_text", "--arch", "docs/to-hf.md"):
        assert word in error.hint


def test_a_config_without_a_model_type(role: Role) -> None:
    role.say(model_type=..., architectures=...)
    assert refused(role).code == "unknown-architecture"


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads"])
def test_a_config_that_lacks_sizes_names_the_fields(field: str, role: Role) -> None:
    role.say(**{field: ..., "intermediate_size": "48"})
    error = refused(role)
    assert (error.exit_code, error.code) == (5, "config-lacks")
    assert all(name in error.message for name in (field, "intermediate_size"))


def without_config(role: Role) -> None:
    for file in (role.path / "huggingface").iterdir():
        file.unlink()


def test_no_config_is_a_choice_of_the_user(role: Role) -> None:
    without_config(role)
    error = refused(role, UsageError)
    assert error.exit_code == 2
    assert "--hf-config" in error.hint


@pytest.mark.parametrize("how", ["common.pt", "run_config.yaml"])
def test_the_hint_names_the_model_that_a_run_was_started_from(how: str, role: Role) -> None:
    without_config(role)
    if how == "common.pt":
        torch.save({"args": {"hf_checkpoint": "/models/Llama-tiny"}}, role.archive / how)
    else:
        (role.archive / how).write_text("model:\n  hf_model_id: '/models/Llama-tiny'\n")
    assert "/models/Llama-tiny" in refused(role, UsageError).hint


@pytest.mark.parametrize("content", [b"", b"{", b"[1]"])
def test_a_config_that_is_none(content: bytes, role: Role) -> None:
    (role.path / "huggingface" / "config.json").write_bytes(content)
    error = refused(role, BrokenCheckpoint)
    assert (error.exit_code, error.code) == (4, "bad-json")


@pytest.mark.parametrize("backend", ["fsdp_dtensor", "zarr"])
def test_other_back_ends_are_named(backend: str, role: Role) -> None:
    write_json(role.archive / "metadata.json", {"sharded_backend": backend, "sharded_backend_version": 1})
    error = refused(role)
    assert (error.exit_code, error.code) == (5, "other-backend")
    assert repr(backend) in error.message
    assert "torch_dist" in error.hint


def test_an_archive_of_zarr_has_no_index(tmp_path: Path) -> None:
    role = Role(tmp_path / "iter_0000001", {}, {})
    write_json(role.path / "metadata.json", {"sharded_backend": "zarr", "sharded_backend_version": 1})
    (role.path / EMBEDDING).mkdir()
    (role.path / EMBEDDING / ".zarray").write_text("{}")
    assert refused(role, NotACheckpoint).exit_code == 3


def test_a_plain_checkpoint_of_torch(tmp_path: Path) -> None:
    role = Role(tmp_path / "plain", {}, {})
    save_dcp(role.path, {"model.weight": torch.ones(4, 2)})
    error = refused(role, NotACheckpoint)
    assert error.exit_code == 3
    assert "plain distributed checkpoint" in error.message


def test_an_archive_of_the_optimizer_alone(role: Role) -> None:
    role.entries = {f"optimizer.state.exp_avg.{key}": entry for key, entry in role.entries.items()}
    role.put()
    error = refused(role, NotACheckpoint)
    assert (error.exit_code, error.code) == (3, "no-weights")
    assert "optimizer" in error.message


def test_several_checkpoints_below_are_listed_as_commands(tmp_path: Path, ckpttool: Callable[..., Call]) -> None:
    for step in (10, 20):
        make(tmp_path / "run" / f"global_step_{step}").path.rename(tmp_path / "run" / f"global_step_{step}" / "actor")
    call = ckpttool("to-hf", tmp_path / "run", "-o", tmp_path / "out", "--dtype", "bf16")
    assert (call.code, call.out) == (3, "")
    for step in (10, 20):
        path = tmp_path / "run" / f"global_step_{step}" / "actor"
        assert f"ckpttool to-hf {path} -o {tmp_path / 'out'} --dtype bf16" in " ".join(call.err.split())
    assert "--step latest --role actor" in " ".join(call.err.split())


@pytest.mark.parametrize("where", ["it", "inside", "around"])
def test_an_output_at_its_source(where: str, role: Role, ckpttool: Callable[..., Call]) -> None:
    before = sorted(role.path.parent.rglob("*"))
    output = {"it": role.archive, "inside": role.archive / "hf", "around": role.path}[where]
    assert ckpttool("to-hf", role.path, "-o", output, "--force").code == 6
    assert sorted(role.path.parent.rglob("*")) == before


def test_an_output_in_the_folder_of_the_config(role: Role, ckpttool: Callable[..., Call]) -> None:
    assert ckpttool("to-hf", role.path, "-o", role.path / "huggingface", "--force").code == 6
    assert (role.path / "huggingface" / "config.json").exists()


def test_an_output_that_exists(role: Role, ckpttool: Callable[..., Call]) -> None:
    role.output.mkdir()
    (role.output / "notes.txt").write_text("mine")
    for options in ([], ["--force"]):
        assert ckpttool("to-hf", role.path, "-o", role.output, *options).code == 6
    assert [path.name for path in role.output.iterdir()] == ["notes.txt"]


def test_force_replaces_a_model(role: Role) -> None:
    done(role)
    role.put_all({"decoder.final_layernorm.weight": torch.full((32,), 3.0)})
    done(role, force=True)
    assert wrong(role) == {"model.norm.weight"}


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
@pytest.mark.parametrize("how", BOMBS)
def test_indexes_that_would_run_code(how: str, file: str, role: Role) -> None:
    marker = role.path.parent / "marker"
    if file == ".metadata":
        (role.archive / file).write_bytes(bombs(marker)[how])
    else:
        torch.save({"iteration": 1}, role.archive / file)
        repack(role.archive / file, lambda _: bombs(marker)[how])
    assert refused(role, Refused).exit_code == 7
    assert not marker.exists()


def rewritten(role: Role, key: str, offset: tuple[int, ...], content: bytes) -> None:
    """Another record for a chunk, at the end of its file."""

    def move(metadata: Metadata) -> None:
        assert metadata.storage_data is not None
        info = metadata.storage_data[MetadataIndex(key, torch.Size(offset))]
        path = role.archive / info.relative_path
        info.offset, info.length = path.stat().st_size, len(content)
        with path.open("ab") as file:
            file.write(content)

    change_metadata(role.archive, move)


@pytest.mark.parametrize("how", BOMBS)
def test_a_record_that_would_run_code(how: str, role: Role) -> None:
    marker, file = role.path.parent / "marker", role.path.parent / "record"
    torch.save(torch.ones(48, 32), file)
    repack(file, lambda _: bombs(marker)[how])
    rewritten(role, EMBEDDING, (0, 0), file.read_bytes())
    assert refused(role, Refused).exit_code == 7
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [torch.ones(48, 32, dtype=torch.float64), torch.ones(48, 32).int(), torch.ones(24, 64), torch.ones(96, 32)[:47]],
)
def test_a_record_that_is_not_what_the_index_says(value: torch.Tensor, role: Role) -> None:
    rewritten(role, EMBEDDING, (0, 0), archive._saved(value.clone()))
    error = refused(role, BrokenCheckpoint)
    assert error.exit_code == 4
    assert EMBEDDING in str(error)


def test_an_archive_that_changes_while_it_is_read(role: Role, monkeypatch: pytest.MonkeyPatch) -> None:
    execute: Callable[..., Any] = sink.execute

    def save_meanwhile(*arguments: Any, **options: Any) -> Any:
        result = execute(*arguments, **options)
        path = role.archive / "__1_0.distcp"
        path.write_bytes(path.read_bytes())
        return result

    monkeypatch.setattr("ckpttool.export.writing.execute", save_meanwhile)
    error = refused(role, BrokenCheckpoint)
    assert (error.code, error.exit_code) == ("changed-meanwhile", 4)
    assert "__1_0.distcp" in error.message


def test_bytes_of_the_model_that_have_no_place(role: Role) -> None:
    def promise(metadata: Metadata) -> None:
        metadata.state_dict_metadata["decoder.something/shard_0_1"] = BytesStorageMetadata()

    change_metadata(role.archive, promise)
    assert "no-bytes" in codes(refused(role, BrokenCheckpoint))


@pytest.mark.parametrize("name", ["../outside.distcp", "/etc/passwd"])
def test_an_index_that_points_outside(name: str, role: Role) -> None:
    def point(metadata: Metadata) -> None:
        assert metadata.storage_data is not None
        next(iter(metadata.storage_data.values())).relative_path = name

    change_metadata(role.archive, point)
    assert refused(role, Refused).exit_code == 7


def test_everything_but_the_model_may_be_there(tmp_path: Path) -> None:
    """Optimizer, generators, extra states and common state are skipped by rule, and told with their numbers."""
    role = make(tmp_path, extra=True)
    result = done(role)
    assert wrong(role) == set()
    metadata = read_metadata(role.archive).state_dict_metadata
    tensors = {key for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    objects = metadata.keys() - tensors
    assert result.skipped["optimizer"].tensors == len(tensors - role.entries.keys()) > 0
    assert result.skipped["extra_state"].objects == sum("_extra_state/" in key for key in objects) > 0
    assert {part: skipped.objects for part, skipped in result.skipped.items() if part in ("rng", "common")} == {
        "rng": 1,
        "common": 1,
    }
    assert sum(s.tensors + s.objects for s in result.skipped.values()) == len(metadata) - len(role.entries)


def test_an_index_of_nothing(role: Role) -> None:
    (role.archive / ".metadata").write_bytes(pickle.dumps(Metadata({}, None, {})))
    assert refused(role, NotACheckpoint).code == "no-weights"


def test_an_archive_without_an_index(role: Role) -> None:
    (role.archive / ".metadata").unlink()
    error = refused(role, BrokenCheckpoint)
    assert "metadata-missing" in codes(error)


def test_a_known_problem_is_one(role: Role) -> None:
    role.put_all({EMBEDDING: role.entries[EMBEDDING].value[:90]})
    problem = only(refused(role, Unmapped), "shapes-disagree")
    assert all(words in problem.message for words in (EMBEDDING, "90 rows", "vocab_size 96"))
