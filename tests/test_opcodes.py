"""Streams that are not to be trusted with C's unpickler: opcodes, lengths, indices, nesting, collisions, chance."""

from __future__ import annotations

import pickle
import pickletools
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ckpttool import opcodes
from ckpttool.errors import BrokenCheckpoint, Refused
from ckpttool.formats import dcp
from ckpttool.formats.torchzip import open_archive
from ckpttool.opcodes import vet
from ckpttool.records import METADATA_NAMES, SHARD_NAMES
from ckpttool.unpickle import check_name, loads
from tests.conftest import DATA
from tests.hostile import PROTO, STOP, confined, named, stacked, text


def accept(_: str, __: str) -> None:
    """Any name will do."""


# Opcodes


NEEDED = """
MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE BINUNICODE8
BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT
SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET BINGET LONG_BINGET BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL
REDUCE BUILD NEWOBJ NEWOBJ_EX PROTO FRAME BINPERSID
"""


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_opcodes_that_no_checkpoint_has_are_refused(opcode: pickletools.OpcodeInfo) -> None:
    refused = f"the opcode {opcode.name}, which no checkpoint needs" in verdict(
        PROTO + b"NNNN(NNNN" + opcode.code.encode("latin-1")
    )
    assert refused == (opcode.name not in NEEDED.split())


def verdict(stream: bytes) -> str:
    try:
        vet(stream, accept, "stream")
    except (BrokenCheckpoint, Refused) as error:
        return error.message
    return "sound"


def test_bytes_that_are_no_opcode_are_damage() -> None:
    """Zeros are what a power cut leaves; nobody's attack."""
    known = set(map(ord, pickletools.code2op))  # type: ignore[attr-defined]
    for op in set(range(256)) - known:
        with pytest.raises(BrokenCheckpoint, match=f"byte {op:#x} at 2 is no instruction"):
            vet(PROTO + bytes([op]), accept, "stream")


@pytest.mark.parametrize(
    ("what", "stream"),
    [
        ("STRING", b"(S'true'\nios\nsystem\n"),
        ("INST", b"(ios\nsystem\n"),
        ("OBJ", b"(" + named("os", "system") + text("true") + b"o"),
        ("EXT1", b"\x82\x01"),
        ("EXT4", b"\x84\x01\x00\x00\x00"),
        ("PERSID", b"Pstorage\n"),
        ("BYTEARRAY8", b"\x96" + (1 << 40).to_bytes(8, "little")),
        ("NEXT_BUFFER", b"\x97"),
        ("POP", b"N0"),
        ("POP_MARK", b"(N1"),
        ("DUP", b"N2"),
        ("LONG4", b"\x8b\xff\xff\xff\x7f"),
        ("INT", b"I1\n"),
        ("PUT", b"Np1\n"),
        ("STRING", b"S'a'\n"),
    ],
)
def test_old_and_indirect_ways_are_refused_by_name(what: str, stream: bytes) -> None:
    for inert in (False, True):
        with pytest.raises(Refused) as caught:
            loads(stream + STOP, METADATA_NAMES if inert else SHARD_NAMES, where="stream", inert=inert)
        assert what in caught.value.message or "os.system" in caught.value.message


def test_a_name_is_checked_before_anything_is_built() -> None:
    """Also where C's unpickler would stop on the way to it."""
    with pytest.raises(Refused, match=r"os\.system"):
        loads(PROTO + b"NNR" + named("os", "system") + STOP, METADATA_NAMES, where="stream", inert=True)


# What the stream makes C allocate or compute


def size8(number: int) -> bytes:
    return number.to_bytes(8, "little")


def integer(value: int) -> bytes:
    raw = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes([len(raw)]) + raw


def doubling(start: bytes, step: bytes, times: int) -> bytes:
    """An object that holds the one before it twice, again and again."""
    return start + b"\x94" + b"".join(b"h" + bytes([n]) + step + b"\x94" for n in range(times))


def doubling_by_calls(times: int) -> bytes:
    """The same, where each step is the idiom of ``torch.Size``, which the walk takes at once."""
    stream, last = b")\x94", 0
    for n in range(times):
        get = b"j" + last.to_bytes(4, "little")
        stream += named("a", "b") + get + get + b"\x86\x94\x85\x94R\x94"
        last = 3 * n + 2
    return stream + b"}j" + last.to_bytes(4, "little") + b"Ns"


PRIME = (1 << 61) - 1  # integers that differ by a multiple of it have the same hash

