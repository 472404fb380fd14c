"""`inspect` on bare distributed archives: Megatron's torch_dist from 0.12 to 0.19, and plain torch DCP."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata

from ckpttool.inspection import inspect
from tests import builders
from tests.looking import (
    Tensors,
    change_json,
    change_metadata,
    codes,
    elements,
    faults,
    headers,
    holds,
    listed,
    numel,
    problem,
    save_dcp,
    weights,
    write_json,
)

STACKED = "decoder.layers: 4 stacked in one key"


@pytest.fixture
def archive(tmp_path: Path, data: Path) -> Path:
    """A whole torch_dist directory of two ranks."""
    return builders.copy(data / "megatron/mcore0.16-dense-tp2", tmp_path / "archive")


@pytest.mark.parametrize(
    ("name", "writer", "ranks", "layers", "common"),
    [
        ("mcore0.12-dense-tp2", "megatron-core 0.12 to 0.14", "2 ranks", STACKED, "common.pt"),
        ("mcore0.14-dense-tp2", "megatron-core 0.12 to 0.14", "2 ranks", STACKED, "common.pt"),
        ("mcore0.16-dense-tp2", "megatron-core 0.16 to 0.18", "2 ranks", STACKED, "common.pt"),
        ("mcore0.16-bias-tp2", "megatron-core 0.16 to 0.18", "2 ranks", STACKED, "common.pt"),
        ("mcore0.16-qk-tp1", "megatron-core 0.16 to 0.18", "1 rank", STACKED, "common.pt"),
        ("mcore0.16-moe-tp1-ep2", "megatron-core 0.16 to 0.18", "2 ranks", STACKED, "common.pt"),
        ("mcore0.16-het-tp1", "megatron-core 0.16 to 0.18", "1 rank", "decoder.layers: 4, one key each", "common.pt"),
        ("mcore0.19-dense-tp2", "megatron-core 0.19 or newer", "2 ranks", STACKED, "common_state"),
    ],
)
def test_archives_of_every_megatron_core(
    request: pytest.FixtureRequest, data: Path, name: str, writer: str, ranks: str, layers: str, common: str
) -> None:
    """Cases 59, 61, 63: with or without common.pt, with Megatron's classes in the index, in both dialects."""
    path = data / "megatron" / name
    expected = model_unless_old(path, request)
    found = inspect(path, tensors="*")
    assert (found.kind, found.state, found.problems) == ("torch_dist", "complete", ())
    assert found.evidence[0] == ".metadata"
    assert "metadata.json (torch_dist)" in found.evidence
    assert found.facts == {
        "written by": writer,
        "world size": f"data files of {ranks}",
        "layers": layers,
        "iteration": f"5 (in {common})",
    }
    assert {row.name: (row.dtype, row.shape) for row in found.tensors if row.part == "model"} == expected
    assert found.parameters == numel(expected)
    assert holds(found) == {("model weights", ""), ("rng", ""), ("extra state", "")} | _common(common)


def _common(kind: str) -> set[tuple[str, str]]:
    return {("common state", "")} if kind == "common_state" else set()


def model_unless_old(path: Path, request: pytest.FixtureRequest) -> Tensors:
    """Torch reads the index by importing what it names: the classes of 0.12 and 0.14 are gone, stand-ins do."""
    name = "megatron.core.dist_checkpointing.strategies.torch"
    strategies = pytest.importorskip(name)
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    for gone in ("MCoreSavePlan", "MCoreMetadata"):
        if not hasattr(strategies, gone):
            monkeypatch.setattr(strategies, gone, type(gone, (), {"__module__": name}), raising=False)
    return weights(path)


def test_chunks_and_bytes_are_listed(data: Path) -> None:
    found = inspect(data / "megatron/mcore0.16-dense-tp2", tensors="*.linear_fc1.weight")
    (row,) = found.tensors
    assert (row.name, row.shape) == ("decoder.layers.mlp.linear_fc1.weight", (4, 96, 32))
    assert (row.placement, row.bytes) == ("16 chunks", 4 * 96 * 32 * 2)


