"""Inputs that are sound in form and enormous in number: ``python -m tests.campaign.extremes FOLDER NAME`` tries one.

What a reader allocates is bounded by what lies on the disk, and what lies on the disk here is a lot.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.campaign.inputs import DEMO, KNOWN
from tests.campaign.outcomes import Outcome, Outcomes

MANY = 1_000_000
SHARD = "model_world_size_4_rank_1.pt"


def many_records(folder: Path) -> None:
    """A shard with a million records of no bytes."""
    shutil.copytree(DEMO / "fsdp", folder)
    names = [b"archive/data.pkl", *(b"archive/data/%07d" % n for n in range(MANY))]
    local, central, at = bytearray(), bytearray(), 0
    for name in names:
        local += b"PK\3\4" + struct.pack("<5H3L2H", 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name
        central += (
            b"PK\1\2" + struct.pack("<6H3L5H2L", 20, 20, 0, 0, 0, 0, 0, 0, 0, len(name), 0, 0, 0, 0, 0, at) + name
        )
        at = len(local)
    end64 = b"PK\6\6" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, len(names), len(names), len(central), len(local))
    locator = b"PK\6\7" + struct.pack("<LQL", 0, len(local) + len(central), 1)
    end = b"PK\5\6" + struct.pack("<HHHHLLH", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (folder / SHARD).write_bytes(local + central + end64 + locator + end)


def claimed_records(folder: Path) -> None:
    """A shard that claims more records than there are atoms in its bytes."""
    shutil.copytree(DEMO / "fsdp", folder)
    end64 = b"PK\6\6" + struct.pack("<QHHLLQQQQ", 44, 45, 45, 0, 0, 2**60, 2**60, 46, 0)
    end = b"PK\6\7" + struct.pack("<LQL", 0, 46, 1) + b"PK\5\6" + struct.pack("<4HLLH", 0, 0, 0xFFFF, 0xFFFF, 46, 0, 0)
    (folder / SHARD).write_bytes(b"PK\1\2".ljust(46, b"\0") + end64 + end)


def many_tensors(folder: Path) -> None:
    """A safetensors file with a million tensors of no elements."""
    folder.mkdir()
    entry = b'"t%07d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    header = b"{" + b",".join(entry % n for n in range(MANY)) + b"}"
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def many_names(folder: Path) -> None:
    """An index with a million names, and a file that has none of them."""
    shutil.copytree(DEMO / "fsdp" / "huggingface", folder)
    index = {"weight_map": {f"t{n:07d}": "model-00001-of-00002.safetensors" for n in range(MANY)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")


def many_files(folder: Path) -> None:
    """A hundred thousand files beside the shards."""
    shutil.copytree(DEMO / "fsdp", folder)
    for n in range(100_000):
        os.close(os.open(folder / f"model-{n:06d}.safetensors", os.O_CREAT | os.O_WRONLY))


def many_folders(folder: Path) -> None:
    """Two thousand steps without anything in them."""
    for n in range(2_000):
        (folder / f"global_step_{n}" / "actor").mkdir(parents=True)


def many_keys(folder: Path) -> None:
    """An index of torch's with a million entries that are none."""
    folder.mkdir()
    items = b"".join(b"X\x08\0\0\0t%07dN" % n for n in range(MANY))
    (folder / ".metadata").write_bytes(b"\x80\x02}(" + items + b"u.")
    (folder / "__0_0.distcp").write_bytes(b"\0" * 100)


def deep(folder: Path) -> None:
    """Directories in directories, as many as the system takes in one path."""
    below = folder
    while len(str(below)) < 3_900:
        below /= "d" * 50
    below.mkdir(parents=True)
    shutil.copyfile(DEMO / "fsdp" / SHARD, below / SHARD)


CASES: dict[str, Callable[[Path], None]] = {
    make.__name__: make
    for make in (many_records, claimed_records, many_tensors, many_names, many_files, many_folders, many_keys, deep)
}

COMMANDS = (
    ("inspect", "{}", "--json"),
    ("diff", "{}", "{}", "--json"),
    ("verify", "{}"),
    ("merge-fsdp", "{}", "-o", "{}.out"),
    ("watch", "{}", "--once", "--interval", "1ms", "--keep-last", "1", "--yes"),
)


def main(folder: Path, name: str) -> None:
    """Try every command on one of them; print an outcome a line."""
    from tests.campaign import broken
    from tests.damaging import peak

    target = folder / name
    CASES[name](target)
    broken.confine()
    for command in [command for command in COMMANDS if command[0] in KNOWN]:
        Path("/proc/self/clear_refs").write_text("5")
        before, begin = peak(), time.monotonic()
        done = broken.tried([word.format(target) for word in command])
        grown, took = peak() - before >> 20, time.monotonic() - begin
        wrong = [f"exit code {done.code}"] * (done.code not in range(8))
        wrong += [f"grown by {grown} MiB"] * (grown > broken.MEMORY >> 20)
        wrong += ["names no file"] * (done.code in (3, 4) and name not in done.out + done.err)
        wrong += [f"it has left {path}" for path in folder.glob("*.out*") if done.code]
        said = (f"{grown} MiB, {took:.1f} s", done.err[-1000:] + done.out[-300:])
        outcome = Outcome((name, command[0]), str(done.code), (*wrong, *said) if wrong else ())
        shutil.rmtree(f"{target}.out", ignore_errors=True)
        sys.stdout.write(json.dumps(outcome) + "\n")
        sys.stderr.write(f"{name} {command[0]}: {done.code}, {grown} MiB, {took:.1f} s\n")
    shutil.rmtree(target)


def campaign(folder: Path, names: tuple[str, ...] = tuple(CASES)) -> Outcomes:
    """Try them one after the other, each in a child of its own."""
    found = Outcomes()
    for name in names:
        line = [sys.executable, "-m", "tests.campaign.extremes", str(folder), name]
        child = subprocess.run(line, capture_output=True, text=True, check=False)
        for said in child.stdout.splitlines():
            what, *rest = json.loads(said)
            found.add(Outcome(tuple(what), rest[0], tuple(rest[1])))
        if child.returncode:
            found.add(Outcome((name,), str(child.returncode), (child.stderr[-2000:],)))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
