"""Damage whole roles and convert them: ``python -m tests.damaging ROLES FOLDER FIRST TIMES``, in a child process.

``ROLES`` has a directory for each role: ``role/`` with what `to-hf` reads and, where one is tried, ``like/``. What a
role becomes undamaged is what it has to become damaged, if it becomes anything: that this is right, others test.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ckpttool.cli import main as ckpttool
from ckpttool.formats.dcp import open_
from ckpttool.formats.payload import locate
from tests.mutations import mutated, scrambled

SECONDS = 10
"""What one conversion of a tiny role may take."""

MEMORY = 300 << 20
"""Bytes that the process may have held at once, all conversions together."""

CODES = {0, 2, 3, 4, 5, 6, 7}
OPTIONS = ((), (), ("--dtype", "bf16"), ("--dtype", "fp16"), ("--max-shard-size", "20kB", "--threads", "2"))

ODD: tuple[Any, ...] = (
    *("", "3", "\ud800", "a\0b", None, True, False, -1, 0, 1, 2, 3, 5, 1.5, -0.0, 1e300, 1 << 31, 1 << 70, 10**400),
    *([], {}, [1], [None], [[[]]], {"a": {}}, {"model_type": "llama"}, ["LlamaForCausalLM"], "llama", float("nan")),
)
CHANGES = {"vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings"}
"""Fields of which another value can make another model of the same tensors: shapes do not show heads."""

OTHER_MAPS = {"model_type", "architectures", "num_labels", "id2label", "layer_types", "text_config"}
"""Fields of which another value can choose another map, or another head."""


class Tensor(NamedTuple):
    """A tensor of an output, by its header."""

    dtype: str
    shape: tuple[int, ...]
    content: bytes


Tensors = dict[str, Tensor]


class Damage(NamedTuple):
    """What was done, how many bytes of tensors were changed by it; ``free`` is whether other tensors may come of it."""

    what: str
    changed: int = 0
    free: bool = False


def tensors_in(output: Path) -> Tensors:
    """All tensors of an output, by hand: torch would take more memory than the conversion."""
    found: Tensors = {}
    for file in sorted(output.glob("*.safetensors")):
        raw = file.read_bytes()
        begin = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:begin]).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                found[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[begin + first : begin + end])
    return found


def differences(one: Tensors, other: Tensors) -> int:
    """How many elements differ; all of them where names, dtypes or shapes do."""
    count = 0
    if {name: t[:2] for name, t in one.items()} != {name: t[:2] for name, t in other.items()}:
        return 1 << 60
    for name, (dtype, _, content) in one.items():
        width = {"F64": 8, "I64": 8, "F32": 4, "BF16": 2, "F16": 2}[dtype]
        if content != other[name].content:
            parts = (range(0, len(content), width),)
            count += sum(content[at : at + width] != other[name].content[at : at + width] for at in parts[0])
    return count


@lru_cache(maxsize=64)
def payloads(archive: Path) -> dict[str, tuple[tuple[int, int], ...]]:
    """Where elements of the model lie in each file of an undamaged archive."""
    source = open_(archive)
    found: dict[str, list[tuple[int, int]]] = {}
    for name, tensor in source.tensors.items():
        if source.part_of(name) == "model":
            for piece in tensor.pieces:
                path = archive / piece.place.file
                handle = os.open(path, os.O_RDONLY)
                payload = locate(str(path), handle, piece.place)
                os.close(handle)
                found.setdefault(piece.place.file, []).append((payload.offset, payload.offset + payload.length))
    return {file: tuple(sorted(ranges)) for file, ranges in found.items()}


def damage(role: Path, original: Path, chance: random.Random) -> Damage:
    """Damage one thing of a role that is a copy."""
    ways: tuple[Callable[[Path, Path, random.Random], Damage], ...] = (
        *(of_index, of_index, of_data, of_data, of_data, of_config, of_config, of_config),
        *(of_json, of_common, of_files),
    )
    return chance.choice(ways)(role, original, chance)


def archive_of(role: Path) -> Path:
    return role / "dist_ckpt"


def of_index(role: Path, _: Path, chance: random.Random) -> Damage:
    """Other values in ``.metadata``, other bytes, or fewer."""
    path = archive_of(role) / ".metadata"
    raw = path.read_bytes()
    if chance.random() < 0.1:
        path.write_bytes(raw[: chance.randrange(len(raw))])
        return Damage("index cut")
    path.write_bytes(mutated(raw, chance))
    return Damage("index")


def of_data(role: Path, original: Path, chance: random.Random) -> Damage:
    """Other bytes in a data file, more around the elements than in them; of other length only now and then."""
    path = chance.choice(sorted(archive_of(role).glob("*.distcp")))
    raw = path.read_bytes()
    if chance.random() < 0.15:
        path.write_bytes(scrambled(raw, chance) if chance.random() < 0.7 else raw[: chance.randrange(len(raw))])
        if path.stat().st_size != len(raw):
            return Damage("data of other length")
    else:
        path.write_bytes(_overwritten(raw, payloads(archive_of(original)).get(path.name, ()), chance))
    new = path.read_bytes()
    held = payloads(archive_of(original)).get(path.name, ())
    return Damage("data", sum(raw[at] != new[at] for begin, end in held for at in range(begin, end)))


def _overwritten(raw: bytes, held: tuple[tuple[int, int], ...], chance: random.Random) -> bytes:
    """Flip, zero, swap or repeat bytes in their place, by preference around the begin or the end of elements."""
    new = bytearray(raw)
    for _ in range(chance.choice((1, 1, 1, 2, 6))):
        length = chance.choice((1, 1, 1, 4, 16, 64, 400))
        begin, end = chance.choice(held) if held else (0, len(raw))
        at = chance.choice((begin - chance.randrange(1, 720), end + chance.randrange(800), chance.randrange(len(raw))))
        at = min(max(at, 0), len(raw) - length)
        other = chance.randrange(len(raw) - length)
        how = chance.randrange(5)
        if how == 0:
            new[at] ^= 1 << chance.randrange(8)
        elif how == 1:
            new[at : at + length] = bytes(length)
        elif how == 2:
            new[at : at + length], new[other : other + length] = new[other : other + length], new[at : at + length]
        elif how == 3:
            new[at : at + length] = new[other : other + length]
        else:
            new[at] = chance.randrange(256)
    return bytes(new)


def of_config(role: Path, _: Path, chance: random.Random) -> Damage:
    """Another value in a field of the config, or other bytes in it."""
    path = role / "huggingface" / "config.json"
    if chance.random() < 0.15:
        path.write_bytes(scrambled(path.read_bytes(), chance))
        return Damage("config bytes", free=True)
    fields = json.loads(path.read_text())
    names = [chance.choice(sorted(fields)) for _ in range(chance.choice((1, 1, 1, 2)))]
    for name in names:
        if chance.random() < 0.1:
            fields.pop(name, None)
        else:
            fields[name] = chance.choice(ODD)
    path.write_text(json.dumps(fields))
    return Damage(f"config {' '.join(names)}", free=bool((CHANGES | OTHER_MAPS).intersection(names)))


def of_json(role: Path, _: Path, chance: random.Random) -> Damage:
    """Other bytes or values in the small files around: what the run says of itself, a reference's index."""
    around = [archive_of(role) / "metadata.json", role / "transformer_config.json", role / "generation_config.json"]
    around += sorted((role.parent / "like").glob("*.json"))
    path = chance.choice([file for file in around if file.is_file()])
    raw = path.read_bytes()
    how = chance.randrange(4)
    if how == 0:
        path.write_bytes(raw[: chance.randrange(len(raw))])
    elif how == 1:
        path.write_bytes(scrambled(raw, chance))
    else:
        fields = json.loads(raw)
        inner = fields["weight_map"] if "weight_map" in fields and how == 2 else fields
        inner[chance.choice(sorted(inner))] = chance.choice(ODD)
        if chance.random() < 0.3:
            inner.pop(chance.choice(sorted(inner)))
        path.write_text(json.dumps(fields))
    return Damage(f"json {path.name}", free=path.name in ("transformer_config.json", "config.json"))


