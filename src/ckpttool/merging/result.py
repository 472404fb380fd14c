"""What ``merge-fsdp`` is asked and what it answers, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from ckpttool.errors import Problem
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
    threads: int = 2
    force: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFile:
    """A file of the output: its bytes, and how many tensors it holds (0: none, it is a side file)."""

    name: str
    bytes: int
    tensors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Tensors that change their dtype; ``overflowed`` finite elements became infinite."""

    dtype: str
    to: str
    tensors: int
    bytes: int
    overflowed: int = 0


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
    """What a merge does or did. Paths are absolute; bytes and seconds are those of the whole command."""

    path: str
    output: str
    done: bool
    options: Options
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
    bytes_free: int = 0
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        return asdict(self)
