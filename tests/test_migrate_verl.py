"""`migrate` where verl's own script goes wrong, and on directories that the script has been at."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint, Problem
from ckpttool.inspection import inspect
from tests import builders
from tests.conftest import Call
from tests.looking import faults, write_json
from tests.migrating import MODES, manifest, move, only, photograph, same_files, source, tiny_role, verls_script

Run = Callable[..., Call]


@pytest.fixture
def role(tmp_path: Path) -> Path:
    return tiny_role(tmp_path / "run/global_step_10/actor")


def reasons(path: Path) -> list[Problem]:
    """Why a migration is refused; nothing may have been touched."""
    before = photograph(path)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(path)
    assert photograph(path) == before
    return list(caught.value.problems)


# What the script does wrong


@pytest.mark.parametrize("variant", ["fsdp2", "hsdp", "lora"])
def test_case_76_fsdp_is_no_legacy_megatron(fsdp_checkpoints: Path, tmp_path: Path, variant: str) -> None:
    """Case 76, D31: its `huggingface/` stays where the merger looks for it."""
    role = builders.copy(fsdp_checkpoints / variant, tmp_path / "global_step_10/actor")
    (role / "huggingface").mkdir(exist_ok=True)
    write_json(role / "huggingface/config.json", {"model_type": "qwen2"})
    before = photograph(role)
    for options in ({}, {"undo": True}, {"remove_v1": True}):
        assert only(role, **options).action == "leave"
    assert photograph(role) == before


def test_case_76_fsdp_without_its_shards(tmp_path: Path) -> None:
    """Case 76: `fsdp_config.json` alone says whose directory it is."""
    role = tmp_path / "global_step_10/actor"
    write_json(role / "fsdp_config.json", {"FSDP_version": 2, "world_size": 4})
    write_json(role / "huggingface/config.json", {"model_type": "qwen2"})
    before = photograph(role)
    assert only(role).kind == "fsdp"
    assert photograph(role) == before


@pytest.mark.parametrize("empty", [["optimizer"], ["model/dist_ckpt"], ["model", "extra/dist_ckpt", "optimizer"]])
def test_case_77_empty_directories_are_not_layout_v2(role: Path, empty: list[str]) -> None:
    """Case 77, D32: what an interruption or verl's path helpers (D29) leave does not count as migrated."""
    before = photograph(role)
    for name in empty:
        (role / name).mkdir(parents=True)
    assert only(role).action == "migrate"
    assert same_files(role / layout.MODEL, photograph(role / "dist_ckpt"))
    assert inspect(role).state == "complete"
    assert only(role, undo=True).action == "undo"
    assert photograph(role) == before


def test_undo_alone_clears_empty_directories(role: Path) -> None:
    before = photograph(role)
    (role / "model/dist_ckpt").mkdir(parents=True)
    assert only(role, undo=True).action == "undo"
    assert photograph(role) == before


def test_case_77_a_tree_that_was_being_linked(role: Path) -> None:
    """Case 77: an interrupted tree is completed."""
    (role / layout.EXTRA).mkdir(parents=True)
    os.link(role / "dist_ckpt/.metadata", role / layout.EXTRA / ".metadata")
    before = source(role)
    plan = only(role)
    assert plan.action == "finish"
    assert {tree.path: tree.change for tree in plan.trees}[layout.EXTRA] == "remade"
    assert source(role) == before
    assert same_files(role / layout.EXTRA, photograph(role / "dist_ckpt"))


@pytest.mark.parametrize("name", ["extra", "model", "optimizer"])
def test_a_run_with_an_unrelated_directory(role: Path, name: str) -> None:
    """D33: a directory named like one of v2 beside the steps does not hide them."""
    run = role.parent.parent
    (run / name).mkdir()
    (run / name / "notes.txt").write_text("mine")
    (plan,) = move(run).roles
    assert (plan.path, plan.action) == (str(role), "migrate")


