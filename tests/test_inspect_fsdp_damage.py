"""`inspect` on shards that are cut short, mixed up, contradict each other, or would run code."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ckpttool.errors import Refused
from ckpttool.inspection import inspect
from tests import builders
from tests.looking import BOMBS, bombs, codes, elements, faults, holds, problem, repack, write_shards


@pytest.fixture
def role(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A whole role of four ranks."""
    return builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "role")


def shard(rank: int, kind: str = "model") -> str:
    return f"{kind}_world_size_4_rank_{rank}.pt"


@pytest.mark.parametrize("kind", ["model", "optim", "extra_state"])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named_with_all_sizes(role: Path, kind: str, fraction: float) -> None:
    """Case 74: name, size, and the sizes of the other ranks."""
    cut = role / shard(2, kind)
    builders.truncate(cut, fraction)
    found = inspect(role)
    assert (found.state, faults(found)) == ("incomplete", ["truncated"])
    told = problem(found, "truncated")
    assert told.path == cut.name
    assert cut.name in told.message
    sizes = {(role / shard(rank, kind)).stat().st_size for rank in (0, 1, 3)} | {cut.stat().st_size}
    assert all(f"{size:,} bytes" in told.message or f"{size:,}, " in told.message for size in sizes)


def test_every_truncated_file_is_named(role: Path) -> None:
    """Case 74: all of them at once."""
    for rank in (1, 3):
        builders.truncate(role / shard(rank))
    assert [told.path for told in inspect(role).faults] == [shard(1), shard(3)]


def test_stale_shards_beside_a_complete_set(role: Path, fsdp_checkpoints: Path) -> None:
    """Shards of a save with another world size are told and not read."""
    builders.stale_ranks(role, 8)
    builders.drop_rank(role, 7)
    found = inspect(role)
    assert (found.state, faults(found)) == ("complete", [])
    message = problem(found, "stale-shards").message
    assert "7 extra_state, 7 model, 7 optim files of world size 8" in message
    assert "set of 4" in message
    assert found.parameters == elements(fsdp_checkpoints / "expected/fsdp2.safetensors")


@pytest.mark.parametrize("said", [4, 3])
def test_two_complete_sets_are_a_problem(role: Path, said: int) -> None:
    """Which one is meant, only the dates tell; the note of the world size decides what is shown."""
    builders.stale_ranks(role, 3)
    (role / "fsdp_config.json").write_text(f'{{"FSDP_version": 2, "world_size": {said}}}')
    found = inspect(role)
    assert "two-world-sizes" in faults(found)
    assert "world sizes 3, 4" in problem(found, "two-world-sizes").message
    assert found.facts["world size"].startswith(f"{said} ranks")


def test_two_incomplete_sets(role: Path) -> None:
    builders.stale_ranks(role, 8)
    for rank in (3, 4, 5, 6, 7):
        builders.drop_rank(role, rank)
    found = inspect(role)
    assert found.facts["world size"].startswith("4 ranks")
    assert set(faults(found)) == {"rank-missing"}


def test_a_rank_that_the_world_does_not_have(role: Path) -> None:
    (role / shard(4)).write_bytes((role / shard(0)).read_bytes())
    found = inspect(role)
    assert "rank-too-high" in faults(found)
    assert "rank 4 in a world of 4" in problem(found, "rank-too-high").message


@pytest.mark.parametrize("name", ["torch2.6-fsdp2", "torch2.9-fsdp2", "torch2.10-fsdp2", "torch2.13-fsdp2"])
def test_two_files_have_swapped_their_names(tmp_path: Path, data: Path, name: str) -> None:
    """Each file carries its own place on the mesh."""
    role = builders.copy(data / "fsdp" / name, tmp_path / "role")
    (role / shard(0)).rename(role / "other")
    (role / shard(2)).rename(role / shard(0))
    (role / "other").rename(role / shard(2))
    found = inspect(role)
    assert set(faults(found)) == {"rank-disagrees"}
    assert {told.message.partition(":")[0] for told in found.faults} == {"rank 0, 2"}


def test_a_file_in_the_format_before_zip(role: Path) -> None:
    torch.save({"w": torch.zeros(2)}, role / shard(1), _use_new_zipfile_serialization=False)
    found = inspect(role)
    assert faults(found) == ["legacy-pt"]
    assert shard(1) in problem(found, "legacy-pt").message


def test_a_file_that_is_no_archive(role: Path) -> None:
    (role / shard(1)).write_bytes(b"<!DOCTYPE html>" * 40)
    assert faults(inspect(role)) == ["not-torch-save"]


