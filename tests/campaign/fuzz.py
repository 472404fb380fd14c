"""Coverage-guided fuzzing, by hand: ``python -m tests.campaign.fuzz unpickle|zip|safetensors [-runs=N] [FOLDER]``.

Needs the extra ``fuzz``. What comes after the target's name goes to libFuzzer; a folder keeps the inputs that reached
something new. Nothing but our own errors may leave a reader; what hangs or takes more memory than the limits below
is a fault as well. Each is left in a file of its own, to be kept as a test once it is fixed.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickletools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ckpttool"]):
    from ckpttool.errors import CkpttoolError
    from ckpttool.formats.safetensorsfile import Entry, header_bytes, read_safetensors
    from ckpttool.formats.torchzip import SMALL, open_archive
    from ckpttool.records import METADATA_NAMES, SHARD_NAMES, stored_tensor
    from ckpttool.unpickle import loads, said

from safetensors import SafetensorError, deserialize

from tests.campaign.payloads import payloads
from tests.damaging import ODD
from tests.mutations import mutated

DATA = Path(__file__).resolve().parent.parent / "data"
LIMITS = ("-rss_limit_mb=1024", "-malloc_limit_mb=512", "-timeout=10", "-max_len=20000")


def unpickle(data: bytes) -> None:
    """The first byte says by which rules the others are read; what comes of it is looked at as a reader would."""
    inert = bool(data[:1] and data[0] % 2)
    with contextlib.suppress(CkpttoolError):
        value, _ = loads(data[1:], METADATA_NAMES if inert else SHARD_NAMES, where="stream", inert=inert)
        assert len(said(value)) < 100_000
        for one in list(value.values())[:100] if isinstance(value, dict) else [value]:
            with contextlib.suppress(CkpttoolError):
                stored_tensor(one)


def of_file(read: Callable[[Path], None]) -> Callable[[bytes], None]:
    """A target that wants a file: one without a disk below it, where there is such a directory."""
    shared = Path("/dev/shm")
    handle, name = tempfile.mkstemp(dir=shared if shared.is_dir() else None)
    os.close(handle)

    def target(data: bytes) -> None:
        Path(name).write_bytes(data)
        with contextlib.suppress(CkpttoolError):
            read(Path(name))

    return target


def archive(path: Path) -> None:
    """All that is listed is looked for; no record is longer than the file, and none lies outside of it."""
    found = open_archive(path)
    size = path.stat().st_size
    for name, entry in found.entries.items():
        with contextlib.suppress(CkpttoolError):
            assert 0 <= found.payload(name) <= size - entry.size
            assert len(found.read(name)) == entry.size <= SMALL


def header(path: Path) -> None:
    """What we take for tensors, the safetensors library takes for the same tensors, if it takes the file at all."""
    ours = read_safetensors(path)
    try:
        theirs = dict(deserialize(path.read_bytes()))
    except SafetensorError:
        return
    assert {name: list(tensor.shape) for name, tensor in ours.items()} == {n: t["shape"] for n, t in theirs.items()}
    assert all(tensor.pieces[0].place.length == len(theirs[name]["data"]) for name, tensor in ours.items())


TARGETS = {"unpickle": unpickle, "zip": of_file(archive), "safetensors": of_file(header)}


def streams() -> Iterator[bytes]:
    """Pickles to begin with: of small real checkpoints, and made to do harm."""
    for path in sorted((DATA / "fsdp").glob("*/*_rank_0.pt"))[:8]:
        yield b"\0" + open_archive(path).read("data.pkl")
    for path in sorted((DATA / "megatron").glob("*/.metadata"))[:3]:
        yield b"\1" + path.read_bytes()
    for payload in payloads(Path("marker")).values():
        yield b"\1" + payload.stream
        yield b"\0" + payload.stream


def files(pattern: str) -> Iterator[bytes]:
    """Whole files to begin with."""
    for path in sorted(DATA.rglob(pattern)):
        if path.stat().st_size < 20_000:
            yield path.read_bytes()


def headers() -> Iterator[bytes]:
    """Small files of our own writing: the library's own are written in tests."""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = (("float32", (2, 3)), ("bfloat16", ()), ("int8", (0, 4)))
    entries = [Entry(f"t{at}", dtype, shape) for at, (dtype, shape) in enumerate(shapes)]
    for count in (0, 1, 3):
        yield header_bytes(entries[:count], 8) + bytes((0, 24, 26, 26)[count])
    yield from files("*.safetensors")


SEEDS: dict[str, Callable[[], Iterator[bytes]]] = {
    "unpickle": streams,
    "zip": lambda: files("*.pt"),
    "safetensors": headers,
}


def other_values(data: bytes, most: int, seed: int) -> bytes:
    """Half of the time change values of the pickle, of which libFuzzer knows nothing."""
    chance = random.Random(seed)
    try:
        if chance.random() < 0.5:
            list(pickletools.genops(data[1:]))
            return (data[:1] + mutated(data[1:], chance))[:most]
    except (ValueError, IndexError, OverflowError):
        pass  # it is none any more
    return bytes(atheris.Mutate(data, most))


def other_header(data: bytes, most: int, seed: int) -> bytes:
    """Half of the time change a value of the header, and let its length be right."""
    chance = random.Random(seed)
    length = int.from_bytes(data[:8], "little")
    try:
        if chance.random() < 0.5:
            fields = json.loads(data[8 : 8 + length])
            entry = fields[chance.choice(sorted(fields))]
            holder = chance.choice((fields, entry, entry["shape"], entry["data_offsets"]))
            key = chance.choice(sorted(holder) if isinstance(holder, dict) else range(len(holder)))
            holder[key] = chance.choice((*ODD, *range(20), [0, 4], [4, 0], [2, 2], "F32", "I8", "F4"))
            text = json.dumps(fields).encode()
            return (len(text).to_bytes(8, "little") + text + data[8 + length :])[:most]
    except (ValueError, LookupError, TypeError, RecursionError):
        pass  # it is none any more
    return bytes(atheris.Mutate(data, most))


MUTATORS = {"unpickle": other_values, "safetensors": other_header}


def main(target: str, options: list[str]) -> None:
    """Never returns: libFuzzer ends the process."""
    folder = Path(tempfile.mkdtemp(prefix=f"ckpttool-fuzz-{target}-"))
    for at, seed in enumerate(SEEDS[target]()):
        (folder / f"{at:04}").write_bytes(seed)
    more = {"custom_mutator": MUTATORS[target]} if target in MUTATORS else {}
    atheris.Setup([sys.argv[0], *LIMITS, *options, str(folder)], TARGETS[target], **more)
    atheris.Fuzz()


if __name__ == "__main__":
    if sys.argv[1:2] == [] or sys.argv[1] not in TARGETS:
        sys.exit(f"one of {', '.join(TARGETS)}")
    main(sys.argv[1], sys.argv[2:])
