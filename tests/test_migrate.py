"""`migrate`: the plan, the modes, several roles at once, the manifest, and the way back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint
from ckpttool.inspection import inspect
from tests import builders
from tests.conftest import Call
from tests.looking import faults, write_json
from tests.migrating import MODES, STAGING, move, only, photograph, source, tiny_role

Run = Callable[..., Call]


@pytest.fixture
def role(tmp_path: Path) -> Path:
    return tiny_role(tmp_path / "run/global_step_10/actor")


@pytest.fixture
def several(tmp_path: Path, megatron_checkpoints: Path, fsdp_checkpoints: Path) -> Path:
    """Two v1 roles, one of v2 and one of FSDP in the first step; one v1 role in the second."""
    step = tmp_path / "run/global_step_10"
    tiny_role(step / "actor")
    tiny_role(step / "critic", model=False)
    builders.copy(megatron_checkpoints / "dense-v2", step / "ref")
    builders.copy(fsdp_checkpoints / "fsdp2", step / "reward")
    tiny_role(tmp_path / "run/global_step_20/actor")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("20")
    return tmp_path / "run"


def actions(path: Path, **options: Any) -> dict[str, str]:
    return {os.path.relpath(plan.path, path): plan.action for plan in move(path, **options).roles}


# The plan


@pytest.mark.parametrize("options", [{"mode": mode} for mode in MODES] + [{"undo": True}, {"remove_v1": True}])
def test_a_dry_run_changes_nothing_and_says_what_would_be(role: Path, options: dict[str, Any]) -> None:
    if "mode" not in options:
        move(role)
    before = photograph(role)
    plan = only(role, dry_run=True, **options)
    assert plan.steps
    assert photograph(role) == before
    assert only(role, **options).trees == plan.trees
    assert photograph(role) != before


@pytest.mark.parametrize("variant", ["dense-v1", "dense-v1-bridge", "moe-v1"])
def test_case_75_trees_for_what_the_archive_holds(megatron_checkpoints: Path, tmp_path: Path, variant: str) -> None:
    """Case 75: read from `.metadata`; the archive beside a bridge's weights has no model keys, so no tree for them."""
    role = builders.copy(megatron_checkpoints / variant, tmp_path / "actor")
    trees = {tree.path: (tree.source, tree.holds) for tree in only(role).trees}
    model = {} if "bridge" in variant else {layout.MODEL: ("dist_ckpt", "model")}
    assert trees == model | {
        layout.OPTIMIZER: ("dist_ckpt", "optimizer, scheduler"),
        layout.EXTRA: ("dist_ckpt", "rng"),
        layout.HUGGINGFACE: ("huggingface", "Hugging Face files"),
    }
    assert {tree for tree in (*layout.ARCHIVES, layout.HUGGINGFACE) if (role / tree).is_dir()} == trees.keys()
    assert inspect(role).state == "complete"


def test_only_weights_of_a_bridge(tmp_path: Path, megatron_checkpoints: Path) -> None:
    role = builders.copy(megatron_checkpoints / "dense-v1-bridge", tmp_path / "actor")
    shutil.rmtree(role / "dist_ckpt")
    before = photograph(role)
    assert [tree.path for tree in only(role).trees] == [layout.HUGGINGFACE]
    assert inspect(role).state == "complete"
    only(role, remove_v1=True)
    assert not (role / "huggingface").exists()
    only(role, undo=True)
    assert photograph(role) == before


@pytest.mark.parametrize("mode", MODES)
def test_modes(role: Path, mode: str) -> None:
    """Source bytes, times, modes and names are untouched; the trees are links, relative links, or copies."""
    before = source(role)
    only(role, mode=mode)
    assert source(role) == before
    for tree, name in ((layout.MODEL, "dist_ckpt"), (layout.HUGGINGFACE, "huggingface")):
        if mode == "symlink":
            assert (role / tree).readlink() == Path("..", name)
            continue
        assert photograph(role / tree) == photograph(role / name)
        for file in (role / name).iterdir():
            assert (role / tree / file.name).samefile(file) == (mode == "hardlink")
    assert not (role / STAGING).exists()


def test_hardlink_is_the_default(role: Path) -> None:
    assert only(role).mode == "hardlink"
    assert (role / "dist_ckpt/.metadata").stat().st_nlink == 4


