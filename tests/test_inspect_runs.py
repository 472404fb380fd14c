"""`inspect` on runs and steps: the table, the tracker, the latest complete step."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttool.inspection import inspect
from ckpttool.inspection.result import Run
from tests import builders
from tests.conftest import Call
from tests.looking import change_json, codes, faults, holds, problem, repack, save_dcp

TRACKER = "latest_checkpointed_iteration.txt"


@pytest.fixture
def run(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A run with two whole steps of two roles."""
    roles = {"actor": fsdp_checkpoints / "fsdp2", "critic": fsdp_checkpoints / "critic"}
    return builders.run_directory(tmp_path / "run", roles, (10, 20))


def table(run: Run | None) -> list[tuple[int | None, str, str]]:
    """Step, role and state of every row."""
    assert run is not None
    return [(row.step, row.role, row.state) for row in run.rows]


def test_a_run_is_a_table_of_steps_and_roles(run: Path) -> None:
    """RL form: `global_step_N/{role}`."""
    found = inspect(run)
    assert (found.kind, found.title, found.state) == ("verl-run", "training run (verl and kin)", "complete")
    assert found.problems == ()
    assert found.evidence == ("2 step directories (global_step_10 to global_step_20)", TRACKER)
    assert table(found.run) == [
        (10, "actor", "complete"),
        (10, "critic", "complete"),
        (20, "actor", "complete"),
        (20, "critic", "complete"),
    ]
    assert found.run is not None
    assert (found.run.tracker_file, found.run.tracker, found.run.latest_complete) == (TRACKER, "20", 20)
    assert [row.path for row in found.run.rows][:2] == ["global_step_10/actor", "global_step_10/critic"]


@pytest.mark.parametrize("beside", ["dist_ckpt", "shards", "config.json"])
def test_a_checkpoint_beside_the_steps_does_not_hide_them(
    run: Path, megatron_checkpoints: Path, fsdp_checkpoints: Path, beside: str
) -> None:
    """Something copied into the run, or the final model of a trainer, is one more row of it."""
    if beside == "dist_ckpt":
        builders.copy(megatron_checkpoints / "dense-v1/dist_ckpt", run / "dist_ckpt")
    elif beside == "shards":
        for shard in (fsdp_checkpoints / "fsdp2").glob("model_world_size_*.pt"):
            shutil.copy2(shard, run)
    else:
        (run / "config.json").write_text('{"model_type": "qwen2"}')
    found = inspect(run)
    assert found.kind == "verl-run"
    assert [row[:2] for row in table(found.run)][:4] == [(10, "actor"), (10, "critic"), (20, "actor"), (20, "critic")]
    assert found.run is not None
    assert [row.path for row in found.run.rows][4:] == ["."]
    assert found.run.latest_complete == 20


def test_rows_have_size_and_age(run: Path) -> None:
    critic = run / "global_step_10/critic"
    files = [path for path in critic.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (1_000, 1_000))
    os.utime(files[0], (2_000, 2_000))
    found = inspect(run)
    assert found.run is not None
    row = found.run.rows[1]
    assert row.bytes == sum(path.stat().st_size for path in files)
    assert row.modified == 2_000


