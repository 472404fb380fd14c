"""Which shards are meant: several nodes, several saves in one directory, runs and steps, replicas."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint, UsageError
from ckpttool.merging import Merge, Options, merge
from tests import builders
from tests.merged import tensors_in, unequal, write_role


@pytest.fixture
def role(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A whole role of four ranks."""
    return builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "role")


@pytest.fixture
def expected(fsdp_checkpoints: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(fsdp_checkpoints / "expected" / "fsdp2.safetensors")
    return found


def scattered(role: Path, *groups: tuple[int, ...]) -> list[Path]:
    """Move the files of these ranks to directories of their own, as nodes keep them."""
    nodes = []
    for number, ranks in enumerate(groups):
        node = role.parent / f"node{number}" / "actor"
        node.mkdir(parents=True)
        for rank in ranks:
            for path in role.glob(f"*_rank_{rank}.pt"):
                shutil.move(path, node / path.name)
        nodes.append(node)
    return nodes


def refusal(role: Path, kind: type[CkpttoolError], **options: Any) -> CkpttoolError:
    with pytest.raises(kind) as caught:
        merge(role, role.parent / "out", Options(**options))
    assert not (role.parent / "out").exists()
    return caught.value


def merged(path: Path, **options: Any) -> Merge:
    return merge(path, path.parent / "out", Options(**options))


def test_directories_of_several_nodes_are_united(role: Path, expected: dict[str, torch.Tensor]) -> None:
    """Case 5."""
    one, two = scattered(role, (1,), (2, 3))
    assert [p.code for p in refusal(role, BrokenCheckpoint, inputs=(str(one),)).problems] == ["rank-missing"]
    merged(role, inputs=(str(one), str(two.parent)))
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


def test_the_first_node_may_be_one_without_a_config(role: Path, expected: dict[str, torch.Tensor]) -> None:
    """Case 5: rank 0's node alone has huggingface/."""
    (node,) = scattered(role, (2, 3))
    result = merge(node, role.parent / "out", Options(inputs=(str(role),)))
    assert result.side_files_from == str(role / "huggingface")
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


def test_a_rank_that_two_nodes_have(role: Path, expected: dict[str, torch.Tensor]) -> None:
    """The same file is a note, another one is not mixed in."""
    (node,) = scattered(role, (2, 3))
    name = "model_world_size_4_rank_2.pt"
    shutil.copyfile(node / name, role / name)
    result = merged(role, inputs=(str(node),))
    assert [note.code for note in result.notes if note.code.startswith("rank")] == ["rank-twice"]
    assert unequal(tensors_in(role.parent / "out"), expected) == set()
    shutil.rmtree(role.parent / "out")
    shutil.copyfile(role / "model_world_size_4_rank_0.pt", role / name)
    codes = [p.code for p in refusal(role, BrokenCheckpoint, inputs=(str(node),)).problems]
    assert "rank-twice" in codes


def test_no_config_of_fsdp_is_needed(role: Path, expected: dict[str, torch.Tensor]) -> None:
    """Case 7, and case 43: SkyRL writes none."""
    (role / "fsdp_config.json").unlink()
    merged(role)
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


@pytest.mark.parametrize("size", [2, 8])
def test_stale_files_of_another_world_size(size: int, role: Path, expected: dict[str, torch.Tensor]) -> None:
    """The one complete set is taken, and it is said."""
    builders.stale_ranks(role, size)
    (role / f"model_world_size_{size}_rank_1.pt").unlink()
    result = merged(role)
    assert "stale-shards" in [note.code for note in result.notes]
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


def two_sets(role: Path) -> dict[str, torch.Tensor]:
    """Add a complete set of world size 2 with other values."""
    other = {"model.norm.weight": torch.randn(6)}
    write_role(role, other)
    return other


def test_two_complete_sets_are_the_users_choice(role: Path, expected: dict[str, torch.Tensor]) -> None:
    other = two_sets(role)
    (role / "fsdp_config.json").unlink()
    error = refusal(role, UsageError)
    assert error.exit_code == 2
    assert "--world-size 2 or --world-size 4" in error.hint
    shutil.rmtree(role / "huggingface")
    merged(role, world_size=2)
    assert unequal(tensors_in(role.parent / "out"), other) == set()
    shutil.rmtree(role.parent / "out")
    merged(role, world_size=4)
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


def test_a_config_that_contradicts_is_the_users_choice(role: Path, expected: dict[str, torch.Tensor]) -> None:
    (role / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": 8}))
    error = refusal(role, UsageError)
    assert [problem.code for problem in error.problems] == ["config-contradicts"]
    merged(role, world_size=4)
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


def test_a_world_size_that_is_not_there(role: Path) -> None:
    assert "there are shards of 4" in refusal(role, UsageError, world_size=3).message


def test_one_replica_of_hsdp_is_enough(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """Case 14: ranks 2 and 3 hold the same as 0 and 1."""
    role = builders.copy(fsdp_checkpoints / "hsdp", tmp_path / "role")
    for rank in (2, 1):
        builders.drop_rank(role, rank)
    result = merged(role)
    expected = load_file(fsdp_checkpoints / "expected" / "hsdp.safetensors")
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()
    assert {"rank-missing", "replicas-suffice"} <= {note.code for note in result.notes}
    builders.drop_rank(role, 3)
    assert "rank-missing" in [p.code for p in refusal_of_incomplete(role, tmp_path)]


def refusal_of_incomplete(role: Path, tmp_path: Path) -> tuple[Any, ...]:
    with pytest.raises(BrokenCheckpoint) as caught:
        merge(role, tmp_path / "other", Options())
    return caught.value.problems


def test_accelerates_files_say_their_world_by_the_mesh(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """The highest rank may be the one that is missing."""
    role = builders.copy(fsdp_checkpoints / "accelerate-bins", tmp_path / "role")
    (role / "pytorch_model_fsdp_0_rank3.bin").unlink()
    error = refusal(role, BrokenCheckpoint)
    assert "rank 3 are missing (1 of 4 ranks)" in error.problems[0].message


def test_two_models_of_accelerate(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role = builders.copy(fsdp_checkpoints / "accelerate-bins", tmp_path / "role")
    for path in sorted(role.glob("pytorch_model_fsdp_0_rank*")):
        shutil.copyfile(path, role / path.name.replace("_0_", "_1_"))
    assert "two-models" in [problem.code for problem in refusal(role, BrokenCheckpoint).problems]


def test_a_run_with_one_role(fsdp_checkpoints: Path, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    """Case 41: the only one below is taken and said."""
    run = builders.run_directory(tmp_path / "run", {"actor": fsdp_checkpoints / "fsdp2"}, (10,))
    result = merged(run)
    assert [note.code for note in result.notes] == ["tokenizer-class"]
    assert result.path == str(run / "global_step_10" / "actor")
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_a_run_with_several(fsdp_checkpoints: Path, tmp_path: Path, expected: dict[str, torch.Tensor]) -> None:
    roles = {"actor": fsdp_checkpoints / "fsdp2", "critic": fsdp_checkpoints / "critic"}
    run = builders.run_directory(tmp_path / "run", roles, (10, 20))
    builders.drop_rank(run / "global_step_20" / "actor", 1)
    error = refusal(run, NotACheckpoint)
    assert error.exit_code == 3
    assert error.hint.count("ckpttool merge-fsdp ") == 4
    assert f"Not whole: {run}/global_step_20/actor (1 of 4 ranks missing)" in error.hint
    assert f"ckpttool merge-fsdp {run} --step latest --role actor -o " in error.hint
    result = merged(run, step="latest", role="actor")
    assert result.path == str(run / "global_step_10" / "actor")
    assert "tracker-disagrees" in [note.code for note in result.notes]
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()


def test_parts_of_a_save_below_are_proposed_as_one(role: Path, expected: dict[str, torch.Tensor]) -> None:
    """Case 5: what each node kept lies in a directory of its own."""
    nodes = scattered(role, (0, 1), (2, 3))
    shutil.rmtree(role)
    with pytest.raises(NotACheckpoint) as caught:
        merge(role.parent, role.parent / "out", Options(dtype="float32"))
    first = shlex.split(caught.value.hint.splitlines()[1])
    command = [*("ckpttool", "merge-fsdp", str(nodes[0]), "--input", str(nodes[1])), "-o", str(role.parent / "out")]
    assert first == [*command, "--dtype", "fp32"]
    merge(nodes[0], role.parent / "out", Options(inputs=(str(nodes[1]),)))
    assert unequal(tensors_in(role.parent / "out"), expected) == set()


def test_a_save_without_the_model(role: Path) -> None:
    """verl's save_contents may leave it out."""
    for path in role.glob("model_*"):
        path.unlink()
    (problem,) = refusal(role, BrokenCheckpoint).problems
    assert "there are extra_state, optim files only" in problem.message


def test_one_ranks_file_is_not_the_checkpoint(role: Path) -> None:
    assert str(role) in refusal(role / "model_world_size_4_rank_0.pt", NotACheckpoint).hint


def test_a_role_of_the_only_step(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    roles = {"actor": fsdp_checkpoints / "fsdp2", "critic": fsdp_checkpoints / "critic"}
    run = builders.run_directory(tmp_path / "run", roles, (10,))
    assert merged(run, role="critic").path == str(run / "global_step_10" / "critic")


def test_a_model_beside_the_roles_is_no_role(fsdp_checkpoints: Path, tmp_path: Path) -> None:
    """An output in a step makes later steps no less complete."""
    run = builders.run_directory(tmp_path / "run", {"actor": fsdp_checkpoints / "fsdp2"}, (10, 20))
    merge(run / "global_step_10" / "actor", run / "global_step_10" / "actor-hf", Options())
    result = merged(run, step="latest", role="actor")
    assert result.path == str(run / "global_step_20" / "actor")
    assert [note.code for note in result.notes] == ["tokenizer-class"]


def test_other_checkpoints_are_named(megatron_checkpoints: Path, tmp_path: Path) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": megatron_checkpoints / "dense-v1"}, (10,))
    error = refusal(run / "global_step_10" / "actor", NotACheckpoint)
    assert "it is a verl" in error.message


@pytest.mark.parametrize("name", ["nothing", "role/huggingface", "file.txt"])
def test_what_has_no_shards(name: str, role: Path) -> None:
    (role.parent / "file.txt").write_text("x")
    path = role.parent / name
    with pytest.raises(NotACheckpoint) as caught:
        merge(path, role.parent / "out", Options())
    assert str(path) in caught.value.message
    assert caught.value.hint
