"""`inspect` on the role directories of verl's Megatron manager: layouts v1 and v2, and all that lies between."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.errors import Refused
from ckpttool.inspection import Inspection, inspect
from tests import builders
from tests.looking import BOMBS, bombs, codes, elements, faults, headers, holds, problem, repack, weights, write_json

TREES = ("model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt")
V1, V2, HALF = "verl-megatron-v1", "verl-megatron-v2", "verl-megatron-half-migrated"


@pytest.fixture
def v1(tmp_path: Path, megatron_checkpoints: Path) -> Path:
    """A whole role of layout v1."""
    return builders.copy(megatron_checkpoints / "dense-v1", tmp_path / "global_step_10/actor")


@pytest.fixture
def v2(tmp_path: Path, megatron_checkpoints: Path) -> Path:
    """A whole role of layout v2, with weights in both forms."""
    return builders.copy(megatron_checkpoints / "dense-v2", tmp_path / "global_step_10/actor")


def migrate(role: Path, mode: str, trees: tuple[str, ...] = TREES) -> Path:
    """What verl's own script makes of layout v1: three trees of one archive, and no manifest."""
    for tree in trees:
        (role / tree).parent.mkdir(parents=True)
        if mode == "linked directories":
            (role / tree).symlink_to(role / "dist_ckpt", target_is_directory=True)
        else:
            shutil.copytree(role / "dist_ckpt", role / tree, copy_function=_COPY[mode])
    if mode == "copies":
        shutil.rmtree(role / "dist_ckpt")
    (role / "model").mkdir(exist_ok=True)
    (role / "huggingface").rename(role / "model/huggingface")
    return role


_COPY: dict[str, Callable[[str, str], object]] = {
    "hard links": os.link,
    "symbolic links": os.symlink,
    "copies": shutil.copy,
}
MODES = ("hard links", "symbolic links", "linked directories", "copies")


def parts(found: Inspection) -> set[tuple[str, str]]:
    """Where the parts of a training are; side files do not matter."""
    words = ("model weights", "optimizer", "scheduler", "rng")
    return {(name, where) for name, where in holds(found) if name in words}


def test_layout_v1(v1: Path, megatron_checkpoints: Path) -> None:
    found = inspect(v1, tensors="*")
    assert (found.kind, found.state, faults(found)) == (V1, "complete", [])
    assert (found.step, found.role) == (10, "actor")
    assert found.evidence == ("dist_ckpt/", "huggingface/", "transformer_config.json")
    assert parts(found) == {(part, "dist_ckpt") for part in ("model weights", "optimizer", "scheduler", "rng")}
    assert ("transformer config", "transformer_config.json") in holds(found)
    assert found.parameters == elements(megatron_checkpoints / "expected/dense-megatron.safetensors")
    stored = {row.name for row in found.tensors if row.part == "model"}
    assert stored == headers(megatron_checkpoints / "expected/dense-megatron.safetensors").keys()
    assert "the weights are in dist_ckpt/" in problem(found, "side-files-only").message
    assert found.facts["optimizer"] == "fully_reshardable"
    assert found.facts["model"] == "qwen2 (Qwen2ForCausalLM)"


def test_layout_v1_of_a_bridge_has_its_weights_in_huggingface(megatron_checkpoints: Path) -> None:
    """Case 75: the archive holds only optimizer and rng."""
    found = inspect(megatron_checkpoints / "dense-v1-bridge")
    assert (found.kind, found.state, codes(found)) == (V1, "complete", ["tokenizer-class"])
    assert parts(found) == {
        ("model weights", "huggingface"),
        *((part, "dist_ckpt") for part in ("optimizer", "scheduler", "rng")),
    }
    assert found.parameters == elements(megatron_checkpoints / "expected/dense-hf/model.safetensors")