def test_copies_keep_times_and_modes_in_spite_of_the_umask(role: Path) -> None:
    file = role / "dist_ckpt/__0_0.distcp"
    file.chmod(0o666)
    os.utime(file, ns=(1_000_000_007, 2_000_000_009))
    (role / "dist_ckpt").chmod(0o2770)
    only(role, mode="copy", remove_v1=True)
    only(role, undo=True)
    assert file.stat().st_mode & 0o7777 == 0o666
    assert file.stat().st_mtime_ns == 2_000_000_009
    assert (role / "dist_ckpt").stat().st_mode & 0o7777 == 0o2770


@pytest.mark.parametrize("refused", [None, 18, 22, 38, 95, 1])
def test_copies_are_made_in_the_kernel_where_it_can(
    role: Path, monkeypatch: pytest.MonkeyPatch, refused: int | None
) -> None:
    calls = []
    in_kernel = os.copy_file_range

    def copy_file_range(*arguments: Any) -> int:
        calls.append(arguments)
        if refused is not None:
            raise OSError(refused, os.strerror(refused))
        return in_kernel(arguments[0], arguments[1], min(arguments[2], 100))

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    only(role, mode="copy")
    assert calls
    assert photograph(role / layout.MODEL) == photograph(role / "dist_ckpt")


def test_sub_directories_come_along(role: Path) -> None:
    write_json(role / "huggingface/a/b/c.json", {"deep": True})
    before = photograph(role)
    only(role, remove_v1=True)
    assert (role / "model/huggingface/a/b/c.json").is_file()
    only(role, undo=True)
    assert photograph(role) == before


# Going on, and the way back


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("again", MODES)
def test_a_finished_migration_is_a_checked_no_op(role: Path, ckpttool: Run, mode: str, again: str) -> None:
    only(role, mode=mode)
    before = photograph(role)
    call = ckpttool("migrate", role, "--mode", again)
    assert (call.code, "1 with nothing to do" in call.out) == (0, True)
    assert photograph(role) == before


@pytest.mark.parametrize("mode", MODES)
def test_a_finished_migration_whose_source_has_gone_bad_is_told(role: Path, mode: str) -> None:
    only(role, mode=mode)
    builders.truncate(role / "dist_ckpt/__0_0.distcp")
    with pytest.raises(BrokenCheckpoint):
        only(role)


def test_links_whose_archive_is_gone_are_told(role: Path) -> None:
    only(role, mode="symlink")
    shutil.rmtree(role / "dist_ckpt")
    with pytest.raises(BrokenCheckpoint) as caught:
        only(role)
    assert {p.code for p in caught.value.problems} >= {"tree-missing"}


@pytest.mark.parametrize("remove_v1", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_undo_gives_back_what_was_there(role: Path, mode: str, remove_v1: bool) -> None:
    if remove_v1 and mode == "symlink":
        return
    write_json(role / "notes.json", {})
    before = photograph(role)
    only(role, mode=mode)
    if remove_v1:
        assert only(role, remove_v1=True).action == "remove v1"
        assert not (role / "dist_ckpt").exists()
        assert inspect(role).state == "complete"
    assert only(role, undo=True).action == "undo"
    assert photograph(role) == before
    assert only(role, undo=True).action == "nothing"


def test_remove_v1_compares_bytes_first(role: Path) -> None:
    only(role, mode="copy")
    data = role / layout.EXTRA / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1] + b"?")
    before = photograph(role)
    for options in ({"remove_v1": True}, {"undo": True}):
        with pytest.raises(BrokenCheckpoint) as caught:
            only(role, **options)
        assert layout.EXTRA in {p.path for p in caught.value.problems}
        assert photograph(role) == before


@pytest.mark.parametrize("saved", [True, False])
def test_undo_leaves_what_was_saved_in_layout_v2(megatron_checkpoints: Path, tmp_path: Path, saved: bool) -> None:
    """Not even when the save did not finish: its trees are not copies of each other."""
    role = builders.copy(megatron_checkpoints / "dense-v2", tmp_path / "actor")
    if not saved:
        (role / layout.MANIFEST).unlink()
    before = photograph(role)
    assert only(role, undo=True).action == "leave"
    assert only(role).action == "leave"
    assert photograph(role) == before


