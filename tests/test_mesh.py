"""Which box a rank holds, held against torch itself; meshes as every torch since 2.6 writes them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats import fsdp
from ckpttool.formats.mesh import Mesh, Placement, local_box, read_mesh, read_placement
from ckpttool.records import StoredTensor
from ckpttool.tensors import Index, tiling_faults
from ckpttool.unpickle import Record, record_class
from tests.pieces import differing

Tensor = tuple[Index, Index, tuple[Placement, ...]]


def in_torch(placement: Placement) -> Any:
    """The same placement as an object of torch."""
    if placement.kind == "_StridedShard":
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return {"Shard": Shard(placement.dim), "Replicate": Replicate(), "Partial": Partial()}[placement.kind]


@st.composite
def placed_tensors(draw: st.DrawFn) -> Tensor:
    """A tensor shape, a mesh shape and placements, each dimension cut left to right."""
    shape = tuple(draw(st.lists(st.integers(0, 13), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    kinds = st.one_of(st.just(Placement("Replicate")), st.builds(Placement, st.just("Shard"), dims(shape)))
    return shape, mesh, tuple(draw(kinds) for _ in mesh)


def dims(shape: Index) -> st.SearchStrategy[int]:
    return st.integers(0, len(shape) - 1)


@st.composite
def fully_sharded(draw: st.DrawFn) -> Tensor:
    """What ``fully_shard`` makes of tensor-parallel weights: its axis is left of those that cut first."""
    shape, mesh, placements = draw(placed_tensors())
    parts, dim = draw(st.integers(1, 5)), draw(dims(shape))
    before = math.prod(n for n, p in zip(mesh, placements, strict=True) if p.shards and p.dim == dim)
    mine = Placement("_StridedShard", dim, before) if before > 1 else Placement("Shard", dim)
    return (shape, (2, parts, *mesh), (Placement("Replicate"), mine, *placements))


def boxes(shape: Index, mesh: Index, placements: Sequence[Placement]) -> list[tuple[Index, Index]]:
    """The box of every rank."""
    return [local_box(shape, mesh, at, placements) for at in product(*map(range, mesh))]


def torchs(shape: Index, mesh: Index, placements: Sequence[Placement]) -> list[tuple[Index, Index]]:
    theirs = list(map(in_torch, placements))
    found = [_compute_local_shape_and_global_offset(shape, mesh, list(at), theirs) for at in product(*map(range, mesh))]
    return [(tuple(offset), tuple(size)) for size, offset in found]


def filled(found: list[tuple[Index, Index]]) -> list[tuple[Index, Index] | Index]:
    """Where an empty box begins means nothing, and torch's answer differs by version."""
    return [size if 0 in size else (offset, size) for offset, size in found]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.one_of(placed_tensors(), fully_sharded()))
def test_boxes_are_torchs(tensor: Tensor) -> None:
    assert filled(boxes(*tensor)) == filled(torchs(*tensor))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.one_of(placed_tensors(), fully_sharded()))
def test_boxes_tile(tensor: Tensor) -> None:
    assert list(tiling_faults(tensor[0], {box for box in boxes(*tensor) if 0 not in box[1]})) == []


@pytest.mark.parametrize(
    ("rows", "ranks", "sizes"),
    [(10, 4, [3, 3, 3, 1]), (6, 4, [2, 2, 2, 0]), (1, 4, [1, 0, 0, 0]), (0, 2, [0, 0]), (7, 1, [7])],
)
def test_rows_are_cut_as_torch_chunk_cuts(rows: int, ranks: int, sizes: list[int]) -> None:
    assert [size[0] for _, size in boxes((rows, 2), (ranks,), (Placement("Shard"),))] == sizes


def test_a_strided_shard_permutes_blocks() -> None:
    """The example in torch's own documentation of ``_StridedShard``."""
    found = boxes((8, 8), (2, 2), (Placement("_StridedShard", 0, 2), Placement("Shard", 0)))
    assert [offset[0] for offset, _ in found] == [0, 4, 2, 6]


