"""`merge-fsdp` against the libraries that wrote the shards: every tensor, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckpttool import sink
from ckpttool.errors import BrokenCheckpoint
from ckpttool.merging import Options, merge
from tests.looking import State, repack, write_shards
from tests.merged import sharded, tensors_in, unequal, write_role

FIXTURES = Path(__file__).parent / "data" / "fsdp"
ROLES = ("fsdp2", "hsdp", "critic", "tied-bf16", "fsdp-tp", "fsdp1", "fsdp1-hsdp", "fsdp1-shardedtensor", "single")
FAMILIES = ("llama", "qwen3-moe", "gemma4")
RANDOM = ("random-4", "random-2x2")
MESHES = ("random-8", "random-2x4", "random-4x2", "random-2x2x2")
STRIDED = ("strided-2x2x2", "strided-2x4", "strided-4x2", "starved-2x4", "shard-dim1")


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir() if path.is_dir()))
def test_every_version_of_torch_merges_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    """Cases 9, 10, 12, 14 and 16: four dialects of the mesh, ShardedTensor, HSDP, uneven and padded shards."""
    merge(FIXTURES / name, tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), load_file(FIXTURES / "expected.safetensors")) == set()


@pytest.mark.parametrize("name", [*ROLES, *FAMILIES, *RANDOM])
def test_four_ranks_merge_to_what_torch_gathers(name: str, fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Cases 1, 4, 14 and 16, on roles saved as verl saves them, and random placements."""
    merge(fsdp_checkpoints / name, tmp_path / "out", Options())
    expected = load_file(fsdp_checkpoints / "expected" / f"{name}.safetensors")
    tied = {"lm_head.weight"} if name in ("tied-bf16", "gemma4") else set()
    assert unequal(tensors_in(tmp_path / "out"), expected) == tied & expected.keys()


