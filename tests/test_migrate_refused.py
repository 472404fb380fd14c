"""`migrate` where the system says no: links, permissions, read-only and full file systems, two at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, CannotWrite
from ckpttool.inspection import inspect
from ckpttool.migration.steps import locked
from tests.conftest import Call
from tests.migrating import MODES, STAGING, as_nobody, manifest, move, only, photograph, same_files, source, tiny_role

Run = Callable[..., Call]

REFUSALS = ("EXDEV", "EPERM", "EMLINK", "ENOTSUP", "EACCES", "ENOSYS", "EIO")
SHARED = Path("/dev/shm")

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else, or mount")


@pytest.fixture
def role(tmp_path: Path) -> Path:
    return tiny_role(tmp_path / "run/global_step_10/actor")


@pytest.fixture
def open_role(open_folder: Path) -> Path:
    """A role that everyone can reach."""
    return tiny_role(open_folder / "run/global_step_10/actor")


def refuse(monkeypatch: pytest.MonkeyPatch, call: str, code: int, after: int = 0) -> None:
    """Let a call fail with this error, from the call after so many on."""
    real, calls = getattr(os, call), iter(range(10_000))

    def refused(*arguments: Any, **options: Any) -> Any:
        if next(calls) < after:
            return real(*arguments, **options)
        raise OSError(code, os.strerror(code), str(arguments[0]), None, str(arguments[1]))

    monkeypatch.setattr(os, call, refused)


# Links


@pytest.mark.parametrize("after", [0, 7])
@pytest.mark.parametrize("name", REFUSALS)
def test_case_78_a_refused_link_stops(
    role: Path, ckpttool: Run, monkeypatch: pytest.MonkeyPatch, name: str, after: int
) -> None:
    """Case 78, D35: the file, the errno and the options are named; nothing is copied, nothing left behind."""
    before = photograph(role)
    refuse(monkeypatch, "link", getattr(errno, name), after)
    call = ckpttool("migrate", role)
    assert call.code == 6
    assert errno.errorcode[getattr(errno, name)] in call.err
    assert any(f"dist_ckpt/{file.name}" in call.err for file in (role / "dist_ckpt").iterdir())
    assert "--fallback" in call.err
    assert "--mode copy" in call.err
    assert photograph(role) == before


@pytest.mark.parametrize("fallback", ["symlink", "copy"])
@pytest.mark.parametrize("name", REFUSALS)
def test_case_78_the_fallback_is_asked_for_and_told(
    role: Path, ckpttool: Run, monkeypatch: pytest.MonkeyPatch, name: str, fallback: str
) -> None:
    """Case 78: never in silence."""
    before = source(role)
    refuse(monkeypatch, "link", getattr(errno, name), 4)
    call = ckpttool("migrate", role, "--fallback", fallback)
    assert call.code == 0
    told = " ".join(call.out.split())
    assert f"went on with --fallback {fallback}" in told
    assert errno.errorcode[getattr(errno, name)] in told
    assert source(role) == before
    assert (role / layout.MODEL).is_symlink() == (fallback == "symlink")
    assert manifest(role)["migration"]["mode"] == fallback
    assert same_files(role / layout.MODEL, photograph(role / "dist_ckpt"))
    assert not (role / STAGING).exists()


@pytest.mark.parametrize("name", ["EPERM", "ENOTSUP"])
def test_symbolic_links_can_be_refused_too(
    role: Path, ckpttool: Run, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    before = photograph(role)
    refuse(monkeypatch, "symlink", getattr(errno, name), 1)
    call = ckpttool("migrate", role, "--mode", "symlink")
    assert (call.code, "--mode copy" in call.err) == (6, True)
    assert photograph(role) == before
    assert ckpttool("migrate", role, "--mode", "symlink", "--fallback", "copy").code == 0
    assert not (role / layout.MODEL).is_symlink()


@pytest.mark.skipif(not os.access(SHARED, os.W_OK), reason="there is no second file system to write to")
def test_a_real_second_file_system(role: Path, ckpttool: Run) -> None:
    """Case 78, D35: the archive lies elsewhere, behind a symbolic link."""
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="ckpttool-test-") as name:
        archive = Path(shutil.move(role / "dist_ckpt", name))
        if archive.stat().st_dev == role.stat().st_dev:
            pytest.skip("it is the same file system")
        (role / "dist_ckpt").symlink_to(archive)
        before = photograph(role), photograph(archive)
        call = ckpttool("migrate", role)
        assert (call.code, "EXDEV" in call.err) == (6, True)
        assert (photograph(role), photograph(archive)) == before
        for fallback in ("symlink", "copy"):
            assert ckpttool("migrate", role, "--fallback", fallback).code == 0
            assert same_files(role / layout.EXTRA, before[1])
            only(role, undo=True)
            assert (photograph(role), photograph(archive)) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [STAGING, "model", "extra"])
def test_a_link_in_our_way_is_not_followed(role: Path, tmp_path: Path, name: str, mode: str) -> None:
    """Names are made and removed there: a link would lead us to do that in somebody's home."""
    home = tmp_path / "home/new"
    home.mkdir(parents=True)
    for precious in (home / "precious.txt", home / "dist_ckpt/precious.txt", home.parent / "dist_ckpt/precious.txt"):
        precious.parent.mkdir(exist_ok=True)
        precious.write_text("mine")
    (role / name).symlink_to(home.parent)
    before = photograph(tmp_path)
    for options in ({"mode": mode}, {"undo": True}, {"mode": mode, "skip_broken": True}):
        with contextlib.suppress(BrokenCheckpoint):
            assert only(role, **options).action in ("refuse", "nothing")
        assert photograph(tmp_path) == before


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["dangling", "directory", "pipe"])
def test_what_a_tree_cannot_take_over_is_refused(role: Path, tmp_path: Path, kind: str, mode: str) -> None:
    odd = role / "huggingface/odd"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to(tmp_path / "nowhere" if kind == "dangling" else tmp_path)
    with pytest.raises(BrokenCheckpoint) as caught:
        only(role, mode=mode)
    assert "odd-entry" in {p.code for p in caught.value.problems}
    assert not (role / "model").exists()