def test_partial_is_refused_by_name() -> None:
    with pytest.raises(BrokenCheckpoint, match="placement Partial") as caught:
        local_box((4,), (2, 2), (0, 0), (Placement("Shard"), Placement("Partial")))
    assert caught.value.code == "partial-placement"
    assert "Redistribute" in caught.value.hint


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((2, 2), [Placement("Shard")]),
        ((2,), [Placement("Shard", 1)]),
        ((2, 3), [Placement("_StridedShard", 0, 2), Placement("Shard")]),
        ((2,), [Placement("_StridedShard", 0, 2)]),
    ],
)
def test_placements_that_do_not_fit_are_refused(mesh: Index, placements: list[Placement]) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        local_box((4,), mesh, (0,) * len(mesh), placements)
    assert caught.value.code == "bad-placement"


# Pickled placements


HOME = "torch.distributed.tensor.placement_types"


def placement_record(name: str, *args: Any, **state: Any) -> Record:
    record = record_class(HOME, name)(*args)
    record.state = state or None
    return record


@pytest.mark.parametrize(
    ("record", "placement", "words"),
    [
        (placement_record("Replicate"), Placement("Replicate"), "Replicate"),
        (placement_record("Shard", dim=1), Placement("Shard", 1), "Shard(1)"),
        (placement_record("Shard", 1), Placement("Shard", 1), "Shard(1)"),
        (placement_record("_Partial", "sum"), Placement("Partial"), "Partial"),
        (
            placement_record("_StridedShard", dim=1, split_factor=4),
            Placement("_StridedShard", 1, 4),
            "_StridedShard(1, split_factor=4)",
        ),
    ],
)
def test_placements_are_read(record: Record, placement: Placement, words: str) -> None:
    assert (read_placement(record), str(placement)) == (placement, words)


@pytest.mark.parametrize(
    "value",
    [
        *(None, 3, placement_record("Shard"), placement_record("Shard", dim=-1), placement_record("Shard", dim=True)),
        *(placement_record("_StridedShard", dim=0, split_factor=0), placement_record("Somewhere", dim=0)),
    ],
)
def test_other_placements_are_refused(value: Any) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        read_placement(value)
    assert caught.value.code == "unknown-placement"


# Dialects of the mesh


FSDP = {
    "torch2.6-fsdp1-mesh": ("2.6 or 2.7", "fsdp=4"),
    "torch2.6-fsdp1-hsdp": ("2.6 or 2.7", "ddp=2 x fsdp=2"),
    "torch2.6-fsdp2": ("2.6 or 2.7", "fsdp=4"),
    "torch2.9-fsdp2": ("2.8 or 2.9", "fsdp=4"),
    "torch2.10-fsdp2": ("2.10 to 2.12", "fsdp=4"),
    "torch2.13-fsdp2": ("2.13", "fsdp=4"),
    "torch2.13-fsdp2-hsdp": ("2.13", "ddp=2 x fsdp=2"),
}


@pytest.mark.parametrize("name", FSDP)
def test_every_dialect_of_the_mesh_is_read(data: Path, name: str) -> None:
    mesh = fsdp.open_(data / "fsdp" / name).mesh
    assert mesh is not None
    assert (mesh.dialect, str(mesh), mesh.ranks) == (*FSDP[name], (0, 1, 2, 3))


def test_shards_without_a_mesh_have_none(data: Path) -> None:
    assert fsdp.open_(data / "fsdp/torch2.6-fsdp1-shardedtensor").mesh is None


def test_a_sub_mesh_is_placed_by_its_rank(fsdp_checkpoints: Path) -> None:
    """Norms of FSDP with tensor parallelism are sharded over the ranks that share this rank's tensor slice."""
    source = fsdp.open_(fsdp_checkpoints / "fsdp-tp")
    norm, query = (source.tensors[f"model.layers.0.{name}.weight"] for name in ("input_layernorm", "self_attn.q_proj"))
    assert (str(source.mesh), norm.placement) == ("fsdp=2 x tp=2", "Shard(0) over fsdp=2")
    assert query.placement == "_StridedShard(0, split_factor=2) over fsdp=2, Shard(0) over tp=2"
    half = norm.shape[0] // 2
    assert {(p.rank, p.offset) for p in (*norm.pieces, *norm.copies)} == {
        (0, (0,)),
        (1, (0,)),
        (2, (half,)),
        (3, (half,)),
    }


def tensor_record(values: Sequence[int], size: Index, strides: Index) -> Record:
    """A tensor of ranks in storage ``0``, as torch pickles it."""
    pid = record_class("torch", "persistent id")(("storage", record_class("torch", "LongStorage"), "0", "cpu", 0))
    return record_class("torch._utils", "_rebuild_tensor_v2")(pid, 0, size, strides)