def test_parameters_are_counted_once_for_all_ranks(megatron_checkpoints: Path) -> None:
    found = inspect(megatron_checkpoints / "megatron-lm/iter_0000010", tensors="*")
    expected = headers(megatron_checkpoints / "expected/megatron-lm-megatron.safetensors")
    assert {row.name for row in found.tensors if row.part == "model"} == expected.keys()
    assert found.parameters == elements(megatron_checkpoints / "expected/megatron-lm-megatron.safetensors")
    assert holds(found) >= {(part, "") for part in ("model weights", "optimizer", "scheduler", "rng")}
    assert found.facts["optimizer"] == "one tensor a parameter (exp_avg, exp_avg_sq, fp32_param)"
    assert found.step == 10


@pytest.mark.parametrize(
    ("name", "oracle"), [("dcp/step-10", "dcp"), ("accelerate/pytorch_model_fsdp_0", "accelerate")]
)
def test_plain_dcp_is_no_unfinished_megatron(fsdp_checkpoints: Path, name: str, oracle: str) -> None:
    """Case 60 b: no metadata.json, no common.pt, and nothing is missing."""
    found = inspect(fsdp_checkpoints / name)
    assert (found.kind, found.state, found.problems) == ("dcp", "complete", ())
    assert found.parameters == elements(fsdp_checkpoints / f"expected/{oracle}.safetensors")
    assert "written by" not in found.facts


def test_what_torchtitan_saves(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "dcp/step-10")
    assert found.step == 10
    parts = {"model weights", "optimizer", "scheduler", "trainer state"}
    assert holds(found) == {(part, "") for part in parts}


def test_an_optimizer_without_its_model(fsdp_checkpoints: Path) -> None:
    found = inspect(fsdp_checkpoints / "accelerate/optimizer_0")
    assert (found.kind, found.parameters, found.modules) == ("dcp", None, None)
    assert holds(found) == {("optimizer", "")}


