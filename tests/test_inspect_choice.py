"""`inspect --step` and `--role`: which checkpoint of a run is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import builders
from tests.conftest import Call


@pytest.fixture
def run(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A run with two whole steps of two roles."""
    roles = {"actor": fsdp_checkpoints / "fsdp2", "critic": fsdp_checkpoints / "critic"}
    return builders.run_directory(tmp_path / "run", roles, (10, 20))


@pytest.mark.parametrize(
    ("options", "path"),
    [
        (["--step", "10", "--role", "critic"], "global_step_10/critic"),
        (["--step", "20", "--role", "actor"], "global_step_20/actor"),
        (["--step", "latest", "--role", "actor"], "global_step_10/actor"),
        (["--step", "10"], "global_step_10"),
    ],
)
def test_a_step_and_a_role_are_chosen(ckpttool: Callable[..., Call], run: Path, options: list[str], path: str) -> None:
    """`latest` is the newest step that is complete, whatever the tracker says."""
    builders.drop_rank(run / "global_step_20/critic", 0)
    call = ckpttool("inspect", run, *options, "--json")
    assert (call.code, call.json["data"]["path"]) == (0, str(run / path))


def test_a_role_of_a_step_is_chosen(ckpttool: Callable[..., Call], run: Path) -> None:
    call = ckpttool("inspect", run / "global_step_10", "--role", "critic", "--json")
    assert call.json["data"]["path"] == str(run / "global_step_10/critic")


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--step", "15"], 3, "global_step_10, global_step_20"),
        (["--step", "newest"], 2, "newest"),
        (["--step", "10", "--role", "ref"], 3, "actor, critic"),
        (["--role", "ref"], 3, "--step latest"),
        (["--role", ".."], 2, "no name of a role"),
        (["--step", "10", "--role", "actor/huggingface"], 2, "no name of a role"),
    ],
)
def test_a_choice_that_is_not_there(
    ckpttool: Callable[..., Call], run: Path, options: list[str], code: int, words: str
) -> None:
    call = ckpttool("inspect", run, *options)
    assert (call.code, call.out) == (code, "")
    assert words in call.err


@pytest.mark.parametrize(
    ("path", "options", "words"),
    [
        ("global_step_10/actor", ["--step", "10"], "no step directories"),
        ("nothing", ["--step", "latest"], "no such directory"),
        ("nothing", ["--role", "actor"], "no role actor"),
    ],
)
def test_a_choice_where_there_is_none(
    ckpttool: Callable[..., Call], run: Path, path: str, options: list[str], words: str
) -> None:
    call = ckpttool("inspect", run / path, *options)
    assert (call.code, words in call.err) == (3, True)


def test_latest_where_nothing_is_complete(ckpttool: Callable[..., Call], run: Path) -> None:
    for step in (10, 20):
        builders.drop_rank(run / f"global_step_{step}/actor", 0)
    call = ckpttool("inspect", run, "--step", "latest")
    assert (call.code, "no step is complete" in call.err) == (3, True)


def test_latest_tells_when_the_tracker_says_otherwise(ckpttool: Callable[..., Call], run: Path) -> None:
    builders.drop_rank(run / "global_step_20/actor", 0)
    call = ckpttool("inspect", run, "--step", "latest", "--json")
    notes = [told for told in call.json["problems"] if told["code"] == "tracker-disagrees"]
    assert [(told["severity"], "20" in told["message"]) for told in notes] == [("note", True)]
