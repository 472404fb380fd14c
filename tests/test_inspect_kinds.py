"""`inspect` on what other tools left, on single files, on wrong paths, and without permission."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.errors import NotACheckpoint
from ckpttool.inspection import inspect
from tests import builders
from tests.conftest import Call
from tests.hostile import save_bomb
from tests.looking import faults, problem, save_dcp

ZERO = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.mark.parametrize(
    ("names", "kind", "title", "hint"),
    [
        ([ZERO.format(0), ZERO.format(1)], "deepspeed", "DeepSpeed ZeRO", "zero_to_fp32"),
        (["bf16_" + ZERO.format(0)], "deepspeed", "DeepSpeed ZeRO", "zero_to_fp32"),
        (["mp_rank_00_model_states.pt"], "deepspeed", "DeepSpeed ZeRO", "zero_to_fp32"),
        (["optimizer_0_rank0.bin", "optimizer_0_rank1.bin"], "accelerate-optimizer", "accelerate", "weights"),
        (["mp_rank_00/model_optim_rng.pt", "mp_rank_01/model_optim_rng.pt"], "megatron-legacy", "legacy", "torch_dist"),
        (["mp_rank_00_000/model.pt", "mp_rank_00_001/model.pt"], "megatron-legacy", "legacy", "torch_dist"),
        (["model/mp_rank_00_000/model.pt", "optim/x"], "megatron-legacy", "legacy", "torch_dist"),
        (["adapter_checkpoint/rank_0.pt"], "adapter-checkpoint", "PEFT adapters", "verl"),
        (["embedding.word_embeddings.weight/.zarray"], "zarr", "zarr", "torch_dist"),
    ],
)
def test_named_and_not_opened(tmp_path: Path, names: list[str], kind: str, title: str, hint: str) -> None:
    """Case 71 among them: verl's old mp_rank_00_000/model.pt has no converter."""
    for name in names:
        (tmp_path / "ckpt" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "ckpt" / name).write_bytes(b"\x80\x04cos\nsystem\n")
    found = inspect(tmp_path / "ckpt")
    assert (found.kind, found.state) == (kind, "not opened")
    assert title in found.title
    assert found.evidence
    assert hint in problem(found, "not-opened").hint
    assert faults(found) == []


