"""The output of a merge is complete or absent: killed at every step, with a full disk, with a device that fails."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import CannotWrite
from ckpttool.merging import Options, merge
from ckpttool.staging import staged
from tests.killing import merge_killed
from tests.merged import QWEN2, fingerprint, leftovers, tensors_in, unequal, write_role

WEIGHTS = {"model.embed_tokens.weight": torch.randn(10, 4), "lm_head.weight": torch.randn(10, 4)}
SEVERAL: dict[str, Any] = {"max_shard_size": 170, "threads": 1}
FILES = {
    *("config.json", "generation_config.json", "model.safetensors.index.json"),
    *("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
}


@pytest.fixture
def role(tmp_path: Path) -> Path:
    """Two ranks, side files, and an output of five files."""
    made = write_role(tmp_path / "role", WEIGHTS, config={**QWEN2, "torch_dtype": "float16"})
    (made / "huggingface" / "generation_config.json").write_text("{}")
    return made


def assert_complete(output: Path) -> None:
    assert {path.name for path in output.iterdir()} == FILES
    assert unequal(tensors_in(output), WEIGHTS) == set()


def every_call(role: Path, output: Path, options: dict[str, Any], prepare: Callable[[], None]) -> Iterator[str]:
    """Kill a merge after and before each of its calls; yield what the output is then."""
    for before in (False, True):
        at, came = 0, True
        while came:
            at += 1
            assert at < 200
            prepare()
            came = merge_killed(role, output, options, at, before=before)
            yield f"{'before' if before else 'after'} call {at}"


def test_killed_at_every_call(role: Path, tmp_path: Path) -> None:
    """The destination is complete or absent, sources are untouched, the next run succeeds and cleans up."""
    output, source = tmp_path / "out", fingerprint(role)
    seen = set()
    for _ in every_call(role, output, SEVERAL, lambda: None):
        seen.add(output.exists())
        if output.exists():
            assert_complete(output)
            shutil.rmtree(output)
        merge(role, output, Options(**SEVERAL))
        assert_complete(output)
        assert leftovers(output) == []
        shutil.rmtree(output)
    assert seen == {True, False}
    assert fingerprint(role) == source


def test_killed_while_it_replaces(role: Path, tmp_path: Path) -> None:
    """With --force the old model is there, or the new one, or the next run has the old one back."""
    output, old = tmp_path / "out", tmp_path / "old"
    merge(role, old, Options(dtype="bfloat16"))
    before = fingerprint(old)

    def prepare() -> None:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(old, output)

    seen = set()
    for _ in every_call(role, output, {**SEVERAL, "force": True}, prepare):
        there = "absent" if not output.exists() else "old" if set(fingerprint(output)) == set(before) else "new"
        seen.add(there)
        if there == "absent":
            with pytest.raises(CannotWrite, match="exists already"):
                merge(role, output, Options(**SEVERAL))
            assert {path.name for path in output.iterdir()} == {path.name for path in old.iterdir()}
        merge(role, output, Options(**SEVERAL, force=True))
        assert_complete(output)
        assert leftovers(output) == []
    assert seen == {"absent", "old", "new"}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(
    ("call", "times"), [("open", 5), ("pwrite", 2), ("write", 3), ("fsync", 7), ("rename", 1), ("mkdir", 1)]
)
def test_an_error_at_every_write(
    call: str, times: int, code: int, role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any call that writes: exit code 6, nothing left."""
    output = tmp_path / "out"
    failed = failing(call, code, monkeypatch)
    at = 1
    while failed(at, lambda: merge(role, output, Options(**SEVERAL))):
        assert not output.exists()
        assert leftovers(output) == []
        at += 1
    assert at - 1 == times
    assert_complete(output)


def test_a_hint_to_the_system_that_fails_is_no_error(
    role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = failing("posix_fadvise", errno.EINVAL, monkeypatch)
    assert not failed(1, lambda: merge(role, tmp_path / "out", Options(**SEVERAL)))
    assert_complete(tmp_path / "out")


def failing(call: str, code: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], object]], bool]:
    """A function that runs a job whose call of a number fails, and tells whether the job came to it."""
    real: Callable[..., Any] = getattr(os, call)

    def run(at: int, job: Callable[[], object]) -> bool:
        done = 0

        def broken(*arguments: Any, **options: Any) -> Any:
            nonlocal done
            if call != "open" or arguments[1] & os.O_CREAT:
                done += 1
                if done == at:
                    raise OSError(code, os.strerror(code), str(arguments[0]))
            return real(*arguments, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, call, broken)
            try:
                job()
            except CannotWrite:
                return done == at
        return False

    return run


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("one may not mount here")
    yield place
    subprocess.run(["umount", place], check=True)


