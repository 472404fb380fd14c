"""What happens to files of checkpoints: each way damages one file, or what lies in its place."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
import warnings
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign import layouts
from tests.campaign.layouts import EXTREMES, WEIRD
from tests.damaging import ODD, payloads
from tests.mutations import mutated, scrambled


class Damage(NamedTuple):
    """The way, the files that are damaged (below the input), and how many bytes of tensors differ afterwards.

    ``free`` is whether an output may hold other tensors than the undamaged one, without a word about it.
    """

    way: str
    files: tuple[str, ...]
    detail: str = ""
    changed: int = 0
    free: bool = False
    closed: bool = False
    """Whether only who is not root is kept out."""


Way = Callable[[Path, Path, random.Random], Damage]


def files_in(folder: Path, *kinds: str) -> list[Path]:
    """Regular files, of these formats if any are asked for."""
    found = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return [path for path in found if not kinds or layouts.kind_of(path) in kinds]


def drawn(folder: Path, chance: random.Random, *kinds: str) -> Path:
    """One of them; any, where there is none of these formats."""
    return chance.choice(files_in(folder, *kinds) or files_in(folder))


def lost(path: Path, folder: Path, original: Path) -> int:
    """How many bytes of tensors are others than they were, in a file that has kept its length."""
    old, new = (original / path.relative_to(folder)).read_bytes(), path.read_bytes()
    return sum(a != b for held in held_in(original / path.relative_to(folder)) for a, b in _pairs(old, new, held))


def _pairs(old: bytes, new: bytes, held: range) -> zip[tuple[int, int]]:
    return zip(old[held.start : held.stop], new[held.start : held.stop], strict=False)


def held_in(path: Path) -> list[range]:
    """Where the bytes of tensors lie in an undamaged file."""
    raw, kind = path.read_bytes(), layouts.kind_of(path)
    if path.suffix == ".distcp":
        found = payloads(path.parent).get(path.name, ())
        return [range(*ends) for ends in found] or [range(len(raw))]
    if kind == "zip" and raw.startswith(b"PK"):
        return list(layouts.records(raw).values())
    return [range(8 + int.from_bytes(raw[:8], "little"), len(raw))] if kind == "safetensors" else []


# Bytes


def cut(folder: Path, _: Path, chance: random.Random) -> Damage:
    """A file ends at a border of its structure, or a byte from there, or anywhere."""
    path = drawn(folder, chance)
    raw = path.read_bytes()
    at = chance.choice(layouts.borders(path, raw)) + chance.choice((-1, 0, 0, 0, 1))
    if chance.random() < 0.3:
        at = chance.randrange(len(raw))
    path.write_bytes(raw[: max(0, min(at, len(raw) - 1))])
    return Damage("cut", (path.name,), f"at {at} of {len(raw)}")


def flip(folder: Path, original: Path, chance: random.Random) -> Damage:
    """Single bits, more often in the structure than in payloads."""
    path = drawn(folder, chance)
    raw, held = bytearray(path.read_bytes()), held_in(original / path.relative_to(folder))
    places = []
    for _ in range(chance.choice((1, 1, 2, 4))):
        at = chance.randrange(len(raw))
        for _ in range(20):
            if any(at in one for one in held) and chance.random() < 0.95:
                at = chance.randrange(len(raw))
        raw[at] ^= 1 << chance.randrange(8)
        places.append(at)
    path.write_bytes(raw)
    free = layouts.kind_of(path) in ("json", "")
    return Damage("flip", (path.name,), f"at {places}", lost(path, folder, original), free)


def scramble(folder: Path, original: Path, chance: random.Random) -> Damage:
    """Bytes removed, inserted, repeated or moved."""
    path = drawn(folder, chance)
    raw = path.read_bytes()
    path.write_bytes(scrambled(raw, chance))
    changed = lost(path, folder, original) if path.stat().st_size == len(raw) else 0
    return Damage("scramble", (path.name,), "", changed, layouts.kind_of(path) in ("json", "", "pickle"))


def zip_number(folder: Path, _: Path, chance: random.Random) -> Damage:
    """A size, an offset, a count or a method of a zip archive."""
    path = drawn(folder, chance, "zip")
    raw = bytearray(path.read_bytes())
    fields = layouts.zip_fields(bytes(raw))
    if not fields:
        return cut(folder, _, chance)
    field = chance.choice(fields)
    old = int.from_bytes(raw[field.at : field.at + field.width], "little")
    value = chance.choice((*EXTREMES, old + 1, old - 1, old * 2, old + 64)) % (1 << 8 * field.width)
    raw[field.at : field.at + field.width] = value.to_bytes(field.width, "little")
    path.write_bytes(raw)
    return Damage("zip number", (path.name,), f"at {field.at}: {old} is {value}")


def pickled(folder: Path, _: Path, chance: random.Random) -> Damage:
    """The pickle of an index or of an archive: other numbers, other names, deeper, cut, or anything else."""
    path = drawn(folder, chance, "zip", "pickle")
    raw = path.read_bytes()
    how = chance.choice((other_number, other_number, other_text, deeper, mutated, shorter))
    try:
        path.write_bytes(how(raw, chance) if layouts.kind_of(path) == "pickle" else repacked(raw, how, chance))
    except (zipfile.BadZipFile, ValueError, IndexError):
        return cut(folder, _, chance)
    return Damage("pickle", (path.name,), how.__name__, free=True)


def repacked(raw: bytes, how: Callable[[bytes, random.Random], bytes], chance: random.Random) -> bytes:
    """The archive with another ``data.pkl``, or with fewer, more, compressed or renamed records."""
    file, style = BytesIO(), chance.randrange(12)
    with warnings.catch_warnings(), zipfile.ZipFile(BytesIO(raw)) as old, zipfile.ZipFile(file, "w") as new:
        warnings.filterwarnings("ignore", message="Duplicate name")
        for entry in old.infolist():
            data, name = old.read(entry), entry.filename
            packed = zipfile.ZIP_DEFLATED if style == 0 else zipfile.ZIP_STORED
            if style == 1 and chance.random() < 0.1:
                name = chance.choice([weird for weird in WEIRD if len(weird) < 60_000 and weird.isprintable()])
            if style == 2 and chance.random() < 0.1:
                continue
            new.writestr(name, how(data, chance) if name.endswith("data.pkl") and style > 1 else data, packed)
    return file.getvalue()


def other_number(raw: bytes, chance: random.Random) -> bytes:
    """Numbers near the ends of what fits into 31, 63 and 64 bits, or below zero."""
    parts = layouts.instructions(raw)
    numbers = [n for n, (name, _, _) in enumerate(parts) if name in ("BININT", "BININT1", "BININT2", "LONG1")]
    new = [data for _, _, data in parts]
    for n in chance.sample(numbers, min(len(numbers), chance.choice((1, 1, 2, 8)))):
        value = chance.choice((*EXTREMES, parts[n][1] + 1, parts[n][1] - 1, -parts[n][1]))
        new[n] = layouts.number(value)
    return b"".join(new)


def other_text(raw: bytes, chance: random.Random) -> bytes:
    """Names that are none."""
    parts = layouts.instructions(raw)
    texts = [n for n, (name, _, _) in enumerate(parts) if "UNICODE" in name]
    new = [data for _, _, data in parts]
    for n in chance.sample(texts, min(len(texts), chance.choice((1, 1, 3)))):
        new[n] = layouts.text(chance.choice(WEIRD))
    return b"".join(new)


def deeper(raw: bytes, chance: random.Random) -> bytes:
    """One value lies in a hundred thousand tuples or lists."""
    parts = [data for _, _, data in layouts.instructions(raw)]
    n, depth = chance.randrange(2, len(parts) - 1), chance.choice((10, 1_000, 100_000))
    parts[n] = chance.choice((parts[n] + b"\x85" * depth, b"]" * depth + parts[n] + b"a" * depth, b"(" * depth))
    return b"".join(parts)


def shorter(raw: bytes, chance: random.Random) -> bytes:
    """The stream ends after any of its instructions."""
    parts = [data for _, _, data in layouts.instructions(raw)]
    return b"".join(parts[: chance.randrange(len(parts))])


def json_value(folder: Path, _: Path, chance: random.Random) -> Damage:
    """Another value, key or depth in JSON, that of a safetensors header included."""
    path = drawn(folder, chance, "json", "safetensors")
    raw, is_header = path.read_bytes(), layouts.kind_of(path) == "safetensors"
    begin = 8 + int.from_bytes(raw[:8], "little") if is_header else 0
    try:
        value = json.loads(raw[8:begin] if is_header else raw)
    except ValueError:
        return cut(folder, _, chance)
    holder, key = chance.choice([*layouts.nodes(value)] or [([0], 0)])
    old, new = holder[key], chance.choice((*ODD, *EXTREMES, *WEIRD, [*"ab"], {"a": None}))
    how = chance.randrange(6)
    if how == 0 and isinstance(holder, dict):
        holder[chance.choice(WEIRD)] = holder.pop(key)
    elif how == 1:
        del holder[key]
    else:
        holder[key] = "DEEP" if how == 2 else new
    data = json.dumps(value, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    depth = chance.choice((10, 900, 200_000))
    data = data.replace(b'"DEEP"', chance.choice((b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth)))
    path.write_bytes(len(data).to_bytes(8, "little") + data + raw[begin:] if is_header else data)
    return Damage(
        "JSON", (path.name,), f"{how}: {str(key)[:40]!r} from {str(old)[:40]!r} to {str(new)[:40]!r}", free=True
    )


def safetensors_length(folder: Path, _: Path, chance: random.Random) -> Damage:
    """The length of the header."""
    path = drawn(folder, chance, "safetensors")
    raw = path.read_bytes()
    old = int.from_bytes(raw[:8], "little")
    value = chance.choice((*EXTREMES, old + 1, old - 1, len(raw), len(raw) - 8, len(raw) - 7)) % 2**64
    path.write_bytes(struct.pack("<Q", value) + raw[8:])
    return Damage("header length", (path.name,), f"{old} is {value}", free=layouts.kind_of(path) != "safetensors")


# Files


def gone(folder: Path, _: Path, chance: random.Random) -> Damage:
    """A file is not there, is empty, has another's bytes, another's name, or is there twice."""
    path, other = drawn(folder, chance), drawn(folder, chance)
    how = chance.choice(("dropped", "empty", "swapped", "overwritten", "copied", "renamed"))
    if how == "dropped":
        path.unlink()
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "swapped":
        one, two = path.read_bytes(), other.read_bytes()
        path.write_bytes(two)
        other.write_bytes(one)
    elif how == "overwritten":
        shutil.copyfile(other, path) if path != other else None
    elif how == "copied":
        shutil.copyfile(path, path.with_name(_next(path.name, chance)))
    else:
        path.rename(path.with_name(_next(path.name, chance)))
    return Damage(how, (path.name, other.name), free=True)


def _next(name: str, chance: random.Random) -> str:
    """Another rank or part, if the name has numbers."""
    digits = [at for at, letter in enumerate(name) if letter.isdigit()]
    if not digits or chance.random() < 0.2:
        return chance.choice((f"copy of {name}", f"{name}.tmp", f".{name}", f"{name}~"))
    at = chance.choice(digits)
    return f"{name[:at]}{(int(name[at]) + chance.randrange(1, 10)) % 10}{name[at + 1 :]}"


def stranger(folder: Path, _: Path, chance: random.Random) -> Damage:
    """In the place of a file lies what is none."""
    path = drawn(folder, chance)
    how = chance.choice(("directory", "pipe", "socket", "device", "random device", "dangling", "loop", "cycle", "link"))
    content = path.read_bytes()
    path.unlink()
    if how == "directory":
        path.mkdir()
        (path / "inside").write_bytes(b"")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "socket":
        _socket(path)
    else:
        target = {"device": "/dev/zero", "random device": "/dev/urandom", "dangling": "gone", "loop": path.name}
        if how == "link":  # to the same bytes elsewhere, which is no damage
            (folder / "elsewhere").write_bytes(content)
            target["link"] = str(folder / "elsewhere")
        path.symlink_to(target.get(how, "."))
    return Damage("stranger", (path.name,), how, free=True)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a path may have about a hundred bytes
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(path.name)
    finally:
        os.chdir(here)


def closed(folder: Path, _: Path, chance: random.Random) -> Damage:
    """A file or a directory that the user may not read."""
    folders = [path for path in folder.rglob("*") if path.is_dir()]
    path = chance.choice([*files_in(folder), *folders])
    path.chmod(chance.choice((0o000, 0o200) if path.is_file() else (0o000, 0o100, 0o600)))
    return Damage("closed", (path.name,), free=True, closed=True)


def named(folder: Path, _: Path, chance: random.Random) -> Damage:
    """A file has a name that should not reach a terminal, or lies beside in great depth."""
    path = drawn(folder, chance)
    usable = [
        name for name in WEIRD if 2 < len(name.encode("utf-8", "replace")) < 200 and not set("/\0\ud800") & set(name)
    ]
    name = chance.choice([*usable, *(f"{weird}{path.name}"[:200] for weird in usable)])
    how = chance.choice(("renamed", "beside", "directory", "deep"))
    if how == "renamed":
        path.rename(path.with_name(name))
    elif how == "beside":
        shutil.copyfile(path, path.with_name(name))
    elif how == "directory":
        shutil.copytree(path.parent, folder / name, ignore=shutil.ignore_patterns(name))
    else:
        below = folder.joinpath(*["deep"] * 100)
        below.mkdir(parents=True)
        shutil.copyfile(path, below / path.name)
    return Damage("named", (path.name, name), f"{how} {name!r}", free=True)


WAYS: tuple[Way, ...] = (
    *(cut, cut, flip, flip, flip, scramble, zip_number, zip_number, pickled, pickled, pickled),
    *(json_value, json_value, safetensors_length, gone, stranger, closed, named),
)


def applied(folder: Path, original: Path, chance: random.Random) -> Damage:
    """Damage an input that is a copy, once, in a way that is drawn."""
    fitting: list[Any] = [way for way in WAYS if way is not zip_number or files_in(folder, "zip")]
    if not files_in(folder, "safetensors"):
        fitting.remove(safetensors_length)
    if not files_in(folder, "zip", "pickle"):
        fitting = [way for way in fitting if way is not pickled]
    chosen: Way = chance.choice(fitting)
    return chosen(folder, original, chance)
