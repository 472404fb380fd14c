"""`migrate`: the manifest that it leaves, and what it shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool import __version__, layout
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.formats import jsonfile, torchzip
from ckpttool.inspection import inspect
from tests import builders
from tests.conftest import Call
from tests.looking import save_dcp, write_json
from tests.migrating import manifest, move, only, outcome, photograph, tiny_role

Run = Callable[..., Call]


@pytest.fixture
def role(tmp_path: Path) -> Path:
    return tiny_role(tmp_path / "run/global_step_10/actor")


# The manifest


def test_case_81_the_manifest_says_schema_2_and_keeps_what_was_said(megatron_checkpoints: Path, tmp_path: Path) -> None:
    """Case 81 and D38: true paths, what an earlier manifest said, who migrated, how and when."""
    role = builders.copy(megatron_checkpoints / "dense-v1", tmp_path / "global_step_10/actor")
    earlier = {"schema_version": 1, "arch": "TheirQwen", "world_size": 8, "custom": [1, 2]}
    write_json(role / layout.MANIFEST, earlier)
    only(role, mode="copy")
    found = manifest(role)
    assert (found["schema_version"], found["framework"], found["role"]) == (2, "megatron", "actor")
    assert (found["arch"], found["world_size"], found["global_step"]) == ("TheirQwen", 8, 10)
    assert found["v1_manifest"] == earlier
    assert found["backend"] == {"has_bridge": False, "use_dist_checkpointing": True, "peft": False}
    assert found["save_contents"] == ["model", "optimizer", "extra"]
    who = found["migration"]
    assert (who["tool"], who["version"], who["mode"]) == ("ckpttool migrate", __version__, "copy")
    assert datetime.fromisoformat(who["time"]).tzinfo is not None


@pytest.mark.parametrize("variant", ["dense-v1", "dense-v1-bridge", "moe-v1"])
def test_every_path_of_the_manifest_holds_something(megatron_checkpoints: Path, tmp_path: Path, variant: str) -> None:
    """D44: composing it creates no directory, and it claims nothing that is not there."""
    role = builders.copy(megatron_checkpoints / variant, tmp_path / "global_step_10/actor")
    only(role)
    found = manifest(role)
    for entry in found["contents"].values():
        path = role / entry["path"]
        assert path.is_file() or any(path.iterdir())
    trees = [str(path.relative_to(role)) for path in role.glob("*/*") if path.is_dir()]
    assert sorted(trees) == sorted(found["directories"])
    assert {p.code for p in inspect(role).problems} <= {"side-files-only", "tokenizer-class", "config-of-5"}
    assert found["arch"] == ("Qwen3MoeForCausalLM" if "moe" in variant else "Qwen2ForCausalLM")
    assert found["world_size"] == 4
    assert found["backend"]["has_bridge"] is ("bridge" in variant)


def test_the_same_fields_as_verl_writes(megatron_checkpoints: Path, tmp_path: Path) -> None:
    role = builders.copy(megatron_checkpoints / "dense-v1", tmp_path / "global_step_10/actor")
    only(role)
    verls = json.loads((megatron_checkpoints / "dense-v2" / layout.MANIFEST).read_text())
    assert manifest(role).keys() - verls.keys() == {"migration"}
    assert verls.keys() <= manifest(role).keys()


@pytest.mark.parametrize("bridge", [False, True])
def test_adapters_of_peft(tmp_path: Path, bridge: bool) -> None:
    """Their shards lie under `model/`; the base model is claimed only where a bridge wrote it."""
    role = tmp_path / "actor"
    role.mkdir()
    name = "decoder.layers.self_attention.linear_qkv.adapter.linear_in.weight"
    state = {name: torch.ones(1, 2), f"optimizer.state.exp_avg.{name}": torch.ones(1, 2)}
    save_dcp(role / "dist_ckpt", state, backend="torch_dist")
    if bridge:
        write_json(role / "huggingface/config.json", {"model_type": "qwen2"})
        save_file({"model.norm.weight": torch.ones(2)}, role / "huggingface/model.safetensors")
    trees = [layout.MODEL, layout.OPTIMIZER, *([layout.HUGGINGFACE] if bridge else [])]
    assert [tree.path for tree in only(role).trees] == trees
    assert manifest(role)["backend"] == {"has_bridge": bridge, "use_dist_checkpointing": False, "peft": True}
    assert manifest(role)["save_contents"] == [*(["model"] if bridge else []), "optimizer"]
    assert manifest(role)["contents"]["peft_adapters"]["path"] == layout.MODEL
    assert ("model" in manifest(role)["contents"]) == bridge
    assert [p for p in inspect(role).problems if p.severity == "error"] == []


def test_a_manifest_that_cannot_be_read_is_not_overwritten(role: Path) -> None:
    (role / layout.MANIFEST).write_text('{"schema_version": 1, "cut')
    before = photograph(role)
    with pytest.raises(BrokenCheckpoint) as caught:
        only(role)
    assert [p.path for p in caught.value.problems] == [layout.MANIFEST]
    assert photograph(role) == before


def test_undo_gives_back_the_manifest_to_the_letter(role: Path) -> None:
    text = '{"b": 1,\n\n  "a": "\\u00fc"}\n'
    (role / layout.MANIFEST).write_text(text)
    for _ in range(2):
        only(role, remove_v1=True)
        only(role, undo=True)
        assert (role / layout.MANIFEST).read_text() == text


def test_a_later_schema_is_left_alone(role: Path) -> None:
    write_json(role / layout.MANIFEST, {"schema_version": 3})
    before = photograph(role)
    assert only(role).action == "leave"
    assert photograph(role) == before


# What is shown


def test_json_is_one_object_with_every_step(role: Path, ckpttool: Run) -> None:
    call = ckpttool("migrate", role, "--json", "--dry-run")
    assert (call.code, call.err, call.json["ok"], call.json["command"]) == (0, "", True, "migrate")
    (plan,) = call.json["data"]["roles"]
    assert (plan["action"], plan["mode"], call.json["data"]["done"]) == ("migrate", "hardlink", False)
    assert {tree["path"]: tree["source"] for tree in plan["trees"]}[layout.MODEL] == "dist_ckpt"
    assert plan["steps"]
    assert plan["manifest"]["schema_version"] == 2


def test_the_listing_names_trees_and_what_comes_next(role: Path, ckpttool: Run) -> None:
    planned = ckpttool("migrate", role, "--dry-run").out
    assert "dry run: nothing was changed" in planned
    done = ckpttool("migrate", role).out
    for out in (planned, done):
        assert all(tree in out for tree in (*layout.ARCHIVES, layout.HUGGINGFACE))
    assert f"ckpttool migrate {role} --undo" in done
    assert f"  ckpttool migrate {role}\n" in planned
    assert "overwrites all of them" in done


@pytest.mark.parametrize(
    "options",
    [
        ("--mode", "move"),
        ("--fallback", "hardlink"),
        ("--remove-v1", "--mode", "symlink"),
        ("--undo", "--remove-v1"),
    ],
)
def test_wrong_usage_is_2_and_changes_nothing(role: Path, ckpttool: Run, options: tuple[str, ...]) -> None:
    before = photograph(role)
    assert ckpttool("migrate", role, *options).code == 2
    assert photograph(role) == before


def test_inspect_counts_linked_files_once(role: Path) -> None:
    """D36: four names of each file, one size."""
    before = inspect(role).disk
    only(role)
    after = inspect(role).disk
    assert before is not None
    assert after is not None
    assert after.unique == before.unique + (role / layout.MANIFEST).stat().st_size
    assert after.apparent > 3 * before.apparent


def test_not_a_checkpoint_is_no_migration(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        move(tmp_path)
    assert outcome(tmp_path) == {}


def test_what_was_checked_is_what_is_told(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config that could be read once is not read again: the second time a disk may fail, and nobody would look."""
    reads: list[str] = []
    read_range = torchzip.read_range

    def counted(path: Path, offset: int, length: int) -> bytes:
        reads.append(path.parent.name + "/" + path.name)
        return read_range(path, offset, length)

    monkeypatch.setattr(jsonfile, "read_range", counted)
    only(role, dry_run=True)
    assert reads.count("huggingface/config.json") == 1
