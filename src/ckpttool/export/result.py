"""What every command that writes a Hugging Face directory is asked and answers, as plain data."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

from ckpttool.errors import CannotWrite, Problem
from ckpttool.export.precision import SHORT
from ckpttool.naming.reporting import Names
from ckpttool.plan import Dropped

Lora = Literal["fuse", "adapter", "both"]
LORA: tuple[Lora, ...] = get_args(Lora)
FUSE = ("fuse", "both")
"""Those with which a whole model is written."""

_UNITS = (("GB", 10**9), ("MB", 10**6), ("KB", 10**3), ("B", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How to write. ``dtype`` is torch's name; ``architecture`` is the class that the config is made to name."""

    WORDS: ClassVar[tuple[str, ...]] = ("like", "dtype", "hf_config", "max_shard_size", "threads")
    SWITCHES: ClassVar[tuple[str, ...]] = ("allow_overflow", "untie", "drop_lm_head", "force")

    step: str | None = None
    role: str | None = None
    dtype: str | None = None
    allow_overflow: bool = False
    untie: bool = False
    drop_lm_head: bool = False
    hf_config: str | None = None
    architecture: str | None = None
    like: str | None = None
    allow_missing: tuple[str, ...] = ()
    allow_extra: tuple[str, ...] = ()
    max_shard_size: int = 5_000_000_000
    threads: int = 1
    force: bool = False
    dry_run: bool = False

    def flags(self) -> Iterator[str]:
        """Yield the options as one types them, but for the dry run and for the choice of a step, which is made."""
        usual = {field.name: field.default for field in fields(self)}
        for name in self.WORDS:
            value = getattr(self, name)
            if value != usual[name]:
                yield f"--{name.replace('_', '-')} {shlex.quote(_typed(name, value))}"
        yield from (f"--allow-missing {shlex.quote(name)}" for name in self.allow_missing)
        yield from (f"--allow-extra {shlex.quote(name)}" for name in self.allow_extra)
        yield from (f"--{name.replace('_', '-')}" for name in self.SWITCHES if getattr(self, name))


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
class Fused:
    """An adapter that is fused or written: how many layers it is on, what it weighs, and which file says so.

    ``ranks`` are all that its layers have; ``alphas`` are those of modules where they are not ``alpha``; ``copies`` are
    tensors of which it has a whole copy (``modules_to_save``).
    """

    name: str
    layers: int
    tensors: int
    ranks: tuple[int, ...]
    alpha: float
    alphas: Mapping[str, float]
    rslora: bool
    dora: bool
    task_type: str | None
    copies: tuple[str, ...]
    settings: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Export:
    """What is or was written. Paths are absolute; bytes and seconds are those of the whole command.

    ``parameters`` are elements of tensors that are no buffers; ``bytes_free`` is looked up for a dry run only.
    """

    path: str
    output: str
    done: bool
    title: str
    model: str
    tensors: int
    parameters: int
    dtypes: Mapping[str, int]
    files: tuple[OutputFile, ...]
    casts: tuple[Cast, ...] = ()
    kept: tuple[str, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    config_changes: tuple[str, ...] = ()
    names: Names | None = None
    side_files_from: str | None = None
    left: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[Problem, ...] = ()
    bytes_read: int = 0
    bytes_written: int = 0
    bytes_free: int | None = None
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """0, or what the command would end with if it were no dry run."""
        return CannotWrite.exit_code if any(problem.severity == "error" for problem in self.notes) else 0

    def as_json(self) -> dict[str, Any]:
        """Return it as values that JSON has; the notes are the problems of the envelope."""
        return {name: value for name, value in asdict(self).items() if name != "notes"}
