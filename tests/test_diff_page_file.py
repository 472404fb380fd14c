"""The file of a page: complete or absent, beside what is there and never over it."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool import staging
from ckpttool.comparison.page import check_page, write_page
from ckpttool.comparison.result import PAGE_BEGINS
from ckpttool.errors import CannotWrite
from ckpttool.render.page import page
from tests import compared
from tests.conftest import Call

PAGE = f"{PAGE_BEGINS}<html>new</html>\n"
EARLIER = f"{PAGE_BEGINS}<html>earlier</html>\n"


ROOT = Path(__file__).resolve().parent.parent


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_page_is_written_whole_with_the_mode_of_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o027)
    try:
        write_page(tmp_path / "new" / "diff.html", PAGE, force=False)
    finally:
        os.umask(old)
    written = tmp_path / "new" / "diff.html"
    assert written.read_text() == PAGE
    assert stat.S_IMODE(written.stat().st_mode) == 0o640
    assert names(written.parent) == ["diff.html"]


def test_what_is_there_stays_without_force(tmp_path: Path) -> None:
    target = tmp_path / "diff.html"
    target.write_text(EARLIER)
    with pytest.raises(CannotWrite, match="exists already"):
        write_page(target, PAGE, force=False)
    assert target.read_text() == EARLIER
    write_page(target, PAGE, force=True)
    assert target.read_text() == PAGE
    assert names(tmp_path) == ["diff.html"]


def _weights(path: Path) -> None:
    path.write_bytes(b"weights")


def _link_to_page(path: Path) -> None:
    path.with_name("real.html").write_text(EARLIER)
    path.symlink_to("real.html")


MADE: dict[str, Callable[[Path], Any]] = {
    "a file of another kind": _weights,
    "an empty file": Path.touch,
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a link to a page": _link_to_page,
    "a link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_force_replaces_an_earlier_page_and_nothing_else(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    target = tmp_path / "diff.html"
    make(target)
    before = target.lstat()
    with pytest.raises(CannotWrite, match="force does not replace it"):
        write_page(target, PAGE, force=True)
    assert os.path.samestat(target.lstat(), before)


def test_a_page_is_never_written_into_a_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "model"
    source.mkdir()
    with pytest.raises(CannotWrite, match="lies in the checkpoint"):
        check_page(source / "diff.html", force=False, sources=[source])
    with pytest.raises(CannotWrite, match="lies in the checkpoint"):
        write_page(source / "diff.html", PAGE, force=False, sources=[tmp_path / "other", source])
    assert names(source) == []


def test_a_file_that_appears_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "diff.html"
    link = os.link

    def late(*paths: Any) -> None:
        target.write_text("mine")
        link(*paths)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(CannotWrite, match="exists already"):
        write_page(target, PAGE, force=False)
    assert target.read_text() == "mine"
    assert names(tmp_path) == ["diff.html"]


def test_a_file_system_without_hard_links_does_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_paths: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    write_page(tmp_path / "diff.html", PAGE, force=False)
    assert (tmp_path / "diff.html").read_text() == PAGE
    assert names(tmp_path) == ["diff.html"]


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, force: bool
) -> None:
    target = tmp_path / "diff.html"
    if force:
        target.write_text(EARLIER)

    def full(*_arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CannotWrite, match="No space left") as caught:
            write_page(target, PAGE, force=force)
    assert "-o" not in caught.value.hint
    assert names(tmp_path) == (["diff.html"] if force else [])
    assert not force or target.read_text() == EARLIER


KILLER = """
import os, sys
from pathlib import Path
from ckpttool.comparison.page import write_page
from tests.killing import KILLED, _end_at
folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
for at in range(1, 40):
    for force in (False, True):
        for before in (False, True):
            target = folder / f"{at}-{force}-{before}" / "diff.html"
            if os.fork() == 0:
                _end_at(at, before=before)
                write_page(target, text, force=force)
                os._exit(0)
            code = os.waitstatus_to_exitcode(os.wait()[1])
            assert code in (0, KILLED), code
            print(at, force, before, code, flush=True)
"""


def test_killed_at_any_call_it_is_there_or_not_and_the_next_run_clears_up(tmp_path: Path) -> None:
    (tmp_path / "page").write_text(PAGE)
    for at in range(1, 40):
        for force in (False, True):
            for before in (False, True):
                folder = tmp_path / f"{at}-{force}-{before}"
                folder.mkdir()
                if force:
                    (folder / "diff.html").write_text(EARLIER)
    command = [sys.executable, "-c", KILLER, str(tmp_path), str(tmp_path / "page")]
    told = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    ends = [line.split() for line in told.stdout.splitlines()]
    assert len(ends) == 39 * 4
    for *case, code in ends:
        folder, force = tmp_path / "-".join(case), case[1] == "True"
        target = folder / "diff.html"
        left = target.read_text() if target.exists() else None
        assert left in ((EARLIER, PAGE) if force else (None, PAGE)), folder
        assert code == "9" or left == PAGE
        write_page(target, PAGE, force=force or left is not None)
        assert target.read_text() == PAGE
        assert names(folder) == ["diff.html"]
    for word in ("False", "True"):
        seen = {end[3] for end in ends if end[1] == word}
        assert seen == {"0", "9"}  # it was killed, and it came to its end


def test_what_another_run_is_filling_is_left_to_it(tmp_path: Path) -> None:
    busy = tmp_path / "diff.html.partial-0123abcd"
    busy.write_text("half")
    stale = tmp_path / "diff.html.partial-89abcdef"
    stale.write_text("half")
    others = tmp_path / "diff.html.partial-mine"
    others.write_text("a name that is not ours")
    handle = staging._lock(busy)
    try:
        write_page(tmp_path / "diff.html", PAGE, force=False)
    finally:
        os.close(handle)
    assert names(tmp_path) == ["diff.html", busy.name, others.name]


def test_every_page_begins_as_one_that_may_be_replaced() -> None:
    assert page(compared.dense(layers=1)).startswith(PAGE_BEGINS)


def test_diff_writes_a_page_and_says_so(ckpttool: Callable[..., Call], data: Path, tmp_path: Path) -> None:
    a, b, target = data / "fsdp" / "torch2.6-fsdp2", tmp_path / "b", tmp_path / "diff.html"
    shutil.copytree(data / "fsdp" / "torch2.13-fsdp2", b)
    call = ckpttool("diff", a, b, "--html", target)
    assert call.code == 0, call.err
    assert str(target) in call.out
    assert target.read_text().startswith(PAGE_BEGINS)
    assert "16 tensors of both are equal" in target.read_text()
    again = ckpttool("diff", a, b, "--html", target)
    assert again.code == 6
    assert again.out == ""
    assert "--force" in again.err
    assert ckpttool("diff", a, b, "--html", target, "--force", "--json").json["ok"]
    inside = ckpttool("diff", a, b, "--html", b / "diff.html")
    assert inside.code == 6
    assert not (b / "diff.html").exists()