def of_common(role: Path, _: Path, chance: random.Random) -> Damage:
    """Other bytes in ``common.pt``, which no tensor is in."""
    path = archive_of(role) / "common.pt"
    if path.is_file():
        path.write_bytes(scrambled(path.read_bytes(), chance))
    else:
        path.write_bytes(chance.randbytes(chance.randrange(200)))
    return Damage("common")


def of_files(role: Path, _: Path, chance: random.Random) -> Damage:
    """A file that is gone, has another name, is a directory, a link to itself, or empty."""
    path = chance.choice(sorted(path for path in role.rglob("*") if path.is_file()))
    how = chance.randrange(6)
    if how == 0:
        path.rename(path.with_name(f"x{path.name}"))
    elif how == 1:
        path.write_bytes(b"")
    elif how == 2:
        path.rename(path.with_name("__7_7.distcp"))
    else:
        path.unlink()
        if how == 4:
            path.mkdir()
        elif how == 5:
            path.symlink_to(path.name)
    return Damage(f"file {path.name}")


class Hanging(BaseException):
    """A conversion that takes longer: no ``Exception``, or it would be taken for one of the tool's."""


def _hangs(_number: int, _frame: object) -> None:
    raise Hanging


class Tried(NamedTuple):
    """What a command line did."""

    code: int
    said: str