BOMBS = {
    "memo index, 4 bytes": b"Nr\xff\xff\xff\xff" + STOP,
    "memo index, 1 byte": b"Nq\xff" + STOP,
    "memo index read": b"j\xff\xff\xff\xff" + STOP,
    "bytes": b"\x8e" + size8(1 << 40) + STOP,
    "bytes beyond 63 bits": b"\x8e" + size8((1 << 64) - 1) + STOP,
    "short bytes": b"B\xff\xff\xff\xff" + STOP,
    "string": b"\x8d" + size8(1 << 40) + STOP,
    "short string": b"X\xff\xff\xff\xff" + STOP,
    "bytearray": b"\x96" + size8(1 << 40) + STOP,
    "frame": b"\x95" + size8(1 << 40) + STOP,
    "frame, one byte too long": b"\x95" + size8(3) + b"N" + STOP,
    "long integer": b"\x8b\xff\xff\xff\x7f" + STOP,
    "nested tuples as key": b"})" + b"\x85" * 200_000 + b"Ns" + STOP,
    "nested tuples by mark as key": b"}" + b"(" * 100_000 + b"t" * 100_000 + b"Ns" + STOP,
    "nested frozen sets": b"(" * 100_000 + b"\x91" * 100_000 + STOP,
    "nested tuples in set": b"\x8f()" + b"\x85" * 200_000 + b"\x90" + STOP,
    "doubling tuples": b"}" + doubling(b")", b"\x86", 60) + b"Ns" + STOP,
    "doubling tuples in calls": doubling_by_calls(60) + STOP,
    "one long size for many keys": named("torch", "Size")
    + b"("
    + b"K\x01" * 50_000
    + b"t\x85Rq\x00}"
    + b"h\x00Ns" * 50_000
    + STOP,
    "nested calls with a tuple": b"}" + named("a", "b") + b")" + b"\x85\x94\x85\x94R\x94" * 20_000 + b"Ns" + STOP,
    "colliding integers": b"}(" + b"".join(integer(n * PRIME) + b"N" for n in range(1, 100_000)) + b"u" + STOP,
    "colliding tuples": b"}(" + b"".join(integer(n) + integer(n) + b"\x86N" for n in range(1, 3_000)) + b"u" + STOP,
    "many tuples, one by one": b"}" + b"K\x01\x85Ns" * 3_000 + STOP,
    "many tuples in a set": b"\x8f(" + b"K\x01\x85" * 3_000 + b"\x90" + STOP,
    "many names": b"](" + b"".join(f"cm\nx{n}\n".encode() for n in range(100_000)) + b"e" + STOP,
    "many nested names": b"("
    + b"".join(b"c__builtin__\ngetattr\ncm\nx\n" + text(f"a{n}") + b"\x86R" for n in range(5_000))
    + b"t"
    + STOP,
    "a name without end": b"c" + b"a" * 2_000_000 + b"\nb\n" + STOP,
    "marks without end": b"(" * 2_000_000,
    "nothing": b"",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_bomb_is_broken_at_once(what: str) -> None:
    grown, outcome = confined(PROTO + BOMBS[what], inert=True, seconds=10)
    assert outcome.startswith(("BrokenCheckpoint: stream: not a readable pickle", "Refused: stream: the pickle has"))
    assert grown < 100_000


@pytest.mark.parametrize("what", sorted(BOMBS.keys() - {"many names", "many nested names"}))
def test_the_walk_alone_finds_it(what: str) -> None:
    """C's unpickler never sees it."""
    assert verdict(PROTO + BOMBS[what]) != "sound"


def test_deep_lists_and_records_are_built_and_let_go() -> None:
    """They are hashed by nobody and freed without recursion."""
    record = named("m", "x")
    lists = b"]" * 300_000 + b"a" * 299_999
    dicts = b"}N" * 99_999 + b"}" + b"s" * 99_999
    states = (record + b")\x81") * 100_000 + b"b" * 99_999
    arguments = record * 4_000 + b")" + b"\x85R" * 4_000
    for stream in (lists, dicts, states, arguments):
        assert confined(PROTO + stream + STOP, inert=True)[1] == "loaded"


# Real streams


def streams(root: Path) -> Iterator[tuple[Path, bytes]]:
    """Every pickle of every checkpoint below: shards, indexes, and the records of archives."""
    for path in sorted(root.rglob("*.pt")):
        if not path.name.startswith(("extra_state", "optim")):
            yield path, open_archive(path).read("data.pkl")
    for path in sorted(root.rglob(".metadata")):
        yield path, path.read_bytes()
        for info in dcp.open_(path.parent).tensors.values():
            place = info.pieces[0].place
            archive = open_archive(path.parent / place.file, place.offset, place.length)
            yield path.parent / place.file, archive.read("data.pkl")


def all_streams(roots: list[Path]) -> list[tuple[Path, bytes]]:
    found = {data: path for root in roots for path, data in streams(root)}
    return [(path, data) for data, path in found.items()]


def test_every_real_stream_passes(fsdp_checkpoints: Path, megatron_checkpoints: Path) -> None:
    found = all_streams([DATA, fsdp_checkpoints, megatron_checkpoints])
    assert len(found) > 100
    for path, data in found:
        inert = path.name in (".metadata", "common.pt")
        check = partial(check_name, allowed=METADATA_NAMES if inert else SHARD_NAMES, inert=inert, where=path.name)
        vet(data, check, path.name)


def test_optimizer_shards_pass_the_opcodes(fsdp_checkpoints: Path) -> None:
    for path in sorted(fsdp_checkpoints.rglob("optim_*_rank_0.pt")):
        vet(open_archive(path).read("data.pkl"), accept, path.name)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_framed_and_long_streams_pass(protocol: int) -> None:
    value = [("x" * n, n, float(n), {n: None}, b"y" * n if protocol > 2 else 0) for n in range(2_000)]
    data = pickle.dumps(value, protocol)
    assert loads(data, frozenset(), where="stream")[0] == value


def test_a_few_hundred_tuples_for_keys_pass() -> None:
    value = {(n, str(n)): {(n,)} for n in range(400)}
    assert loads(pickle.dumps(value, 4), frozenset(), where="stream")[0] == value


def _allowing(module: str, name: str) -> None:
    check_name(module, name, SHARD_NAMES, inert=False, where="stream")


def _outcome(stream: bytes, rules: str | None = None) -> type[BaseException] | None:
    try:
        vet(stream, _allowing, "stream", rules=rules)
    except (BrokenCheckpoint, Refused) as error:
        return type(error)
    return None


def test_a_stream_is_let_through_by_its_likeness_only_where_the_walk_would(
    fsdp_checkpoints: Path,
) -> None:
    """Bytes of a real stream changed, beside the stream that passed: the same verdict as a walk of its own."""
    data = open_archive(fsdp_checkpoints / "fsdp2" / "model_world_size_4_rank_0.pt").read("data.pkl")
    for at in range(0, len(data), 5):
        for value in {data[at] ^ 1, 0x2E, 0x52, (data[at] + 7) % 256} - {data[at]}:
            changed = data[:at] + bytes([value]) + data[at + 1 :]
            assert _outcome(data, rules="rules") is None
            assert _outcome(changed, rules="rules") == _outcome(changed)
            opcodes._passed.clear()


def test_the_other_ranks_are_not_walked_again(fsdp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They differ in their coordinates; under other rules nothing has passed."""
    folder = fsdp_checkpoints / "fsdp2"
    first, second = (open_archive(folder / f"model_world_size_4_rank_{r}.pt").read("data.pkl") for r in (0, 1))
    assert first != second
    opcodes._passed.clear()
    vet(first, _allowing, "first", rules="rules")
    with monkeypatch.context() as patch:
        patch.setattr(opcodes, "_walk", lambda *_: pytest.fail("walked"))
        vet(second, _allowing, "second", rules="rules")
    with pytest.raises(Refused):
        loads(second, (), where="second")


def test_what_follows_the_end_is_not_looked_at() -> None:
    assert loads(PROTO + b"N" + STOP + b"\xff" * 10, frozenset(), where="stream")[0] is None


def test_stacked_names_are_checked_when_they_are_built() -> None:
    with pytest.raises(Refused, match=r"os\.system"):
        loads(PROTO + stacked("os", "system") + STOP, METADATA_NAMES, where="stream", inert=True)


# Chance


@pytest.mark.parametrize("kind", ["shard", "metadata", "record"])
def test_no_changed_byte_breaks_out(kind: str, tmp_path: Path) -> None:
    """Random damage to real streams is reported as damage: no crash, no hang, no other exception."""
    command = [sys.executable, "-m", "tests.mutations", kind, str(tmp_path), "300"]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (child.returncode, child.stderr) == (0, "")
    outcomes = dict(line.split(": ") for line in child.stdout.splitlines())
    assert sum(map(int, outcomes.values())) == 300
    assert outcomes.keys() <= {"sound", "problems", "BrokenCheckpoint", "Refused"}
    assert len(outcomes) >= 2
