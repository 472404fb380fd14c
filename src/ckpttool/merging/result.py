"""What ``merge-fsdp`` is asked and what it answers, as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ckpttool.errors import Problem
from ckpttool.export.precision import SHORT
from ckpttool.plan import Dropped

OnMismatch = Literal["error", "rank0"]
ON_MISMATCH: tuple[OnMismatch, ...] = get_args(OnMismatch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to merge. ``dtype`` is torch's name; sizes are in bytes; ``inputs`` are further directories of the save."""

    inputs: tuple[str, ...] = ()
    step: str | None = None
    role: str | None = None
    world_size: int | None = None
    dtype: str | None = None
    cast_buffers: bool = False
    allow_overflow: bool = False
    on_mismatch: OnMismatch = "error"
    check_replicas: bool = True
    untie: bool = False
    drop_lm_head: bool = False
    hf_config: str | None = None
    max_shard_size: int = 5_000_000_000
    threads: int = 1
    force: bool = False
    dry_run: bool = False

    def flags(self) -> Iterator[str]:
        """Yield the options as one types them, but for the dry run and for the choice of a step, which is made."""
        for folder in self.inputs:
            yield f"--input {shlex.quote(folder)}"
        for name in _WORDS:
            value = getattr(self, name)
            if value != getattr(Options(), name):
                yield f"--{name.replace('_', '-')} {shlex.quote(_typed(name, value))}"
        yield from (f"--{name.replace('_', '-')}" for name in _SWITCHES if getattr(self, name))
        if not self.check_replicas:
            yield "--no-check-replicas"


_SWITCHES = ("cast_buffers", "allow_overflow", "untie", "drop_lm_head", "force")
_WORDS = ("world_size", "dtype", "on_mismatch", "hf_config", "max_shard_size", "threads")
_UNITS = (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1))


def _typed(name: str, value: Any) -> str:
    """Write a value as one types it."""
    if name == "max_shard_size":
        unit, factor = next((unit, factor) for unit, factor in _UNITS if value % factor == 0)
        return f"{value // factor}{unit}"
    return SHORT.get(value, str(value))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file of the output: its bytes, and how many tensors it holds (0: none, it is a side file)."""

    name: str
    bytes: int
    tensors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Tensors that change their dtype, and by name how many of their finite elements became infinite."""

    dtype: str
    to: str
    names: tuple[str, ...]
    bytes: int
    overflowed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A tensor whose stored copies are not the same on all ranks: those that differ from rank ``reference``.

    ``changed`` counts elements whose bits differ on the rank where most do, ``nans`` those of them that are NaN on
    either side, ``largest`` is the largest difference between the others.
    """

    name: str
    reference: int
    ranks: tuple[int, ...]
    elements: int
    changed: int
    largest: float
    nans: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Copies:
    """What was compared: replicated tensors, and replicas of shards (HSDP), by bytes or by recorded CRC-32."""

    replicated: int = 0
    replicated_bytes: int = 0
    replicas: int = 0
    by_crc: int = 0
    by_bytes: int = 0
    checked: bool = True
    mismatches: tuple[Mismatch, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """What a merge does or did. Paths are absolute; bytes and seconds are those of the whole command.

    ``parameters`` are elements of tensors that are no buffers; ``bytes_free`` is looked up for a dry run only.
    """

    path: str
    output: str
    done: bool
    options: Options
    folders: tuple[str, ...]
    title: str
    model: str
    tensors: int
    parameters: int
    dtypes: Mapping[str, int]
    files: tuple[OutputFile, ...]
    copies: Copies
    casts: tuple[Cast, ...] = ()
    kept: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    renamed: Mapping[str, int] = field(default_factory=dict)
    config_changes: tuple[str, ...] = ()
    side_files_from: str | None = None
    left: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[Problem, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_free: int | None = None
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as values that JSON has; the notes are the problems of the envelope."""
        return {name: value for name, value in asdict(self).items() if name != "notes"}