def test_links_to_files_are_linked_as_files(role: Path, tmp_path: Path) -> None:
    """As in a cache of models: the tree gets the file itself, the link of v1 stays."""
    config = role / "huggingface/config.json"
    blob = Path(shutil.move(config, tmp_path / "blob"))
    config.symlink_to(blob)
    only(role)
    assert not (role / layout.HUGGINGFACE / "config.json").is_symlink()
    assert (role / layout.HUGGINGFACE / "config.json").samefile(blob)
    assert config.is_symlink()


@pytest.mark.parametrize("by", ["us", "verl's script"])
def test_remove_v1_with_links_is_refused(role: Path, ckpttool: Run, by: str) -> None:
    only(role, mode="symlink")
    if by != "us":
        (role / layout.MANIFEST).unlink()
    before = photograph(role)
    call = ckpttool("migrate", role, "--remove-v1", "--json")
    assert call.code == 4
    assert "linked-tree" in {problem["code"] for problem in call.json["problems"]}
    assert photograph(role) == before


# Who may


@root_only
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("options", [*[("--mode", mode) for mode in MODES], ("--undo",), ("--remove-v1",)])
def test_a_role_of_somebody_else(open_role: Path, ckpttool: Run, options: tuple[str, ...]) -> None:
    if "--mode" not in options:
        ckpttool("migrate", open_role)
    before = photograph(open_role)
    call = as_nobody("migrate", open_role, *options)
    assert call.code == 6
    assert "hint:" in call.err
    assert "Permission denied" in call.err
    assert photograph(open_role) == before
    assert as_nobody("migrate", open_role, *options, "--dry-run").code == 0


