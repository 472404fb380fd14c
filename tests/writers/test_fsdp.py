"""The FSDP and DCP checkpoints are what they claim to be, by the judgement of torch."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.writers.reading import SIDE_FILES, expected, read_metadata, read_tensors, same, shards

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FOUR_RANKS = (
    "fsdp2",
    "hsdp",
    "fsdp-tp",
    "fsdp1",
    "fsdp1-shardedtensor",
    "critic",
    "lora",
    "lora-only",
    "tied-bf16",
    "fsdp1-hsdp",
    "llama",
    "qwen3-moe",
    "gemma4",
)
BUFFERS = {"aaa_first", "model.layer_scalar", "model.layers.0.step"}
SAME_TRAINING = ("hsdp", "fsdp-tp", "fsdp1", "fsdp1-shardedtensor", "fsdp1-hsdp", "single", "dcp", "accelerate-bins")
GATE = "model.layers.0.mlp.gate_proj.weight"
DTENSOR_ROLES = tuple(name for name in FOUR_RANKS if name != "fsdp1-shardedtensor")


def local(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value._local_tensor
    return tensor


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_a_role_has_the_files_of_every_rank(fsdp_checkpoints: Path, name: str) -> None:
    role = fsdp_checkpoints / name
    wanted = {f"{part}_world_size_4_rank_{r}.pt" for part in ("model", "optim", "extra_state") for r in range(4)}
    assert {path.name for path in role.glob("*.pt")} == wanted
    version = 1 if name.startswith("fsdp1") else 2
    config = json.loads((role / "fsdp_config.json").read_text())
    assert config == {"FSDP_version": version, "world_size": 4}
    assert {path.name for path in (role / "huggingface").iterdir()} == SIDE_FILES
    generation = json.loads((role / "huggingface/generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1"])
def test_one_mesh_shards_rows_and_copies_buffers(fsdp_checkpoints: Path, name: str) -> None:
    for state in shards(fsdp_checkpoints / name):
        plain = {key for key, value in state.items() if not isinstance(value, DTensor)}
        assert plain == BUFFERS
        assert next(iter(state)) == "aaa_first"
        assert state["model.layers.0.step"].shape == ()
        for key in state.keys() - plain:
            assert state[key].placements == (Shard(0),)
            assert state[key].device_mesh.mesh_dim_names == ("fsdp",)


@pytest.mark.parametrize("name", ["fsdp2", "fsdp1"])
def test_expected_is_the_concatenation_of_the_shards(fsdp_checkpoints: Path, name: str) -> None:
    ranks = shards(fsdp_checkpoints / name)
    merged = {
        key: torch.cat([local(state[key]) for state in ranks]) if isinstance(value, DTensor) else value
        for key, value in ranks[0].items()
    }
    assert same(merged, expected(fsdp_checkpoints, name))


def test_shards_are_uneven_and_padded(fsdp_checkpoints: Path) -> None:
    ranks = shards(fsdp_checkpoints / "fsdp2")
    parts = [local(state["model.embed_tokens.weight"]) for state in ranks]
    assert [len(part) for part in parts] == [33, 33, 33, 31]
    assert parts[3].untyped_storage().nbytes() > parts[3].numel() * 4


@pytest.mark.parametrize("name", ["hsdp", "fsdp1-hsdp"])
def test_hsdp_repeats_every_shard(fsdp_checkpoints: Path, name: str) -> None:
    ranks = [state[GATE] for state in shards(fsdp_checkpoints / name)]
    assert ranks[0].placements == (Replicate(), Shard(0))
    assert ranks[0].device_mesh.mesh_dim_names == ("ddp", "fsdp")
    assert torch.equal(local(ranks[0]), local(ranks[2]))
    merged = torch.cat([local(ranks[0]), local(ranks[1])])
    assert torch.equal(merged, expected(fsdp_checkpoints, name)[GATE])


def test_tensor_parallel_strides_the_shards(fsdp_checkpoints: Path) -> None:
    ranks = shards(fsdp_checkpoints / "fsdp-tp")
    gate = [state[GATE] for state in ranks]
    assert gate[0].placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert [len(local(part)) for part in gate] == [12, 12, 11, 11]
    merged = torch.cat([local(gate[rank]) for rank in (0, 2, 1, 3)])
    assert torch.equal(merged, expected(fsdp_checkpoints, "fsdp-tp")[GATE])
    down = ranks[0]["model.layers.0.mlp.down_proj.weight"]
    assert down.placements == (Shard(0), Shard(1))


@pytest.mark.parametrize("name", SAME_TRAINING)
def test_the_same_training_gives_the_same_tensors(fsdp_checkpoints: Path, name: str) -> None:
    """Every way of sharding gathers to one truth, by as many ways of gathering."""
    assert same(expected(fsdp_checkpoints, name), expected(fsdp_checkpoints, "fsdp2"))


class Record:
    """Stands for a ShardedTensor, which only unpickles inside its own process group."""

    ProcessGroupState = ShardedTensor.ProcessGroupState

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.local_shards = state[0]


class ShardedTensorUnpickler(pickle.Unpickler):
    """Hands out records in place of sharded tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "_rebuild_wrapper_subclass":
            return lambda *_: Record()
        return Record if name == "ShardedTensor" else super().find_class(module, name)