@pytest.mark.parametrize("name", ["actr", "nothing/at/all", "dist_ckpt/.metadata"])
def test_case_79_wrong_paths(role: Path, ckpttool: Run, name: str) -> None:
    """Case 79, D34: never exit code 0."""
    call = ckpttool("migrate", role.parent / name if name == "actr" else role / name)
    assert call.code == 3
    assert "hint:" in call.err
    assert (f"ckpttool migrate {role}" in call.err) == (name == "actr")


def test_case_79_a_directory_above(role: Path, ckpttool: Run) -> None:
    """Case 79: too high up, the command to type is told; it is not done on a guess."""
    before = photograph(role)
    call = ckpttool("migrate", role.parent.parent.parent)
    assert (call.code, f"ckpttool migrate {role.parent.parent}" in call.err) == (3, True)
    assert photograph(role) == before
    tiny_role(role.parent.parent.with_name("other") / "global_step_1/actor")
    call = ckpttool("migrate", role.parent.parent.parent)
    assert call.err.count("ckpttool migrate ") == 2


def test_a_directory_with_nothing_in_it(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        move(tmp_path)


def test_case_80_links_survive_a_move(role: Path) -> None:
    """Case 80, D37: the trees are relative links; `inspect` tells when they lead nowhere."""
    only(role, mode="symlink")
    step = role.parent.rename(role.parent.with_name("global_step_11"))
    moved = step.rename(step.parent.parent / "elsewhere") / "actor"
    wanted = photograph(moved / "dist_ckpt")
    assert all(same_files(moved / tree, wanted) for tree in layout.ARCHIVES)
    assert only(moved).action == "nothing"
    shutil.move(moved / "dist_ckpt", moved.parent)
    assert inspect(moved).state != "complete"
    assert faults(inspect(moved))


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "__0_0.distcp"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_case_74_an_incomplete_source_is_refused(role: Path, name: str, damage: str) -> None:
    """Case 74, D38: every file is held against the index first; the file is named."""
    file = role / "dist_ckpt" / name
    if damage == "gone":
        file.unlink()
    else:
        builders.truncate(file)
    found = reasons(role)
    assert any(name in f"{problem.path} {problem.message}" for problem in found)


def test_all_reasons_at_once(role: Path) -> None:
    (role / "dist_ckpt/__0_0.distcp").unlink()
    (role / "huggingface/config.json").write_text("{")
    (role / "huggingface/model.safetensors").write_bytes(b"\x08")
    paths = {problem.path.split("/")[0] for problem in reasons(role)}
    assert paths == {"dist_ckpt", "huggingface"}


def test_adapters_of_before_stay_and_are_told(role: Path) -> None:
    """D39: current verl does not load `adapter_checkpoint/`; nothing here can make it."""
    (role / "adapter_checkpoint").mkdir()
    (role / "adapter_checkpoint/adapter_0.pt").write_bytes(b"weights")
    plan = only(role)
    assert any("adapter_checkpoint/" in note for note in plan.notes)
    assert (role / "adapter_checkpoint/adapter_0.pt").read_bytes() == b"weights"


@pytest.mark.parametrize("mode", MODES)
def test_half_a_copy_does_not_count_as_done(role: Path, mode: str) -> None:
    """D40: a file cut short is made anew, never accepted, and never the reason to drop the source."""
    shutil.copytree(role / "dist_ckpt", role / layout.OPTIMIZER)
    builders.truncate(role / layout.OPTIMIZER / "__0_0.distcp")
    before = source(role)
    assert only(role, mode=mode).action == "finish"
    assert source(role) == before
    assert same_files(role / layout.OPTIMIZER, photograph(role / "dist_ckpt"))


# Directories that the script has been at


@pytest.mark.parametrize("mode", MODES)
def test_what_the_script_migrated_is_checked_and_given_its_manifest(role: Path, mode: str) -> None:
    before = photograph(role / "dist_ckpt")
    verls_script(role, mode)
    plan = only(role)
    assert plan.action == ("adopt" if mode != "symlink" else "finish")
    assert all(same_files(role / tree, before) for tree in layout.ARCHIVES)
    assert manifest(role)["migration"]["mode"] == ("copy" if mode == "copy" else "hardlink")
    assert set(manifest(role)["directories"]) == {*layout.ARCHIVES, layout.HUGGINGFACE}
    assert inspect(role).state == "complete"
    assert only(role).action == "nothing"


@pytest.mark.parametrize("mode", MODES)
def test_what_the_script_did_can_be_undone(role: Path, mode: str) -> None:
    before = photograph(role)
    verls_script(role, mode)
    assert only(role, undo=True).action == "undo"
    assert photograph(role) == before


def test_absolute_links_become_relative(role: Path) -> None:
    """D37: the script's links are replaced in symlink mode too."""
    verls_script(role, "symlink")
    before = photograph(role / "dist_ckpt")
    assert only(role, mode="symlink").action == "finish"
    assert all((role / tree).readlink() == Path("../dist_ckpt") for tree in layout.ARCHIVES)
    assert photograph(role / "dist_ckpt") == before


def test_links_of_the_script_that_dangle_after_a_move(role: Path) -> None:
    verls_script(role, "symlink")
    moved = role.rename(role.with_name("critic"))
    assert only(moved, mode="symlink").action == "finish"
    assert all((moved / tree / ".metadata").is_file() for tree in layout.ARCHIVES)


@pytest.mark.parametrize("mode", ["hardlink", "symlink"])
def test_a_tree_for_model_keys_that_are_not_there(tmp_path: Path, mode: str) -> None:
    """D39: the script always makes `model/dist_ckpt`. A whole one may stay; the manifest does not claim it."""
    role = tiny_role(tmp_path / "global_step_10/actor", model=False)
    verls_script(role, mode)
    assert only(role).action in ("adopt", "finish")
    assert "model" not in manifest(role)["contents"]
    assert layout.MODEL not in manifest(role)["directories"]
    assert not (role / layout.MODEL).is_symlink()
    assert inspect(role).state == "complete"


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_copies_of_the_script_that_differ_get_no_manifest(role: Path, damage: str) -> None:
    verls_script(role, "copy")
    file = role / layout.EXTRA / "__0_0.distcp"
    if damage == "gone":
        file.unlink()
    else:
        builders.truncate(file)
    assert {problem.path for problem in reasons(role)} == {layout.EXTRA}


@pytest.mark.parametrize("left", [".metadata", "__0_0.distcp", "metadata.json"])
def test_the_script_was_killed_while_it_removed_the_source(role: Path, left: str) -> None:
    """In copy mode it ends with that: the trees have everything, `dist_ckpt/` has remains."""
    v1 = photograph(role)
    shutil.copytree(role / "dist_ckpt", role.parent / "kept")
    verls_script(role, "copy")
    (role / "dist_ckpt").mkdir()
    shutil.copy2(role.parent / "kept" / left, role / "dist_ckpt" / left)
    shutil.copytree(role, role.with_name("critic"))
    assert only(role.with_name("critic"), undo=True).action == "undo"
    assert photograph(role.with_name("critic")) == v1
    assert only(role).action == "finish"
    assert inspect(role).state == "complete"
    assert not (role / "dist_ckpt").exists()
    assert only(role).action == "nothing"


def test_a_source_that_is_cut_short_is_no_remains(role: Path) -> None:
    """Which of the two is the right one is not ours to say."""
    for tree in layout.ARCHIVES:
        shutil.copytree(role / "dist_ckpt", role / tree)
    builders.truncate(role / "dist_ckpt/__0_0.distcp")
    assert "dist_ckpt/__0_0.distcp" in {problem.path for problem in reasons(role)}


@pytest.mark.parametrize("trees", [layout.ARCHIVES[1:2], layout.ARCHIVES[1:], layout.ARCHIVES])
@pytest.mark.parametrize("mode", MODES)
def test_finishing_a_half_migration_of_the_script(role: Path, mode: str, trees: tuple[str, ...]) -> None:
    """The script makes optimizer, extra, model, and then moves `huggingface/`."""
    v1 = photograph(role)
    verls_script(role, "hardlink", trees)
    (role / layout.HUGGINGFACE).rename(role / "huggingface")
    before = source(role)
    assert only(role, mode=mode).action == "finish"
    assert source(role) == before
    assert inspect(role).state == "complete"
    only(role, undo=True)
    assert photograph(role) == v1
