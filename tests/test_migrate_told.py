"""What `migrate` tells its user: what it will do, what it did, what to type next."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import layout
from tests import builders
from tests.conftest import Call
from tests.migrating import as_nobody

Run = Callable[..., Call]
SHARING = "overwrites all of them"


@pytest.fixture
def role(megatron_checkpoints: Path, tmp_path: Path) -> Path:
    return builders.copy(megatron_checkpoints / "dense-v1", tmp_path / "run/global_step_10/actor")


def test_an_unset_variable_does_not_migrate_the_working_directory(
    ckpttool: Run, role: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(role)
    assert ckpttool("migrate", "").code == 2
    assert not (role / "model").exists()


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--mode", "copy"],
        ["--mode", "symlink"],
        ["--fallback", "copy"],
        ["--remove-v1"],
        ["--skip-broken"],
        ["--mode", "copy", "--remove-v1", "--skip-broken"],
    ],
)
def test_the_next_line_of_a_dry_run_is_the_same_command(ckpttool: Run, role: Path, options: list[str]) -> None:
    out = ckpttool("migrate", role, *options, "--dry-run").out
    next_line = out.splitlines()[-1].strip()
    assert next_line.split() == ["ckpttool", "migrate", str(role), *options]
    assert ckpttool(*next_line.split()[1:]).code == 0


def test_the_next_line_after_undo_is_tried(ckpttool: Run, role: Path) -> None:
    ckpttool("migrate", role)
    assert ckpttool("migrate", role, "--undo", "--dry-run").out.splitlines()[-1].endswith(f"migrate {role} --undo")


def test_a_dry_run_says_what_goes(ckpttool: Run, role: Path) -> None:
    assert (
        "the names of layout v1 go: dist_ckpt/, huggingface/"
        in ckpttool("migrate", role, "--remove-v1", "--dry-run").out
    )
    done = ckpttool("migrate", role, "--remove-v1").out
    assert "made, hardlink of dist_ckpt/" in done
    assert "the names of layout v1 go" in done


@pytest.mark.parametrize(("mode", "shares"), [("hardlink", True), ("symlink", True), ("copy", False)])
def test_copies_are_not_said_to_share(ckpttool: Run, role: Path, mode: str, shares: bool) -> None:
    assert (SHARING in ckpttool("migrate", role, "--mode", mode).out) == shares


def test_a_mode_that_comes_too_late_is_told(ckpttool: Run, role: Path) -> None:
    ckpttool("migrate", role, "--mode", "symlink")
    out = ckpttool("migrate", role, "--mode", "copy").out
    assert "by symlink; for --mode copy take them back with --undo first" in out


def test_what_an_interruption_left_is_told(ckpttool: Run, role: Path) -> None:
    ckpttool("migrate", role)
    (role / layout.MIGRATION_STAGING / "old").mkdir(parents=True)
    assert "cleared first" in ckpttool("migrate", role, "--dry-run").out
    out = ckpttool("migrate", role).out
    assert "finished" in out
    assert "had left was cleared" in out
    assert not (role / layout.MIGRATION_STAGING).exists()


def test_an_interruption_is_seen_from_the_run(ckpttool: Run, role: Path) -> None:
    (role / layout.MIGRATION_STAGING).mkdir()
    assert "migration-interrupted" in ckpttool("inspect", role.parents[1], "--json").out


def test_v1_that_lost_a_file_after_the_migration(ckpttool: Run, role: Path) -> None:
    """The trees have it: --undo heals, and nothing says that all is well."""
    ckpttool("migrate", role)
    (role / "dist_ckpt/__0_0.distcp").unlink()
    call = ckpttool("migrate", role)
    assert call.code == 4
    assert "--undo brings it back" in call.err
    assert ckpttool("migrate", role, "--undo").code == 0
    assert (role / "dist_ckpt/__0_0.distcp").is_file()


def test_one_broken_role_is_not_offered_the_others(ckpttool: Run, role: Path) -> None:
    (role / "dist_ckpt/.metadata").unlink()
    call = ckpttool("migrate", role)
    assert call.code == 4
    assert "--skip-broken" not in call.err


def test_a_run_of_v1_is_offered_the_migration(ckpttool: Run, role: Path) -> None:
    run = role.parents[1]
    builders.write_tracker(run, 10)
    assert f"ckpttool migrate {run}" in ckpttool("inspect", run).out


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_roles_that_are_not_ours_stop_all_before_the_first(megatron_checkpoints: Path, open_folder: Path) -> None:
    """The second one cannot be written in; the first one is not touched, but with --skip-broken."""
    run = open_folder / "run"
    roles = [builders.copy(megatron_checkpoints / "dense-v1", run / f"global_step_{n}/actor") for n in (10, 20)]
    for path in (run, *run.rglob("*")):
        os.chown(path, 65534, 65534)
    for path in (roles[1], *roles[1].rglob("*")):
        os.chown(path, 0, 0)
    stopped = as_nobody("migrate", run)
    assert (stopped.code, "global_step_20/actor: Permission denied" in stopped.err) == (6, True)
    assert not (roles[0] / "model").exists()
    assert as_nobody("migrate", run, "--skip-broken").code == 4
    assert (roles[0] / "model").exists()
    assert not (roles[1] / "model").exists()


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_words(role: Path, stop: signal.Signals, code: int) -> None:
    program = (
        "import os, sys, time; real = os.link\n"
        "def slow(*a, **k): print('linking', file=sys.stderr, flush=True); time.sleep(60)\n"
        f"os.link = slow; sys.argv = ['ckpttool', 'migrate', {str(role)!r}]\n"
        "from ckpttool.cli import entry; entry()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "linking\n"
        time.sleep(0.1)
        process.send_signal(stop)
        _, err = process.communicate(timeout=20)
    assert process.returncode == code
    assert "--undo takes it back" in err
    assert not (role / "model").exists()


def test_a_demo_that_does_not_fit(ckpttool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([("a", "b", "[Errno 28] No space left on device")])

    monkeypatch.setattr("ckpttool.demo.shutil.copytree", full)
    call = ckpttool("demo", tmp_path / "demo")
    assert (call.code, "No space left" in call.err) == (6, True)


def test_quiet_counts_and_refuses(ckpttool: Run, role: Path) -> None:
    other = builders.copy(role, role.parents[1] / "global_step_20/actor")
    (other / "dist_ckpt/.metadata").unlink()
    stopped = ckpttool("migrate", role.parents[1], "--quiet")
    assert (stopped.code, stopped.out) == (4, "")
    assert "global_step_20/actor" in stopped.err
    skipped = ckpttool("migrate", role.parents[1], "--quiet", "--skip-broken")
    assert "global_step_20/actor: refused" in skipped.out
    assert "model/dist_ckpt" not in skipped.out
    assert skipped.out.splitlines()[-1] == "1 migrated, 1 refused"
    assert ckpttool("migrate", role, "-q").out == "1 with nothing to do\n"


def test_files_beside_the_steps_do_not_hide_them(ckpttool: Run, role: Path) -> None:
    """A configuration at the top of a run is a Hugging Face directory of its own; the roles below are migrated."""
    run = role.parents[1]
    (run / "config.json").write_text('{"model_type": "qwen2"}')
    out = ckpttool("migrate", run).out
    assert "1 left alone, 1 migrated" in out
    assert (role / "model/dist_ckpt").is_dir()
    assert not (run / "model").exists()
