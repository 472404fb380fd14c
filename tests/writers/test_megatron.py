"""The Megatron checkpoints are what they claim to be, by the judgement of torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.writers.reading import SIDE_FILES, expected, part_of, read_metadata, read_tensors, same

# Read by one process, without a process group: that is the point of these tests.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ARCHIVES = {
    "dense-v1/dist_ckpt": {"model", "optimizer", "rng_state"},
    "dense-v1-bridge/dist_ckpt": {"optimizer", "rng_state"},
    "dense-v2/model/dist_ckpt": {"model"},
    "dense-v2/optimizer/dist_ckpt": {"optimizer"},
    "dense-v2/extra/dist_ckpt": {"rng_state"},
    "dense-v2-bridge/optimizer/dist_ckpt": {"optimizer"},
    "dense-v2-bridge/extra/dist_ckpt": {"rng_state"},
    "moe-v1/dist_ckpt": {"model", "optimizer", "rng_state"},
    "moe-v2/model/dist_ckpt": {"model"},
    "moe-v2/optimizer/dist_ckpt": {"optimizer"},
    "moe-v2/extra/dist_ckpt": {"rng_state"},
    "megatron-lm/iter_0000010": {"model", "optimizer", "rng_state"},
}
WITH_MODEL = {
    "dense-v1/dist_ckpt": "dense",
    "dense-v2/model/dist_ckpt": "dense",
    "moe-v1/dist_ckpt": "moe",
    "moe-v2/model/dist_ckpt": "moe",
    "megatron-lm/iter_0000010": "megatron-lm",
}
FULL_OPTIMIZER = {
    "dense-v1/dist_ckpt": ("dense", "param"),
    "dense-v1-bridge/dist_ckpt": ("dense", "param"),
    "dense-v2/optimizer/dist_ckpt": ("dense", "param"),
    "moe-v1/dist_ckpt": ("moe", "param"),
    "megatron-lm/iter_0000010": ("megatron-lm", "fp32_param"),
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_holds_its_parts_and_no_other(megatron_checkpoints: Path, name: str) -> None:
    folder = megatron_checkpoints / name
    assert {part_of(key) for key in read_metadata(folder).state_dict_metadata} == ARCHIVES[name]
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert (folder / "common.pt").is_file()


def test_every_archive_is_listed_here(megatron_checkpoints: Path) -> None:
    found = {str(path.parent.relative_to(megatron_checkpoints)) for path in megatron_checkpoints.rglob(".metadata")}
    assert found == ARCHIVES.keys()


@pytest.mark.parametrize("name", WITH_MODEL)
def test_the_model_tensors_are_the_expected_ones(megatron_checkpoints: Path, name: str) -> None:
    tensors = {
        key: value for key, value in read_tensors(megatron_checkpoints / name).items() if part_of(key) == "model"
    }
    assert same(tensors, expected(megatron_checkpoints, f"{WITH_MODEL[name]}-megatron"))


def test_layers_are_stacked_and_cut_by_tensor_parallel(megatron_checkpoints: Path) -> None:
    found = read_metadata(megatron_checkpoints / "dense-v1/dist_ckpt").state_dict_metadata
    fc1: Any = found["decoder.layers.mlp.linear_fc1.weight"]
    assert tuple(fc1.size) == (4, 96, 32)
    offsets = sorted(tuple(chunk.offsets) for chunk in fc1.chunks)
    assert offsets == [(layer, row, 0) for layer in range(4) for row in (0, 24, 48, 72)]
    assert "decoder.layers.mlp.linear_fc1._extra_state/shard_0_4" in found
    assert "rng_state/shard_1.0_2.2" in found


def test_experts_are_an_axis_of_their_own(megatron_checkpoints: Path) -> None:
    found = read_metadata(megatron_checkpoints / "moe-v1/dist_ckpt").state_dict_metadata
    fc1: Any = found["decoder.layers.mlp.experts.experts.linear_fc1.weight"]
    assert tuple(fc1.size) == (2, 4, 48, 32)
    assert {tuple(chunk.sizes) for chunk in fc1.chunks} == {(1, 1, 12, 32)}
    assert "decoder.layers.mlp.experts.experts.linear_fc1._extra_state/shard_1.3_2.4" in found


@pytest.mark.parametrize("name", FULL_OPTIMIZER)
def test_the_optimizer_keeps_master_weights_and_moments(megatron_checkpoints: Path, name: str) -> None:
    model, master = FULL_OPTIMIZER[name]
    tensors = read_tensors(megatron_checkpoints / name)
    for key, value in expected(megatron_checkpoints, f"{model}-megatron").items():
        assert torch.equal(tensors[f"optimizer.state.{master}.{key}"], value.float())
        for moment in ("exp_avg", "exp_avg_sq"):
            assert tensors[f"optimizer.state.{moment}.{key}"].any()


def test_bucket_form_of_the_optimizer(megatron_checkpoints: Path) -> None:
    """verl's default: buckets without names, one set for the dense and one for the expert part."""
    tensors = read_tensors(megatron_checkpoints / "moe-v2/optimizer/dist_ckpt")
    assert all(".bucket_idx_0." in key and value.ndim == 1 for key, value in tensors.items())
    assert {key.partition(".")[0] for key in tensors} == {"chained_0", "chained_1"}


