"""`verify`: every byte that has a checksum. Which bytes those are, `zipfile` and torch's own index say."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttool.verification import checksums, records, work
from ckpttool.verification.records import Alike
from tests import builders
from tests.conftest import Call
from tests.hostile import save_bomb
from tests.verifying import all_records, check, faults, flip, items_of, messages, notes, records_of
from tests.writers.reading import read_metadata

FSDP, MEGATRON = "fsdp/torch2.13-fsdp2", "megatron/mcore0.16-moe-tp1-ep2"
KINDS = (FSDP, "fsdp/torch2.6-fsdp1-shardedtensor", MEGATRON, "megatron/mcore0.19-dense-tp2")


@pytest.fixture
def copy(data: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies of small real checkpoints, to be damaged."""

    def make(name: str) -> Path:
        return builders.copy(data / name, tmp_path / Path(name).name)

    return make


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is smaller than most archives, and tasks of a few units: what large files need."""
    monkeypatch.setattr(checksums, "BUFFER", 1500)
    monkeypatch.setattr(work, "MOST_UNITS", 3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_real_libraries_wrote_is_sound(ckpttool: Callable[..., Call], data: Path, kind: str) -> None:
    """Every record that `zipfile` finds has been read, and every byte of them."""
    call = ckpttool("verify", data / kind, "--json")
    records = all_records(data / kind)
    assert (call.code, call.json["ok"], call.json["problems"]) == (0, True, [])
    assert check(call, "crc")["state"] == "sound"
    assert sum(file["records"] for file in call.json["data"]["files"]) == len(records)
    assert sum(file["recorded"] for file in call.json["data"]["files"]) == len(records)
    assert check(call, "crc")["bytes"] == sum(record.end - record.begin for record in records)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", ["1", "3"])
def test_in_parts_and_threads_it_is_the_same(
    ckpttool: Callable[..., Call], data: Path, kind: str, threads: str, small_buffer: None
) -> None:
    call = ckpttool("verify", data / kind, "--json", "--threads", threads)
    assert (call.code, call.json["problems"]) == (0, [])
    assert check(call, "crc")["bytes"] == sum(record.end - record.begin for record in all_records(data / kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffer", [1500, checksums.BUFFER])
def test_every_flipped_byte_is_found(
    ckpttool: Callable[..., Call],
    copy: Callable[[str], Path],
    data: Path,
    kind: str,
    buffer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First, last and some byte of some records: the file is named, and the tensor or record."""
    monkeypatch.setattr(checksums, "BUFFER", buffer)
    root, chance = copy(kind), random.Random(buffer)
    records = [record for record in all_records(root) if record.end > record.begin and record.name != "data.pkl"]
    for record in chance.sample(records, 3):
        for at in {record.begin, record.end - 1, chance.randrange(record.begin, record.end)}:
            flip(record.path, at, 1 << chance.randrange(8))
            call = ckpttool("verify", root, "--json")
            assert (call.code, faults(call)) == (1, [("crc-mismatch", record.path.name)]), record
            assert record.name in messages(call)
            shutil.copyfile(data / kind / record.path.name, record.path)
    assert ckpttool("verify", root).code == 0


