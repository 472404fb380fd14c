"""`verify` and `integrity.json`: Megatron's file is understood, ours is the same to the byte."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from ckpttool.demo import DATA as DEMO
from tests import builders
from tests.conftest import Call
from tests.verifying import all_records, check, faults, flip, messages, notes

ARCHIVE, SHARDS = "megatron/mcore0.19-dense-tp2", "fsdp/torch2.9-fsdp2"


@pytest.fixture
def archive(data: Path, tmp_path: Path) -> Path:
    """A copy of a Megatron archive, with the list of hashes that megatron-core itself has made of it."""
    root = builders.copy(data / ARCHIVE, tmp_path / "archive")
    shutil.copyfile(data / "integrity/mcore0.19-dense-tp2.json", root / "integrity.json")
    return root


def hashes(folder: Path) -> dict[str, str]:
    """What a manifest has to list: the files that lie directly in a directory."""
    files = (path for path in folder.iterdir() if path.is_file() and path.name != "integrity.json")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def listed(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "integrity.json").read_text())
    assert content["algorithm"] == "sha256"
    files: dict[str, str] = content["files"]
    return files


def test_what_megatron_wrote_is_read(ckpttool: Callable[..., Call], archive: Path) -> None:
    call = ckpttool("verify", archive, "--json")
    told = check(call, "integrity")
    assert (call.code, told["state"], told["files"]) == (0, "sound", len(hashes(archive)))
    assert told["bytes"] == sum(path.stat().st_size for path in archive.iterdir() if path.name != "integrity.json")
    assert all(file["checked"] == file["bytes"] for file in call.json["data"]["files"])


def test_what_is_written_is_what_megatron_writes(ckpttool: Callable[..., Call], archive: Path) -> None:
    before = (archive / "integrity.json").read_bytes()
    (archive / "integrity.json").unlink()
    call = ckpttool("verify", archive, "--write-integrity", "--json")
    assert (call.code, call.json["data"]["integrity_file"]) == (0, "integrity.json")
    assert (archive / "integrity.json").read_bytes() == before
    assert ckpttool("verify", archive).code == 0


def test_megatron_itself_agrees(ckpttool: Callable[..., Call], archive: Path) -> None:
    """Where a megatron-core that has it is installed (0.18 or newer)."""
    if tuple(map(int, version("megatron-core").split(".")[:2])) < (0, 18):
        pytest.skip("this megatron-core has no integrity manifests")
    validation = importlib.import_module("megatron.core.dist_checkpointing.validation")
    assert ckpttool("verify", archive, "--write-integrity", "--force").code == 0
    validation.verify_integrity_manifest(str(archive))
    validation.save_integrity_manifest(str(archive))
    assert check(ckpttool("verify", archive, "--json"), "integrity")["state"] == "sound"


def test_bytes_that_no_record_covers_are_covered(ckpttool: Callable[..., Call], archive: Path) -> None:
    """A bit in the header of a record, which no checksum of the zip has."""
    record = next(record for record in all_records(archive) if record.end > record.begin)
    flip(record.path, record.begin - 1)
    call = ckpttool("verify", archive, "--json")
    assert (call.code, faults(call)) == (1, [("integrity-mismatch", record.path.name)])
    (archive / "integrity.json").unlink()
    assert ckpttool("verify", archive).code == 0


def test_every_difference_is_listed(ckpttool: Callable[..., Call], archive: Path) -> None:
    (archive / "__1_0.distcp").unlink()
    flip(archive / "metadata.json", 0)
    shutil.copyfile(archive / "__0_0.distcp", archive / "__2_0.distcp")
    (archive / "notes.txt").write_text("kept this one")
    call = ckpttool("verify", archive, "--json")
    found = faults(call)
    assert ("integrity-missing-file", "__1_0.distcp") in found
    assert ("integrity-mismatch", "metadata.json") in found
    assert "__2_0.distcp" in messages(call)
    assert [told["severity"] for told in call.json["problems"] if told["code"] == "integrity-extra-file"] == [
        "error",
        "note",
    ]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        '{"algorithm": "sha256"}',
        '{"algorithm": "md5", "files": {}}',
        '{"algorithm": ["sha256"], "files": {}}',
        '{"files": {".metadata": 7}}',
        '{"files": {".metadata": "abcd"}}',
        '{"files": {"../outside": "%s"}}' % ("0" * 64),
        '{"files": {"/etc/passwd": "%s"}}' % ("0" * 64),
        '{"files": {"": "%s"}}' % ("0" * 64),
        '{"files": {"a\\u0000b": "%s"}}' % ("0" * 64),
        "[" * 100_000,
    ],
)
def test_a_list_that_is_none_is_a_fault(ckpttool: Callable[..., Call], archive: Path, content: str) -> None:
    (archive / "integrity.json").write_text(content)
    call = ckpttool("verify", archive, "--json")
    assert (call.code, faults(call)) == (1, [("integrity-unreadable", "integrity.json")])


def test_other_hashes_are_read(ckpttool: Callable[..., Call], archive: Path) -> None:
    digests = {path.name: hashlib.sha512(path.read_bytes()).hexdigest().upper() for path in archive.glob("*.distcp")}
    digests[".metadata"] = hashlib.sha512((archive / ".metadata").read_bytes()).hexdigest()
    digests["metadata.json"] = "0" * 128
    (archive / "integrity.json").write_text(json.dumps({"algorithm": "sha512", "files": digests}))
    call = ckpttool("verify", archive, "--json")
    assert faults(call) == [("integrity-mismatch", "metadata.json")]


def test_nothing_is_written_for_what_has_faults(ckpttool: Callable[..., Call], data: Path, tmp_path: Path) -> None:
    root = builders.copy(data / SHARDS, tmp_path / "role")
    builders.drop_rank(root, 2)
    before = sorted(root.iterdir())
    call = ckpttool("verify", root, "--write-integrity", "--json")
    assert (call.code, call.json["data"]["integrity_file"], sorted(root.iterdir())) == (1, None, before)
    assert check(call, "integrity")["state"] == "faults"


def test_one_that_is_there_is_replaced_only_by_force(ckpttool: Callable[..., Call], archive: Path) -> None:
    (archive / "integrity.json").write_text("{}")
    assert ckpttool("verify", archive, "--write-integrity").code == 6
    assert (archive / "integrity.json").read_text() == "{}"
    assert ckpttool("verify", archive, "--write-integrity", "--force").code == 0
    assert listed(archive) == hashes(archive)


def test_every_directory_of_tensors_gets_its_own(ckpttool: Callable[..., Call], data: Path, tmp_path: Path) -> None:
    """A run: its shards, the archives of a role in layout v2, a Hugging Face model; not what lies around them."""
    run = tmp_path / "run"
    builders.copy(data / SHARDS, run / "global_step_1/actor")
    (run / "global_step_1/actor/huggingface").mkdir()
    (run / "global_step_1/actor/huggingface/config.json").write_text('{"model_type": "llama", "architectures": ["x"]}')
    call = ckpttool("verify", run, "--write-integrity", "--json")
    written = ["global_step_1/actor/integrity.json", "global_step_1/actor/huggingface/integrity.json"]
    assert (call.code, sorted(call.json["data"]["integrity_files"])) == (0, sorted(written))
    for name in written:
        assert listed((run / name).parent) == hashes((run / name).parent)
    (run / "global_step_1/actor/huggingface/config.json").write_text('{"model_type": "gemma", "architectures": ["x"]}')
    assert faults(ckpttool("verify", run, "--json")) == [
        ("integrity-mismatch", "global_step_1/actor/huggingface/config.json")
    ]


def test_trees_that_are_linked_are_hashed_once(ckpttool: Callable[..., Call], archive: Path) -> None:
    """Two lists of the same files, as a migration by hard links leaves them."""
    role = archive.parent / "role"
    for tree in ("model/dist_ckpt", "optimizer/dist_ckpt"):
        shutil.copytree(archive, role / tree, copy_function=os.link)
    once = ckpttool("verify", archive, "--json").json["data"]["bytes_read"]
    call = ckpttool("verify", role, "--json")
    assert (check(call, "integrity")["state"], call.json["data"]["bytes_read"]) == ("sound", once)


def test_a_place_that_cannot_be_written(
    ckpttool: Callable[..., Call], archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (archive / "integrity.json").unlink()
    real = os.write

    def full(handle: int, content: bytes) -> int:
        if handle > 2:
            raise OSError(28, "No space left on device")
        return real(handle, content)

    before = sorted(archive.iterdir())
    monkeypatch.setattr(os, "write", full)
    call = ckpttool("verify", archive, "--write-integrity", "--json")
    assert (call.code, sorted(archive.iterdir())) == (6, before)


def test_what_a_killed_run_left_is_not_listed(ckpttool: Callable[..., Call], archive: Path) -> None:
    (archive / "integrity.json").unlink()
    (archive / "integrity.json.partial-0a1b2c3d").write_text("{")
    assert ckpttool("verify", archive, "--write-integrity").code == 0
    assert sorted(listed(archive)) == [".metadata", "__0_0.distcp", "__1_0.distcp", "metadata.json"]
    assert not (archive / "integrity.json.partial-0a1b2c3d").exists()


def test_no_directory_of_one_file(ckpttool: Callable[..., Call], archive: Path) -> None:
    assert ckpttool("verify", archive / "__0_0.distcp", "--write-integrity").code == 2


def test_two_runs_do_not_write_at_once(ckpttool: Callable[..., Call], archive: Path) -> None:
    (archive / "integrity.json").unlink()
    handle = os.open(archive, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        assert ckpttool("verify", archive, "--write-integrity").code == 6
    finally:
        os.close(handle)
    assert ckpttool("verify", archive, "--write-integrity").code == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_checkpoint_of_somebody_else(open_folder: Path, data: Path) -> None:
    """It is verified, its list is not written; what cannot be read is a fault."""
    whole, closed = (builders.copy(data / SHARDS, open_folder / name) for name in ("whole", "closed"))
    (closed / "model_world_size_4_rank_1.pt").chmod(0)
    child = subprocess.run(
        [sys.executable, "-c", _NOBODY, str(whole), str(closed)], check=False, capture_output=True, timeout=60
    )
    assert child.stdout.split() == [b"0", b"6", b"1"], child.stderr
    assert not (whole / "integrity.json").exists()


_NOBODY = """
import contextlib, io, os, sys
from ckpttool.cli import main
def run(*words):
    with contextlib.redirect_stdout(io.StringIO()):
        return main(["verify", *words])
whole, closed = sys.argv[1:]
run(whole)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
print(run(whole), run(whole, "--write-integrity"), run(closed))
"""


def test_notes_do_not_matter(ckpttool: Callable[..., Call], archive: Path) -> None:
    (archive / "README.md").write_text("a note of a user")
    call = ckpttool("verify", archive, "--json")
    assert (call.code, notes(call)) == (0, ["integrity-extra-file"])


def test_a_list_is_not_taken_along_to_what_is_made_of_the_shards(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    """The files that it lists are others there."""
    role = Path(shutil.copytree(DEMO / "fsdp", tmp_path / "role"))
    assert ckpttool("verify", role, "--write-integrity").code == 0
    assert (role / "huggingface" / "integrity.json").is_file()
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "out").code == 0
    assert not (tmp_path / "out" / "integrity.json").exists()
    assert ckpttool("verify", tmp_path / "out").code == 0