def test_the_sft_form_has_one_row_a_step(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    run = builders.sft_directory(tmp_path / "run", fsdp_checkpoints / "fsdp2", (5, 10))
    found = inspect(run)
    assert (found.kind, found.state) == ("verl-run", "complete")
    assert table(found.run) == [(5, "", "complete"), (10, "", "complete")]
    assert found.run is not None
    assert found.run.latest_complete == 10


def test_a_megatron_run_of_verl(tmp_path: Path, megatron_checkpoints: Path) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": megatron_checkpoints / "dense-v2"}, (10,))
    found = inspect(run)
    assert (found.state, table(found.run)) == ("complete", [(10, "actor", "complete")])


def test_steps_are_in_the_order_of_numbers(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": fsdp_checkpoints / "lora-only"}, (9, 100, 20))
    assert [step for step, _, _ in table(inspect(run).run)] == [9, 20, 100]


def _no_rank(run: Path) -> None:
    builders.drop_rank(run / "global_step_20/actor", 3)


def _cut(run: Path) -> None:
    builders.truncate(run / "global_step_20/critic/model_world_size_4_rank_1.pt")


def _empty_role(run: Path) -> None:
    shutil.rmtree(run / "global_step_20/critic")
    (run / "global_step_20/critic").mkdir()


def _empty_step(run: Path) -> None:
    shutil.rmtree(run / "global_step_20")
    (run / "global_step_20").mkdir()


def _only_data(run: Path) -> None:
    for role in ("actor", "critic"):
        shutil.rmtree(run / "global_step_20" / role)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_no_rank, "rank 3"),
        (_cut, "model_world_size_4_rank_1.pt"),
        (_empty_role, "empty"),
        (_empty_step, "empty"),
        (_only_data, "not recognised"),
    ],
)
def test_the_tracker_points_to_a_save_that_never_finished(
    run: Path, damage: Callable[[Path], None], words: str
) -> None:
    """Case 72: a table with the reason, and the latest step that can be used."""
    damage(run)
    found = inspect(run)
    assert found.state == "incomplete"
    assert found.run is not None
    assert found.run.latest_complete == 10
    broken = [row for row in found.run.rows if row.state != "complete"]
    assert {row.step for row in broken} == {20}
    assert any(words in row.reason for row in broken)
    told = problem(found, "tracker-ahead")
    assert "step 20" in told.message
    assert "latest complete step is 10" in told.message
    assert "step 10" in told.hint


@pytest.mark.parametrize(("damage", "code"), [(_empty_role, "absent"), (_only_data, "unknown")])
def test_a_role_without_content_is_a_fault(run: Path, damage: Callable[[Path], None], code: str) -> None:
    damage(run)
    (run / TRACKER).unlink()
    found = inspect(run)
    assert (found.state, faults(found)) == ("incomplete", [code])
    assert found.problems[0].path.startswith("global_step_20")


def test_every_broken_role_is_a_problem_of_its_own(run: Path) -> None:
    for role in ("actor", "critic"):
        builders.drop_rank(run / "global_step_20" / role, 0)
    found = inspect(run)
    told = [p for p in found.faults if p.code == "rank-missing"]
    assert [p.path for p in told] == ["global_step_20/actor", "global_step_20/critic"]
    assert all("multi-node" in p.hint for p in told)
    assert all("2 more" in p.message for p in told)


def test_a_step_of_megatron_without_its_manifest(tmp_path: Path, megatron_checkpoints: Path) -> None:
    """Case 72: verl writes the manifest last."""
    run = builders.run_directory(tmp_path / "run", {"actor": megatron_checkpoints / "dense-v2"}, (10, 20))
    change_json(run / "global_step_20/actor/ckpt_contents.json", global_step=20)
    assert inspect(run).problems == ()
    (run / "global_step_20/actor/ckpt_contents.json").unlink()
    found = inspect(run)
    assert set(faults(found)) == {"no-manifest", "tracker-ahead"}
    assert found.run is not None
    assert found.run.latest_complete == 10


def test_the_next_command_looks_at_what_is_broken(run: Path) -> None:
    _no_rank(run)
    commands = [suggestion.command for suggestion in inspect(run).next]
    assert any("global_step_10/" in command for command in commands)
    assert any("global_step_20/actor" in command for command in commands)


def test_the_tracker_names_a_step_that_is_not_here(run: Path) -> None:
    builders.write_tracker(run, 30)
    found = inspect(run)
    assert (found.state, faults(found)) == ("incomplete", ["tracker-ahead"])
    message = problem(found, "tracker-ahead").message
    assert "step 30, which is not here" in message
    assert "latest complete step is 20" in message


