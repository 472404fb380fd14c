"""What `merge-fsdp` refuses, with all reasons, before it writes anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

from ckpttool import sink
from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Refused, Unmapped, UsageError
from ckpttool.merging import Options, merge
from tests import builders
from tests.looking import BOMBS, State, bombs, repack, write_shards
from tests.merged import QWEN2, leftovers, sharded, tensors_in, unequal, write_config, write_role


@pytest.fixture
def role(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A whole role of four ranks."""
    return builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "role")


def refused(role: Path, options: Options | None = None, kind: type[CkpttoolError] = BrokenCheckpoint) -> CkpttoolError:
    """The error; nothing is written."""
    output = role.parent / "out"
    with pytest.raises(kind) as caught:
        merge(role, output, options or Options())
    assert not output.exists()
    assert leftovers(output) == []
    return caught.value


def codes(error: CkpttoolError) -> list[str]:
    return [problem.code for problem in error.problems]


def test_missing_ranks_are_named_with_the_other_nodes(role: Path) -> None:
    """Case 5."""
    for rank in (0, 2):
        builders.drop_rank(role, rank)
    error = refused(role)
    assert (error.exit_code, codes(error)) == (4, ["rank-missing"])
    assert "rank 0, 2 are missing (2 of 4 ranks)" in error.problems[0].message
    assert "node" in error.problems[0].hint


def test_everything_is_told_at_once(role: Path) -> None:
    """Before a byte of a tensor is read: files, keys, and shapes together."""
    builders.drop_rank(role, 3)
    builders.truncate(role / "model_world_size_4_rank_1.pt")
    path = role / "model_world_size_4_rank_2.pt"
    state = torch.load(path, weights_only=True)
    del state["model.norm.weight"]
    state["aaa_first"] = state["aaa_first"].to(torch.int32)
    torch.save(state, path)
    error = refused(role)
    assert sorted(codes(error)) == ["dtype-disagrees", "key-missing", "rank-missing", "truncated"]


