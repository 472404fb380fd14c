"""`inspect` holds verl's manifest against the disk and against the contents matrix."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpttool.inspection import inspect
from tests import builders
from tests.looking import change_json, codes, faults, problem, write_json

MANIFEST = "ckpt_contents.json"
ALL = ["model", "hf_model", "optimizer", "extra"]
HYBRID = {"has_bridge": True, "use_dist_checkpointing": True, "peft": False}


@pytest.fixture
def role(tmp_path: Path, megatron_checkpoints: Path) -> Path:
    """A role of layout v2 that holds every tree of the matrix."""
    return builders.copy(megatron_checkpoints / "dense-v2", tmp_path / "global_step_10/actor")


def flags(bridge: bool | None, dist: bool | None) -> dict[str, bool]:
    """The flags of a manifest; `None` is left out."""
    given = {"has_bridge": bridge, "use_dist_checkpointing": dist}
    return {name: value for name, value in given.items() if value is not None}


def test_a_manifest_that_is_right(role: Path) -> None:
    found = inspect(role)
    assert found.manifest is not None
    assert codes(found) == ["tokenizer-class"]
    assert (found.manifest.schema_version, found.manifest.save_contents) == (2, tuple(ALL))
    assert found.manifest.backend == HYBRID
    assert [(t.path, t.holds, t.format, t.found) for t in found.manifest.trees] == [
        ("model/huggingface", "model weights", "huggingface", True),
        ("model/dist_ckpt", "model weights", "megatron_dist_checkpoint", True),
        ("optimizer/dist_ckpt", "optimizer, lr_scheduler", "megatron_dist_checkpoint", True),
        ("extra/dist_ckpt", "rng_state", "megatron_dist_checkpoint", True),
        ("transformer_config.json", "transformer_config", "json", True),
    ]
    assert found.facts["world size"] == "data files of 4 ranks"


TREES = ("model/huggingface", "model/dist_ckpt", "optimizer/dist_ckpt", "extra/dist_ckpt")


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("emptied", [False, True])
def test_a_tree_is_missing_or_empty(role: Path, tree: str, emptied: bool) -> None:
    """An empty directory is absent."""
    shutil.rmtree(role / tree)
    if emptied:
        (role / tree).mkdir()
    found = inspect(role)
    assert (found.state, faults(found)) == ("incomplete", ["tree-missing"])
    assert problem(found, "tree-missing").path == tree
    assert any(told.code == "empty-tree" and f" {tree}/" in told.message for told in found.problems) is emptied
    assert found.manifest is not None
    assert [t.path for t in found.manifest.trees if not t.found] == [tree]


def test_the_transformer_config_is_missing(role: Path) -> None:
    (role / "transformer_config.json").unlink()
    assert [told.path for told in inspect(role).faults] == ["transformer_config.json"]


def test_every_missing_tree_is_told(role: Path) -> None:
    for tree in ("optimizer", "extra"):
        shutil.rmtree(role / tree)
    assert [told.path for told in inspect(role).faults] == ["optimizer/dist_ckpt", "extra/dist_ckpt"]


@pytest.mark.parametrize(
    ("bridge", "dist", "contents", "trees"),
    [
        (True, False, ["model"], {"model/huggingface"}),
        (True, False, ["hf_model"], {"model/huggingface"}),
        (True, False, ["model", "hf_model"], {"model/huggingface"}),
        (False, True, ["model"], {"model/dist_ckpt"}),
        (True, True, ["model"], {"model/dist_ckpt"}),
        (True, True, ["model", "hf_model"], {"model/huggingface", "model/dist_ckpt"}),
        (None, True, ["model"], {"model/dist_ckpt"}),
        (None, False, ["model"], {"model/huggingface"}),
        (True, None, ["model"], {"model/huggingface"}),
        (False, None, ["model"], {"model/dist_ckpt"}),
    ],
)
def test_the_matrix_says_where_the_weights_must_be(
    role: Path, bridge: bool | None, dist: bool | None, contents: list[str], trees: set[str]
) -> None:
    """Each row of the matrix, and the alias form with one flag: what it asks for is missed, nothing else."""
    for tree in ("model/huggingface", "model/dist_ckpt"):
        shutil.rmtree(role / tree)
    change_json(role / MANIFEST, save_contents=contents, backend=flags(bridge, dist), contents={})
    assert {told.path for told in inspect(role).faults if told.code == "tree-missing"} == trees


@pytest.mark.parametrize(
    ("bridge", "dist", "contents", "words"),
    [
        (False, False, ["model"], "nothing could hold the weights"),
        (False, True, ["hf_model"], "needs a bridge"),
        (False, False, ["hf_model"], "needs a bridge"),
        (None, True, ["hf_model"], "needs a bridge"),
        (True, True, ["model", "optimiser"], "optimiser"),
    ],
)
def test_a_save_that_cannot_be(
    role: Path, bridge: bool | None, dist: bool | None, contents: list[str], words: str
) -> None:
    change_json(role / MANIFEST, save_contents=contents, backend=flags(bridge, dist))
    told = problem(inspect(role), "illegal-contents")
    assert words in told.message


def test_peft_adapters_lie_in_the_archive_even_with_a_bridge(tmp_path: Path, megatron_checkpoints: Path) -> None:
    role = builders.copy(megatron_checkpoints / "dense-v2-bridge", tmp_path / "role")
    change_json(role / MANIFEST, backend={**flags(True, False), "peft": True})
    told = problem(inspect(role), "tree-missing")
    assert told.path == "model/dist_ckpt"
    assert "adapters" in told.message


def test_a_tree_that_nobody_asked_for(role: Path) -> None:
    change_json(role / MANIFEST, save_contents=["model", "hf_model", "extra"])
    found = inspect(role)
    assert (found.state, faults(found)) == ("complete", [])
    assert problem(found, "tree-unexpected").message.endswith(": optimizer/dist_ckpt")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("adapters/dist_ckpt", "in adapters/dist_ckpt, which is not there"),
        ("../critic/model", "outside, in ../critic/model"),
        ("/data/model", "outside, in /data/model"),
    ],
)
def test_the_manifest_claims_what_is_not_there(role: Path, path: str, words: str) -> None:
    (role.parent / "critic/model").mkdir(parents=True)
    change_json(role / MANIFEST, contents={"peft_adapters": {"path": path, "format": "huggingface"}})
    found = inspect(role)
    assert found.state == "complete"
    assert problem(found, "manifest-disagrees").message.endswith(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"global_step": 20}, "says step 20, the directory says 10"), ({"role": "critic"}, "says role critic")],
)
def test_the_manifest_is_of_another_place(role: Path, changes: dict[str, object], words: str) -> None:
    """The directory was copied or renamed."""
    change_json(role / MANIFEST, **changes)
    found = inspect(role)
    assert (found.state, codes(found)) == ("complete", ["tokenizer-class", "manifest-disagrees"])
    assert words in problem(found, "manifest-disagrees").message


def test_the_world_size_is_in_the_manifest_when_no_archive_tells(role: Path) -> None:
    for tree in ("model/dist_ckpt", "optimizer", "extra"):
        shutil.rmtree(role / tree)
    change_json(role / MANIFEST, save_contents=["model"], backend=flags(True, False), contents={})
    found = inspect(role)
    assert (found.state, found.faults, found.facts["world size"]) == ("complete", (), "4")


@pytest.mark.parametrize("version", [1, None])
def test_a_manifest_of_an_older_schema(role: Path, version: int | None) -> None:
    """Case 81: it has no known fields, so nothing is held against it."""
    write_json(role / MANIFEST, {"schema_version": version, "save_contents": ["hf_model"]})
    found = inspect(role)
    assert f"schema version {version}" in problem(found, "old-manifest").message
    assert found.manifest is not None
    assert (found.manifest.schema_version, found.manifest.trees) == (version, ())
    assert faults(found) == []


@pytest.mark.parametrize("text", ["", '{"schema_version": 2,', "[2]", "\udcff"])
def test_a_manifest_that_cannot_be_read(role: Path, text: str) -> None:
    (role / MANIFEST).write_bytes(text.encode(errors="surrogateescape"))
    found = inspect(role)
    assert (found.state, faults(found)) == ("incomplete", ["bad-json"])
    assert problem(found, "bad-json").path == MANIFEST
    assert found.manifest is None


@pytest.mark.parametrize(
    "content",
    [
        {"save_contents": "model", "backend": [], "contents": 3},
        {"save_contents": [["model"], None], "backend": {"has_bridge": "yes"}, "contents": {"model": []}},
        {"global_step": "ten", "world_size": None, "role": 7, "contents": {"model": {"path": 5}}},
    ],
)
def test_a_manifest_with_values_of_other_types(role: Path, content: dict[str, object]) -> None:
    """Untrusted: whatever it says, there is an answer."""
    write_json(role / MANIFEST, {"schema_version": 2, **content})
    found = inspect(role)
    assert found.manifest is not None
    assert found.kind == "verl-megatron-v2"