def test_a_tree_of_another_save_is_not_replaced_nor_removed(role: Path) -> None:
    shutil.copytree(role / "dist_ckpt", role / layout.MODEL)
    (role / layout.MODEL / "__7_0.distcp").write_bytes(b"newer")
    before = photograph(role)
    for undo in (False, True):
        with pytest.raises(BrokenCheckpoint) as caught:
            only(role, undo=undo)
        assert [p.code for p in caught.value.problems] == ["tree-foreign"]
        assert photograph(role) == before


def test_a_newer_save_beside_an_older_huggingface_is_refused(role: Path) -> None:
    shutil.move(role / "dist_ckpt", role / layout.OPTIMIZER)
    before = photograph(role)
    with pytest.raises(BrokenCheckpoint) as caught:
        only(role)
    assert "mixed-layouts" in {p.code for p in caught.value.problems}
    assert photograph(role) == before


# Several roles


def test_every_v1_role_below_a_run(several: Path) -> None:
    others = [several / "global_step_10/ref", several / "global_step_10/reward"]
    before = [photograph(other) for other in others]
    assert actions(several) == {
        "global_step_10/actor": "migrate",
        "global_step_10/critic": "migrate",
        "global_step_10/ref": "leave",
        "global_step_10/reward": "leave",
        "global_step_20/actor": "migrate",
    }
    assert [photograph(other) for other in others] == before
    assert set(actions(several).values()) == {"nothing", "leave"}
    assert set(actions(several, undo=True).values()) == {"undo", "leave"}
    assert [photograph(other) for other in others] == before


def test_path_may_be_a_step_and_is_the_working_directory_by_default(
    several: Path, ckpttool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(several / "global_step_10")
    assert ckpttool("migrate").code == 0
    assert (several / "global_step_10/actor" / layout.MODEL).is_dir()
    assert not (several / "global_step_20/actor/model").exists()


def test_a_step_that_is_the_role_itself(tmp_path: Path) -> None:
    step = tiny_role(tmp_path / "sft/global_step_30")
    (tmp_path / "sft/latest_checkpointed_iteration.txt").write_text("30")
    assert actions(tmp_path / "sft") == {"global_step_30": "migrate"}
    assert faults(inspect(step)) == []


def test_all_are_checked_before_the_first_is_touched(several: Path, ckpttool: Run) -> None:
    """Case 72: a step whose save never finished is refused, with all reasons of all roles."""
    (several / "global_step_20/actor/dist_ckpt/.metadata").unlink()
    builders.truncate(several / "global_step_10/critic/dist_ckpt/__0_0.distcp")
    before = photograph(several)
    call = ckpttool("migrate", several, "--json")
    assert call.code == 4
    assert photograph(several) == before
    paths = {problem["path"] for problem in call.json["problems"]}
    assert any(path.startswith("global_step_20/actor/dist_ckpt") for path in paths)
    assert any(path.startswith("global_step_10/critic/dist_ckpt") for path in paths)
    assert "--skip-broken" in call.json["problems"][0]["hint"]


def test_skip_broken_goes_on_with_the_sound_ones(several: Path, ckpttool: Run) -> None:
    broken = several / "global_step_10/critic"
    (broken / "dist_ckpt/.metadata").unlink()
    before = photograph(broken)
    call = ckpttool("migrate", several, "--skip-broken")
    assert call.code == 4
    assert "1 refused" in call.out
    assert "2 migrated" in call.out
    assert photograph(broken) == before
    assert inspect(several / "global_step_20/actor").state == "complete"


@pytest.mark.parametrize("variant", ["fsdp", "v2"])
def test_nothing_to_migrate_is_0_with_a_listing(
    tmp_path: Path, fsdp_checkpoints: Path, megatron_checkpoints: Path, ckpttool: Run, variant: str
) -> None:
    origin = fsdp_checkpoints / "fsdp2" if variant == "fsdp" else megatron_checkpoints / "moe-v2"
    step = tmp_path / "global_step_10"
    role = builders.copy(origin, step / "actor")
    before = photograph(role)
    for options in ((), ("--dry-run",), ("--undo",), ("--remove-v1",), ("--mode", "copy")):
        call = ckpttool("migrate", step, *options)
        assert (call.code, "actor: left alone" in call.out) == (0, True)
    assert photograph(role) == before