def test_experts_are_counted(megatron_checkpoints: Path) -> None:
    found = inspect(megatron_checkpoints / "moe-v1")
    assert found.parameters == elements(megatron_checkpoints / "expected/moe-megatron.safetensors")
    assert found.facts["model"] == "qwen3_moe (Qwen3MoeForCausalLM)"
    assert found.facts["optimizer"] == "fully_reshardable"


@pytest.mark.parametrize(
    ("name", "model_trees", "empty"),
    [
        ("dense-v2", ("model/dist_ckpt", "model/huggingface"), None),
        ("dense-v2-bridge", ("model/huggingface",), "model/dist_ckpt/"),
        ("moe-v2", ("model/dist_ckpt",), "model/huggingface/"),
    ],
)
def test_layout_v2(megatron_checkpoints: Path, name: str, model_trees: tuple[str, ...], empty: str | None) -> None:
    """Weights in two forms count once; empty directories are helpers' artefacts and count as absent."""
    found = inspect(megatron_checkpoints / name)
    assert (found.kind, found.title) == (V2, "verl Megatron role directory, layout v2")
    assert (found.state, faults(found)) == ("complete", [])
    assert parts(found) == {
        *(("model weights", tree) for tree in model_trees),
        ("optimizer", "optimizer/dist_ckpt"),
        ("scheduler", "optimizer/dist_ckpt"),
        ("rng", "extra/dist_ckpt"),
    }
    assert found.parameters == elements(megatron_checkpoints / f"expected/{name.split('-')[0]}-megatron.safetensors")
    assert found.manifest is not None
    assert [tree.path for tree in found.manifest.trees if not tree.found] == []
    if empty is None:
        assert "empty-tree" not in codes(found)
    else:
        assert problem(found, "empty-tree").message.endswith(f": {empty}")


def test_the_optimizer_of_experts_is_named(megatron_checkpoints: Path) -> None:
    assert inspect(megatron_checkpoints / "moe-v2").facts["optimizer"].startswith("dp_reshardable")


def test_a_save_of_layout_v2_that_never_finished(v2: Path) -> None:
    """Case 72: verl writes the manifest last."""
    (v2 / "ckpt_contents.json").unlink()
    found = inspect(v2)
    assert (found.kind, found.state, faults(found)) == (V2, "incomplete", ["no-manifest"])
    told = problem(found, "no-manifest")
    assert (told.path, "did not finish" in told.message) == ("ckpt_contents.json", True)


@pytest.mark.parametrize("tree", TREES)
def test_one_tree_of_layout_v2_is_damaged(v2: Path, tree: str) -> None:
    """Case 60: a fault says in which tree it is."""
    (v2 / tree / "metadata.json").unlink()
    found = inspect(v2)
    assert faults(found) == ["not-finalised"]
    assert problem(found, "not-finalised").path == f"{tree}/metadata.json"


def test_nothing_was_saved(tmp_path: Path) -> None:
    role = tmp_path / "actor"
    for tree in (*TREES, "model/huggingface"):
        (role / tree).mkdir(parents=True)
    found = inspect(role)
    assert (found.state, faults(found)) == ("incomplete", ["nothing-saved"])
    assert all(tree in problem(found, "empty-tree").message for tree in TREES)


@pytest.mark.parametrize("mode", MODES)
def test_migrated_by_verls_script(v1: Path, mode: str) -> None:
    """Layout v2 without a manifest, in each mode of the script."""
    whole = inspect(v1)
    found = inspect(migrate(v1, mode))
    assert (found.kind, found.state, faults(found)) == (V2, "complete", [])
    words = "symbolic links" if mode == "linked directories" else mode
    assert found.title == f"verl Megatron role directory, layout v2, migrated by verl's script ({words})"
    assert problem(found, "no-manifest").severity == "note"
    assert found.parameters == whole.parameters