def test_a_file_that_another_tool_has_compressed(role: Path) -> None:
    with zipfile.ZipFile(role / shard(0)) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(role / shard(0), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    found = inspect(role)
    assert set(faults(found)) == {"compressed-zip"}
    assert shard(0) in found.faults[0].message


def test_a_shard_that_holds_no_state_dict(role: Path) -> None:
    torch.save([torch.zeros(2)], role / shard(1))
    found = inspect(role)
    assert faults(found) == ["no-state-dict"]
    assert shard(1) in problem(found, "no-state-dict").message


def test_entries_that_are_no_tensors(tmp_path: Path) -> None:
    role = write_shards(tmp_path / "role", lambda rank, _: {"b": torch.zeros(2), "version": 3})
    found = inspect(role)
    assert (found.state, codes(found)) == ("complete", ["not-tensors"] * 2)
    assert found.parameters == 2


def rows(rank: int, mesh: DeviceMesh, **options: Any) -> DTensor:
    return DTensor.from_local(torch.full((4, 3), float(rank)), mesh, [Shard(0)], run_check=False, **options)


def _key_missing(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {"w": rows(rank, mesh)} | ({} if rank else {"b": torch.zeros(2)})


def _dtype(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {"w": rows(rank, mesh), "b": torch.zeros(2, dtype=torch.bfloat16 if rank else torch.float32)}


def _shape(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {"w": rows(rank, mesh), "b": torch.zeros(2 + rank)}


def _placement(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    whole = DTensor.from_local(torch.zeros(4, 2), mesh, [Replicate()], run_check=False)
    part = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False)
    return {"w": rows(rank, mesh), "b": part if rank else whole}


def _sharded_on_one(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    part = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)], run_check=False)
    return {"w": rows(rank, mesh)} | ({"b": part} if rank else {})


def _partial(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    return {"w": rows(rank, mesh), "b": DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)}


def _short(rank: int, mesh: DeviceMesh) -> dict[str, Any]:
    local = torch.zeros(2 if rank else 4, 2)
    part = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1))
    return {"w": rows(rank, mesh), "b": part}


@pytest.mark.parametrize(
    ("state", "code", "words"),
    [
        (_key_missing, "key-missing", "absent on rank 1"),
        (_sharded_on_one, "key-missing", "absent on rank 0"),
        (_dtype, "dtype-disagrees", "dtype"),
        (_shape, "shape-disagrees", "shape"),
        (_placement, "placement-disagrees", "placement"),
        (_partial, "partial-placement", "Partial"),
        (_short, "shape-disagrees", "[2, 2]"),
    ],
    ids=["replicated key missing", "sharded key missing", "dtype", "shape", "placement", "partial", "short local"],
)
def test_ranks_contradict_each_other(
    tmp_path: Path, state: Callable[[int, DeviceMesh], dict[str, Any]], code: str, words: str
) -> None:
    """Cases 1 to 3: nothing is decided by one rank alone; the tensor is named."""
    found = inspect(write_shards(tmp_path / "role", state))
    assert found.state == "incomplete"
    assert code in faults(found)
    told = [p for p in found.faults if p.code == code]
    assert all(words in p.message and p.message.endswith(": b") for p in told)


def test_one_problem_of_a_thousand_tensors_is_one_line(tmp_path: Path) -> None:
    names = [f"b{n:03}" for n in range(1000)]
    role = write_shards(tmp_path / "role", lambda rank, _: {n: torch.zeros(1 + rank) for n in names})
    told = problem(inspect(role), "shape-disagrees")
    assert "b000, b001" in told.message
    assert "992 more" in told.message


def test_fsdp_is_not_taken_for_a_megatron_role(role: Path) -> None:
    """Case 76: huggingface/ alone says nothing about Megatron."""
    assert inspect(role).kind == "fsdp"


def test_fsdp_whose_side_files_a_migration_has_moved(role: Path) -> None:
    """Case 76: the damage that verl's script does to such a role."""
    (role / "model").mkdir()
    (role / "huggingface").rename(role / "model/huggingface")
    found = inspect(role)
    assert (found.kind, found.state) == ("fsdp", "complete")
    assert holds(found) >= {("model weights", ""), ("side files", "model/huggingface")}
    assert "model/huggingface" in problem(found, "misplaced").message


@pytest.mark.parametrize("way", BOMBS)
def test_a_hostile_shard_is_refused_and_nothing_runs(role: Path, tmp_path: Path, way: str) -> None:
    marker = tmp_path / "it-ran"
    repack(role / shard(1), lambda _: bombs(marker)[way])
    with pytest.raises(Refused, match=shard(1)) as refused:
        inspect(role)
    assert refused.value.exit_code == 7
    assert not marker.exists()


@pytest.mark.parametrize("way", BOMBS)
def test_the_bombs_do_go_off(tmp_path: Path, way: str) -> None:
    """What makes the tests of refusals mean something."""
    marker = tmp_path / "it-ran"
    pickle.loads(bombs(marker)[way])
    assert marker.exists()


@pytest.mark.parametrize("kind", ["optim", "extra_state"])
def test_states_of_optimizer_and_rng_are_never_unpickled(role: Path, tmp_path: Path, kind: str) -> None:
    marker = tmp_path / "it-ran"
    repack(role / shard(1, kind), lambda _: bombs(marker)[BOMBS[0]])
    found = inspect(role)
    assert (found.state, faults(found)) == ("complete", [])
    assert not marker.exists()


def test_an_unknown_class_in_a_shard_is_refused_by_name(role: Path) -> None:
    repack(role / shard(1), lambda _: b"\x80\x02cmy_trainer.states\nFancyTensor\n)R.")
    with pytest.raises(Refused, match=r"my_trainer\.states\.FancyTensor"):
        inspect(role)


def test_a_shard_that_is_a_link_to_nowhere(role: Path) -> None:
    (role / shard(1)).unlink()
    (role / shard(1)).symlink_to(os.devnull + "-gone")
    found = inspect(role)
    assert "dangling-link" in faults(found)
    assert shard(1) in problem(found, "dangling-link").message
