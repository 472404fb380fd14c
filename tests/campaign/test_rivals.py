"""Two watches of one run, and a watch beside another command on one of its steps: see `rivals.py`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.campaign import rivals
from tests.campaign.acting import Following, following
from tests.migrating import tiny_role

WRITES = 113
"""About how many a watch with two steps does; those of a later moment than its end are none."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as name:
        yield Path(name)


@pytest.fixture(scope="module")
def subject(folder: Path) -> Following:
    return following(folder / "following")


def test_a_second_watch_with_the_same_state_is_kept_out(folder: Path, subject: Following) -> None:
    for at in range(2, WRITES, 16):
        assert rivals.one_state(folder, subject, at) == [], at


def test_watches_with_two_states_do_not_delete_what_the_other_acts_on(folder: Path, subject: Following) -> None:
    seen = set()
    for at in range(1, WRITES, 9):
        told, wrong = rivals.two_states(folder, subject, at)
        assert wrong == [], at
        seen |= told
    assert seen >= {"pinned", "is deleted"}


@pytest.mark.parametrize(("first", "codes"), [("watch", {0, 3}), ("merge", {4})])
def test_a_step_that_is_deleted_while_it_is_merged(
    folder: Path, subject: Following, first: str, codes: set[int]
) -> None:
    ends = set()
    for at in range(1, WRITES, 10) if first == "watch" else range(1, 30, 7):
        _, merge, wrong = rivals.beside_merge(folder, subject, at, first=first)
        assert wrong == [], at
        ends.add(merge.code)
    assert ends == codes


@pytest.mark.parametrize("first", ["watch", "migrate"])
def test_a_role_that_is_migrated_by_two(folder: Path, first: str) -> None:
    v1 = tiny_role(folder / first / "global_step_10" / "actor", rng=False)
    late = set()
    for at in range(1, 80, 16):
        watch, migrate, wrong = rivals.beside_migrate(folder, v1, at, first=first)
        assert wrong == [], at
        late.add((watch if first == "migrate" else migrate).code)
    assert late == {0, 1 if first == "migrate" else 6}