def test_the_index_names_classes_of_megatron(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 61: classes that no library has any more become inert."""
    expected = weights(archive)
    top = _classes(monkeypatch, "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata", Metadata)
    other = _classes(monkeypatch, "megatron.training.gone", "PlannerState", object)

    def change(metadata: Metadata) -> None:
        metadata.planner_data = other()
        metadata.__class__ = top

    change_metadata(archive, change)
    found = inspect(archive, tensors="*")
    assert (found.state, found.problems) == ("complete", ())
    assert found.facts["written by"] == "megatron-core 0.15"
    assert found.parameters == numel(expected)


def _classes(monkeypatch: pytest.MonkeyPatch, module: str, name: str, base: type) -> type:
    made = type(name, (base,), {"__module__": module})
    holder = sys.modules.get(module) or ModuleType(module)
    monkeypatch.setitem(sys.modules, module, holder)
    monkeypatch.setattr(holder, name, made, raising=False)
    return made


def test_the_plan_of_megatron_without_its_own_data(archive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.9 and newer drop what old megatron-core hangs on the index."""
    plan = _classes(monkeypatch, "megatron.core.dist_checkpointing.strategies.torch", "MCoreSavePlan", object)

    def change(metadata: Any) -> None:
        metadata.all_local_plans = [plan()]

    change_metadata(archive, change)
    assert inspect(archive).facts["written by"] == "megatron-core 0.12 to 0.15"


FLAT = {"optimizer.state.exp_avg.decoder.layers.w": torch.zeros(2, 1, 1, 8)}


@pytest.mark.parametrize(
    ("name", "states", "words"),
    [
        ("old", FLAT, "old format"),
        ("old, chained", {f"chained_0.{key}": value for key, value in FLAT.items()}, "old format"),
        (
            "model space",
            {"optimizer.state.fp32_param.decoder.layers.w": torch.zeros(2, 4, 2)},
            "one tensor a parameter",
        ),
        ("fully", {"optimizer.state.param.decoder.layers.w": torch.zeros(2, 4, 2)}, "fully_reshardable"),
        ("buckets", {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.x.param": torch.zeros(8)}, "dp_reshardable"),
        ("objects", {"optimizer.distributed.dp_group_idx_0.param_state/shard_0_1": torch.zeros(1)}, "dp_zero_gather"),
    ],
)
def test_the_format_of_the_optimizer_is_named(
    tmp_path: Path, name: str, states: dict[str, torch.Tensor], words: str
) -> None:
    """Case 62: states of flattened ranges cannot be loaded any more; the weights can."""
    path = save_dcp(tmp_path / "a", {"decoder.layers.w": torch.zeros(2, 4, 2), **states}, backend="torch_dist")
    found = inspect(path)
    assert words in found.facts["optimizer"]
    assert (found.state, faults(found), found.parameters) == ("complete", [], 16)
    assert ("old-optimizer" in codes(found)) is name.startswith("old")


def test_flattened_states_without_their_model(tmp_path: Path) -> None:
    """Case 62: then megatron-core's notes beside the index tell."""
    path = save_dcp(tmp_path / "a", FLAT, backend="torch_dist")
    assert "old-optimizer" not in codes(inspect(path))

    def change(metadata: Any) -> None:
        metadata.mcore_data = {key: {"nd_reformulated_orig_global_shape": (2, 4, 2)} for key in FLAT}

    change_metadata(path, change)
    assert "old optimizer format" in problem(inspect(path), "old-optimizer").message


def test_the_common_state_names_the_old_optimizer(archive: Path) -> None:
    """Case 62: content_metadata of 0.13 to 0.15."""
    content = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
    path = save_dcp(archive.parent / "a", FLAT, backend="torch_dist")
    torch.save({"content_metadata": content}, path / "common.pt")
    assert "old-optimizer" in codes(inspect(path))


def test_one_key_an_expert(tmp_path: Path) -> None:
    """Case 63: singleton_local_shards, with gate and up apart."""
    experts = "decoder.layers.{}.mlp.experts.experts.{}.linear_fc1.weight_{}"
    state = {experts.format(la, e, half): torch.zeros(4, 2) for la in range(2) for e in range(3) for half in "wv"}
    found = inspect(save_dcp(tmp_path / "a", state, backend="torch_dist"))
    assert found.facts["layers"] == "decoder.layers: 2, one key each; one key an expert"
    assert found.parameters == 2 * 3 * 2 * 8


def test_both_dialects_in_one_archive(tmp_path: Path) -> None:
    """Case 63: decided key by key; a vision tower may differ from the text."""
    state = {"language_model.decoder.layers.w": torch.zeros(3, 2), "vision_model.decoder.layers.0.w": torch.zeros(2)}
    found = inspect(save_dcp(tmp_path / "a", state, backend="torch_dist"))
    assert found.facts["layers"] == (
        "language_model.decoder.layers: 3 stacked in one key; vision_model.decoder.layers: 1, one key each"
    )


def test_peft_adapters_are_not_counted_as_the_model(tmp_path: Path) -> None:
    state = {"decoder.layers.w": torch.zeros(2, 8), "decoder.layers.w.adapter.linear_in.weight": torch.zeros(2, 1)}
    found = inspect(save_dcp(tmp_path / "a", state, backend="torch_dist"))
    assert found.parameters == 16
    assert holds(found) == {("model weights", ""), ("adapters", "")}


def test_data_files_with_a_prefix(tmp_path: Path, archive: Path) -> None:
    """A separation hint: the index decides, not a pattern."""

    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            info.relative_path = f"model_{info.relative_path}"

    change_metadata(archive, change)
    for path in archive.glob("*.distcp"):
        path.rename(path.with_name(f"model_{path.name}"))
    assert inspect(archive).problems == ()


def test_files_of_other_producers_are_told(archive: Path) -> None:
    (archive / "run_config.yaml").write_text("model: {}\n")
    change_json(archive / "metadata.json", unknown=1)
    assert ("side file", "run_config.yaml") in holds(inspect(archive))


def test_a_backend_without_a_name_is_read_as_torch_dist(archive: Path) -> None:
    write_json(archive / "metadata.json", {})
    found = inspect(archive)
    assert (found.kind, found.state) == ("torch_dist", "complete")
    assert listed(inspect(archive, tensors="*.weight"))