def test_the_tracker_is_behind(run: Path) -> None:
    """An async save, or a copy: the newer step is whole."""
    builders.write_tracker(run, 10)
    found = inspect(run)
    assert (found.state, codes(found)) == ("complete", ["tracker-behind"])
    assert "latest complete step is 20" in problem(found, "tracker-behind").message


@pytest.mark.parametrize("text", ["", "twenty", "-1", "20\n30", "\N{SUPERSCRIPT TWO}", "\x1b[31m20", "20" * 40])
def test_the_tracker_is_garbage(run: Path, text: str) -> None:
    builders.write_tracker(run, text)
    found = inspect(run)
    assert found.state == "incomplete"
    assert faults(found) == ["tracker-unreadable"] if len(text) < 40 else ["tracker-ahead"]
    assert "latest complete step is 20" in found.faults[0].message


@pytest.mark.parametrize("text", ["20\n", " 20 "])
def test_space_around_the_step_does_not_matter(run: Path, text: str) -> None:
    builders.write_tracker(run, text)
    assert inspect(run).problems == ()


def test_no_tracker(run: Path) -> None:
    (run / TRACKER).unlink()
    found = inspect(run)
    assert (found.kind, found.state, codes(found)) == ("verl-run", "complete", ["tracker-missing"])
    assert problem(found, "tracker-missing").hint == "echo 20 > latest_checkpointed_iteration.txt"
    assert found.run is not None
    assert (found.run.tracker_file, found.run.latest_complete) == (None, 20)


def test_no_step_is_complete(run: Path) -> None:
    for step in (10, 20):
        builders.drop_rank(run / f"global_step_{step}/actor", 0)
    found = inspect(run)
    assert found.run is not None
    assert found.run.latest_complete is None
    assert "no step is complete" in problem(found, "tracker-ahead").message


def test_a_tracker_alone(tmp_path: Path) -> None:
    builders.write_tracker(tmp_path, 20)
    found = inspect(tmp_path)
    assert found.state == "incomplete"
    assert set(faults(found)) == {"tracker-ahead", "no-steps"}


def test_a_step_is_a_table_of_roles(run: Path) -> None:
    builders.drop_rank(run / "global_step_20/critic", 1)
    found = inspect(run / "global_step_20")
    assert (found.kind, found.title, found.step, found.state) == ("step", "training step", 20, "incomplete")
    assert found.evidence == ("actor/", "critic/")
    assert table(found.run) == [(20, "actor", "complete"), (20, "critic", "incomplete")]
    assert ("dataloader state", "") in holds(found)


def test_the_transfer_queue_is_no_role(run: Path) -> None:
    """verl's asynchronous trainer leaves it, sometimes empty."""
    (run / "global_step_20/transfer_queue").mkdir()
    found = inspect(run)
    assert (found.state, {role for _, role, _ in table(found.run)}) == ("complete", {"actor", "critic"})


def test_a_hostile_step_is_refused_by_its_place(ckpttool: Callable[..., Call], run: Path) -> None:
    repack(run / "global_step_20/actor/model_world_size_4_rank_2.pt", lambda _: b"cos\nsystem\n(Vtrue\ntR.")
    call = ckpttool("inspect", run, "--json")
    assert call.code == 7
    (refused,) = [told for told in call.json["problems"] if told["code"] == "refused"]
    assert "global_step_20/actor: model_world_size_4_rank_2.pt" in refused["message"]
    rows = {(row["step"], row["role"]): row["state"] for row in call.json["data"]["run"]["rows"]}
    assert (rows[20, "actor"], rows[10, "actor"]) == ("refused", "complete")


