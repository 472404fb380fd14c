"""Damage real pickles at random and open them: ``python -m tests.mutations KIND FOLDER TIMES``, in a child process."""

from __future__ import annotations

import pickletools
import random
import resource
import shutil
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from ckpttool.errors import CkpttoolError
from ckpttool.formats import dcp, fsdp
from ckpttool.formats.torchzip import open_archive
from ckpttool.records import METADATA_NAMES
from ckpttool.source import Source
from ckpttool.unpickle import loads

DATA = Path(__file__).parent / "data"
SHARDS = sorted((DATA / "fsdp").glob("*/*_rank_1.pt"))
ARCHIVES = sorted((DATA / "megatron").iterdir())


PUSHES = {
    *("BININT", "BININT1", "BININT2", "LONG1", "BINUNICODE", "SHORT_BINUNICODE", "NONE", "NEWTRUE", "NEWFALSE"),
    *("BINGET", "GLOBAL", "EMPTY_TUPLE", "EMPTY_LIST", "EMPTY_DICT"),
}
OTHERS = [
    *(b"N", b"\x88", b"K\x00", b"K\x07", b"J\xff\xff\xff\xff", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"),
    *(b"G\x7f\xf8\0\0\0\0\0\0", b"X\0\0\0\0", b")", b"]", b"}", b"]K\x01a", b"]]a"),
    *(b"K\x00K\x00\x86", b"K\x01\x85\x85", b"]\x85"),
]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Put other values in the place of some, or change the bytes without regard to what they mean."""
    return exchanged(data, chance) if chance.random() < 0.6 else scrambled(data, chance)


def exchanged(data: bytes, chance: random.Random) -> bytes:
    """The structure of the stream stays: this reaches the readers behind the unpickler."""
    at = [position for _, _, position in pickletools.genops(data) if position is not None]
    ops = [op.name for op, _, _ in pickletools.genops(data)]
    pushes = [n for n, name in enumerate(ops) if name in PUSHES]
    parts = [data[a:b] for a, b in pairwise([*at, len(data)])]
    for n in [n for n, name in enumerate(ops) if name == "TUPLE1" and chance.random() < 0.02]:
        parts[n] = chance.choice((b"", b"\x85\x85"))
    for n in chance.sample(pushes, chance.choice((1, 1, 2, 5))):
        parts[n] = chance.choice((*OTHERS, b"h" + bytes([chance.randrange(60)]), parts[chance.choice(pushes)]))
    return b"".join(parts)


def scrambled(data: bytes, chance: random.Random) -> bytes:
    """Change, remove, insert, repeat or move a few bytes."""
    raw = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4))):
        at, length = chance.randrange(len(raw)), chance.choice((1, 1, 2, 8, 40))
        kind = chance.randrange(5)
        if kind == 0:
            raw[at] = chance.randrange(256)
        elif kind == 1:
            del raw[at : at + length]
        elif kind == 2:
            raw[at:at] = chance.randbytes(length)
        elif kind == 3:
            raw[at:at] = raw[at : at + length]
        else:
            other = chance.randrange(len(raw))
            raw[at : at + length] = raw[other : other + length]
    return bytes(raw)


def shard(folder: Path, chance: random.Random) -> Source:
    """One rank of an FSDP checkpoint, its ``data.pkl`` damaged."""
    path = chance.choice(SHARDS)
    target = folder / path.name
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for entry in old.infolist():
            data = old.read(entry)
            new.writestr(entry.filename, mutated(data, chance) if entry.filename.endswith("data.pkl") else data)
    return fsdp.open_(folder)


def metadata(folder: Path, chance: random.Random) -> Source:
    """The index of a Megatron checkpoint, damaged."""
    root = chance.choice(ARCHIVES)
    shutil.copyfile(root / "metadata.json", folder / "metadata.json")
    (folder / ".metadata").write_bytes(mutated((root / ".metadata").read_bytes(), chance))
    return dcp.open_(folder)


def record(_: Path, chance: random.Random) -> Source | None:
    """The common state of a Megatron checkpoint, damaged, by the unpickler alone."""
    data = open_archive(DATA / "megatron/mcore0.16-dense-tp2/common.pt").read("data.pkl")
    loads(mutated(data, chance), METADATA_NAMES, where="common.pt", inert=True)
    return None


def attempt(open_one: Callable[[Path, random.Random], Source | None], folder: Path, seed: int) -> str:
    """What one damaged checkpoint comes to; exceptions that are not ours end the process."""
    try:
        source = open_one(folder, random.Random(seed))
    except CkpttoolError as error:
        return type(error).__name__
    return "problems" if source is not None and any(p.code != "rank-missing" for p in source.problems) else "sound"


def main(kind: str, folder: Path, times: int) -> None:
    """Count the outcomes."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    makers: dict[str, Callable[[Path, random.Random], Source | None]] = {
        "shard": shard,
        "metadata": metadata,
        "record": record,
    }
    outcomes: Counter[str] = Counter()
    for seed in range(times):
        target = folder / str(seed)
        target.mkdir()
        try:
            outcomes[attempt(makers[kind], target, seed)] += 1
        except Exception:
            sys.stderr.write(f"{kind}, seed {seed}\n")
            raise
        shutil.rmtree(target)
    for name, count in outcomes.items():
        sys.stdout.write(f"{name}: {count}\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