def test_the_tensor_of_a_shard_is_named(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(FSDP)
    shard = root / "model_world_size_4_rank_2.pt"
    (weight,) = [r for r in records_of(shard) if r.name == "data/3"]
    state = torch.load(shard, weights_only=False)
    flip(shard, weight.begin)
    changed = torch.load(shard, weights_only=False)
    (name,) = [n for n in state if not torch.equal(_local(state[n]), _local(changed[n]))]
    assert f"{name})" in messages(ckpttool("verify", root, "--json"))


def _local(value: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = getattr(value, "_local_tensor", value)
    return local.view(torch.uint8) if local.ndim else local.reshape(1).view(torch.uint8)


def test_a_damaged_pickle_is_a_fault_whatever_it_says_now(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path]
) -> None:
    """Its bytes are checked although nothing can be made of them; what it names now may be refused (7)."""
    root = copy(FSDP)
    for path in sorted(root.glob("model_*.pt")):
        (pickle,) = [record for record in records_of(path) if record.name == "data.pkl"]
        flip(path, (pickle.begin + pickle.end) // 2)
    call = ckpttool("verify", root, "--json")
    assert call.code in (1, 7)
    found = [path for code, path in faults(call) if code == "crc-mismatch"]
    assert found == [path.name for path in sorted(root.glob("model_*.pt"))]


def test_a_damaged_byte_order_is_a_damaged_record(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    """All other records of the file are checked, although inspect does not open it."""
    root = copy(FSDP)
    shard = root / "model_world_size_4_rank_1.pt"
    flip(shard, next(record for record in records_of(shard) if record.name == "byteorder").begin)
    flip(shard, next(record for record in records_of(shard) if record.name == "data/3").begin)
    found = faults(ckpttool("verify", root, "--json"))
    assert found.count(("crc-mismatch", shard.name)) == 2


def test_what_would_run_code_is_refused_and_the_rest_is_checked(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root, marker = copy(FSDP), tmp_path / "ran"
    save_bomb(root / "model_world_size_4_rank_0.pt", marker)
    shard = root / "model_world_size_4_rank_3.pt"
    flip(shard, next(record for record in records_of(shard) if record.name == "data/0").begin)
    call = ckpttool("verify", root, "--json")
    assert (call.code, call.json["ok"]) == (7, False)
    assert {code for code, _ in faults(call)} == {"refused", "crc-mismatch"}
    assert not marker.exists()


def test_an_optimizer_is_checked_and_never_unpickled(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], tmp_path: Path
) -> None:
    root, marker = copy(FSDP), tmp_path / "ran"
    for rank in range(4):
        save_bomb(root / f"optim_world_size_4_rank_{rank}.pt", marker)
    assert ckpttool("verify", root, "--values").code == 0
    path = root / "optim_world_size_4_rank_1.pt"
    flip(path, next(records_of(path)).begin)
    call = ckpttool("verify", root, "--json")
    assert (call.code, faults(call)) == (1, [("crc-mismatch", path.name)])
    assert not marker.exists()


def test_all_faults_are_listed_and_others_go_on(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(MEGATRON)
    record = next(r for r in all_records(root) if r.path.name == "__0_0.distcp" and r.end > r.begin)
    builders.truncate(root / "common.pt")
    builders.truncate(root / "__1_1.distcp", 0.9)
    (root / "__0_1.distcp").unlink()
    flip(record.path, record.begin)
    call = ckpttool("verify", root, "--json")
    assert call.code == 1
    assert sorted(faults(call)) == [
        ("crc-mismatch", "__0_0.distcp"),
        ("file-missing", ""),
        ("truncated", "__1_1.distcp"),
        ("truncated", "common.pt"),
    ]


def test_what_cannot_be_read_is_a_fault(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(FSDP)
    (root / "extra.pt").write_bytes(b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.")
    (root / "empty.pth").write_bytes(b"")
    os.mkfifo(root / "fifo.pt")
    call = ckpttool("verify", root, "--json")
    assert call.code == 1
    assert sorted(faults(call)) == [("legacy-pt", "extra.pt"), ("truncated", "empty.pth")]


def test_both_places_of_a_checksum_are_held_against_the_bytes(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path]
) -> None:
    """In the directory, and behind the record or before it: one that is changed is a fault."""
    root = copy(FSDP)
    shard = root / "model_world_size_4_rank_0.pt"
    raw = shard.read_bytes()
    with zipfile.ZipFile(shard) as archive:
        count = Counter(info.CRC for info in archive.infolist())
    for crc in (crc.to_bytes(4, "little") for crc, times in list(count.items())[:5] if times == 1):
        places = [at for at in range(len(raw)) if raw.startswith(crc, at)]
        assert len(places) == 2
        for at in places:
            flip(shard, at)
            assert ("crc-mismatch", shard.name) in faults(ckpttool("verify", root, "--json"))
            flip(shard, at)


def test_checksums_that_were_not_recorded_are_told_and_no_fault(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], small_buffer: None
) -> None:
    root = copy(FSDP)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.ones(300), "b": torch.ones(3)}, root / "data.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    records = list(records_of(root / "data.pt"))
    call = ckpttool("verify", root, "--json")
    assert (call.code, notes(call)) == (0, ["not-recorded"])
    told = {file["name"]: file for file in call.json["data"]["files"]}["data.pt"]
    assert (told["records"], told["recorded"], told["checked"]) == (len(records), 0, 0)
    alone = ckpttool("verify", root / "data.pt", "--json")
    assert (alone.code, check(alone, "crc")["state"]) == (0, "not recorded")


def test_data_files_without_an_index_are_checked_from_their_ends(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path]
) -> None:
    root = copy("megatron/mcore0.19-dense-tp2")
    records = len(all_records(root))
    (root / ".metadata").unlink()
    call = ckpttool("verify", root, "--json")
    assert [code for code, _ in faults(call)] == ["metadata-missing"]
    assert sum(file["recorded"] for file in call.json["data"]["files"]) == records


def test_a_record_of_many_names_is_not_read_as_often(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path]
) -> None:
    """Four megabytes that would be read a hundred times."""
    root = copy(FSDP)
    with zipfile.ZipFile(root / "data.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"N.")
        archive.writestr("archive/data/0", bytes(4 << 20))
    raw = (root / "data.pt").read_bytes()
    begin, end = raw.rindex(b"PK\x01\x02"), raw.rindex(b"PK\x05\x06")
    again = b"".join(raw[begin : end - 1] + bytes([at]) for at in range(ord("0"), ord("9") + 1))
    tail = bytearray(raw[end:])
    tail[8:10] = tail[10:12] = (11).to_bytes(2, "little")
    tail[12:16] = (len(again) + begin - int.from_bytes(tail[16:20], "little")).to_bytes(4, "little")
    (root / "data.pt").write_bytes(raw[:begin] + again + tail)
    call = ckpttool("verify", root, "--json")
    assert (call.code, faults(call)) == (1, [("damaged-zip", "data.pt")])
    assert call.json["data"]["bytes_read"] < 1 << 20


def test_layouts_that_are_remembered_are_small(monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """A hostile archive has as many bytes around its records as it likes."""
    alike, path = Alike(), data / FSDP / "model_world_size_4_rank_0.pt"
    raw = memoryview(path.read_bytes())
    assert alike.check(raw, path, 0) == alike.check(raw, path, 0)
    assert alike.remembered == 1
    monkeypatch.setattr(records, "LAYOUT_MOST", 100)
    other = Alike()
    assert other.check(raw, path, 0)[1] == []
    assert other.remembered == 0


def test_a_zip_of_somebody_else_is_no_fault(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(FSDP)
    with zipfile.ZipFile(root / "weights.bin", "w") as archive:
        archive.writestr("hello.txt", "hello")
    assert ckpttool("verify", root).code == 0


def test_tensors_that_inspect_does_not_look_at_have_headers(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], data: Path
) -> None:
    root = copy(FSDP)
    (root / "somewhere/else").mkdir(parents=True)
    target = root / "somewhere/else/adapter_model.safetensors"
    shutil.copyfile(data / "fsdp/expected.safetensors", target)
    assert ckpttool("verify", root).code == 0
    builders.truncate(target, 0.9)
    call = ckpttool("verify", root, "--json")
    assert faults(call) == [("truncated", "somewhere/else/adapter_model.safetensors")]


def test_a_single_file(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(MEGATRON)
    call = ckpttool("verify", root / "__0_1.distcp", "--json", "--values")
    assert (call.code, [file["name"] for file in call.json["data"]["files"]]) == (0, ["__0_1.distcp"])
    wanted = [record for record in all_records(root) if record.path.name == "__0_1.distcp"]
    assert call.json["data"]["files"][0]["records"] == len(wanted)
    flip(wanted[0].path, wanted[0].begin)
    assert ckpttool("verify", root / "__0_1.distcp").code == 1
    assert ckpttool("verify", root / "__0_0.distcp").code == 0


def test_a_run_is_verified_as_a_whole_or_a_step_of_it(
    ckpttool: Callable[..., Call], data: Path, tmp_path: Path
) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": data / FSDP, "critic": data / FSDP}, (10, 20))
    assert ckpttool("verify", run).code == 0
    shard = run / "global_step_10/critic/model_world_size_4_rank_1.pt"
    flip(shard, next(records_of(shard)).begin + 1)
    flip(run / "global_step_10/data.pt", next(records_of(run / "global_step_10/data.pt")).begin)
    builders.drop_rank(run / "global_step_20/actor", 3)
    call = ckpttool("verify", run, "--json")
    assert call.code in (1, 7)
    assert ("crc-mismatch", str(shard.relative_to(run))) in faults(call)
    assert ("crc-mismatch", "global_step_10/data.pt") in faults(call)
    assert ("rank-missing", "global_step_20/actor") in faults(call)
    assert ckpttool("verify", run, "--step", "10", "--role", "actor").code == 0
    assert ckpttool("verify", run, "--step", "20", "--role", "critic").code == 0
    assert ckpttool("verify", run, "--step", "20").code == 1


def test_files_of_several_names_are_read_once(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(FSDP)
    call = ckpttool("verify", root, "--json")
    (root / "again").mkdir()
    for path in root.glob("*.pt"):
        (root / "again" / path.name).hardlink_to(path)
    (root / "loop").symlink_to(".")
    again = ckpttool("verify", root, "--json")
    assert (again.code, again.json["data"]["bytes_read"]) == (0, call.json["data"]["bytes_read"])


def test_a_file_that_is_written_to_meanwhile_is_told(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy(FSDP)
    shard, real = root / "model_world_size_4_rank_1.pt", os.preadv

    def grow(handle: int, buffers: list[memoryview], at: int) -> int:
        if os.fstat(handle).st_ino == shard.stat().st_ino:
            os.utime(shard, ns=(1, 1))
        return real(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", grow)
    call = ckpttool("verify", root, "--json")
    assert (call.code, faults(call)) == (1, [("changed-meanwhile", shard.name)])


def test_a_disk_that_fails_is_told(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = copy(FSDP)
    bad, real = (root / "model_world_size_4_rank_1.pt").stat().st_ino, os.preadv

    def fail(handle: int, buffers: list[memoryview], at: int) -> int:
        if os.fstat(handle).st_ino == bad:
            raise OSError(5, "Input/output error")
        return real(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", fail)
    call = ckpttool("verify", root, "--json")
    assert (call.code, faults(call)) == (1, [("unreadable", "model_world_size_4_rank_1.pt")])


def test_items_that_overlap_are_read_once_and_told(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    """An index that says of a thousand items that they lie in one place must not have it read a thousand times."""
    root = copy("megatron/mcore0.19-dense-tp2")
    metadata = read_metadata(root)
    infos = list(metadata.storage_data.values())
    first, second = [info for info in infos if info.relative_path == "__0_0.distcp"][:2]
    second.offset, second.length = first.offset + 8, first.length
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    assert ("items-overlap", "__0_0.distcp") in faults(ckpttool("verify", root, "--json"))


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--read-subset", "0/3"], 2),
        (["--read-subset", "4/3"], 2),
        (["--read-subset", "0%"], 2),
        (["--read-subset", "101%"], 2),
        (["--read-subset", "much"], 2),
        (["--read-subset", "5"], 2),
        (["--force"], 2),
        (["--threads", "0"], 2),
        (["--write-integrity", "--read-subset", "5%"], 2),
        (["--step", "5"], 3),
    ],
)
def test_words_that_make_no_sense(ckpttool: Callable[..., Call], data: Path, words: list[str], code: int) -> None:
    assert ckpttool("verify", data / FSDP, *words).code == code


def test_no_checkpoint(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    assert ckpttool("verify", tmp_path).code == 3
    assert ckpttool("verify", tmp_path / "nothing").code == 3
    (tmp_path / "notes.txt").write_text("hello")
    assert ckpttool("verify", tmp_path / "notes.txt").code == 3


def test_words_for_people(ckpttool: Callable[..., Call], copy: Callable[[str], Path]) -> None:
    root = copy(FSDP)
    sound = ckpttool("verify", root)
    assert "FSDP role directory: sound" in sound.out
    assert f"ckpttool verify {root} --write-integrity" in sound.out
    builders.truncate(root / "model_world_size_4_rank_1.pt")
    broken = ckpttool("verify", root)
    assert "model_world_size_4_rank_1.pt: truncated" in broken.out
    assert f"ckpttool inspect {root}" in broken.out
    assert len(ckpttool("verify", root, "--quiet").out.splitlines()) == 2


def test_torch_is_not_imported(data: Path) -> None:
    code = (
        "import sys; from ckpttool.cli import main; "
        f"code = main(['verify', {str(data / MEGATRON)!r}, '--values', '-q']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.parametrize("buffered", [True, False])
def test_a_hole_in_the_place_of_a_tensor(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], buffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros where an archive was, as a copy that lost its extents leaves them, are no tensor without a checksum."""
    if not buffered:
        monkeypatch.setattr(checksums, "BUFFER", 1500)
    root = copy(MEGATRON)
    index, entry = max(
        ((index, entry) for index, entry in read_metadata(root).storage_data.items() if "weight" in index.fqn),
        key=lambda item: item[1].length,
    )
    file = root / entry.relative_path
    with file.open("r+b") as handle:
        handle.seek(entry.offset)
        handle.write(bytes(entry.length))
    call = ckpttool("verify", root, "--json")
    assert call.code == 1
    assert faults(call) == [("not-torch-save", file.name)]
    assert index.fqn in messages(call)


@pytest.mark.parametrize("kind", ["megatron/mcore0.16-dense-tp2", "megatron/mcore0.19-dense-tp2"])
def test_a_file_of_zeros_has_no_object_without_a_checksum(
    ckpttool: Callable[..., Call], copy: Callable[[str], Path], kind: str
) -> None:
    """Megatron saves objects as archives, too: every item is told, not taken for one that was saved as it is."""
    role = copy(kind)
    file = role / "__0_0.distcp"
    items = [key for key, path, _, _ in items_of(role) if path == file]
    file.write_bytes(bytes(file.stat().st_size))
    call = ckpttool("verify", role, "--json")
    assert (call.code, faults(call)) == (1, [("not-torch-save", file.name)] * len(items))
    assert all(key in messages(call) for key in items)
