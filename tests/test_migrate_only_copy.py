"""`migrate` never deletes the last copy of a byte, whatever was done to the role between two runs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint
from ckpttool.inspection import inspect
from ckpttool.migration import steps
from tests.conftest import Call
from tests.migrating import STAGING, move, only, part, photograph, same_files, source, tiny_role

Run = Callable[..., Call]
DATA = "__0_0.distcp"
ANEW = b"saved anew"


@pytest.fixture
def role(tmp_path: Path) -> Path:
    return tiny_role(tmp_path / "run/global_step_10/actor")


def contents(role: Path) -> set[str]:
    """The distinct contents of the files of a role, wherever they lie; the manifest apart."""
    files = [path for path in role.rglob("*") if path.is_file() and not path.is_symlink()]
    return {sha256(path.read_bytes()).hexdigest() for path in files if path.name != layout.MANIFEST}


def write_into(file: Path) -> None:
    """Change bytes in place, as a trainer that saves again does; the size stays."""
    with file.open("r+b") as data:
        data.seek(10)
        data.write(ANEW)


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, role: Path, **options: Any) -> bool:
    """Migrate, interrupted after so many steps; tell whether it came so far."""
    real, done = steps._one, iter(range(10_000))

    def one(*arguments: Any) -> None:
        if next(done) >= count:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_one", one)
        try:
            move(role, **options)
        except KeyboardInterrupt:
            return True
    return False


# Links that somebody made


@pytest.mark.parametrize(("name", "tree"), [("dist_ckpt", layout.MODEL), ("huggingface", layout.HUGGINGFACE)])
def test_a_v1_name_that_links_to_a_tree_is_no_archive(role: Path, name: str, tree: str) -> None:
    """Made so that an older verl can load; --undo puts the tree in the place of the link."""
    before = source(role)
    move(role, remove_v1=True)
    (role / name).symlink_to(tree)
    assert only(role).action == "nothing"
    assert only(role, undo=True).action == "undo"
    assert not (role / name).is_symlink()
    assert source(role) == before


def test_trees_of_links_need_what_they_link_to(role: Path) -> None:
    before = source(role)
    for tree in layout.ARCHIVES:
        (role / tree).mkdir(parents=True)
        for file in (role / "dist_ckpt").iterdir():
            (role / tree / file.name).symlink_to(f"../../dist_ckpt/{file.name}")
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role, remove_v1=True)
    assert [reason.code for reason in caught.value.problems] == ["linked-tree"]
    assert source(role) == before


def test_what_returns_must_not_lean_on_what_goes(role: Path) -> None:
    move(role, mode="copy", remove_v1=True)
    model = role / layout.MODEL
    for file in list(model.iterdir()):
        file.unlink()
        file.symlink_to(f"../../{layout.OPTIMIZER}/{file.name}")
    before = contents(role)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role, undo=True)
    assert "linked-tree" in {reason.code for reason in caught.value.problems}
    assert contents(role) == before


# Bytes that changed


@pytest.mark.parametrize("where", [layout.MODEL, "dist_ckpt"])
def test_an_unfinished_tree_with_other_bytes_is_kept(role: Path, where: str) -> None:
    """Same sizes, other bytes, a file missing: not what an interrupted copy leaves."""
    move(role, mode="copy")
    write_into(role / where / DATA)
    (role / layout.MODEL / "metadata.json").unlink()
    before = contents(role)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role)
    assert "tree-foreign" in {reason.code for reason in caught.value.problems}
    assert contents(role) == before


@pytest.mark.parametrize("manifest", [True, False])
def test_a_copy_that_differs_is_seen(role: Path, manifest: bool) -> None:
    """A finished migration and trees of somebody else are both held against v1, sizes and times first."""
    move(role, mode="copy")
    if not manifest:
        (role / layout.MANIFEST).unlink()
    write_into(role / "dist_ckpt" / DATA)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role)
    assert {reason.code for reason in caught.value.problems} == {"tree-foreign"}
    assert all(reason.message.endswith(f": {DATA}") for reason in caught.value.problems)


def test_a_truncated_archive_does_not_condemn_its_copies(role: Path) -> None:
    move(role, mode="copy")
    os.truncate(role / "dist_ckpt" / DATA, 5)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role)
    hints = [reason.hint for reason in caught.value.problems if reason.code == "tree-foreign"]
    assert hints
    assert all("keep it" in hint for hint in hints)


@pytest.mark.parametrize("then", [{}, {"undo": True}, {"remove_v1": True}])
@pytest.mark.parametrize("first", [{"remove_v1": True}, {"undo": True}])
def test_what_lies_aside_is_deleted_only_if_it_is_elsewhere(
    role: Path, monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], then: dict[str, Any]
) -> None:
    """Interrupted after every step; then everything in its place changes; then the next run."""
    move(role, mode="copy")
    copy, count = role.parent / "again", 0
    while True:
        shutil.copytree(role, copy)
        count += 1
        if not stop_after(monkeypatch, count, copy, **first):
            break
        for name in ("dist_ckpt", *layout.ARCHIVES):
            if (copy / name / DATA).is_file():
                write_into(copy / name / DATA)
        (copy / "dist_ckpt").mkdir(exist_ok=True)
        before = contents(copy)
        with suppress(BrokenCheckpoint):
            move(copy, **then)
        assert contents(copy) == before
        shutil.rmtree(copy)
    assert count > 5


@pytest.mark.parametrize("then", [{}, {"undo": True}])
@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_a_tree_that_was_being_built_may_be_all_that_is_left(
    role: Path, monkeypatch: pytest.MonkeyPatch, mode: str, then: dict[str, Any]
) -> None:
    """Interrupted after every step; then `dist_ckpt/` is deleted; then the next run."""
    copy, count, refused = role.parent / "again", 0, 0
    while True:
        shutil.copytree(role, copy)
        count += 1
        if not stop_after(monkeypatch, count, copy, mode=mode):
            break
        shutil.rmtree(copy / "dist_ckpt")
        before = contents(copy)
        try:
            move(copy, **then)
        except BrokenCheckpoint:
            refused += 1
        assert contents(copy) == before
        shutil.rmtree(copy)
    assert refused > 3


@pytest.mark.parametrize("options", [{"undo": True}, {"remove_v1": True}])
def test_bytes_that_change_after_the_plan(role: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    """Of two roles the second is rewritten in place while the first is at work: hours, with large ones."""
    second = tiny_role(role.parent / "critic")
    move(role.parent, mode="copy")
    real = steps._one

    def one(where: Path, *arguments: Any) -> None:
        if where == role and (second / layout.MODEL / DATA).read_bytes()[10:20] != ANEW:
            for tree in layout.ARCHIVES:
                write_into(second / tree / DATA)
        real(where, *arguments)

    monkeypatch.setattr(steps, "_one", one)
    kept = source(second)
    with pytest.raises(BrokenCheckpoint, match="nowhere else") as caught:
        move(role.parent, **options)
    assert "Done before that: actor" in caught.value.hint
    assert source(second) == kept
    assert ANEW in (second / layout.MODEL / DATA).read_bytes()


def test_the_others_go_on(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A role that breaks between plan and execution is one of the broken ones."""
    roles = [tiny_role(role.parent / name) for name in ("critic", "ref")]
    real = steps._one

    def one(where: Path, *arguments: Any) -> None:
        if where == role:
            (roles[0] / "dist_ckpt" / DATA).unlink(missing_ok=True)
        real(where, *arguments)

    monkeypatch.setattr(steps, "_one", one)
    done = move(role.parent, skip_broken=True)
    assert [plan.action for plan in done.roles] == ["migrate", "refuse", "migrate"]


