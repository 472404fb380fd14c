"""Merges that would have gone wrong without a word: one test a trap."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.serialization
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckpttool.errors import BrokenCheckpoint, CannotWrite, CkpttoolError, UsageError
from ckpttool.merging import Options, merge
from tests import builders
from tests.conftest import Call
from tests.looking import State, write_shards
from tests.merged import QWEN2, config_of, sharded, tensors_in, unequal, write_config, write_generation, write_role

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def codes(role: Path, output: Path, kind: type[CkpttoolError] = BrokenCheckpoint, **options: Any) -> list[str]:
    """The codes of what is refused; nothing is written."""
    with pytest.raises(kind) as caught:
        merge(role, output, Options(**options))
    assert not output.exists()
    return [problem.code for problem in caught.value.problems] or [caught.value.code]


# Ranks and meshes


def test_the_lowest_rank_is_the_lowest_number(tmp_path: Path) -> None:
    """Not the first name (10 comes before 2), not the first directory."""
    role = write_role(tmp_path / "role", {"w": torch.ones(24)}, lambda rank: {"b": torch.tensor([rank])}, ranks=12)
    node = tmp_path / "node"
    node.mkdir()
    for rank in (0, 3):
        name = f"model_world_size_12_rank_{rank}.pt"
        (role / name).rename(node / name)
    merge(role, tmp_path / "out", Options(inputs=(str(node),), on_mismatch="rank0"))
    assert tensors_in(tmp_path / "out")["b"].tolist() == [0]


def pipeline(rank: int, mesh: DeviceMesh) -> State:
    """Two stages of two ranks each, every stage with tensors of its own."""
    stage = mesh["fsdp"]
    return {f"layers.{mesh.get_local_rank('pp')}.w": sharded(torch.randn(4, 2), mesh.get_local_rank("fsdp"), stage)}


def test_missing_ranks_of_another_mesh_are_no_replicas(tmp_path: Path) -> None:
    """The second stage of a pipeline is on the other node: half of the model is not here."""
    role = write_shards(tmp_path / "role", pipeline, (2, 2), ("pp", "fsdp"))
    for rank in (2, 3):
        (role / f"model_world_size_4_rank_{rank}.pt").unlink()
    assert "rank-missing" in codes(role, tmp_path / "out")


def test_missing_ranks_of_plain_tensors_are_missing(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {}, {"b": torch.ones(3)}, ranks=4)
    (role / "model_world_size_4_rank_2.pt").unlink()
    assert codes(role, tmp_path / "out") == ["rank-missing"]


def experts(*, equal: bool) -> Callable[[int, DeviceMesh], State]:
    """One name on two meshes: replicas where they are equal, else the experts of two groups."""

    def state(rank: int, mesh: DeviceMesh) -> State:
        value = torch.arange(8.0).reshape(4, 2) + (0 if equal else 10 * mesh.get_local_rank("ep"))
        return {"experts.w": sharded(value, mesh.get_local_rank("fsdp"), mesh["fsdp"])}

    return state


@pytest.mark.parametrize("options", [{}, {"on_mismatch": "rank0"}, {"check_replicas": False}])
def test_experts_under_one_name_are_told_from_replicas(options: dict[str, Any], tmp_path: Path) -> None:
    """Whatever is asked: one of the two would be lost."""
    differ = write_shards(tmp_path / "differ", experts(equal=False), (2, 2), ("ep", "fsdp"))
    assert set(codes(differ, tmp_path / "out", **options)) == {"not-replicas"}
    equal = write_shards(tmp_path / "equal", experts(equal=True), (2, 2), ("ep", "fsdp"))
    merge(equal, tmp_path / "out", Options(**options))
    assert unequal(tensors_in(tmp_path / "out"), {"experts.w": torch.arange(8.0).reshape(4, 2)}) == set()


def test_a_shard_of_another_dtype_than_its_tensor(tmp_path: Path) -> None:
    def state(rank: int, mesh: DeviceMesh) -> State:
        tensor = sharded(torch.randn(4, 2), rank, mesh)
        tensor._local_tensor = tensor._local_tensor.double()
        return {"w": tensor}

    assert codes(write_shards(tmp_path / "role", state), tmp_path / "out") == ["dtype-disagrees"]


def test_more_local_rows_than_the_placement_gives(tmp_path: Path) -> None:
    """An empty box whose rank holds something all the same."""

    def state(rank: int, mesh: DeviceMesh) -> State:
        size = torch.Size([1, 2])
        local = torch.randn(1, 2)
        return {"w": DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=size, stride=(2, 1))}

    assert codes(write_shards(tmp_path / "role", state), tmp_path / "out") == ["shape-disagrees"]


def test_one_rank_with_a_mesh_tells_buffers_by_it(tmp_path: Path) -> None:
    """FSDP2 on one GPU: parameters are DTensors, so what is plain is a buffer."""
    role = write_role(tmp_path / "role", {"w": torch.randn(4)}, {"router.scale": torch.tensor([0.1])}, ranks=1)
    result = merge(role, tmp_path / "out", Options(dtype="bfloat16"))
    found = tensors_in(tmp_path / "out")
    assert (found["w"].dtype, found["router.scale"].dtype) == (torch.bfloat16, torch.float32)
    assert result.parameters == 4


# Files


def test_a_rank_twice_without_recorded_checksums(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        one = write_role(tmp_path / "one", {"w": torch.zeros(4)})
        other = write_role(tmp_path / "other", {"w": torch.ones(4)})
    finally:
        torch.serialization.set_crc32_options(before)
    assert codes(one, tmp_path / "out", inputs=(str(other),)) == ["rank-twice", "rank-twice"]


def test_a_rank_of_accelerate_twice(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = builders.copy(fsdp_checkpoints / "accelerate-bins", tmp_path / "role")
    node = tmp_path / "node"
    node.mkdir()
    (node / "pytorch_model_fsdp_0_rank1.bin").write_bytes((role / "pytorch_model_fsdp_0_rank2.bin").read_bytes())
    assert "rank-twice" in codes(role, tmp_path / "out", inputs=(str(node),))


def test_directories_that_do_not_go_together(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role, other = fsdp_checkpoints / "fsdp2", fsdp_checkpoints / "accelerate-bins"
    codes(role, tmp_path / "out", UsageError, inputs=(str(other),))
    codes(other, tmp_path / "out", UsageError, inputs=(str(role),))


def save_alone(folder: Path, state: Any) -> Path:
    folder.mkdir(parents=True)
    torch.save(state, folder / "model_world_size_1_rank_0.pt")
    return folder


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ({1: torch.ones(2), "1": torch.zeros(2)}, "odd-key"),
        ({"model": {"w": torch.ones(2)}, "x": torch.ones(1)}, "nested-state"),
        ({"list": [torch.ones(2)], "x": torch.ones(1)}, "nested-state"),
        ({"z": torch.tensor([1 + 2j]).conj()}, "lazy-view"),
        ({"z": torch.tensor([1 + 2j]).conj().imag}, "lazy-view"),
    ],
)
def test_tensors_that_would_be_lost_or_wrong(state: Any, code: str, tmp_path: Path) -> None:
    assert codes(save_alone(tmp_path / "role", state), tmp_path / "out") == [code]


def test_a_tensor_that_claims_more_than_a_disk_has(tmp_path: Path) -> None:
    """Four bytes that are said to be a trillion elements are refused before anything is compared."""
    state = {"w": torch.ones(1).expand(1 << 50)}
    for rank in range(2):
        (tmp_path / "role").mkdir(exist_ok=True)
        torch.save(state, tmp_path / "role" / f"model_world_size_2_rank_{rank}.pt")
    assert codes(tmp_path / "role", tmp_path / "out", CannotWrite, dry_run=True) == ["no-space"]


# Tied embeddings


def test_t5_ties_to_its_shared_embeddings(tmp_path: Path) -> None:
    """`lm_head` equals the copy in the encoder, but what it is tied to has changed."""
    table = torch.randn(10, 4)
    names = {"shared.weight": table + 1, "encoder.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 10}
    role = write_role(tmp_path / "role", names, config=config)
    assert codes(role, tmp_path / "out") == ["tied-differ"]


@pytest.mark.parametrize("model_type", ["mamba", "openai-gpt", "ctrl"])
def test_embeddings_of_other_names_are_found_by_their_shape(model_type: str, tmp_path: Path) -> None:
    table = torch.randn(10, 4)
    weights = {"backbone.odd_table.weight": table, HEAD: table.clone(), "norm.weight": torch.ones(4)}
    config = {"model_type": model_type, "architectures": ["OddForCausalLM"], "vocab_size": 10}
    result = merge(write_role(tmp_path / "role", weights, config=config), tmp_path / "out", Options())
    assert [drop.name for drop in result.dropped] == [HEAD]


def test_a_head_is_not_dropped_when_the_config_says_both(tmp_path: Path) -> None:
    weights = {EMBED: torch.randn(10, 4), HEAD: torch.randn(10, 4)}
    config = {**QWEN2, "text_config": {"tie_word_embeddings": True}}
    role = write_role(tmp_path / "role", weights, config=config)
    assert codes(role, tmp_path / "out", drop_lm_head=True) == ["not-tied"]
    merge(role, tmp_path / "out", Options(untie=True))
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


def test_untie_where_nothing_is_tied(tmp_path: Path) -> None:
    weights = {EMBED: torch.randn(10, 4), HEAD: torch.randn(10, 4)}
    role = write_role(tmp_path / "role", weights, config=QWEN2)
    assert codes(role, tmp_path / "out", untie=True) == ["not-tied"]


def test_no_architectures_no_verdict_on_the_head(tmp_path: Path) -> None:
    config = {"model_type": "llama", "vocab_size": 10, "tie_word_embeddings": False}
    result = merge(
        write_role(tmp_path / "role", {EMBED: torch.ones(10, 4)}, config=config), tmp_path / "out", Options()
    )
    assert ["names no architectures" in note.message for note in result.notes] == [True]


# Configurations and side files


def test_numbers_of_the_config_stay_as_they_are_written(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, config=QWEN2)
    numbers = '"a": 1e400, "b": 0.1000000000000000055, "c": 1E-5, "d": 123456789012345678901234567890, "e": -0.0'
    (role / "huggingface" / "config.json").write_text(f'{{"torch_dtype": "float16", {numbers}, "f": "0.10"}}')
    merge(role, tmp_path / "out", Options())
    text = (tmp_path / "out" / "config.json").read_text()
    assert '"torch_dtype": "float32"' in text
    assert all(f"{part.strip()}" in text for part in [*numbers.split(","), '"f": "0.10"'])


@pytest.mark.parametrize("depth", [5000, 50_000])
def test_a_config_that_is_nested_too_deeply(depth: int, tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, config=QWEN2)
    (role / "huggingface" / "config.json").write_text('{"a":' * depth + "{}" + "}" * depth)
    assert codes(role, tmp_path / "out") == ["bad-json"]


def test_a_header_that_no_reader_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpttool.plan.HEADER_MOST", 4000)
    weights = {f"{'w' * 80}{n}": torch.ones(2) for n in range(60)}
    assert codes(write_role(tmp_path / "role", weights), tmp_path / "out") == ["header-too-long"]


def test_side_files_that_go_in_a_circle(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, config=QWEN2)
    (role / "huggingface" / "a.json").symlink_to("b.json")
    (role / "huggingface" / "b.json").symlink_to("a.json")
    assert merge(role, tmp_path / "out", Options()).left == ("a.json", "b.json")


# Outputs


def test_the_base_model_is_no_place_for_the_output(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)})
    base = write_config(tmp_path, QWEN2, "base").parent
    for output in (base, base / "merged"):
        with pytest.raises(CannotWrite, match="lies in the checkpoint"):
            merge(role, output, Options(hf_config=str(base), force=True))
    assert os.listdir(base) == ["config.json"]


@pytest.mark.parametrize("stranger", ["thesis.tex", ".git", "src", "README.md"])
def test_force_takes_nothing_that_is_not_of_a_model(stranger: str, tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, config=QWEN2)
    merge(role, tmp_path / "out", Options())
    merge(role, tmp_path / "out", Options(force=True))
    (tmp_path / "out" / stranger).mkdir()
    with pytest.raises(CannotWrite, match="does not replace it"):
        merge(role, tmp_path / "out", Options(force=True))


def test_the_working_directory_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, config=QWEN2)
    merge(role, tmp_path / "out", Options())
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(CannotWrite, match="working directory"):
        merge(role, Path(), Options(force=True))


def test_directories_of_a_similar_name_are_left(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)})
    for name in ("out.partial-precious-data", "out.replaced-mine", "out.partial-ABCDEFGH"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
    merge(role, tmp_path / "out", Options())
    names = ["out", "out.partial-ABCDEFGH", "out.partial-precious-data", "out.replaced-mine", "role"]
    assert sorted(os.listdir(tmp_path)) == names


# What is printed


def test_the_next_line_of_a_dry_run_names_the_folders_that_were_found(
    ckpttool: Callable[..., Call], fsdp_checkpoints: Path, tmp_path: Path
) -> None:
    runs = []
    for number, ranks in enumerate(((0, 1), (2, 3))):
        run = builders.run_directory(tmp_path / f"run{number}", {"actor": fsdp_checkpoints / "fsdp2"}, (10,))
        for rank in {0, 1, 2, 3} - set(ranks):
            builders.drop_rank(run / "global_step_10" / "actor", rank)
        runs.append(run)
    options = ["--step", "10", "--role", "actor", "--input", runs[1], "-o", tmp_path / "out", "--dry-run"]
    call = ckpttool("merge-fsdp", runs[0], *options)
    assert call.code == 0
    assert ckpttool(*shlex.split(call.out.splitlines()[-1])[1:]).code == 0


def test_names_that_look_like_options(
    ckpttool: Callable[..., Call], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_role(tmp_path / "-role", {"w": torch.ones(2)})
    call = ckpttool("merge-fsdp", "./-role", "-o", "./-out")
    assert call.code == 0
    assert call.out.splitlines()[-1] == "  ckpttool inspect ./-out --strict"


def test_two_boxes_that_differ_have_two_references(tmp_path: Path) -> None:
    """HSDP: what rank 2 holds is that of rank 0, what rank 3 holds that of rank 1."""

    def state(rank: int, mesh: DeviceMesh) -> State:
        from torch.distributed.tensor import Replicate

        local = torch.arange(4.0).reshape(2, 2) + rank
        size = torch.Size([4, 2])
        placed = [Replicate(), Shard(0)]
        return {"w": DTensor.from_local(local, mesh, placed, run_check=False, shape=size, stride=(2, 1))}

    role = write_shards(tmp_path / "role", state, (2, 2), ("ddp", "fsdp"))
    result = merge(role, tmp_path / "out", Options(on_mismatch="rank0", dry_run=True))
    assert [(m.reference, m.ranks) for m in result.copies.mismatches] == [(0, (2,)), (1, (3,))]


def test_the_config_speaks_of_a_smaller_dtype(tmp_path: Path) -> None:
    """Master weights in float32 are twice as large as what people serve: it is told."""
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, config={**QWEN2, "torch_dtype": "bfloat16"})
    write_generation(role / "huggingface")
    result = merge(role, tmp_path / "out", Options())
    assert [(note.code, "--dtype bf16" in note.hint) for note in result.notes] == [("dtype", True)]
    assert config_of(tmp_path / "out")["torch_dtype"] == "float32"


def test_json_of_a_note_is_a_note(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, lambda rank: {"b": torch.tensor([rank])})
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--on-mismatch", "rank0", "--json")
    told = json.loads(call.out)
    assert [(problem["code"], problem["severity"]) for problem in told["problems"]] == [
        ("no-config", "note"),
        ("copies-differ", "note"),
    ]
    assert "notes" not in told["data"]