def test_other_names_of_steps(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    """SkyRL's tracker and the directory name of verl's docs."""
    role = fsdp_checkpoints / "lora-only"
    builders.copy(role, tmp_path / "run/global_steps_4/policy")
    (tmp_path / "run/latest_ckpt_global_step.txt").write_text("4")
    found = inspect(tmp_path / "run")
    assert found.run is not None
    assert (found.run.tracker_file, found.run.tracker, found.state) == ("latest_ckpt_global_step.txt", "4", "complete")
    assert table(found.run) == [(4, "policy", "complete")]


def test_megatron_lm_with_its_tracker(megatron_checkpoints: Path) -> None:
    found = inspect(megatron_checkpoints / "megatron-lm")
    assert (found.kind, found.title, found.state) == ("megatron-run", "Megatron-LM checkpoint directory", "complete")
    assert found.problems == ()
    assert table(found.run) == [(10, "", "complete")]
    assert found.run is not None
    assert (found.run.tracker, found.run.latest_complete) == ("10", 10)


def test_a_megatron_lm_save_that_never_finished(tmp_path: Path, megatron_checkpoints: Path) -> None:
    """Cases 60, 72."""
    run = builders.copy(megatron_checkpoints / "megatron-lm", tmp_path / "run")
    shutil.copytree(run / "iter_0000010", run / "iter_0000020")
    (run / "iter_0000020/metadata.json").unlink()
    builders.write_tracker(run, 20)
    found = inspect(run)
    assert set(faults(found)) == {"not-finalised", "tracker-ahead"}
    assert found.run is not None
    assert found.run.latest_complete == 10


def test_release_of_megatron_lm(tmp_path: Path, megatron_checkpoints: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(megatron_checkpoints / "megatron-lm/iter_0000010", run / "release")
    builders.write_tracker(run, "release")
    found = inspect(run)
    assert (found.kind, found.state, found.problems) == ("megatron-run", "complete", ())
    assert table(found.run) == [(None, "", "complete")]


def test_the_tracker_names_a_release_that_is_not_here(tmp_path: Path, megatron_checkpoints: Path) -> None:
    run = builders.copy(megatron_checkpoints / "megatron-lm", tmp_path / "run")
    builders.write_tracker(run, "release")
    found = inspect(run)
    assert faults(found) == ["tracker-ahead"]
    assert "release" in problem(found, "tracker-ahead").message


def test_torchtitan_steps(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    run = builders.copy(fsdp_checkpoints / "dcp", tmp_path / "checkpoint")
    shutil.copytree(run / "step-10", run / "step-20")
    (run / "step-20/.metadata").unlink()
    found = inspect(run)
    assert (found.kind, found.state, faults(found)) == ("run", "incomplete", ["metadata-missing"])
    assert table(found.run) == [(10, "", "complete"), (20, "", "incomplete")]
    assert found.run is not None
    assert found.run.latest_complete == 10


def test_accelerate_with_model_and_optimizer(fsdp_checkpoints: Path) -> None:
    """Case 41: the parent is given instead of pytorch_model_fsdp_0."""
    found = inspect(fsdp_checkpoints / "accelerate")
    assert (found.kind, found.title) == ("accelerate", "accelerate checkpoint (SHARDED_STATE_DICT)")
    assert (found.state, found.evidence) == ("complete", ("optimizer_0/", "pytorch_model_fsdp_0/"))
    assert found.run is not None
    assert [row.path for row in found.run.rows] == ["optimizer_0", "pytorch_model_fsdp_0"]
    assert any("pytorch_model_fsdp_0" in suggestion.command for suggestion in found.next)


def test_one_checkpoint_below_is_taken_and_told(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    """Case 41: the parent of the one candidate."""
    shutil.copytree(fsdp_checkpoints / "accelerate/pytorch_model_fsdp_0", tmp_path / "output/a/pytorch_model_fsdp_0")
    found = inspect(tmp_path / "output")
    assert (found.kind, found.path) == ("dcp", str(tmp_path / "output/a/pytorch_model_fsdp_0"))
    assert str(tmp_path / "output") in problem(found, "found-below").message


def test_two_models_side_by_side(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_dcp(tmp_path / name, {"w": torch.zeros(2)})
    found = inspect(tmp_path)
    assert (found.kind, found.title) == ("collection", "directory of checkpoints")
    assert found.run is not None
    assert [row.path for row in found.run.rows] == ["a", "b"]