@root_only
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("closed", "code"), [(".", 3), ("..", 3), ("dist_ckpt", 3), ("huggingface", 3), ("dist_ckpt/.metadata", 4)]
)
def test_a_role_that_may_not_be_read(open_role: Path, closed: str, code: int) -> None:
    before = photograph(open_role)
    mode = (open_role / closed).stat().st_mode
    (open_role / closed).chmod(0)
    call = as_nobody("migrate", open_role)
    assert (call.code, "ermission denied" in call.err, "hint:" in call.err) == (code, True, True)
    (open_role / closed).chmod(mode)
    assert photograph(open_role) == before


@root_only
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_files_of_somebody_else_may_not_be_linked(open_role: Path) -> None:
    """Case 78: Linux protects files of other owners from hard links."""
    switch = Path("/proc/sys/fs/protected_hardlinks")
    if not switch.is_file() or switch.read_text().strip() != "1":
        pytest.skip("protected_hardlinks is off")
    os.chown(open_role, 65534, 65534)
    before = photograph(open_role)
    call = as_nobody("migrate", open_role)
    assert (call.code, "EPERM" in call.err, "--fallback" in call.err) == (6, True, True)
    assert photograph(open_role) == before
    assert as_nobody("migrate", open_role, "--fallback", "copy").code == 0
    assert inspect(open_role).state == "complete"


# Where it can be written


def mounted(role: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in a mount namespace of its own; `$role` and `$ckpttool` are set."""
    environment = {**os.environ, "role": str(role), "ckpttool": f"{sys.executable} -m ckpttool"}
    command = ["unshare", "--mount", "sh", "-euc", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _can_mount() -> bool:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        return False
    with tempfile.TemporaryDirectory() as name:
        return mounted(Path(name), 'mount -t tmpfs -o size=64k tmpfs "$role"').returncode == 0


mounting = pytest.mark.skipif(not _can_mount(), reason="mounting is not allowed here")

ROOM = """
before="$role.before"; mkdir "$role.small"; mount -t tmpfs -o {options} tmpfs "$role.small"
cp -a "$role" "$role.small/actor"; role="$role.small/actor"
(cd "$role"; find . -type f | sort | xargs md5sum) > "$before"
"""
SAME = f"""
[ ! -e "$role/{STAGING}" ] && [ ! -e "$role/model" ] && [ ! -e "$role/ckpt_contents.json" ]
(cd "$role"; find . -type f | sort | xargs md5sum) | diff - "$before"
"""


@mounting
@pytest.mark.parametrize("options", [*[f"--mode {mode}" for mode in MODES], "--undo", "--remove-v1"])
def test_a_read_only_file_system(role: Path, options: str) -> None:
    """A real one: the role is bound over itself and made read-only."""
    if "--mode" not in options:
        move(role)
    before = photograph(role)
    script = f'mount --bind "$role" "$role"; mount -o remount,bind,ro "$role"; $ckpttool migrate "$role" {options}'
    done = mounted(role, script)
    assert (done.returncode, "Read-only file system" in done.stderr) == (6, True), done.stderr
    assert "EROFS" in done.stderr
    assert "hint:" in done.stderr
    assert photograph(role) == before


@mounting
def test_a_finished_role_on_a_read_only_file_system_is_a_no_op(role: Path) -> None:
    move(role)
    script = 'mount --bind "$role" "$role"; mount -o remount,bind,ro "$role"; $ckpttool migrate "$role"'
    assert mounted(role, script).returncode == 0


@mounting
def test_free_space_is_checked_before_a_copy(role: Path) -> None:
    """A real file system that has no room for three more archives."""
    (role / "huggingface/tokenizer.json").write_text('"' + "x" * 300_000 + '"')
    script = ROOM.format(options="size=512k") + 'code=0; $ckpttool migrate "$role" --mode copy || code=$?\n' + SAME
    done = mounted(role, script + 'echo "code $code"; $ckpttool migrate "$role"')
    assert "code 6" in done.stdout, done.stderr
    assert "bytes, " in done.stderr
    assert "are free" in done.stderr
    assert "--mode hardlink" in done.stderr
    assert done.returncode == 0


@mounting
@pytest.mark.parametrize("mode", ["hardlink", "copy"])
def test_a_disk_that_fills_up_meanwhile(role: Path, mode: str) -> None:
    """A real file system whose last byte or name is taken before we are done: nothing is left behind."""
    (role / "huggingface/tokenizer.json").write_text('"' + "x" * 300_000 + '"')
    room = "size=512k" if mode == "copy" else "size=2m,nr_inodes=16"
    lie = "import shutil; shutil.disk_usage = lambda _: type('', (), {'free': 1 << 60}); "
    run = f"import sys; {lie}from ckpttool.cli import main; sys.exit(main(sys.argv[1:]))"
    command = f'code=0; {sys.executable} -c "{run}" migrate "$role" --mode {mode} || code=$?\n'
    done = mounted(role, ROOM.format(options=room) + command + SAME + 'echo "code $code"')
    assert (done.returncode, "code 6" in done.stdout) == (0, True), done.stdout + done.stderr
    assert "ENOSPC" in done.stderr


def test_free_space_counts_all_roles_together(role: Path, ckpttool: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two roles of which either would fit: the first is not begun."""
    tiny_role(role.with_name("critic"))
    needed = only(role, mode="copy", dry_run=True).copied_bytes
    usage = shutil.disk_usage(role)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=needed + 10))
    before = photograph(role.parent)
    assert ckpttool("migrate", role.parent, "--mode", "copy").code == 6
    assert photograph(role.parent) == before
    assert ckpttool("migrate", role, "--mode", "copy").code == 0


