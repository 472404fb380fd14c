"""Directories that a careless tool calls whole, broken, hostile, or never comes back from."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.inspection import inspect
from ckpttool.tensors import tiling_faults
from tests import builders
from tests.conftest import Call
from tests.looking import faults, problem

Run = Callable[..., Call]


def role_of(checkpoints: Path, variant: str, root: Path) -> Path:
    """Copy a role into a run of one step."""
    role = root / "run/global_step_10/actor"
    builders.copy(checkpoints / variant, role)
    return role


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# Weights have to be there, not only the directory that should hold them.


def test_v2_of_a_bridge_without_the_weights(megatron_checkpoints: Path, tmp_path: Path) -> None:
    """The side files of verl's default save hide that the weights are gone."""
    role = role_of(megatron_checkpoints, "dense-v2-bridge", tmp_path)
    assert inspect(role).state == "complete"
    for file in (role / "model/huggingface").glob("*.safetensors*"):
        file.unlink()
    found = inspect(role)
    assert (found.state, found.parameters) == ("incomplete", None)
    assert "model weights" in problem(found, "tree-missing").message


def test_v2_whose_model_archive_holds_an_optimizer(megatron_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(megatron_checkpoints, "moe-v2", tmp_path)
    shutil.rmtree(role / "model/dist_ckpt")
    shutil.copytree(role / "optimizer/dist_ckpt", role / "model/dist_ckpt")
    assert "model/dist_ckpt" in problem(inspect(role), "tree-missing").message


def test_v1_without_any_weights(megatron_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(megatron_checkpoints, "dense-v1-bridge", tmp_path)
    (role / "huggingface/model.safetensors").unlink()
    assert faults(inspect(role)) == ["no-weights"]


def test_a_manifest_that_vouches_for_nothing(megatron_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(megatron_checkpoints, "moe-v2", tmp_path)
    edit_json(role / "ckpt_contents.json", save_contents=[])
    assert "bad-manifest" in faults(inspect(role))


def test_optimizer_shards_without_the_model(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(fsdp_checkpoints, "fsdp2", tmp_path)
    for file in role.glob("model_world_size_*"):
        file.unlink()
    assert "no model shard is here: of 4 ranks" in problem(inspect(role), "rank-missing").message


def test_shards_of_nothing(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "model_world_size_1_rank_0.pt")
    assert faults(inspect(tmp_path)) == ["no-tensors"]


def test_replicas_suffice_for_the_weights(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """HSDP: ranks 0 and 1 are one whole replica."""
    role = role_of(fsdp_checkpoints, "hsdp", tmp_path)
    for rank in (2, 3):
        builders.drop_rank(role, rank)
    found = inspect(role)
    assert set(faults(found)) == {"rank-missing"}
    assert problem(found, "replicas-suffice").severity == "note"
    builders.drop_rank(role, 1)
    assert "replicas-suffice" not in {p.code for p in inspect(role).problems}


# Sound checkpoints that look like something broken.


@pytest.mark.parametrize("key", ["model.decoder.layers.0.self_attn.q_proj.weight", "decoder.layers.0.fc1.weight"])
def test_plain_dcp_of_a_model_with_a_decoder(tmp_path: Path, key: str) -> None:
    """OPT, BART, Whisper: not an interrupted Megatron save."""
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({key: torch.zeros(4, 4)}, checkpoint_id=tmp_path, no_dist=True)
    found = inspect(tmp_path)
    assert (found.kind, found.state, faults(found)) == ("dcp", "complete", [])


def test_a_second_copy_in_another_format_and_files_no_index_names(tmp_path: Path) -> None:
    """Published models: consolidated.safetensors, an old pytorch_model.bin."""
    (tmp_path / "config.json").write_text('{"model_type": "mistral", "architectures": ["MistralForCausalLM"]}')
    for part in (1, 2):
        save_file({f"w{part}": np.zeros(4, np.float32)}, tmp_path / f"model-{part:05d}-of-00002.safetensors")
    names = {f"w{part}": f"model-{part:05d}-of-00002.safetensors" for part in (1, 2)}
    index = {"metadata": {"total_size": 32}, "weight_map": names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"w1": np.zeros(4, np.float32), "w2": np.zeros(4, np.float32)}, tmp_path / "consolidated.safetensors")
    torch.save({"w1": torch.zeros(4)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    found = inspect(tmp_path)
    assert (found.state, found.parameters) == ("complete", 8)
    assert {p.code for p in found.problems} == {"second-copy", "file-not-in-index", "no-generation-config"}


@pytest.mark.parametrize(("file", "content"), [("config.json", '{"a": 1}'), ("tokenizer.py", "x = 1")])
def test_any_folder_with_such_a_file_is_no_model(tmp_path: Path, file: str, content: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(NotACheckpoint):
        inspect(tmp_path)


def test_litter_of_a_logger_is_a_note(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(fsdp_checkpoints, "fsdp2", tmp_path)
    (tmp_path / "run/wandb").mkdir()
    (tmp_path / "run/wandb/debug.log").symlink_to("gone")
    found = inspect(tmp_path / "run")
    assert (found.state, problem(found, "dangling-link").severity) == ("complete", "note")
    assert role.is_dir()


def test_deepspeed_inside_a_trainer_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-500"
    (step / "global_step500").mkdir(parents=True)
    (step / "config.json").write_text('{"model_type": "qwen2"}')
    (step / "latest").write_text("global_step500")
    (step / "zero_to_fp32.py").write_text("")
    assert (inspect(step).kind, inspect(step).state) == ("deepspeed", "not opened")


def test_a_step_that_is_not_opened_is_not_broken(tmp_path: Path) -> None:
    """Old verl saved mp_rank_XX; the tracker is right about it."""
    (tmp_path / "global_step_10/actor/mp_rank_00").mkdir(parents=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10")
    found = inspect(tmp_path)
    assert (faults(found), problem(found, "not-opened").severity) == ([], "note")


# Broken ones that look sound.


def test_a_step_that_lacks_a_role(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    roles = {"policy": fsdp_checkpoints / "lora-only", "critic": fsdp_checkpoints / "lora-only"}
    builders.run_directory(tmp_path / "run", roles, steps=(10, 20))
    shutil.rmtree(tmp_path / "run/global_step_20/critic")
    found = inspect(tmp_path / "run")
    assert "step 20 has no critic" in problem(found, "role-missing").message
    assert found.run is not None
    assert found.run.latest_complete == 10


def test_a_dataloader_state_that_was_cut_short(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(fsdp_checkpoints, "fsdp2", tmp_path)
    (role.parent / "data.pt").write_bytes(b"")
    assert faults(inspect(role.parent)) == ["truncated"]


def metadata_of(tmp_path: Path, length: int) -> Path:
    """Write an index of one bf16 chunk of 1000 x 1000 in a record of ``length`` bytes."""
    size = torch.Size([1000, 1000])
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), size)
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), size, [chunk])
    place = _StorageInfo("__0_0.distcp", 0, length)
    index = Metadata({"w": entry}, None, {MetadataIndex("w", torch.Size([0, 0])): place})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(length))
    return tmp_path


def test_a_record_that_is_shorter_than_its_chunk(tmp_path: Path) -> None:
    assert faults(inspect(metadata_of(tmp_path, 2_000_000))) == []
    assert faults(inspect(metadata_of(tmp_path, 10))) == ["storage-short"]


# Damage is no attack, and one bad file does not hide the others.


def test_an_index_of_zeros_is_damage(tmp_path: Path) -> None:
    """What some file systems leave after a power cut."""
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / ".metadata").write_bytes(bytes(4096))
    assert faults(inspect(tmp_path)) == ["unreadable-pickle"]


# Mazes and bombs.


def test_steps_that_lead_back_to_the_run(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"global_step_{step}").symlink_to(".")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    found = inspect(tmp_path)
    assert found.state == "incomplete"
    assert found.run is not None
    assert len(found.run.rows) == 2


def test_a_maze_of_links(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(fsdp_checkpoints, "fsdp2", tmp_path)
    below = role
    for _ in range(30):
        (below / "next").mkdir()
        (below / "also").symlink_to("next")
        below = below / "next"
    (below / "file").write_bytes(b"x")
    found = inspect(role)
    assert found.state == "complete"
    assert found.disk is not None
    assert found.disk.files < 1000


def test_links_out_of_the_checkpoint_are_not_counted(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(fsdp_checkpoints, "fsdp2", tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "huge").write_bytes(bytes(10_000_000))
    (role / "data").symlink_to(elsewhere)
    found = inspect(role)
    assert found.disk is not None
    assert found.disk.apparent < 10_000_000


def test_a_build_tree_with_the_name_of_a_step(tmp_path: Path) -> None:
    (tmp_path / "foo/release").mkdir(parents=True)
    (tmp_path / "foo/release/x.o").write_bytes(b"x")
    with pytest.raises(NotACheckpoint, match="nothing that ckpttool recognises"):
        inspect(tmp_path)


def test_a_world_of_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "model_world_size_0_rank_0.pt").write_bytes(b"x")
    with pytest.raises(NotACheckpoint):
        inspect(tmp_path)


def test_a_manifest_with_an_endless_path(megatron_checkpoints: Path, tmp_path: Path) -> None:
    role = role_of(megatron_checkpoints, "moe-v2", tmp_path)
    contents = {"model": {"path": "x" * 5000}}
    edit_json(role / "ckpt_contents.json", contents=contents)
    assert problem(inspect(role), "manifest-disagrees").severity == "note"


def test_a_sparse_index_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    with (tmp_path / ".metadata").open("wb") as file:
        os.truncate(file.fileno(), 2 << 40)
    assert "more than any index has" in problem(inspect(tmp_path), "unreadable-pickle").message


def test_irregular_boxes_have_a_bound() -> None:
    stairs = [((n, n), (8000 - n, 1)) for n in range(4000)]
    assert list(tiling_faults((8000, 4000), stairs)) == ["cut too irregularly to check"]


def test_json_beyond_reason_is_not_parsed(tmp_path: Path) -> None:
    from ckpttool.formats.jsonfile import read_object

    (tmp_path / "config.json").write_text("[" + "[],[]," * 4_000_000 + "[]]")
    with pytest.raises(BrokenCheckpoint, match="more than is read"):
        read_object(tmp_path / "config.json")


# The command line.


def test_tensors_of_a_run_need_a_choice(ckpttool: Run, fsdp_checkpoints: Path, tmp_path: Path) -> None:
    roles = {"policy": fsdp_checkpoints / "lora-only", "critic": fsdp_checkpoints / "lora-only"}
    builders.run_directory(tmp_path / "run", roles, steps=(10,))
    call = ckpttool("inspect", tmp_path / "run", "--tensors")
    assert call.code == 2
    assert "--tensors" in call.err.splitlines()[-1]
    shutil.rmtree(tmp_path / "run/global_step_10/critic")
    assert "lora_A" in ckpttool("inspect", tmp_path / "run", "--tensors").out


def test_role_names_are_no_markup(ckpttool: Run, fsdp_checkpoints: Path, tmp_path: Path) -> None:
    builders.run_directory(tmp_path / "run", {"[red]:smile:": fsdp_checkpoints / "lora-only"}, steps=(10,))
    assert "[red]:smile:" in ckpttool("inspect", tmp_path / "run").out