BIG = {"w": torch.randn(600, 600)}


def test_too_small_a_disk_is_told_before_anything_is_written(small_disk: Path, tmp_path: Path) -> None:
    """Case 40."""
    role = write_role(tmp_path / "big", BIG)
    with pytest.raises(CannotWrite) as caught:
        merge(role, small_disk / "out", Options())
    assert (caught.value.code, caught.value.exit_code) == ("no-space", 6)
    assert "1,44" in caught.value.message
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile(small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 40: somebody else was quicker."""
    role = write_role(tmp_path / "big", BIG)
    monkeypatch.setattr("ckpttool.merging.check_space", lambda *_: None)
    with pytest.raises(CannotWrite) as caught:
        merge(role, small_disk / "out", Options())
    assert (caught.value.code, caught.value.exit_code) == ("ENOSPC", 6)
    assert list(small_disk.iterdir()) == []


def test_what_is_there_is_not_replaced_without_being_asked(role: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    merge(role, output, Options())
    before = fingerprint(output)
    with pytest.raises(CannotWrite, match="exists already"):
        merge(role, output, Options())
    assert fingerprint(output) == before


@pytest.mark.parametrize("what", ["file", "link", "other"])
def test_force_replaces_models_only(what: str, role: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    if what == "file":
        output.write_text("thesis")
    elif what == "link":
        output.symlink_to(role)
    else:
        output.mkdir()
        (output / "thesis.txt").write_text("thesis")
    with pytest.raises(CannotWrite, match="lies in the checkpoint" if what == "link" else "does not replace it"):
        merge(role, output, Options(force=True))
    assert output.is_symlink() == (what == "link")
    assert (output / "thesis.txt").exists() == (what == "other")


def test_force_replaces_what_was_written_with_a_side_file_of_any_name(role: Path, tmp_path: Path) -> None:
    """Its name is no model's, but the source has it; one that the source has not is a user's."""
    (role / "huggingface" / "notes.txt").write_text("of the training")
    merge(role, tmp_path / "out", Options())
    with pytest.raises(CannotWrite, match="exists already"):
        merge(role, tmp_path / "out", Options())
    merge(role, tmp_path / "out", Options(**SEVERAL, force=True))
    assert {path.name for path in (tmp_path / "out").iterdir()} == FILES | {"notes.txt"}
    (tmp_path / "out" / "thesis.txt").write_text("thesis")
    for dry_run in (True, False):
        with pytest.raises(CannotWrite, match="does not replace it"):
            merge(role, tmp_path / "out", Options(force=True, dry_run=dry_run))
    assert (tmp_path / "out" / "thesis.txt").read_text() == "thesis"


def test_an_output_in_the_source_or_around_it(role: Path, tmp_path: Path) -> None:
    source = fingerprint(role)
    (tmp_path / "link").symlink_to(role)
    for output in (role / "out", role / "huggingface" / "out", tmp_path / "link" / "out"):
        with pytest.raises(CannotWrite, match="lies in the checkpoint"):
            merge(role, output, Options())
    (tmp_path / "config.json").write_text('{"model_type": "x"}')
    with pytest.raises(CannotWrite, match="lies in it"):
        merge(role, tmp_path, Options(force=True))
    assert fingerprint(role) == source


def test_an_empty_directory_is_replaced_when_asked(role: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(CannotWrite, match="exists already"):
        merge(role, tmp_path / "out", Options())
    merge(role, tmp_path / "out", Options(**SEVERAL, force=True))
    assert_complete(tmp_path / "out")


def test_directories_above_the_output_are_made(role: Path, tmp_path: Path) -> None:
    merge(role, tmp_path / "a" / "b" / "out", Options(**SEVERAL))
    assert_complete(tmp_path / "a" / "b" / "out")


def test_a_run_that_is_still_busy_is_left_alone(role: Path, tmp_path: Path) -> None:
    first = staged(tmp_path / "out")
    folder = first.__enter__()
    merge(role, tmp_path / "out", Options(**SEVERAL))
    assert folder.is_dir()
    with pytest.raises(CannotWrite, match="made meanwhile"):
        first.__exit__(None, None, None)
    assert_complete(tmp_path / "out")
    assert leftovers(tmp_path / "out") == []
