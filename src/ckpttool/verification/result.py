"""What ``verify`` found, as plain data: rendered for people, dumped as JSON for programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ckpttool.errors import Problem
from ckpttool.source import SourceOptions

State = Literal["sound", "faults", "not recorded", "not asked", "not there"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subset:
    """Which part is to be read: the ``part``-th of ``parts``, or a random ``percent`` or number of ``bytes``."""

    text: str
    part: int = 0
    parts: int = 0
    percent: float = 0.0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(SourceOptions):
    """What to check beside structure, checksums and ``integrity.json``; ``force`` replaces one that is there.

    ``against`` is what the checkpoint was converted from.
    """

    step: str | None = None
    role: str | None = None
    values: bool = False
    subset: Subset | None = None
    write_integrity: bool = False
    second_opinion: bool = False
    against: str | None = None
    force: bool = False
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One kind of check: what came of it, in a word and in a line; how many files and bytes it has read."""

    name: str
    state: State
    detail: str = ""
    files: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileCheck:
    """A file with bytes that can be checked.

    ``records`` are those that were looked at, ``recorded`` those with a checksum; ``checked`` are the bytes of the file
    (``bytes`` in all) that a checksum or a hash was held against.
    """

    name: str
    records: int
    recorded: int
    bytes: int
    checked: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCheck:
    """The elements of a tensor that were looked at, by what they are; ``zero``: all are. ``where`` is its directory."""

    name: str
    where: str
    elements: int
    nan: int
    inf: int
    zero: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The answer to: is it whole and intact. ``problems`` has every fault; paths in it are relative to ``path``.

    ``integrity_files`` are the manifests that were written. ``refused`` tells that something would run code.
    """

    path: str
    kind: str
    title: str
    checks: tuple[Check, ...]
    files: tuple[FileCheck, ...] = ()
    values: tuple[ValueCheck, ...] = ()
    problems: tuple[Problem, ...] = ()
    subset: str | None = None
    integrity_files: tuple[str, ...] = ()
    bytes_read: int = 0
    seconds: float = 0.0
    refused: bool = False
    options: Options = field(default_factory=Options)

    @property
    def faults(self) -> tuple[Problem, ...]:
        """What speaks against it."""
        return tuple(problem for problem in self.problems if problem.severity == "error")

    @property
    def sound(self) -> bool:
        """Whether nothing that was checked speaks against it."""
        return not self.faults

    @property
    def exit_code(self) -> int:
        """0 for sound, 1 for faults, 7 where something was refused."""
        return 7 if self.refused else 0 if self.sound else 1

    def check(self, name: str) -> Check:
        """Return the check of this name."""
        return next(check for check in self.checks if check.name == name)

    def as_json(self) -> dict[str, Any]:
        """Return plain data; problems are reported beside it, in the envelope."""
        left_out = ("problems", "refused", "options")
        data = {name: value for name, value in asdict(self).items() if name not in left_out}
        written = data["integrity_files"]
        return {"sound": self.sound, **data, "integrity_file": written[0] if written else None}