def test_a_run_of_deepspeed(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("global_step500")
    (tmp_path / "global_step500").mkdir()
    (tmp_path / "global_step500" / ZERO.format(0)).write_bytes(b"x")
    found = inspect(tmp_path)
    assert (found.kind, found.state, found.path) == ("deepspeed", "not opened", str(tmp_path / "global_step500"))


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor"])
def test_other_backends_of_megatron_are_named(tmp_path: Path, backend: str) -> None:
    save_dcp(tmp_path / "a", {"model.module.decoder.layers.w": torch.zeros(2)}, backend=backend)
    found = inspect(tmp_path / "a")
    assert (found.kind, found.state) == (backend, "not opened")
    assert backend in found.title
    assert found.evidence == (f"metadata.json (sharded_backend {backend})",)


def test_an_index_of_a_backend_that_is_not_opened_may_be_hostile(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", {"w": torch.zeros(2)}, backend="fsdp_dtensor")
    (tmp_path / "a/.metadata").write_bytes(b"cos\nsystem\n(Vtrue\ntR.")
    assert inspect(tmp_path / "a").state == "not opened"


def test_legacy_megatron_with_its_tracker(tmp_path: Path) -> None:
    """Case 71: `iter_*` of the old kind below a tracker."""
    (tmp_path / "iter_0000100/mp_rank_00").mkdir(parents=True)
    (tmp_path / "iter_0000100/mp_rank_00/model_optim_rng.pt").write_bytes(b"x")
    builders.write_tracker(tmp_path, 100)
    found = inspect(tmp_path)
    assert found.kind == "megatron-run"
    assert found.run is not None
    assert [(row.step, row.state) for row in found.run.rows] == [(100, "not opened")]


def test_an_empty_directory_is_absent(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    found = inspect(tmp_path)
    assert (found.kind, found.state, found.title) == ("absent", "absent", "empty directory")
    call = ckpttool("inspect", tmp_path)
    assert (call.code, "absent" in call.out, "present" in call.out) == (0, True, False)


Files = list[tuple[str, Callable[[Path], object], str]]


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


FILES: Files = [
    ("model_world_size_8_rank_3.pt", lambda p: torch.save({}, p), "one FSDP file (model) of rank 3 in a world of 8"),
    ("optim_world_size_8_rank_3.pt", lambda p: torch.save({}, p), "one FSDP file (optim) of rank 3 in a world of 8"),
    ("__3_1.distcp", _text("x"), "data file of a distributed checkpoint"),
    (".metadata", _text("x"), "index of a torch distributed checkpoint"),
    ("metadata.json", _text("{}"), "finished torch_dist save"),
    ("common.pt", lambda p: torch.save({}, p), "unsharded state of a Megatron checkpoint"),
    ("config.json", _text("{}"), "Hugging Face model configuration"),
    ("adapter_config.json", _text("{}"), "PEFT adapter"),
    ("model.safetensors.index.json", _text("{}"), "index of a sharded Hugging Face model"),
    ("fsdp_config.json", _text("{}"), "verl's note"),
    ("ckpt_contents.json", _text("{}"), "manifest"),
    ("transformer_config.json", _text("{}"), "Megatron transformer configuration"),
    ("latest_checkpointed_iteration.txt", _text("3"), "tracker"),
    ("any.pt", lambda p: torch.save({}, p), "file written by torch.save"),
    ("model.gguf", _text("GGUF\x03"), "GGUF"),
    ("weights.npy", lambda p: p.write_bytes(b"\x93NUMPY\x01\x00"), "numpy array"),
    ("weights.h5", lambda p: p.write_bytes(b"\x89HDF\r\n\x1a\n"), "HDF5"),
]


@pytest.mark.parametrize(("name", "write", "words"), FILES, ids=[name for name, _, _ in FILES])
def test_a_file_instead_of_a_directory(
    ckpttool: Callable[..., Call], tmp_path: Path, name: str, write: Callable[[Path], object], words: str
) -> None:
    write(tmp_path / name)
    call = ckpttool("inspect", tmp_path / name, "--json")
    assert (call.code, call.json["ok"]) == (0, True)
    assert words in call.json["data"]["title"]
    assert call.json["data"]["facts"]["size"] == f"{(tmp_path / name).stat().st_size:,} bytes"


def test_a_safetensors_file_tells_what_it_holds(tmp_path: Path) -> None:
    save_file({"a.w": torch.zeros(3, 2), "a.b": torch.zeros(3)}, tmp_path / "any.safetensors")
    found = inspect(tmp_path / "any.safetensors", tensors="*.w")
    assert (found.kind, found.state, found.parameters) == ("safetensors", "complete", 9)
    assert [(row.name, row.shape) for row in found.tensors] == [("a.w", (3, 2))]


@pytest.mark.parametrize("name", ["model_world_size_4_rank_0.pt", "any.pt", "any.safetensors"])
def test_a_file_cut_short(tmp_path: Path, name: str) -> None:
    """Case 74 for a file by itself."""
    if name.endswith("pt"):
        torch.save({"w": torch.zeros(64)}, tmp_path / name)
    else:
        save_file({"w": torch.zeros(64)}, tmp_path / name)
    builders.truncate(tmp_path / name)
    found = inspect(tmp_path / name)
    assert (found.state, faults(found)) == ("incomplete", ["truncated"])
    assert name in problem(found, "truncated").message


def test_a_file_leads_to_its_directory(fsdp_checkpoints: Path) -> None:
    """Case 41: one shard given instead of the role."""
    found = inspect(fsdp_checkpoints / "fsdp2/model_world_size_4_rank_0.pt")
    assert any(suggestion.command.endswith("/fsdp2") for suggestion in found.next)


def test_a_file_that_runs_code_is_not_unpickled(tmp_path: Path) -> None:
    save_bomb(tmp_path / "any.pt", tmp_path / "it-ran")
    found = inspect(tmp_path / "any.pt")
    assert "not unpickled" in found.title
    assert not (tmp_path / "it-ran").exists()


def _nothing(path: Path) -> Path:
    return path / "nothing"


def _unknown_file(path: Path) -> Path:
    (path / "notes.txt").write_text("no checkpoint")
    return path / "notes.txt"


def _unknown_directory(path: Path) -> Path:
    (path / "src").mkdir()
    (path / "src/main.py").write_text("pass")
    return path


def _pipe(path: Path) -> Path:
    os.mkfifo(path / "pipe")
    return path / "pipe"


def _dangling(path: Path) -> Path:
    (path / "link").symlink_to(path / "gone")
    return path / "link"


def _several(path: Path) -> Path:
    for name in ("a", "b"):
        save_dcp(path / "runs" / name / "deep", {"w": torch.zeros(2)})
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_nothing, "no such file or directory"),
        (_unknown_file, "no file that ckpttool recognises"),
        (_unknown_directory, "nothing that ckpttool recognises"),
        (_pipe, "neither a directory nor a regular file"),
        (_dangling, "leads nowhere"),
        (_several, "2 lie below it"),
    ],
)
def test_no_checkpoint_is_code_3(
    ckpttool: Callable[..., Call], tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    """Case 79 for inspect: one line of fact with the path, one of hint, nothing on stdout."""
    path = make(tmp_path)
    call = ckpttool("inspect", path)
    assert (call.code, call.out) == (3, "")
    assert str(path) in call.err.splitlines()[0]
    assert words in call.err
    assert "hint:" in call.err


def test_several_checkpoints_below_are_listed_as_commands(tmp_path: Path) -> None:
    path = _several(tmp_path)
    with pytest.raises(NotACheckpoint) as raised:
        inspect(path)
    for name in ("a", "b"):
        assert f"ckpttool inspect {path}/runs/{name}/deep" in raised.value.hint


def test_the_search_for_checkpoints_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a whole file server, too."""
    save_dcp(tmp_path / "runs/a/deep", {"w": torch.zeros(2)})
    assert inspect(tmp_path).kind == "dcp"
    monkeypatch.setattr("ckpttool.inspection.search.CROWD", 2)
    with pytest.raises(NotACheckpoint, match="nothing that ckpttool recognises"):
        inspect(tmp_path)


def test_a_tracker_inside_of_a_model_makes_no_run_of_it(tmp_path: Path, megatron_checkpoints: Path) -> None:
    model = builders.copy(megatron_checkpoints / "expected/dense-hf", tmp_path / "hf")
    builders.write_tracker(model, 20)
    assert inspect(model).kind == "huggingface"


def test_a_mistyped_path_is_answered_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "global_step_100").mkdir()
    with pytest.raises(NotACheckpoint) as raised:
        inspect(tmp_path / "global_steps_100/actor")
    assert "global_step_100" in raised.value.hint


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    save_dcp(tmp_path / "a", {"w": torch.zeros(2)})
    (tmp_path / "a/loop").symlink_to(tmp_path / "a")
    found = inspect(tmp_path / "a")
    assert (found.kind, found.parameters) == ("dcp", 2)


def test_no_json_is_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert faults(inspect(tmp_path)) == ["bad-json"]
