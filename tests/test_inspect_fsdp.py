"""`inspect` on directories of FSDP shards: every dialect, every buffer, every way to be incomplete."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckpttool.inspection import inspect
from tests import builders
from tests.looking import (
    change_json,
    codes,
    elements,
    faults,
    headers,
    holds,
    listed,
    problem,
    repack,
    write_json,
    write_shards,
)
from tests.merged import write_role

LINE = "fsdp=4"
SQUARE = "ddp=2 x fsdp=2"
ROWS = "Shard(0) over fsdp=4: {}; replicated: {}"
REPLICATED_ROWS = "Replicate over ddp=2, Shard(0) over fsdp=2: {}; replicated: {}"


@pytest.fixture
def role(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A whole role of four ranks."""
    return builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "role")


def shard(rank: int, kind: str = "model") -> str:
    return f"{kind}_world_size_4_rank_{rank}.pt"


@pytest.mark.parametrize(
    ("name", "mesh", "torch_version", "placements"),
    [
        ("torch2.6-fsdp1-mesh", LINE, "2.6 or 2.7", ROWS),
        ("torch2.6-fsdp1-hsdp", SQUARE, "2.6 or 2.7", REPLICATED_ROWS),
        ("torch2.6-fsdp2", LINE, "2.6 or 2.7", ROWS),
        ("torch2.9-fsdp2", LINE, "2.8 or 2.9", ROWS),
        ("torch2.10-fsdp2", LINE, "2.10 to 2.12", ROWS),
        ("torch2.13-fsdp2", LINE, "2.13", ROWS),
        ("torch2.13-fsdp2-hsdp", SQUARE, "2.13", REPLICATED_ROWS),
    ],
)
def test_shards_of_every_torch_read_the_same(
    data: Path, name: str, mesh: str, torch_version: str, placements: str
) -> None:
    """Cases 9, 11, 12, 14: four dialects of the mesh, without torch, without a warning."""
    expected = data / "fsdp/expected.safetensors"
    found = inspect(data / "fsdp" / name, tensors="*")
    assert (found.kind, found.state, found.problems) == ("fsdp", "complete", ())
    assert found.evidence == ("4 of 4 model_world_size_4_rank_*.pt", "fsdp_config.json")
    assert found.parameters == elements(expected)
    assert listed(found) == headers(expected)
    assert found.facts["mesh"] == f"{mesh} (written by torch {torch_version})"
    assert found.facts["placements"] == placements.format(11, 5)
    assert found.facts["world size"] == "4 ranks (model files of rank 0-3)"


def test_sharded_tensors_of_fsdp1_are_read_and_named(data: Path) -> None:
    """Case 10: FSDP1 without a mesh stores ShardedTensor; no process group is needed."""
    expected = data / "fsdp/expected.safetensors"
    found = inspect(data / "fsdp/torch2.6-fsdp1-shardedtensor", tensors="*")
    assert (found.kind, found.state, found.problems) == ("fsdp", "complete", ())
    assert listed(found) == headers(expected)
    assert found.facts["placements"] == "ShardedTensor: 11; replicated: 5"
    assert "mesh" not in found.facts


@pytest.mark.parametrize("name", ["torch2.6-fsdp2", "torch2.13-fsdp2"])
def test_shards_of_an_npu_machine(tmp_path: Path, data: Path, name: str) -> None:
    """Case 13: the device in the pickle is one that this machine does not have."""
    role = builders.copy(data / "fsdp" / name, tmp_path / "role")
    for path in role.glob("*.pt"):
        repack(path, lambda pickled: pickled.replace(b"X\x03\0\0\0cpu", b"X\x05\0\0\0npu:0"))
        assert b"npu:0" in path.read_bytes()
    found = inspect(role, tensors="*")
    assert (found.state, found.problems) == ("complete", ())
    assert listed(found) == headers(data / "fsdp/expected.safetensors")