def run(role: Path, output: Path, options: tuple[str, ...]) -> Tried:
    """One command line in this process."""
    like = role.parent / "like"
    more = ("--like", str(like)) if like.is_dir() else ()
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = ckpttool(["to-hf", str(role), "-o", str(output), "--json", *more, *options])
    return Tried(code, out.getvalue() + err.getvalue())


def in_time(role: Path, output: Path, options: tuple[str, ...]) -> Tried:
    """The same; one that hangs has no exit code of the table."""
    signal.alarm(SECONDS)
    try:
        return run(role, output, options)
    except Hanging:
        return Tried(-1, "hangs")
    finally:
        signal.alarm(0)


def fingerprint(folder: Path) -> dict[str, Any]:
    """Every entry of a directory with its bytes and its time."""
    return {
        str(path.relative_to(folder)): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


@lru_cache(maxsize=256)
def expected(case: Path, folder: Path, options: tuple[str, ...]) -> Tensors:
    """What an undamaged role becomes."""
    output = folder / f"{case.name}.expected"
    done = run(case / "role", output, options)
    assert done.code == 0, done.said
    found = tensors_in(output)
    shutil.rmtree(output)
    return found


def attempt(cases: list[Path], folder: Path, seed: int) -> tuple[str, int]:
    """Damage one role and convert it: what was done and the exit code. Anything that may not be is an error."""
    chance = random.Random(seed)
    case, options = chance.choice(cases), chance.choice(OPTIONS)
    wanted = expected(case, folder, options)
    copy = folder / str(seed)
    shutil.copytree(case, copy)
    what = damage(copy / "role", case / "role", chance)
    before = fingerprint(copy)
    output = folder / f"{seed}.out"
    done = in_time(copy / "role", output, options)
    where = f"{case.name} {' '.join(options)}: {what}: {done}"
    assert done.code in CODES, where
    assert fingerprint(copy) == before, where
    assert output.exists() == (done.code == 0), where
    assert sorted(path.name for path in folder.iterdir() if path.name.startswith(output.name)) == [output.name] * (
        done.code == 0
    ), where
    if done.code == 0 and not what.free:
        assert differences(wanted, tensors_in(output)) <= what.changed, where
    shutil.rmtree(copy)
    shutil.rmtree(output, ignore_errors=True)
    return what.what.split()[0], done.code


def peak() -> int:
    """Bytes that this process has held at most (``ru_maxrss`` would have the parent's)."""
    said = Path("/proc/self/status")
    if not said.is_file():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return int(said.read_text().partition("VmHWM:")[2].split()[0]) << 10


def main(roles: Path, folder: Path, first: int, times: int) -> int:
    """Count the outcomes, and tell of every seed that came to what may not be."""
    signal.signal(signal.SIGALRM, _hangs)
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
    outcomes: Counter[tuple[str, int]] = Counter()
    cases, bad = sorted(path for path in roles.iterdir() if path.is_dir()), 0
    for seed in range(first, first + times):
        try:
            outcomes[attempt(cases, folder, seed)] += 1
        except AssertionError as error:
            bad += 1
            sys.stderr.write(f"seed {seed}: {str(error)[:1500]}\n")
        if peak() > MEMORY:
            bad += 1
            sys.stderr.write(f"seed {seed}: {peak():,} bytes\n")
            Path("/proc/self/clear_refs").write_text("5")  # the next one begins anew
    for (what, code), count in sorted(outcomes.items()):
        sys.stdout.write(f"{what} {code}: {count}\n")
    sys.stdout.write(f"peak {peak() >> 20} MiB\n")
    return min(bad, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