def test_free_space_is_checked_before_a_fallback_too(
    role: Path, ckpttool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = photograph(role)
    usage = shutil.disk_usage(role)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=10))
    refuse(monkeypatch, "link", errno.EPERM)
    call = ckpttool("migrate", role, "--fallback", "copy")
    assert (call.code, "10 are free" in call.err) == (6, True)
    assert photograph(role) == before


# Two at once


@pytest.mark.parametrize("options", [{}, {"undo": True}])
def test_two_at_once_exclude_each_other(role: Path, ckpttool: Run, options: dict[str, bool]) -> None:
    if options:
        move(role)
    before = photograph(role)
    with locked(role):
        with pytest.raises(CannotWrite) as caught:
            move(role, **options)
        call = ckpttool("migrate", role, "--json", *(["--undo"] if options else []))
    assert (caught.value.code, call.code, call.json["problems"][0]["code"]) == ("busy", 6, "busy")
    assert photograph(role) == before
    move(role, **options)


def test_many_at_once_leave_one_migration(role: Path) -> None:
    before = source(role)
    command = [sys.executable, "-m", "ckpttool", "migrate", str(role)]
    children = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for _ in range(6)]
    codes = {child.wait(timeout=60) for child in children}
    assert codes <= {0, 6}
    assert 0 in codes
    assert source(role) == before
    assert inspect(role).state == "complete"
    assert only(role).action == "nothing"


@root_only
def test_directories_that_one_may_not_write_in_are_ones_own(open_role: Path) -> None:
    """Read-only directories of one's own: removed where they go, named where they would have to be renamed."""
    below = open_role / "huggingface/sub"
    below.mkdir()
    (below / "a.txt").write_text("x")
    for path in (open_role, *open_role.rglob("*")):
        os.chown(path, 65534, 65534)
    below.chmod(0o555)
    assert as_nobody("migrate", open_role).code == 0
    assert as_nobody("migrate", open_role, "--remove-v1").code == 0
    assert not (open_role / STAGING).exists()
    assert not (open_role / "dist_ckpt").exists()
    (open_role / layout.MODEL).chmod(0o555)
    before = photograph(open_role)
    call = as_nobody("migrate", open_role, "--undo")
    assert (call.code, "Permission denied" in call.err) == (6, True)
    assert photograph(open_role) == before
    (open_role / layout.MODEL).chmod(0o755)
    assert as_nobody("migrate", open_role, "--undo").code == 0


def test_a_fallback_to_links_leaves_them_dangling_too(role: Path, ckpttool: Run) -> None:
    call = ckpttool("migrate", role, "--remove-v1", "--fallback", "symlink")
    assert (call.code, "would lead nowhere" in call.err) == (2, True)
    assert not (role / "model").exists()