@pytest.mark.parametrize("mode", MODES)
def test_bytes_of_linked_files_are_counted_once(v1: Path, mode: str) -> None:
    archive = sum(path.stat().st_size for path in (v1 / "dist_ckpt").iterdir())
    others = sum(path.stat().st_size for path in v1.rglob("*") if path.is_file()) - archive
    found = inspect(migrate(v1, mode))
    assert found.disk is not None
    names = 3 if mode == "copies" else 4
    assert found.disk.apparent == names * archive + others
    assert found.disk.unique == (names if mode == "copies" else 1) * archive + others
    shared = [(s.trees, s.bytes, s.symbolic) for s in found.disk.shared]
    trees = tuple(sorted(("dist_ckpt", *TREES)))
    assert shared == ([] if mode == "copies" else [(trees, archive, mode != "hard links")])


def test_one_archive_in_three_trees_is_told_as_one(v1: Path) -> None:
    found = inspect(migrate(v1, "hard links"))
    assert [c.where for c in found.contents if c.name == "same archive"] == [*TREES[1:], "dist_ckpt"]
    assert {where for name, where in parts(found)} == {"model/dist_ckpt"}


@pytest.mark.parametrize("mode", ["hard links", "symbolic links"])
def test_links_with_a_manifest_are_a_finished_layout_v2(v1: Path, mode: str) -> None:
    write_manifest(migrate(v1, mode), ["model", "optimizer", "extra"])
    found = inspect(v1)
    assert (found.kind, found.state, faults(found)) == (V2, "complete", [])
    assert found.title == f"verl Megatron role directory, layout v2 with the names of v1 kept ({mode})"
    assert "no-manifest" not in codes(found)


def write_manifest(role: Path, contents: list[str]) -> None:
    backend = {"has_bridge": False, "use_dist_checkpointing": True, "peft": False}
    write_json(role / "ckpt_contents.json", {"schema_version": 2, "backend": backend, "save_contents": contents})


def test_the_manifest_is_still_of_schema_1_after_verls_script(v1: Path) -> None:
    """Case 81."""
    write_json(v1 / "ckpt_contents.json", {"schema_version": 1})
    found = inspect(migrate(v1, "hard links"))
    assert (found.kind, faults(found)) == (V2, [])
    assert "migrated by verl's script" in found.title
    assert "schema version 1" in problem(found, "old-manifest").message
    assert found.manifest is not None
    assert found.manifest.schema_version == 1


@pytest.mark.parametrize("mode", ["symbolic links", "linked directories"])
def test_absolute_links_dangle_after_a_move(v1: Path, mode: str) -> None:
    """Case 80: all three trees lead to where the run was before."""
    migrate(v1, mode)
    moved = v1.parent.parent / "elsewhere"
    v1.parent.rename(moved)
    found = inspect(moved / "actor")
    assert (found.state, "dangling-link" in faults(found)) == ("incomplete", True)
    told = problem(found, "dangling-link")
    assert "model/dist_ckpt" in told.message
    assert "moved" in told.hint
    assert found.kind == HALF


@pytest.mark.parametrize(
    ("trees", "missing"),
    [
        (TREES[:1], "extra/dist_ckpt, optimizer/dist_ckpt"),
        (TREES[:2], "extra/dist_ckpt"),
        (TREES[1:], "model/dist_ckpt"),
    ],
)
def test_half_migrated_trees_are_missing(v1: Path, trees: tuple[str, ...], missing: str) -> None:
    found = inspect(migrate(v1, "hard links", trees))
    assert (found.kind, found.state, faults(found)) == (HALF, "incomplete", ["half-migrated"])
    assert problem(found, "half-migrated").message.endswith(f": {missing}")
    assert "nothing in dist_ckpt/ is lost" in problem(found, "half-migrated").hint


def test_half_migrated_huggingface_was_not_moved(v1: Path) -> None:
    migrate(v1, "hard links")
    (v1 / "model/huggingface").rename(v1 / "huggingface")
    found = inspect(v1)
    assert (found.kind, faults(found)) == (HALF, ["half-migrated"])
    assert problem(found, "half-migrated").message.endswith(": model/huggingface")