@pytest.mark.parametrize(
    ("name", "placements"),
    [
        ("fsdp2", ROWS.format(27, 3)),
        ("fsdp1", ROWS.format(27, 3)),
        ("hsdp", REPLICATED_ROWS.format(27, 3)),
        ("fsdp1-shardedtensor", "ShardedTensor: 27; replicated: 3"),
        ("critic", "Shard(0) over fsdp=4: 28"),
        ("tied-bf16", "Shard(0) over fsdp=4: 27"),
        ("lora", "Shard(0) over fsdp=4: 35"),
        ("single", "whole: 30"),
    ],
)
def test_parameters_are_counted_once(fsdp_checkpoints: Path, name: str, placements: str) -> None:
    """Case 4 among them: a world of one holds plain tensors."""
    expected = fsdp_checkpoints / "expected" / f"{name}.safetensors"
    found = inspect(fsdp_checkpoints / name, tensors="*")
    assert (found.kind, found.state, faults(found)) == ("fsdp", "complete", [])
    assert listed(found) == headers(expected)
    lora = sum(torch.Size(shape).numel() for key, (_, shape) in headers(expected).items() if "lora_" in key)
    tied = headers(expected)["lm_head.weight"] if name == "tied-bf16" else ("", (0,))
    assert found.parameters == elements(expected) - lora - torch.Size(tied[1]).numel()
    assert ("lm_head.weight is model.embed_tokens.weight" in found.facts.get("tied", "")) == (name == "tied-bf16")
    assert found.facts["placements"] == placements


def test_strided_shards_are_told_in_words(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "fsdp-tp", tensors="*.gate_proj.weight")
    assert found.facts["mesh"] == "fsdp=2 x tp=2 (written by torch 2.13)"
    assert found.facts["placements"].split("; ") == [
        "_StridedShard(0, split_factor=2) over fsdp=2, Shard(0) over tp=2: 16",
        "Shard(0) over fsdp=2: 7",
        "Shard(0) over fsdp=2, Shard(1) over tp=2: 4",
        "replicated: 3",
    ]
    assert {row.placement for row in found.tensors} == {
        "_StridedShard(0, split_factor=2) over fsdp=2, Shard(0) over tp=2"
    }


def test_what_is_in_a_role(role: Path) -> None:
    found = inspect(role)
    assert holds(found) == {
        ("model weights", ""),
        ("optimizer", ""),
        ("scheduler and rng", ""),
        ("side files", "huggingface"),
    }
    sizes = {content.name: content.bytes for content in found.contents}
    assert sizes["optimizer"] == sum(p.stat().st_size for p in role.glob("optim_*.pt"))
    assert sizes["scheduler and rng"] == sum(p.stat().st_size for p in role.glob("extra_state_*.pt"))
    assert found.facts["model"] == "qwen2 (Qwen2ForCausalLM)"


def test_dtypes_are_told_with_their_bytes(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "fsdp2")
    uses = {use.dtype: (use.tensors, use.parameters, use.bytes) for use in found.dtypes}
    assert uses == {"float32": (28, 23_585, 94_340), "int64": (2, 5, 40)}
    (use,) = inspect(fsdp_checkpoints / "tied-bf16").dtypes
    assert (use.dtype, use.bytes) == ("bfloat16", 2 * use.parameters)


def test_the_module_tree_adds_up(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "fsdp2")
    assert found.modules is not None
    expected = headers(fsdp_checkpoints / "expected/fsdp2.safetensors")
    assert (found.modules.tensors, found.modules.parameters) == (len(expected), found.parameters)
    top = {module.name: module.parameters for module in found.modules.children}
    assert top == {
        name: sum(torch.Size(s).numel() for k, (_, s) in expected.items() if k.split(".")[0] == name)
        for name in ("aaa_first", "model", "lm_head")
    }
    (layers,) = [m for c in found.modules.children if c.name == "model" for m in c.children if "layers" in m.name]
    assert layers.name == "layers.* (2)"
    assert layers.bytes == sum(module.bytes for module in layers.children) + 8  # the buffer `step` of one layer


@pytest.mark.parametrize(("gone", "words"), [((0,), "0"), ((0, 1), "0-1"), ((1, 3), "1, 3")])
def test_missing_ranks_are_listed_and_lie_on_other_nodes(role: Path, gone: tuple[int, ...], words: str) -> None:
    """Case 5: a node of a multi-node run has only its own ranks; rank 0 wrote the side files."""
    for rank in gone:
        builders.drop_rank(role, rank)
    (role / "fsdp_config.json").unlink()
    shutil.rmtree(role / "huggingface")
    found = inspect(role)
    assert (found.kind, found.state) == ("fsdp", "incomplete")
    assert faults(found) == ["rank-missing"] * 3
    assert [told.message.partition(" ")[0] for told in found.faults] == ["model", "extra_state", "optim"]
    for told in found.faults:
        assert f"rank {words} " in told.message
        assert f"{len(gone)} of 4 ranks" in told.message
        assert "multi-node" in told.hint
        assert "copy them" in told.hint


def test_a_missing_rank_leaves_the_rest_readable(role: Path, fsdp_checkpoints: Path) -> None:
    builders.drop_rank(role, 2)
    found = inspect(role, tensors="*")
    assert listed(found) == headers(fsdp_checkpoints / "expected/fsdp2.safetensors")
    assert found.facts["world size"] == "4 ranks (model files of rank 0-1, 3)"


