"""Migrated trees, read by the libraries that will read them: megatron-core on the ranks that wrote, torch's DCP."""

from __future__ import annotations

import importlib
import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpttool import layout
from tests import builders
from tests.conftest import DATA
from tests.migrating import MODES, only, source
from tests.writers.reading import expected, read_metadata, read_tensors, same

VARIANTS = {"dense": "dense-v1", "bridge": "dense-v1-bridge", "moe": "moe-v1"}
ARCHIVES = {
    "dense": layout.ARCHIVES,
    "bridge": (layout.OPTIMIZER, layout.EXTRA),
    "moe": layout.ARCHIVES,
}
PARTS = {layout.MODEL: "model", layout.OPTIMIZER: "optimizer", layout.EXTRA: "extra"}
FIXTURES = sorted(path.name for path in (DATA / "megatron").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def migrated(megatron_checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every variant as v1 and migrated in every mode, loaded by the ranks of one world."""
    out = tmp_path_factory.mktemp("migrated")
    for name, variant in VARIANTS.items():
        builders.copy(megatron_checkpoints / variant, out / name / "v1")
        for mode in MODES:
            role = builders.copy(megatron_checkpoints / variant, out / name / mode)
            before = source(role)
            assert only(role, mode=mode).action == "migrate"
            assert source(role) == before
    shutil.copytree(out / "dense/copy", out / "dense/spoiled")
    norm = expected(megatron_checkpoints, "dense-megatron")["decoder.final_layernorm.weight"]
    spoil(out / "dense/spoiled" / layout.MODEL, norm)
    builders.run_writer("migrated", out)
    return out


def spoil(tree: Path, tensor: torch.Tensor) -> None:
    """Put zeros where this tensor lies."""
    needle = tensor.view(torch.uint8).numpy().tobytes()
    (file,) = [path for path in tree.glob("*.distcp") if needle in path.read_bytes()]
    file.write_bytes(file.read_bytes().replace(needle, bytes(len(needle))))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_megatron_loads_from_every_tree_what_it_loads_from_v1(migrated: Path, name: str, mode: str) -> None:
    """Case 75: model, optimizer with scheduler, and rng, each by the state dict that verl hands over."""
    for rank in range(4):
        told = json.loads((migrated / f"loaded-{rank}.json").read_text())
        for tree in ARCHIVES[name]:
            assert told[f"{name}/{mode}/{PARTS[tree]}"] == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", VARIANTS)
def test_trees_are_made_for_what_the_archive_holds(migrated: Path, name: str, mode: str) -> None:
    """Case 75: no `model/dist_ckpt` without model keys."""
    role = migrated / name / mode
    assert [tree for tree in layout.ARCHIVES if (role / tree).exists()] == list(ARCHIVES[name])


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_a_bridge_lie_under_model(migrated: Path, megatron_checkpoints: Path, mode: str) -> None:
    tensors = load_file(migrated / "bridge" / mode / "model/huggingface/model.safetensors")
    assert same(tensors, load_file(megatron_checkpoints / "expected/dense-hf/model.safetensors"))


@pytest.fixture(scope="module")
def _megatron() -> None:
    """The index of old archives names classes of megatron-core, whose import warns of what is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("megatron.core")


@pytest.mark.usefixtures("_megatron")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FIXTURES)
def test_fixtures_of_every_version_by_torch(tmp_path: Path, name: str, mode: str) -> None:
    fixture = DATA / "megatron" / name
    role = tmp_path / "global_step_10/actor"
    builders.copy(fixture, role / "dist_ckpt")
    before = source(role)
    plan = only(role, mode=mode)
    assert plan.action == "migrate"
    assert source(role) == before
    wanted = read_tensors(fixture)
    assert wanted
    for change in plan.trees:
        assert same(read_tensors(role / change.path), wanted)
        assert read_metadata(role / change.path).state_dict_metadata.keys() == metadata_keys(fixture)


def metadata_keys(folder: Path) -> object:
    return read_metadata(folder).state_dict_metadata.keys()


def test_the_comparison_sees_a_difference(migrated: Path) -> None:
    """One tensor of one tree was spoiled after the migration."""
    told = [json.loads((migrated / f"loaded-{rank}.json").read_text()) for rank in range(4)]
    wrong = {key for by_role in told for key in by_role["dense/spoiled/model"]}
    assert wrong == {"model.decoder.final_layernorm.weight"}
    assert all(by_role[f"dense/spoiled/{part}"] == [] for by_role in told for part in ("optimizer", "extra"))


def test_saving_in_place_into_one_tree_changes_all(tmp_path: Path) -> None:
    """What sharing means: megatron-core truncates the files that are there."""
    role = tmp_path / "actor"
    builders.copy(DATA / "megatron" / FIXTURES[0], role / "dist_ckpt")
    only(role)
    builders.truncate(role / layout.MODEL / "__0_0.distcp")
    assert (role / "dist_ckpt/__0_0.distcp").stat().st_size == (role / layout.MODEL / "__0_0.distcp").stat().st_size