@pytest.mark.parametrize("gone", ["__1_0.distcp", "common.pt"])
def test_half_migrated_a_tree_has_not_all_links(v1: Path, gone: str) -> None:
    migrate(v1, "hard links")
    (v1 / "extra/dist_ckpt" / gone).unlink()
    found = inspect(v1)
    assert found.kind == HALF
    assert gone in problem(found, "tree-incomplete").message
    assert problem(found, "half-migrated").message.endswith(": extra/dist_ckpt")


@pytest.mark.parametrize("gone", ["__1_0.distcp", ".metadata"])
def test_half_migrated_a_tree_is_half_copied(v1: Path, gone: str) -> None:
    shutil.copytree(v1 / "dist_ckpt", v1 / "dist_ckpt-kept")
    migrate(v1, "copies")
    (v1 / "dist_ckpt-kept").rename(v1 / "dist_ckpt")
    (v1 / "model/dist_ckpt" / gone).unlink()
    found = inspect(v1)
    assert (found.kind, found.state) == (HALF, "incomplete")
    assert problem(found, "half-migrated").message.endswith(": model/dist_ckpt")


def test_half_migrated_weights_of_a_bridge_need_no_tree_for_the_model(
    tmp_path: Path, megatron_checkpoints: Path
) -> None:
    """Case 75: an archive without model keys asks for no model/dist_ckpt."""
    role = builders.copy(megatron_checkpoints / "dense-v1-bridge", tmp_path / "role")
    found = inspect(migrate(role, "hard links", TREES[1:]))
    assert (found.kind, found.state, faults(found)) == (V2, "complete", [])


@pytest.mark.parametrize("empty", ["optimizer", "model/dist_ckpt"])
def test_an_empty_tree_beside_layout_v1_misleads_verl(v1: Path, empty: str) -> None:
    """An interrupted migration, or verl's path helpers, leave it; verl then does not look into dist_ckpt/."""
    (v1 / empty).mkdir(parents=True)
    found = inspect(v1)
    assert (found.kind, found.state) == (V1, "complete")
    told = problem(found, "empty-tree")
    assert f"{empty}/" in told.message
    assert "remove them" in told.hint


def test_adapters_of_layout_v1_are_named_and_not_opened(v1: Path) -> None:
    (v1 / "adapter_checkpoint").mkdir()
    (v1 / "adapter_checkpoint/adapter.pt").write_bytes(b"not opened")
    found = inspect(v1)
    assert ("adapters", "adapter_checkpoint") in holds(found)
    assert "not opened" in problem(found, "adapter-checkpoint").message
    assert found.state == "complete"


def test_megatron_fsdp_saves_one_archive(tmp_path: Path, v1: Path) -> None:
    """Its manifest claims trees that it never writes."""
    role = tmp_path / "role"
    shutil.copytree(v1 / "dist_ckpt", role / "model/dist_ckpt")
    write_manifest(role, ["model", "optimizer", "extra"])
    found = inspect(role)
    assert (found.kind, found.state, faults(found)) == (V2, "complete", [])
    assert found.manifest is not None
    assert [(tree.path, tree.found) for tree in found.manifest.trees] == [("model/dist_ckpt", True)]


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_a_hostile_tree_is_refused(v2: Path, tmp_path: Path, file: str) -> None:
    marker = tmp_path / "it-ran"
    path = v2 / "extra/dist_ckpt" / file
    if file == ".metadata":
        path.write_bytes(bombs(marker)[BOMBS[3]])
    else:
        repack(path, lambda _: bombs(marker)[BOMBS[3]])
    with pytest.raises(Refused, match=f"extra/dist_ckpt: {file}"):
        inspect(v2)
    assert not marker.exists()


def test_the_weights_of_a_tree_are_what_torch_reads(v2: Path) -> None:
    found = inspect(v2, tensors="*")
    rows = {row.name: (row.dtype, row.shape) for row in found.tensors if row.where == "model/dist_ckpt"}
    assert rows == weights(v2 / "model/dist_ckpt")
