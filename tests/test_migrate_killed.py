"""`migrate` killed right before and right after each of its file-system calls: nothing is lost, the next run ends it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool import layout
from ckpttool.inspection import inspect
from tests.migrating import (
    MODES,
    STAGING,
    manifest,
    move,
    only,
    outcome,
    photograph,
    reachable,
    source,
    tiny_role,
    verls_script,
)

CALLS = (
    "chmod",
    "copy_file_range",
    "fchmod",
    "fsync",
    "link",
    "mkdir",
    "open",
    "pwrite",
    "rename",
    "replace",
    "rmdir",
    "symlink",
    "truncate",
    "unlink",
    "utime",
    "write",
)
KILLED, MOST = 9, 400

Job = Callable[[Path], object]
Scenario = tuple[Callable[[Path], Path], dict[str, Any]]


def _v1(role: Path) -> Path:
    return tiny_role(role)


def _v1_with_manifest(role: Path) -> Path:
    tiny_role(role)
    (role / layout.MANIFEST).write_text('{"schema_version": 1,\n   "note": "by hand"}\n')
    return role


def _migrated(**options: Any) -> Callable[[Path], Path]:
    def build(role: Path) -> Path:
        move(_v1_with_manifest(role), **options)
        return role

    return build


def _half(role: Path) -> Path:
    """verl's script was interrupted in the second of its trees."""
    tiny_role(role)
    shutil.copytree(role / "dist_ckpt", role / layout.OPTIMIZER, copy_function=os.link)
    shutil.copytree(role / "dist_ckpt", role / layout.EXTRA, copy_function=os.link)
    (role / layout.EXTRA / "metadata.json").unlink()
    return role


def _absolute(role: Path) -> Path:
    return verls_script(tiny_role(role), "symlink")


def _bare(role: Path) -> Path:
    """An archive with a single part: its one tree looks like a save of layout v2."""
    tiny_role(role)
    shutil.rmtree(role / "huggingface")
    return role


MIGRATIONS: dict[str, Scenario] = {
    **{mode: (_v1_with_manifest, {"mode": mode}) for mode in MODES},
    "half": (_half, {}),
    "absolute links": (_absolute, {}),
    "without huggingface": (_bare, {}),
}
REMOVALS: dict[str, Scenario] = {
    "hardlink, remove v1": (_v1_with_manifest, {"remove_v1": True}),
    "copy, remove v1": (_v1, {"mode": "copy", "remove_v1": True}),
    "remove v1 later": (_migrated(), {"remove_v1": True}),
}
UNDOINGS: dict[str, Scenario] = {
    **{mode: (_migrated(mode=mode), {"undo": True}) for mode in MODES},
    "hardlink, v1 removed": (_migrated(remove_v1=True), {"undo": True}),
    "copy, v1 removed": (_migrated(mode="copy", remove_v1=True), {"undo": True}),
}


def killed(role: Path, options: dict[str, Any], at: int, *, before: bool) -> bool:
    """Run in a forked child that ends at the call of this number; tell whether it came so far."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:  # pragma: no cover - coverage does not see it
        _count_calls(at, before=before)
        code = 70
        try:
            move(role, **options)
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def _count_calls(at: int, *, before: bool) -> None:
    done = 0

    def counted(call: Callable[..., Any], *, always: bool) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            counts = always or bool(arguments[1] & os.O_CREAT)
            done += counts
            if before and counts and done == at:
                os._exit(KILLED)
            result = call(*arguments, **options)
            if counts and done == at:
                os._exit(KILLED)
            return result

        return wrapped

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name), always=name != "open"))


def every_kill(tmp_path: Path, scenario: Scenario, *, before: bool) -> Iterator[Path]:
    """The role as it is found after each possible kill."""
    build, options = scenario
    whole = build(tmp_path / "whole/global_step_10/actor")
    for at in range(1, MOST):
        role = clone(whole, tmp_path / f"{at}")
        if not killed(role, options, at, before=before):
            assert at > 10
            return
        yield role
        shutil.rmtree(tmp_path / f"{at}")
    pytest.fail("it never ends")


def clone(role: Path, to: Path) -> Path:
    """A copy that keeps times, modes and what is linked with what, and its place in a step."""
    target = to / "global_step_10/actor"
    seen: dict[tuple[int, int], Path] = {}

    def copy(name: str, new: str) -> None:
        info = os.stat(name)
        if (first := seen.setdefault((info.st_dev, info.st_ino), Path(new))) == Path(new):
            shutil.copy2(name, new)
        else:
            os.link(first, new)

    shutil.copytree(role, target, symlinks=True, copy_function=copy)
    for link in (path for path in target.rglob("*") if path.is_symlink() and path.readlink().is_absolute()):
        link.unlink()
        link.symlink_to(target / "dist_ckpt")
    return target


def honest(role: Path) -> bool:
    """Half a migration is not called a finished one: whoever has the manifest has its trees."""
    found = inspect(role)
    finished = found.state == "complete" and found.manifest is not None and found.manifest.schema_version == 2
    return not finished or all((role / tree).is_dir() and any((role / tree).iterdir()) for tree in claimed(role))


def claimed(role: Path) -> list[str]:
    return list(manifest(role)["directories"])


def undone(role: Path, to: Path) -> dict[str, object]:
    """What `--undo` makes of a copy."""
    other = clone(role, to)
    only(other, undo=True)
    return dict(photograph(other))


def done(scenario: Scenario, tmp_path: Path, name: str) -> dict[str, object]:
    """What the undisturbed run leaves."""
    build, options = scenario
    role = clone(build(tmp_path / f"{name}-model/global_step_10/actor"), tmp_path / name)
    move(role, **options)
    return {path: value for path, value in outcome(role).items() if path != layout.MANIFEST} | _manifest(role)


def _manifest(role: Path) -> dict[str, object]:
    return {layout.MANIFEST: outcome(role).get(layout.MANIFEST)}


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("name", MIGRATIONS)
def test_killed_while_migrating(tmp_path: Path, name: str, before: bool) -> None:
    scenario = build, options = MIGRATIONS[name]
    v1 = photograph(build(tmp_path / "v1/global_step_10/actor"))
    print(v1)
    print(scenario, options)
