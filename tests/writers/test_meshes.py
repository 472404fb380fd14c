"""The shards of larger meshes are cut as they claim to be, by the judgement of torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.writers.placed import COUNT, DTYPES, same_bits
from tests.writers.reading import expected, shards

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

RANDOM = {
    "random-4": (4,),
    "random-2x2": (2, 2),
    "random-8": (8,),
    "random-2x4": (2, 4),
    "random-4x2": (4, 2),
    "random-2x2x2": (2, 2, 2),
}
STRIDED = {"strided-2x4": (2, 4), "strided-4x2": (4, 2), "strided-2x2x2": (2, 2, 2)}
OTHERS = ("starved-2x4", "shard-dim1")


def local(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value._local_tensor if isinstance(value, DTensor) else value
    return tensor


@pytest.fixture
def random_root(request: pytest.FixtureRequest, name: str) -> Path:
    """The smaller meshes are written with everything else that four ranks write."""
    root: Path = request.getfixturevalue(
        "fsdp_checkpoints" if name in ("random-4", "random-2x2") else "mesh_checkpoints"
    )
    return root


def test_every_role_is_listed_here(mesh_checkpoints: Path) -> None:
    wanted = {*RANDOM, *STRIDED, *OTHERS} - {"random-4", "random-2x2"}
    assert {path.name for path in mesh_checkpoints.iterdir()} == wanted | {"expected"}
    for name in wanted:
        files = {f"model_world_size_8_rank_{rank}.pt" for rank in range(8)} | {"fsdp_config.json"}
        assert {path.name for path in (mesh_checkpoints / name).iterdir()} == files
        config = json.loads((mesh_checkpoints / name / "fsdp_config.json").read_text())
        assert config == {"FSDP_version": 2, "world_size": 8}


@pytest.mark.parametrize("name", RANDOM)
def test_random_tensors_are_of_every_kind(random_root: Path, name: str) -> None:
    state = shards(random_root / name)[0]
    whole = expected(random_root, name)
    assert len(state) == COUNT
    assert {key: (value.dtype, value.shape) for key, value in state.items()} == {
        key: (value.dtype, value.shape) for key, value in whole.items()
    }
    assert {value.dtype for value in whole.values()} == set(DTYPES)
    assert {value.ndim for value in whole.values()} == {0, 1, 2, 3, 4}
    assert any(value.is_floating_point() and value.float().isnan().any() for value in whole.values())


@pytest.mark.parametrize("name", RANDOM)
def test_random_placements_occur(random_root: Path, name: str) -> None:
    placed = [value for value in shards(random_root / name)[0].values() if isinstance(value, DTensor)]
    assert COUNT // 2 < len(placed) < COUNT
    assert {value.device_mesh.mesh.shape for value in placed} == {RANDOM[name]}
    found = {one for value in placed for one in value.placements}
    assert found == {Replicate(), *map(Shard, range(4))}


@pytest.mark.parametrize("name", RANDOM)
def test_random_layouts_occur(random_root: Path, name: str) -> None:
    parts = {key: local(value) for key, value in shards(random_root / name)[0].items()}
    assert any(not part.is_contiguous() for part in parts.values())
    windows = [part for key, part in parts.items() if key.endswith("window") and part.numel()]
    assert all(part.storage_offset() >= 3 for part in windows)
    assert len({part.untyped_storage().data_ptr() for part in windows}) < len(windows)


@pytest.mark.parametrize("name", RANDOM)
def test_what_no_axis_cuts_is_the_oracle(random_root: Path, name: str) -> None:
    ranks, whole = shards(random_root / name), expected(random_root, name)
    for key, value in ranks[0].items():
        if not isinstance(value, DTensor) or all(one == Replicate() for one in value.placements):
            assert all(same_bits(local(state[key]), whole[key]) for state in ranks)


# Tensor parallelism inside


@pytest.mark.parametrize("name", STRIDED)
def test_strided_blocks_are_uneven(mesh_checkpoints: Path, name: str) -> None:
    ranks = shards(mesh_checkpoints / name)
    weight = ranks[0]["columns_13.weight"]
    tensor_parallel = STRIDED[name][-1]
    copies = (Replicate(),) if name == "strided-2x2x2" else ()
    assert weight.placements == (*copies, _StridedShard(0, split_factor=tensor_parallel), Shard(0))
    assert tuple(weight.device_mesh.mesh.shape) == STRIDED[name]
    rows = [len(local(state["columns_13.weight"])) for state in ranks]
    assert (
        rows
        == {
            "strided-2x4": [2, 2, 2, 1, 2, 2, 2, 0],
            "strided-4x2": [2, 2, 2, 2, 2, 2, 1, 0],
            "strided-2x2x2": [4, 3, 3, 3, 4, 3, 3, 3],
        }[name]
    )


@pytest.mark.parametrize("name", STRIDED)
def test_columns_and_biases_are_cut_too(mesh_checkpoints: Path, name: str) -> None:
    state = shards(mesh_checkpoints / name)[0]
    assert len(state) == 13
    assert state["rows_13.weight"].placements[-2:] == (Shard(0), Shard(1))
    assert state["rows_13.bias"].placements[-2:] == (Shard(0), Replicate())
    assert isinstance(state["tokens.weight"].placements[-2], _StridedShard)
    assert isinstance(state["columns_7.bias"].placements[-2], _StridedShard)
    assert state["norm.weight"].device_mesh.ndim == len(STRIDED[name]) - 1


def test_the_oracle_knows_nothing_of_the_mesh(mesh_checkpoints: Path) -> None:
    one, *others = (expected(mesh_checkpoints, name) for name in STRIDED)
    for other in others:
        assert one.keys() == other.keys()
        assert all(same_bits(value, other[key]) for key, value in one.items())


def test_torch_forgets_the_shape_of_a_part_without_columns(mesh_checkpoints: Path) -> None:
    """By the placements it would be (3, 0) and (2, 0)."""
    weights = [local(state["rows_6.weight"]) for state in shards(mesh_checkpoints / "starved-2x4")]
    assert [tuple(weight.shape) for weight in weights[3::4]] == [(0, 0), (0, 0)]
    whole = [torch.cat(weights[start : start + 3], 1) for start in (0, 4)]
    assert torch.equal(torch.cat(whole), expected(mesh_checkpoints, "starved-2x4")["rows_6.weight"])


def test_fully_shard_may_cut_another_dimension(mesh_checkpoints: Path) -> None:
    ranks = shards(mesh_checkpoints / "shard-dim1")
    placements = {name: value.placements for name, value in ranks[0].items()}
    assert placements == {
        "stack": (Shard(2),),
        "long": (Shard(0),),
        "wide.weight": (Shard(1),),
        "wide.bias": (Shard(0),),
    }
    merged = torch.cat([local(state["stack"]) for state in ranks], 2)
    assert torch.equal(merged, expected(mesh_checkpoints, "shard-dim1")["stack"])