def test_an_optimizer_file_is_missing(role: Path) -> None:
    (role / shard(3, "optim")).unlink()
    found = inspect(role)
    assert faults(found) == ["rank-missing"]
    message = problem(found, "rank-missing").message
    assert message.startswith("optim ")
    assert "rank 3 " in message


def test_only_the_note_of_the_shards_is_left(role: Path) -> None:
    """Case 5: all shards are on other nodes."""
    for rank in range(4):
        builders.drop_rank(role, rank)
    found = inspect(role)
    assert (found.kind, found.state) == ("fsdp", "incomplete")
    told = problem(found, "rank-missing")
    assert "world size 4" in told.message
    assert "multi-node" in told.hint


def test_no_fsdp_config_is_needed(role: Path) -> None:
    """Case 7: older verl writes none; world size and mesh come from the shards."""
    whole = inspect(role)
    (role / "fsdp_config.json").unlink()
    found = inspect(role)
    assert (found.kind, found.state, faults(found)) == ("fsdp", "complete", [])
    assert (found.facts, found.parameters) == (whole.facts, whole.parameters)


def test_fsdp_config_contradicts_the_files(role: Path) -> None:
    """Case 7: the file is a cross-check."""
    change_json(role / "fsdp_config.json", world_size=8)
    found = inspect(role)
    assert faults(found) == ["config-contradicts"]
    told = problem(found, "config-contradicts")
    assert (told.path, told.message) == ("fsdp_config.json", "says world size 8, the files are of world size 4")


def test_world_size_zero_says_nothing(role: Path) -> None:
    change_json(role / "fsdp_config.json", world_size=0)
    assert faults(inspect(role)) == []


def test_fsdp_config_is_no_json(role: Path) -> None:
    (role / "fsdp_config.json").write_text('{"world_size": ')
    found = inspect(role)
    assert (found.kind, faults(found)) == ("fsdp", ["bad-json"])
    assert "fsdp_config.json" in problem(found, "bad-json").message


@pytest.mark.parametrize("content", [None, {"model_type": "qwen2"}, {"architectures": None}])
def test_the_model_configuration_is_not_needed(role: Path, content: dict[str, object] | None) -> None:
    """Case 8: no config.json, or one without architectures, costs no more than its own words."""
    config = role / "huggingface/config.json"
    if content is None:
        config.unlink()
    else:
        write_json(config, content)
    found = inspect(role)
    assert (found.state, faults(found)) == ("complete", [])
    assert ("side-files-missing" in codes(found)) is (content is None)
    if content is None:
        assert problem(found, "side-files-missing").message == "huggingface/ has no config.json"


def test_files_as_accelerate_names_them(fsdp_checkpoints: Path) -> None:
    """The size of the world is in the meshes; optimizer files are counted and not unpickled."""
    found = inspect(fsdp_checkpoints / "accelerate-bins")
    assert (found.kind, found.state) == ("fsdp", "complete")
    assert found.facts["world size"] == "4 ranks (model files of rank 0-3)"
    assert found.title == "FSDP shards as accelerate names them"
    assert ("optimizer", "") in holds(found)
    assert found.next[0].command.startswith("ckpttool merge-fsdp ")
    tensors = inspect(fsdp_checkpoints / "accelerate-bins", tensors="*")
    assert listed(tensors) == headers(fsdp_checkpoints / "expected" / "accelerate-bins.safetensors")


def test_flattened_parameters_of_accelerate(fsdp_checkpoints: Path) -> None:
    """LOCAL_STATE_DICT: what each parameter was is known to the torch that wrote it alone."""
    found = inspect(fsdp_checkpoints / "accelerate-local")
    assert (found.state, faults(found)) == ("incomplete", ["flat-parameters"])
    assert not any("merge-fsdp" in suggestion.command for suggestion in found.next)


def test_side_files_hold_no_weights(role: Path) -> None:
    """Case 42: people take huggingface/ for the model."""
    found = inspect(role)
    told = problem(found, "side-files-only")
    assert "side files only" in told.message
    assert "the weights are in 4 FSDP shards" in told.message
    assert found.next[0].command.startswith("ckpttool merge-fsdp ")


def test_weights_in_both_forms_are_counted_once(role: Path, fsdp_checkpoints: Path, megatron_checkpoints: Path) -> None:
    weights = megatron_checkpoints / "expected/dense-hf/model.safetensors"
    shutil.copy(weights, role / "huggingface/model.safetensors")
    found = inspect(role)
    assert ("model weights", "huggingface") in holds(found)
    assert "side-files-only" not in codes(found)
    assert found.parameters == elements(fsdp_checkpoints / "expected/fsdp2.safetensors")


