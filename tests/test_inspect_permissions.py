"""`inspect` on what the user may not read: in a child process that has dropped root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import builders

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")

# The first calls import everything: afterwards the interpreter's own directory may be out of reach.
_AS_NOBODY = """
import contextlib, io, os, sys
from ckpttool.cli import main
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    for path in (sys.argv[1], "/no/such/path"):
        main(["inspect", path])
        main(["inspect", "--json", path])
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
sys.exit(main(["inspect", "--json", sys.argv[1]]))
"""


def inspect_as_nobody(path: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-c", _AS_NOBODY, str(path)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert child.stdout, child.stderr
    return child.returncode, json.loads(child.stdout)


def codes(answer: dict[str, Any]) -> list[str]:
    return [told["code"] for told in answer["problems"] if told["severity"] == "error"]


@pytest.fixture
def role(open_folder: Path, fsdp_checkpoints: Path) -> Path:
    return builders.copy(fsdp_checkpoints / "fsdp2", open_folder / "run/global_step_10/actor")


def test_readable_for_everyone(role: Path) -> None:
    code, answer = inspect_as_nobody(role)
    assert (code, answer["data"]["state"], codes(answer)) == (0, "complete", [])


def test_the_directory_is_closed(role: Path) -> None:
    role.chmod(0o700)
    code, answer = inspect_as_nobody(role)
    assert (code, answer["data"], codes(answer)) == (3, None, ["unreadable"])
    assert f"{role}: permission denied" in answer["problems"][0]["message"]
    assert "access" in answer["problems"][0]["hint"]


def test_the_parent_is_closed(role: Path) -> None:
    role.parent.chmod(0o700)
    code, answer = inspect_as_nobody(role)
    assert (code, answer["data"]) == (3, None)
    assert "permission denied" in answer["problems"][0]["message"]


@pytest.mark.parametrize("kind", ["model", "optim"])
def test_one_shard_is_closed(role: Path, kind: str) -> None:
    """safetensors and umasks leave such files: named, and the rest is told."""
    shard = role / f"{kind}_world_size_4_rank_2.pt"
    shard.chmod(0o600)
    code, answer = inspect_as_nobody(role)
    assert (code, answer["data"]["state"], codes(answer)) == (0, "incomplete", ["unreadable"])
    assert answer["problems"][0]["path"] == shard.name
    assert answer["data"]["parameters"] == 23_590


@pytest.mark.parametrize("name", ["fsdp_config.json", "huggingface/config.json"])
def test_a_side_file_is_closed(role: Path, name: str) -> None:
    (role / name).chmod(0o600)
    code, answer = inspect_as_nobody(role)
    assert (code, codes(answer)) == (0, ["unreadable"])
    assert name.rpartition("/")[2] in answer["problems"][0]["message"]


def test_the_side_files_are_closed(role: Path) -> None:
    (role / "huggingface").chmod(0o700)
    code, answer = inspect_as_nobody(role)
    assert (code, answer["data"]["kind"], codes(answer)) == (0, "fsdp", ["unreadable"])
    assert "huggingface" in answer["problems"][0]["message"]


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_one_file_of_an_archive_is_closed(open_folder: Path, data: Path, name: str) -> None:
    archive = builders.copy(data / "megatron/mcore0.16-dense-tp2", open_folder / "archive")
    (archive / name).chmod(0o600)
    code, answer = inspect_as_nobody(archive)
    assert (code, answer["data"]["kind"], codes(answer)) == (0, "torch_dist", ["unreadable"])
    assert name in answer["problems"][0]["message"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_model_is_closed(open_folder: Path, megatron_checkpoints: Path, name: str) -> None:
    """safetensors writes 0600: the serving user cannot read it."""
    model = builders.copy(megatron_checkpoints / "expected/dense-hf", open_folder / "hf")
    for path in model.iterdir():
        path.chmod(0o600 if path.name == name else 0o644)
    code, answer = inspect_as_nobody(model)
    assert (code, answer["data"]["kind"], codes(answer)) == (0, "huggingface", ["unreadable"])
    assert name in answer["problems"][0]["message"]


@pytest.mark.parametrize("closed", ["global_step_20", "global_step_20/actor"])
def test_one_step_of_a_run_is_closed(open_folder: Path, role: Path, closed: str) -> None:
    """The others are told all the same."""
    run = role.parent.parent
    shutil.copytree(role.parent, run / "global_step_20")
    builders.write_tracker(run, 20)
    (run / closed).chmod(0o700)
    code, answer = inspect_as_nobody(run)
    assert (code, answer["data"]["kind"]) == (0, "verl-run")
    rows = {row["step"]: row["state"] for row in answer["data"]["run"]["rows"]}
    assert rows == {10: "complete", 20: "unknown"}
    assert answer["data"]["run"]["latest_complete"] == 10
    assert "unreadable" in codes(answer)


def test_the_tracker_is_closed(open_folder: Path, role: Path) -> None:
    run = role.parent.parent
    builders.write_tracker(run, 10)
    (run / "latest_checkpointed_iteration.txt").chmod(0o600)
    code, answer = inspect_as_nobody(run)
    assert (code, answer["data"]["kind"], codes(answer)) == (0, "verl-run", ["unreadable"])
    assert answer["data"]["run"]["latest_complete"] == 10


@pytest.mark.parametrize("tree", ["optimizer", "optimizer/dist_ckpt", "model/huggingface"])
def test_one_tree_of_a_megatron_role_is_closed(open_folder: Path, megatron_checkpoints: Path, tree: str) -> None:
    role = builders.copy(megatron_checkpoints / "dense-v2", open_folder / "actor")
    for path in role.rglob("*.safetensors"):
        path.chmod(0o644)
    (role / tree).chmod(0o700)
    code, answer = inspect_as_nobody(role)
    assert (code, answer["data"]["kind"], codes(answer)[0]) == (0, "verl-megatron-v2", "unreadable")
    assert answer["problems"][0]["path"] == tree
    assert answer["data"]["parameters"] == 39_456


def test_a_closed_neighbour_does_not_hide_the_checkpoint_below(role: Path) -> None:
    run = role.parent.parent
    (run.parent / "aaa").mkdir(mode=0o700)
    code, answer = inspect_as_nobody(run.parent)
    assert (code, answer["data"]["path"]) == (0, str(run))