@pytest.mark.parametrize("name", [*MESHES, *STRIDED])
def test_eight_ranks_merge_to_what_torch_gathers(name: str, mesh_checkpoints: Path, tmp_path: Path) -> None:
    """Case 15: strided shards on meshes of two and three dimensions, uneven sizes, any dimension."""
    merge(mesh_checkpoints / name, tmp_path / "out", Options())
    expected = load_file(mesh_checkpoints / "expected" / f"{name}.safetensors")
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_accelerates_files_merge_like_any_others(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    merge(fsdp_checkpoints / "accelerate-bins", tmp_path / "out", Options())
    expected = load_file(fsdp_checkpoints / "expected" / "accelerate-bins.safetensors")
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_a_plain_tensor_is_written_once_in_its_own_dtype(tmp_path: Path) -> None:
    """Cases 1 and 2: 0-d and 1-d buffers, one of them the first key; the mesh comes from the tensors that have one."""
    buffers = {"aaa.buf": torch.tensor([5]), "zero.d": torch.tensor(7), "one.d": torch.tensor([0.25])}
    weights = {"w": torch.randn(5, 3)}
    merge(write_role(tmp_path / "role", weights, buffers), tmp_path / "out", Options(dtype="bfloat16"))
    found = tensors_in(tmp_path / "out")
    assert unequal(found, {**buffers, "w": weights["w"].bfloat16()}) == set()


def test_a_uniform_weight_is_no_replica(tmp_path: Path) -> None:
    """A sharded weight of ones is the same on all ranks, and is put together all the same."""
    weights = {"norm.weight": torch.ones(8), "w": torch.zeros(4, 2)}
    merge(write_role(tmp_path / "role", weights, ranks=4), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


def test_a_world_of_one_is_whole(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Case 4."""
    result = merge(fsdp_checkpoints / "single", tmp_path / "out", Options())
    assert (result.copies.replicated, result.copies.replicas) == (0, 0)


def test_more_ranks_than_rows(tmp_path: Path) -> None:
    """Tails of a Shard may be empty on most ranks."""
    weights = {"tiny": torch.randn(1), "three": torch.randn(3, 2), "none": torch.zeros(0, 4)}
    merge(write_role(tmp_path / "role", weights, ranks=16), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


def test_views_of_shared_and_larger_storages(tmp_path: Path) -> None:
    """Case 16: what is stored is more than what is meant; several tensors may lie in one storage, in any strides."""
    big = torch.arange(40.0).reshape(10, 4)
    views = {
        "rows": big[3:7],
        "columns": big.t(),
        "steps": big[1::3, 1::2],
        "same": big[:1].expand(6, 4),
        "permuted": torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        "scalar": big[3, 2],
        "doubles": torch.arange(10, dtype=torch.float64)[::2],
    }
    (tmp_path / "role").mkdir()
    torch.save(views, tmp_path / "role" / "model_world_size_1_rank_0.pt")
    merge(tmp_path / "role", tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), views) == set()


def test_transposed_and_expanded_shards(tmp_path: Path) -> None:
    big = torch.arange(40.0).reshape(10, 4)

    def state(rank: int, mesh: DeviceMesh) -> State:
        def part(local: torch.Tensor, shape: tuple[int, int]) -> DTensor:
            size = torch.Size(shape)
            return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=(shape[1], 1))

        return {
            "columns": part(big[:, 2 * rank : 2 * rank + 2].clone().t(), (4, 10)),
            "same": part(big[rank : rank + 1].clone().expand(3, 4), (6, 4)),
        }

    merge(write_shards(tmp_path / "role", state), tmp_path / "out", Options())
    same = torch.cat([big[:1].expand(3, 4), big[1:2].expand(3, 4)])
    assert unequal(tensors_in(tmp_path / "out"), {"columns": big.t(), "same": same}) == set()


def test_a_replicated_dtensor_is_written_once(tmp_path: Path) -> None:
    value = torch.randn(3, 3)

    def state(rank: int, mesh: DeviceMesh) -> State:
        return {"r": DTensor.from_local(value, mesh, [Replicate()], run_check=False), "w": sharded(value, rank, mesh)}

    result = merge(write_shards(tmp_path / "role", state), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), {"r": value, "w": value}) == set()
    assert (result.copies.replicas, result.copies.by_crc) == (1, 1)


def test_neither_torch_nor_transformers_is_imported(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Cases 11, 13, 34: nothing of the machine that wrote is needed."""
    code = (
        "import sys; from ckpttool.cli import main\n"
        f"assert main(['merge-fsdp', {str(fsdp_checkpoints / 'fsdp2')!r}, '-o', {str(tmp_path / 'out')!r}]) == 0\n"
        "assert not {'torch', 'transformers', 'megatron', 'pydantic'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_model_that_nobody_knows(tmp_path: Path) -> None:
    """Case 34: an unknown model type is no obstacle."""
    weights = {"odd.embed.weight": torch.randn(10, 4), "odd.out.weight": torch.randn(4, 4)}
    config = {"model_type": "my_unknown", "architectures": ["MyUnknownModel"]}
    merge(write_role(tmp_path / "role", weights, config=config), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "my_unknown"


def test_shards_tagged_with_devices_of_other_machines(tmp_path: Path) -> None:
    """Case 13: `npu:0` and `cuda:3` in the pickle are words only."""
    role = write_role(tmp_path / "role", {"w": torch.randn(6, 2)})
    expected = tmp_path / "expected.safetensors"
    merge(role, tmp_path / "cpu", Options())
    save_file(tensors_in(tmp_path / "cpu"), expected)
    for rank, device in enumerate((b"npu:0", b"cuda:3")):
        path = role / f"model_world_size_2_rank_{rank}.pt"
        repack(path, on_device(device))
        assert device in path.read_bytes()
    merge(role, tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), load_file(expected)) == set()


def on_device(name: bytes) -> Callable[[bytes], bytes]:
    """A change of a pickle: what was on the CPU is on this device."""
    text = b"X" + len(name).to_bytes(4, "little") + name
    return lambda data: data.replace(b"X\x03\x00\x00\x00cpu", text)


def test_an_empty_storage_and_a_checkpoint_of_buffers_alone(tmp_path: Path) -> None:
    buffers = {"a": torch.zeros(0), "b": torch.tensor(True)}
    merge(write_role(tmp_path / "role", {}, buffers), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), buffers) == set()


def test_what_is_read_is_what_is_there(tmp_path: Path) -> None:
    """Bytes are read once: nothing is stored twice in this checkpoint."""
    weights = {"w": torch.randn(64, 8), "v": torch.randn(7)}
    result = merge(write_role(tmp_path / "role", weights), tmp_path / "out", Options())
    assert result.bytes_read == sum(value.nbytes for value in weights.values())
    written = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert result.bytes_written == written


def test_memory_is_a_buffer_not_the_model(tmp_path: Path) -> None:
    """Case 38: a child that merges 256 MB into another dtype, one tensor of it alone 160 MB, takes less than half."""
    weights = {"big": torch.zeros(40_000_000), "w": torch.zeros(3000, 4000), "v": torch.zeros(3000, 4000)}
    role = write_role(tmp_path / "role", weights)
    code = (
        "from pathlib import Path; from ckpttool.cli import main\n"
        f"assert main(['merge-fsdp', {str(role)!r}, '-o', {str(tmp_path / 'out')!r}, '--dtype', 'bf16', '-q']) == 0\n"
        "told = Path('/proc/self/status').read_text().partition('VmHWM:')[2]; print(told.split()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 110 * 1024


def test_what_was_written_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 46: success is said only of what is there; a file that lost its end on the way is no output."""
    role = write_role(tmp_path / "role", {"w": torch.randn(64, 8)})
    write = sink.write_weights

    def lossy(files: Any, sources: Any, root: Path, folder: Path, **options: Any) -> Any:
        done = write(files, sources, root, folder, **options)
        os.truncate(folder / "model.safetensors", 5000)
        return done

    monkeypatch.setattr(sink, "write_weights", lossy)
    with pytest.raises(BrokenCheckpoint, match="not what was planned"):
        merge(role, tmp_path / "out", Options())
    assert os.listdir(tmp_path) == ["role"]


def test_tied_weights_in_one_storage_are_one_tensor(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Case 21: ties are decided by config and bytes, not by what shares a storage; the alias is not read twice."""
    result = merge(fsdp_checkpoints / "gemma4", tmp_path / "out", Options())
    assert [drop.name for drop in result.dropped] == ["lm_head.weight"]


def test_progress_adds_up(tmp_path: Path) -> None:
    told: list[int] = []
    totals: list[int] = []

    def ready(total: int) -> Callable[[int], None]:
        totals.append(total)
        return told.append

    weights = {f"w{n}": torch.randn(1000, 30) for n in range(5)}
    role = write_role(tmp_path / "role", weights)
    merge(role, tmp_path / "out", Options(max_shard_size=300_000, threads=3), ready)
    assert totals == [sum(told)] == [sum(path.stat().st_size for path in (tmp_path / "out").iterdir())]