def two_ranks(rank: int, mesh: DeviceMesh) -> dict[str, object]:
    local = torch.full((4, 3), float(rank))
    return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False), "b": torch.zeros(2)}


def test_skyrl_is_recognised_by_the_file_pattern(tmp_path: Path) -> None:
    """Case 43: another framework, the same file names, no file of verl's."""
    role = write_shards(tmp_path / "global_step_7/policy", two_ranks)
    found = inspect(role)
    assert (found.kind, found.state, found.role, found.step) == ("fsdp", "complete", "policy", 7)
    assert found.evidence == ("2 of 2 model_world_size_2_rank_*.pt",)
    assert found.parameters == 8 * 3 + 2


def test_a_role_with_adapters_only_is_named_so(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "lora-only")
    assert (found.kind, found.title) == ("fsdp-lora", "FSDP role directory, LoRA adapters only")
    assert found.parameters == elements(fsdp_checkpoints / "expected/lora-only.safetensors")
    assert ("adapters", "") in holds(found)
    assert ("model weights", "") not in holds(found)
    assert found.facts["lora"] == "r 4, alpha 8, CAUSAL_LM"


def test_adapters_beside_the_base_are_counted_apart(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "lora")
    expected = headers(fsdp_checkpoints / "expected/lora.safetensors")
    counts = {content.name: content.tensors for content in found.contents}
    assert counts["adapters"] == sum("lora_" in name for name in expected) == 8
    assert counts["model weights"] == len(expected) - 8


def test_what_can_be_made_of_adapters_is_suggested(fsdp_checkpoints: Path) -> None:
    for name, fuse in (("lora", "--lora fuse"), ("lora-only", "--lora fuse --base MODEL")):
        found = inspect(fsdp_checkpoints / name)
        assert found.facts["adapters"] == "default: LoRA of rank 4 on 4 modules (q_proj, v_proj)"
        lines = [line.command for line in found.next if "merge-fsdp" in line.command]
        assert lines[0].endswith(f"-hf {fuse}")
        assert lines[1].endswith("-lora --lora adapter")


@pytest.mark.parametrize(
    "place", ["lora_train_meta.json", "../lora_train_meta.json", "lora_adapter/adapter_config.json"]
)
def test_a_run_of_adapters_suggests_what_can_be_made_of_them(
    fsdp_checkpoints: Path, tmp_path: Path, place: str
) -> None:
    role = builders.copy(fsdp_checkpoints / "lora", tmp_path / "global_step_3/actor")
    (role / "lora_adapter").mkdir()
    (role / "lora_train_meta.json").rename(role / place)
    lines = [line.command for line in inspect(tmp_path).next if "merge-fsdp" in line.command]
    assert [line.partition(" --lora ")[2] for line in lines] == ["fuse", "adapter"]


def test_layers_that_are_called_adapters_are_no_adapters(tmp_path: Path) -> None:
    weights = {"encoder.adapter_layer.weight": torch.ones(2), "model.floral_A.weight": torch.ones(2)}
    found = inspect(write_role(tmp_path / "role", weights))
    assert (found.kind, "adapters" in found.facts, found.parameters) == ("fsdp", False, 4)


def test_lora_meta_may_lie_in_the_step(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    role = builders.copy(fsdp_checkpoints / "lora-only", tmp_path / "global_step_3/actor")
    (role / "lora_train_meta.json").rename(role.parent / "lora_train_meta.json")
    assert inspect(role).facts["lora"] == "r 4, alpha 8, CAUSAL_LM"


def test_an_sft_step_is_the_role(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    run = builders.sft_directory(tmp_path / "run", fsdp_checkpoints / "fsdp2", (5,))
    found = inspect(run / "global_step_5")
    assert (found.kind, found.step, found.role) == ("fsdp", 5, None)
    (loader,) = [content for content in found.contents if content.name == "dataloader state"]
    assert loader.detail == "data_0.pt"
    assert loader.bytes == (run / "global_step_5/data_0.pt").stat().st_size


def test_the_evidence_is_in_the_file_names(role: Path) -> None:
    assert inspect(role).evidence == (
        "4 of 4 extra_state_world_size_4_rank_*.pt",
        "4 of 4 model_world_size_4_rank_*.pt",
        "4 of 4 optim_world_size_4_rank_*.pt",
        "fsdp_config.json",
    )