@pytest.mark.parametrize("name", ["dense-v1/dist_ckpt", "dense-v2/optimizer/dist_ckpt"])
def test_the_scheduler_is_common_state_of_the_optimizer(megatron_checkpoints: Path, name: str) -> None:
    common = torch.load(megatron_checkpoints / name / "common.pt", weights_only=False)
    assert common["lr_scheduler"]["num_steps"] == 1
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"


@pytest.mark.parametrize("name", ["dense-v1", "moe-v1"])
def test_v1_has_no_weights_beside_the_archive(megatron_checkpoints: Path, name: str) -> None:
    role = megatron_checkpoints / name
    assert {path.name for path in role.iterdir()} == {"dist_ckpt", "huggingface", "transformer_config.json"}
    assert {path.name for path in (role / "huggingface").iterdir()} == SIDE_FILES


@pytest.mark.parametrize(
    "folder", ["dense-v1-bridge/huggingface", "dense-v2-bridge/model/huggingface", "dense-v2/model/huggingface"]
)
def test_a_bridge_has_written_the_weights(megatron_checkpoints: Path, folder: str) -> None:
    tensors = load_file(megatron_checkpoints / folder / "model.safetensors")
    assert same(tensors, load_file(megatron_checkpoints / "expected/dense-hf/model.safetensors"))
    assert {path.name for path in (megatron_checkpoints / folder).iterdir()} == SIDE_FILES | {"model.safetensors"}


@pytest.mark.parametrize("name", ["dense-v2", "dense-v2-bridge", "moe-v2"])
def test_a_manifest_names_what_is_there(megatron_checkpoints: Path, name: str) -> None:
    role = megatron_checkpoints / name
    manifest = json.loads((role / "ckpt_contents.json").read_text())
    assert manifest["schema_version"] == 2
    assert manifest["world_size"] == 4
    for entry in manifest["contents"].values():
        path = role / entry["path"]
        assert path.is_file() or any(path.iterdir())
    directories = {str(path.relative_to(role)) for path in role.glob("*/*") if any(path.iterdir())}
    assert directories == manifest["directories"].keys()


def test_v2_may_leave_a_model_folder_empty(megatron_checkpoints: Path) -> None:
    assert not any((megatron_checkpoints / "moe-v2/model/huggingface").iterdir())
    assert not any((megatron_checkpoints / "dense-v2-bridge/model/dist_ckpt").iterdir())


def test_megatron_lm_pads_the_vocabulary(megatron_checkpoints: Path) -> None:
    save = megatron_checkpoints / "megatron-lm"
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "10"
    common = torch.load(save / "iter_0000010/common.pt", weights_only=False)
    assert common["args"].padded_vocab_size == 256
    rows = read_tensors(save / "iter_0000010")["output_layer.weight"]
    assert rows.shape == (256, 32)
    assert torch.all(rows[128:] == 9)


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_transformers_answers_as_megatron_did(megatron_checkpoints: Path, name: str) -> None:
    """The two forms of the weights mean the same: the map of the writers is right."""
    transformers = pytest.importorskip("transformers")
    oracle = expected(megatron_checkpoints, f"{name}-logits")
    folder = megatron_checkpoints / "expected" / f"{name}-hf"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model.eval()(oracle["ids"]).logits
    torch.testing.assert_close(logits, oracle["logits"], atol=1e-5, rtol=0)
