"""`migrate` killed right before and right after every file-system call: nothing is lost, the next run ends it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckpttool import layout
from ckpttool.inspection import inspect
from tests.killing import killed
from tests.migrating import (
    MODES,
    Photograph,
    clone,
    manifest,
    move,
    outcome,
    part,
    photograph,
    reachable,
    same_files,
    tiny_role,
    verls_script,
)

MOST = 400


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of kills: what is synced is counted, but not waited for."""
    monkeypatch.setattr(os, "fsync", lambda _handle: None)


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one."""
    shared = Path("/dev/shm")
    if not os.access(shared, os.W_OK):
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(prefix="ckpttool-test-", dir=shared))
    yield path
    shutil.rmtree(path)


Prepare = Callable[[Path], object]


@dataclass(frozen=True)
class Scenario:
    """What is made of a v1 role first, and what is then killed."""

    options: dict[str, Any] = field(default_factory=dict)
    prepare: Prepare = lambda _role: None
    v1: Callable[[Path], Path] = lambda role: described(role)


def described(role: Path) -> Path:
    """A v1 role with a manifest that no program of today would write to the letter."""
    tiny_role(role)
    (role / layout.MANIFEST).write_text('{"schema_version": 1,\n   "note": "by hand"}\n')
    return role


def lean(role: Path) -> Path:
    """An archive with a single part and nothing else: its one tree could be a save of layout v2."""
    tiny_role(role, model=False, rng=False)
    shutil.rmtree(role / "huggingface")
    return role


def half(role: Path) -> None:
    """verl's script was interrupted in the second of its trees."""
    shutil.copytree(role / "dist_ckpt", role / layout.OPTIMIZER, copy_function=os.link)
    shutil.copytree(role / "dist_ckpt", role / layout.EXTRA, copy_function=os.link)
    (role / layout.EXTRA / "metadata.json").unlink()


def migrated(**options: Any) -> Prepare:
    return lambda role: move(role, **options)


MIGRATIONS = {
    **{mode: Scenario({"mode": mode}) for mode in MODES},
    "lean": Scenario(v1=lean),
    "half by verl's script": Scenario(prepare=half),
    "half by verl's script, copies": Scenario({"mode": "copy"}, half),
    "absolute links of verl's script": Scenario(prepare=lambda role: verls_script(role, "symlink")),
    "hard links of verl's script": Scenario(prepare=verls_script),
}
REMOVALS = {
    "hardlink": Scenario({"remove_v1": True}),
    "copy": Scenario({"mode": "copy", "remove_v1": True}, v1=tiny_role),
    "later": Scenario({"remove_v1": True}, migrated()),
    "lean": Scenario({"remove_v1": True}, v1=lean),
}
UNDOINGS = {
    **{mode: Scenario({"undo": True}, migrated(mode=mode)) for mode in MODES},
    "no manifest before": Scenario({"undo": True}, migrated(), tiny_role),
    "v1 removed": Scenario({"undo": True}, migrated(remove_v1=True)),
    "v1 removed, copies": Scenario({"undo": True}, migrated(mode="copy", remove_v1=True)),
    "v1 removed, lean": Scenario({"undo": True}, migrated(remove_v1=True), lean),
    "of verl's script": Scenario({"undo": True}, verls_script),
}


@dataclass(frozen=True)
class Case:
    """A scenario built: the role of v1, as it is before the run that is killed, and how that would end."""

    v1: Photograph
    end: Photograph
    states: Iterator[Path]


def played(tmp_path: Path, scenario: Scenario, *, before: bool) -> Case:
    v1 = scenario.v1(tmp_path / "v1/global_step_10/actor")
    start = clone(v1, tmp_path / "start/global_step_10")
    scenario.prepare(start)
    end = clone(start, tmp_path / "end/global_step_10")
    move(end, **scenario.options)
    return Case(photograph(v1), outcome(end), _states(tmp_path, start, scenario.options, before=before))


def _states(tmp_path: Path, start: Path, options: dict[str, Any], *, before: bool) -> Iterator[Path]:
    """The role as each of the possible kills leaves it."""
    for at in range(1, MOST):
        role = clone(start, tmp_path / f"{at}/global_step_10")
        if not killed(role, options, at, before=before):
            assert at > 10
            return
        yield role
        shutil.rmtree(tmp_path / f"{at}")
    pytest.fail("it never ends")


def check_state(case: Case, role: Path) -> None:
    """Nothing of v1 is lost, and no half of a migration is called a whole one."""
    assert reachable(case.v1, role)
    found = inspect(role)
    if found.state == "complete" and found.manifest is not None and found.manifest.schema_version == 2:
        for tree in manifest(role)["directories"]:
            source = "huggingface" if tree == layout.HUGGINGFACE else "dist_ckpt"
            assert same_files(role / tree, part(case.v1, source))


def undone(role: Path) -> Photograph:
    """What `--undo` makes of a copy."""
    other = clone(role, role.parent.with_name(f"{role.parent.name}0"))
    move(other, undo=True)
    return photograph(other)


BOTH = pytest.mark.parametrize("before", [False, True], ids=["after", "before"])


@BOTH
@pytest.mark.parametrize("name", MIGRATIONS)
def test_migrating(work: Path, name: str, before: bool) -> None:
    """The source stays as it is; the same command ends it; --undo gives v1 back."""
    scenario = MIGRATIONS[name]
    case = played(work, scenario, before=before)
    for role in case.states:
        check_state(case, role)
        assert part(photograph(role), "dist_ckpt") == part(case.v1, "dist_ckpt")
        assert undone(role) == case.v1
        move(role, **scenario.options)
        assert outcome(role) == case.end


@BOTH
@pytest.mark.parametrize("name", REMOVALS)
def test_removing_the_names_of_v1(work: Path, name: str, before: bool) -> None:
    """The same command ends it; one without --remove-v1 is no worse; --undo gives v1 back."""
    scenario = REMOVALS[name]
    case = played(work, scenario, before=before)
    for role in case.states:
        check_state(case, role)
        assert undone(role) == case.v1
        plain = clone(role, role.parent.with_name("global_step_30"))
        move(plain, **{**scenario.options, "remove_v1": False})
        assert undone(plain) == case.v1
        move(role, **scenario.options)
        assert outcome(role) == case.end


@BOTH
@pytest.mark.parametrize("name", UNDOINGS)
def test_undoing(work: Path, name: str, before: bool) -> None:
    """--undo ends what it began, and migrating again is as good as ever."""
    case = played(work, UNDOINGS[name], before=before)
    assert photograph(work / "end/global_step_10/actor") == case.v1
    for role in case.states:
        check_state(case, role)
        again = clone(role, role.parent.with_name("global_step_30"))
        move(again)
        assert inspect(again).state == "complete"
        assert manifest(again)["schema_version"] == 2
        assert undone(again) == case.v1
        move(role, undo=True)
        assert photograph(role) == case.v1