class ShardedTensorPickle:
    """What `torch.load` wants of a pickle module."""

    Unpickler = ShardedTensorUnpickler
    load = staticmethod(pickle.load)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_without_a_mesh_fsdp1_writes_sharded_tensors(fsdp_checkpoints: Path) -> None:
    role = fsdp_checkpoints / "fsdp1-shardedtensor"
    parts: list[Any] = []
    for rank in range(4):
        path = role / f"model_world_size_4_rank_{rank}.pt"
        state = torch.load(path, weights_only=False, pickle_module=ShardedTensorPickle)
        assert {key for key, value in state.items() if not isinstance(value, Record)} == BUFFERS
        parts += state[GATE].local_shards
    assert [part.metadata.shard_offsets[0] for part in parts] == [0, 12, 24, 36]
    merged = torch.cat([part.tensor for part in parts])
    assert torch.equal(merged, expected(fsdp_checkpoints, role.name)[GATE])


def test_a_critic_has_one_score_and_no_head(fsdp_checkpoints: Path) -> None:
    state = shards(fsdp_checkpoints / "critic")[0]
    assert state["score.weight"].shape == (1, 32)
    assert not any(key.startswith("lm_head") for key in state)


def test_lora_only_holds_nothing_but_adapters(fsdp_checkpoints: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    only = shards(fsdp_checkpoints / "lora-only")[0]
    assert name in only
    assert all("lora_" in key for key in only)
    whole = shards(fsdp_checkpoints / "lora")[0]
    assert any(".base_layer." in key for key in whole)
    assert only.keys() < whole.keys()
    meta = json.loads((fsdp_checkpoints / "lora-only/lora_train_meta.json").read_text())
    assert meta == {"r": only[name].shape[0], "lora_alpha": 8, "task_type": "CAUSAL_LM"}


@pytest.mark.parametrize(("name", "dtype"), [("tied-bf16", torch.bfloat16), ("gemma4", torch.float32)])
def test_tied_weights_share_one_storage(fsdp_checkpoints: Path, name: str, dtype: torch.dtype) -> None:
    state = shards(fsdp_checkpoints / name)[0]
    head, embedding = local(state["lm_head.weight"]), local(state["model.embed_tokens.weight"])
    assert head.dtype == dtype
    assert head.untyped_storage().data_ptr() == embedding.untyped_storage().data_ptr()


def test_experts_are_packed_and_the_last_rank_may_have_none(fsdp_checkpoints: Path) -> None:
    ranks = shards(fsdp_checkpoints / "qwen3-moe")
    experts = "model.layers.1.mlp.experts"
    assert ranks[0][f"{experts}.gate_up_proj"].shape == (6, 24, 32)
    assert ranks[0][f"{experts}.down_proj"].shape == (6, 32, 12)
    assert [len(local(state[f"{experts}.down_proj"])) for state in ranks] == [2, 2, 2, 0]


def test_every_rank_of_gemma_has_the_scalars_of_its_layers(fsdp_checkpoints: Path) -> None:
    for state in shards(fsdp_checkpoints / "gemma4"):
        plain = {key: value for key, value in state.items() if not isinstance(value, DTensor)}
        scalars = {f"model.layers.{layer}.layer_scalar": torch.tensor([0.5 + layer]) for layer in range(2)}
        assert same(plain, scalars)


def test_a_world_of_one_writes_plain_tensors(fsdp_checkpoints: Path) -> None:
    role = fsdp_checkpoints / "single"
    state = torch.load(role / "model_world_size_1_rank_0.pt", weights_only=True)
    assert all(type(value) is torch.Tensor for value in state.values())
    assert same(dict(state), expected(fsdp_checkpoints, "single"))


@pytest.mark.parametrize("name", DTENSOR_ROLES)
def test_the_optimizer_has_made_its_step(fsdp_checkpoints: Path, name: str) -> None:
    path = fsdp_checkpoints / name / "optim_world_size_4_rank_0.pt"
    state = torch.load(path, weights_only=False)["state"]
    moments = [entry["exp_avg"] for entry in state.values()]
    assert moments
    assert any(bool(getattr(moment, "_local_tensor", moment).any()) for moment in moments)


def test_extra_state_is_what_verl_puts_there(fsdp_checkpoints: Path) -> None:
    path = fsdp_checkpoints / "fsdp2/extra_state_world_size_4_rank_3.pt"
    extra = torch.load(path, weights_only=False)
    assert extra["lr_scheduler"]["last_epoch"] == 1
    assert extra["rng"].keys() == {"cpu", "numpy", "random"}


@pytest.mark.parametrize(
    ("name", "folder"), [("dcp", "dcp/step-10"), ("accelerate", "accelerate/pytorch_model_fsdp_0")]
)
def test_torch_reads_the_plain_dcp(fsdp_checkpoints: Path, name: str, folder: str) -> None:
    tensors = {
        key.removeprefix("model."): value
        for key, value in read_tensors(fsdp_checkpoints / folder).items()
        if key.startswith("model.")
    }
    assert same(tensors, expected(fsdp_checkpoints, name))


def test_dcp_also_holds_the_training(fsdp_checkpoints: Path) -> None:
    keys = set(read_metadata(fsdp_checkpoints / "dcp/step-10").state_dict_metadata)
    assert {key.partition(".")[0] for key in keys} == {"model", "optimizer", "lr_scheduler", "train_state"}
    optimizer = read_metadata(fsdp_checkpoints / "accelerate/optimizer_0").state_dict_metadata
    assert f"optimizer.state.{GATE}.exp_avg" in optimizer


# Without DCP, as accelerate does


def test_accelerate_writes_a_file_of_dtensors_a_rank(fsdp_checkpoints: Path) -> None:
    folder = fsdp_checkpoints / "accelerate-bins"
    names = {f"{part}_0_rank{rank}.bin" for part in ("pytorch_model_fsdp", "optimizer") for rank in range(4)}
    assert {path.name for path in folder.iterdir()} == names
    ranks = [torch.load(folder / f"pytorch_model_fsdp_0_rank{rank}.bin", weights_only=False) for rank in range(4)]
    merged = torch.cat([local(state[GATE]) for state in ranks])
    assert torch.equal(merged, expected(fsdp_checkpoints, "accelerate-bins")[GATE])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_accelerate_may_write_flat_parameters(fsdp_checkpoints: Path) -> None:
    folder = fsdp_checkpoints / "accelerate-local"
    assert {path.name for path in folder.iterdir()} == {f"pytorch_model_fsdp_rank{rank}.bin" for rank in range(4)}
    path = folder / "pytorch_model_fsdp_rank0.bin"
    state = torch.load(path, weights_only=False, pickle_module=ShardedTensorPickle)
    flat = {key for key, value in state.items() if isinstance(value, Record)}
    assert flat == {"_flat_param", "model.layers.0._flat_param", "model.layers.1._flat_param"}
    assert state.keys() - flat == BUFFERS