# The way back, with what is there


def test_undo_takes_the_tree_that_is_whole(role: Path) -> None:
    before = source(role)
    move(role, mode="copy", remove_v1=True)
    (role / layout.MODEL / DATA).unlink()
    only(role, undo=True)
    assert source(role) == before


def test_a_tree_of_relative_links_does_not_move(role: Path) -> None:
    """A store of blobs beside the trees: from the place of v1 its links would lead nowhere."""
    move(role, mode="copy", remove_v1=True)
    (role / "blobs").mkdir()
    (role / layout.MODEL / DATA).rename(role / "blobs/0")
    for tree in layout.ARCHIVES:
        (role / tree / DATA).unlink(missing_ok=True)
        (role / tree / DATA).symlink_to("../../blobs/0")
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role, undo=True)
    assert "linked-tree" in {reason.code for reason in caught.value.problems}
    assert inspect(role).state == "complete"


@pytest.mark.parametrize("mode", ["hardlink", "symlink", "copy"])
def test_an_interrupted_migration_of_hugging_face_files_alone_is_undone(
    role: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    shutil.rmtree(role / "dist_ckpt")
    (role / layout.TRANSFORMER_CONFIG).write_text("{}")
    before, copy, count = photograph(role), role.parent / "again", 0
    while True:
        shutil.copytree(role, copy)
        count += 1
        if not stop_after(monkeypatch, count, copy, mode=mode):
            break
        move(copy, undo=True)
        assert photograph(copy) == before
        shutil.rmtree(copy)
    assert count > 5


def test_a_file_lost_after_an_interruption_comes_back(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, copy, count, told = source(role), role.parent / "again", 0, 0
    while True:
        shutil.copytree(role, copy)
        count += 1
        if not stop_after(monkeypatch, count, copy):
            break
        if (copy / layout.MODEL / DATA).exists() and not (copy / layout.MANIFEST).exists():
            (copy / "dist_ckpt" / DATA).unlink()
            with pytest.raises(BrokenCheckpoint) as caught:
                move(copy)
            told += "--undo brings" in "".join(reason.hint for reason in caught.value.problems)
            move(copy, undo=True)
            assert source(copy) == before
        shutil.rmtree(copy)
    assert told > 1


def test_a_link_in_the_place_of_what_comes_back(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    move(role)
    assert stop_after(monkeypatch, 4, role, remove_v1=True)
    (role.parent / "empty").mkdir()
    (role / "dist_ckpt").symlink_to("../empty")
    before = contents(role)
    assert only(role).action in ("finish", "nothing")
    assert contents(role) == before


@pytest.mark.parametrize("make", [lambda path: path.symlink_to("nowhere"), lambda path: path.write_text("hi")])
def test_a_name_that_is_taken(role: Path, make: Callable[[Path], object]) -> None:
    move(role, remove_v1=True)
    make(role / "dist_ckpt")
    before = photograph(role)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role, undo=True)
    assert [reason.code for reason in caught.value.problems] == ["name-taken"]
    assert photograph(role) == before


def test_a_v1_link_comes_back_after_an_interruption(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dist_ckpt` on another disk: its relative link leads nowhere while it lies aside."""
    store = role.parents[2] / "store"
    (role / "dist_ckpt").rename(store)
    (role / "dist_ckpt").symlink_to(os.path.relpath(store, role))
    move(role, mode="copy")
    assert stop_after(monkeypatch, 4, role, remove_v1=True)
    assert (role / STAGING / "v1/dist_ckpt").is_symlink()
    assert only(role, undo=True).action == "undo"
    assert (role / "dist_ckpt").resolve() == store


# Manifests that somebody edited


def _null_directories(manifest: dict[str, Any]) -> None:
    manifest["directories"] = None


def _text_for_the_earlier_one(manifest: dict[str, Any]) -> None:
    manifest["v1_manifest"] = "x"


def _half_a_character(manifest: dict[str, Any]) -> None:
    manifest["migration"]["v1_manifest_text"] = "\ud800"


@pytest.mark.parametrize("edit", [_null_directories, _text_for_the_earlier_one, _half_a_character])
@pytest.mark.parametrize("options", [{}, {"undo": True}])
def test_an_edited_manifest_is_refused(
    role: Path, edit: Callable[[dict[str, Any]], None], options: dict[str, Any]
) -> None:
    move(role)
    file = role / layout.MANIFEST
    manifest = json.loads(file.read_text())
    edit(manifest)
    file.write_text(json.dumps(manifest))
    before = photograph(role)
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role, **options)
    assert "bad-manifest" in {reason.code for reason in caught.value.problems}
    assert photograph(role) == before


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to("../manifest.json")])
def test_a_manifest_that_is_no_file(role: Path, make: Callable[[Path], object]) -> None:
    make(role / layout.MANIFEST)
    with pytest.raises(BrokenCheckpoint):
        move(role)
    assert not (role / "model").exists()


def test_inspect_names_no_author_where_the_manifest_cannot_be_read(role: Path) -> None:
    move(role, remove_v1=True)
    (role / layout.MANIFEST).write_text("{")
    assert "verl's script" not in inspect(role).title


def test_what_lies_aside_is_named_where_all_else_is_broken(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = source(role)
    move(role, mode="copy")
    assert stop_after(monkeypatch, 4, role, remove_v1=True)
    for tree in layout.ARCHIVES:
        (role / tree / DATA).unlink()
    with pytest.raises(BrokenCheckpoint) as caught:
        move(role)
    (reason,) = [reason for reason in caught.value.problems if reason.code == "migration-interrupted"]
    assert f"{STAGING}/v1/dist_ckpt" in reason.message
    (role / STAGING / "v1/dist_ckpt").rename(role / "dist_ckpt")
    assert same_files(role / "dist_ckpt", part(before, "dist_ckpt"))