def test_nothing_of_the_data_is_read_before(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builders.drop_rank(role, 3)

    def never(*_: object) -> None:
        raise AssertionError("data was read")

    monkeypatch.setattr("ckpttool.reading.Reader.read", never)
    monkeypatch.setattr("ckpttool.reading.Reader.read_piece", never)
    refused(role)


@pytest.mark.parametrize("kind", ["optim", "extra_state"])
def test_files_that_are_not_merged_may_be_missing(role: Path, kind: str) -> None:
    (role / f"{kind}_world_size_4_rank_1.pt").unlink()
    builders.truncate(role / f"{kind}_world_size_4_rank_2.pt")
    merge(role, role.parent / "out", Options())


def test_partial_placements_are_refused_by_name(tmp_path: Path) -> None:
    def state(rank: int, mesh: DeviceMesh) -> State:
        return {"w": DTensor.from_local(torch.randn(4, 2), mesh, [Partial()], run_check=False)}

    error = refused(write_shards(tmp_path / "role", state))
    assert codes(error) == ["partial-placement"]
    assert "Partial" in error.problems[0].message
    assert "w" in error.problems[0].message


def test_shapes_that_do_not_tile(tmp_path: Path) -> None:
    """Case 16: a rank holds fewer rows than its placement says."""

    def state(rank: int, mesh: DeviceMesh) -> State:
        size = torch.Size([6, 2])
        return {"w": DTensor.from_local(torch.randn(3 - rank, 2), mesh, [Shard(0)], shape=size, stride=(2, 1))}

    assert codes(refused(write_shards(tmp_path / "role", state))) == ["shape-disagrees"]


def test_placements_that_disagree(tmp_path: Path) -> None:
    def state(rank: int, mesh: DeviceMesh) -> State:
        return {"w": sharded(torch.randn(4, 4), rank, mesh, dim=rank)}

    assert "placement-disagrees" in codes(refused(write_shards(tmp_path / "role", state)))


def test_a_tensor_that_is_sharded_on_one_rank_only(tmp_path: Path) -> None:
    def state(rank: int, mesh: DeviceMesh) -> State:
        value = torch.ones(4)
        return {"w": sharded(value, rank, mesh) if rank else value}

    assert "placement-disagrees" in codes(refused(write_shards(tmp_path / "role", state)))


def test_dtypes_that_safetensors_cannot_hold(tmp_path: Path) -> None:
    odd = {"odd": torch.zeros(2, dtype=torch.complex128)}
    error = refused(write_role(tmp_path / "role", {"w": torch.ones(2)}, odd))
    assert codes(error) == ["unwritable-dtype"]
    assert error.problems[0].message == "safetensors has no complex128: odd"


@pytest.mark.parametrize("name", ["__metadata__", "bad\ud800name"])
def test_names_that_safetensors_cannot_hold(name: str, tmp_path: Path) -> None:
    assert codes(refused(write_role(tmp_path / "role", {"w": torch.ones(2)}, {name: torch.ones(1)}))) == [
        "unwritable-name"
    ]


@pytest.mark.parametrize(
    "segment", ["_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "module.", "module._orig_mod."]
)
def test_wrappers_are_taken_out_of_names(segment: str, tmp_path: Path) -> None:
    """Case 26."""
    weights = {f"{segment}model.w": torch.randn(4, 2), f"{segment}model.v": torch.randn(3)}
    result = merge(write_role(tmp_path / "role", weights), tmp_path / "out", Options())
    found = tensors_in(tmp_path / "out")
    assert unequal(found, {name.removeprefix(segment): value for name, value in weights.items()}) == set()
    assert result.renamed == dict.fromkeys(segment.removesuffix(".").split("."), 2)


def test_wrappers_inside_names(tmp_path: Path) -> None:
    """Each block may be wrapped; `module` further inside is a name of the model's own."""
    weights = {"model.layers.0._checkpoint_wrapped_module.module.w": torch.randn(4, 2)}
    merge(write_role(tmp_path / "role", weights), tmp_path / "out", Options())
    assert set(tensors_in(tmp_path / "out")) == {"model.layers.0.module.w"}


def test_names_that_would_collide(tmp_path: Path) -> None:
    """Case 26."""
    weights = {"_orig_mod.w": torch.randn(4), "module.w": torch.randn(4), "v": torch.randn(2)}
    error = refused(write_role(tmp_path / "role", weights))
    assert codes(error) == ["names-collide"]
    assert all(name in error.problems[0].message for name in ("_orig_mod.w", "module.w"))


@pytest.mark.parametrize("name", ["lora", "lora-only"])
def test_adapters_are_not_lost_without_a_word(name: str, fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Case 22: never a silent copy of the base model."""
    error = refused(builders.copy(fsdp_checkpoints / name, tmp_path / "role"), kind=UsageError)
    assert error.exit_code == 2
    assert "--lora" in error.message


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.q_proj.lora_A.default.weight", UsageError),
        ("m.q.lora_magnitude_vector.default.weight", UsageError),
        ("base_model.model.m.weight", Unmapped),
    ],
)
def test_what_peft_leaves_in_names(name: str, kind: type[CkpttoolError], tmp_path: Path) -> None:
    refused(write_role(tmp_path / "role", {name: torch.ones(2)}), kind=kind)


def test_layers_that_are_called_adapters_are_layers(tmp_path: Path) -> None:
    weights = {"encoder.adapter_layer.weight": torch.ones(2), "model.floral_A.weight": torch.ones(2)}
    merge(write_role(tmp_path / "role", weights), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


def test_flattened_parameters_are_refused_by_name(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    error = refused(builders.copy(fsdp_checkpoints / "accelerate-local", tmp_path / "role"))
    assert codes(error) == ["flat-parameters"]
    assert "SHARDED_STATE_DICT" in error.problems[0].message


@pytest.mark.parametrize("how", BOMBS)
def test_a_shard_that_would_run_code(how: str, role: Path) -> None:
    marker = role.parent / "marker"
    repack(role / "model_world_size_4_rank_1.pt", lambda _: bombs(marker)[how])
    error = refused(role, kind=Refused)
    assert error.exit_code == 7
    assert not marker.exists()


def test_a_bomb_in_a_file_that_is_not_merged_is_not_opened(role: Path) -> None:
    for kind in ("optim", "extra_state"):
        repack(role / f"{kind}_world_size_4_rank_0.pt", lambda _: bombs(role.parent / "marker")[BOMBS[0]])
    merge(role, role.parent / "out", Options())
    assert not (role.parent / "marker").exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"architectures": 3, "dtype": {}}'])
def test_a_config_that_is_none(content: bytes, tmp_path: Path) -> None:
    """Case 8: a damaged config is refused by name; an odd one is only a config."""
    role = write_role(tmp_path / "role", {"w": torch.ones(2)})
    (role / "huggingface").mkdir()
    (role / "huggingface" / "config.json").write_bytes(content)
    if content.startswith(b'{"'):
        merge(role, tmp_path / "out", Options())
    else:
        assert codes(refused(role)) == ["bad-json"]


def test_a_checkpoint_that_changes_while_it_is_read(role: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer saves into the directory: the output would be of two saves."""
    execute: Callable[..., Any] = sink.execute

    def save_meanwhile(*arguments: Any, **options: Any) -> Any:
        done = execute(*arguments, **options)
        path = role / "model_world_size_4_rank_2.pt"
        path.write_bytes(path.read_bytes())
        return done

    monkeypatch.setattr("ckpttool.export.writing.execute", save_meanwhile)
    error = refused(role)
    assert (error.code, error.exit_code) == ("changed-meanwhile", 4)
    assert "model_world_size_4_rank_2.pt" in error.message


def test_a_causal_model_without_a_head(tmp_path: Path) -> None:
    weights = {"model.embed_tokens.weight": torch.randn(10, 4), "model.norm.weight": torch.ones(4)}
    error = refused(write_role(tmp_path / "role", weights, config=QWEN2))
    assert codes(error) == ["head-missing"]
    write_config(tmp_path / "role", {**QWEN2, "architectures": ["Qwen2Model"]})
    merge(tmp_path / "role", tmp_path / "base", Options())
    critic = {**QWEN2, "architectures": ["Qwen2ForTokenClassification"]}
    write_role(tmp_path / "scored", {**weights, "score.weight": torch.ones(1, 4)}, config=critic)
    merge(tmp_path / "scored", tmp_path / "critic", Options())