def new_mesh(shape: Index, strides: Index) -> Record:
    """A mesh of torch 2.13: one flat layout an axis."""
    axes = tuple(record_class("m", "_FlatLayout")() for _ in shape)
    for axis, n, stride in zip(axes, shape, strides, strict=True):
        axis.state = {"shape": n, "stride": stride}
    layout, mesh = record_class("m", "_MeshLayout")(), record_class("m", "DeviceMesh")()
    layout.state = {"axes": axes}
    mesh.state = {"_layout": layout, "_rank_map": tensor_record((), (8,), (1,)), "_mesh_dim_names": None}
    return mesh


def eight_ranks(_: StoredTensor) -> bytes:
    return struct.pack("<8q", *range(8))


@pytest.mark.parametrize(("shape", "strides"), [((3, 4), (4, 1)), ((2,), (8,)), ((1 << 11, 1 << 11), (0, 0))])
def test_a_mesh_beyond_its_ranks_is_refused(shape: Index, strides: Index) -> None:
    with pytest.raises(BrokenCheckpoint) as caught:
        read_mesh(new_mesh(shape, strides), 0, eight_ranks)
    assert caught.value.code == "unreadable-pickle"


def test_coordinates_are_row_major() -> None:
    mesh = Mesh(("a", "b"), (2, 3), (5, 4, 3, 2, 1, 0), "test")
    assert [mesh.coordinate(rank) for rank in (5, 4, 0, 6)] == [(0, 0), (0, 1), (1, 2), None]


# Written by torch in this process, which plays one rank of eight


@pytest.fixture(params=(0, 5))
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    init_process_group("fake", rank=request.param, world_size=8, store=FakeStore())
    yield request.param
    destroy_process_group()


def saved(folder: Path, rank: int, mesh: DeviceMesh, placements: list[Any]) -> fsdp.FsdpSource:
    """Save one tensor of this placement as rank of a world of eight, and open it."""
    value = DTensor.from_local(torch.ones(2), mesh, placements, run_check=False)
    torch.save({"weight": value}, folder / f"model_world_size_8_rank_{rank}.pt")
    return fsdp.open_(folder)


def sub_meshes() -> dict[str, DeviceMesh]:
    cube = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    return {
        "line": init_device_mesh("cpu", (8,), mesh_dim_names=("a",)),
        "one left": init_device_mesh("cpu", (1, 8), mesh_dim_names=("a", "b")),
        "one right": init_device_mesh("cpu", (8, 1), mesh_dim_names=("a", "b")),
        "without names": init_device_mesh("cpu", (2, 4)),
        "whole": cube,
        "first": cube["a"],
        "outer": cube["a", "c"],
        "flattened": cube["a", "c"]._flatten("ac"),
        "of one": init_device_mesh("cpu", (8, 1), mesh_dim_names=("a", "b"))["b"],
    }


def test_meshes_are_torchs(tmp_path: Path, rank: int) -> None:
    for name, theirs in sub_meshes().items():
        mesh = saved(tmp_path, rank, theirs, [Replicate()] * theirs.ndim).mesh
        assert mesh is not None, name
        assert (mesh.shape, list(mesh.ranks)) == (tuple(theirs.shape), theirs.mesh.flatten().tolist()), name
        assert mesh.coordinate(rank) == tuple(theirs.get_coordinate() or ()), name
        assert mesh.names == (theirs.mesh_dim_names or ("dim0", "dim1")), name


def test_a_world_of_one_is_read(tmp_path: Path) -> None:
    """Its mesh dimension of size 1 has no layout of its own in torch 2.13."""
    init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
        state = {"weight": DTensor.from_local(torch.arange(6.0).reshape(3, 2), mesh, [Shard(0)], run_check=False)}
        torch.save(state, tmp_path / "model_world_size_1_rank_0.pt")
    finally:
        destroy_process_group()
    source = fsdp.open_(tmp_path)
    assert (source.problems, str(source.mesh), source.tensors["weight"].placement) == (
        *((), "fsdp=1", "Shard(0) over fsdp=1"),
    )
    assert differing(source, {"weight": torch.arange(6.0).reshape(3, 2)}) == []


def test_a_partial_tensor_is_reported_by_name(tmp_path: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",))
    problems = saved(tmp_path, rank, mesh, [Partial()]).problems
    assert [p.message.endswith("values: weight") for p in problems if p.code == "partial-placement"] == [True]
