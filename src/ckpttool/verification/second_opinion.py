"""``--second-opinion``: a sample of the tensors, read again through the framework's own reader and compared bit by bit.

Our reader finds elements from offsets and strides; the frameworks read the same files by code that is not ours. What
both read alike is not only intact but also understood. The sample is bounded in bytes and spread over the files.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np

from ckpttool.elements import Array, dtype_of
from ckpttool.errors import CkpttoolError, Problem, Refused
from ckpttool.reading import Reader
from ckpttool.source import Source
from ckpttool.tensors import DTYPE_BITS, Index, Piece, TensorInfo, Wrap
from ckpttool.verification.frameworks import Frameworks, NotPossible, Part, find_torch

SAMPLE = 256 << 20
"""Bytes of a sample, where nothing else is asked for."""

MOST_PARTS = 64
"""Tensors of a sample."""

PART = 16 << 20
"""Bytes that are compared of one tensor; more of it adds little."""

MOST_ITEM = 256 << 20
"""Bytes of the largest item of a ``.distcp`` file that is looked at: torch reads it whole, whatever is asked of it."""

LOOKED_AT = 256
"""Pieces of one tensor among which the one is taken whose file has been sampled least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondOpinion:
    """What a framework's own reader says of a sample.

    ``reader`` names the libraries that were asked and their versions; ``tensors`` and ``bytes`` are what both have read
    and compared. What could not be asked for is a note among the ``problems``, with its reason.
    """

    reader: str
    tensors: int
    bytes: int
    problems: tuple[Problem, ...]


def second_opinion(root: Path, source: Source, sample: int = SAMPLE, seed: int | None = None) -> SecondOpinion:
    """Read at most ``sample`` bytes of a checkpoint through torch or safetensors too, and compare every bit.

    ``root`` is what the places of the pieces are relative to; the same ``seed`` takes the same sample. Raises
    :class:`~ckpttool.errors.UsageError` without torch, :class:`Refused` for a pickle that would run code.
    """
    version = find_torch()
    frameworks, problems = Frameworks(root), _Problems()
    parts = sorted(
        take_sample(source.tensors, sample, random.Random(seed), problems),  # noqa: S311 - no secret
        key=lambda part: (part.piece.place.file, part.piece.place.offset),
    )
    tensors = size = 0
    with Reader(root) as reader:
        for part in parts:
            compared = _compare(reader, frameworks, part, problems)
            tensors, size = tensors + bool(compared), size + compared
    return SecondOpinion(reader=_named(frameworks, version), tensors=tensors, bytes=size, problems=problems.all())


def _named(frameworks: Frameworks, version: str) -> str:
    """Name what was asked; safetensors has its tensors made by torch."""
    torch = f"torch {version}"
    return f"safetensors {metadata.version('safetensors')}, {torch}" if "safetensors" in frameworks.used else torch


class _Problems:
    """Faults one by one, and what is not possible once a reason."""

    def __init__(self) -> None:
        self._faults: list[Problem] = []
        self._reasons: Counter[str] = Counter()
        self._failed: Exception | None = None

    def fault(self, code: str, message: str, path: str, hint: str = "") -> None:
        self._faults.append(Problem(code=code, message=message, path=path, hint=hint))

    def failed(self, error: Exception, part: Part) -> None:
        """Report that a reader of a framework fails, once for what every part of a file fails by."""
        if error is not self._failed:
            self._failed, file = error, part.piece.place.file
            code = error.code if isinstance(error, CkpttoolError) else ""
            code = code if code not in ("", type(error).__name__) else "second-opinion-fails"
            self.fault(code, f"{file}: {part.tensor.name}: {_said(error)}", file)

    def not_possible(self, reason: str) -> None:
        self._reasons[reason] += 1

    def all(self) -> tuple[Problem, ...]:
        """Return the faults, and a note for each reason with the number of tensors that it concerns."""
        notes = (
            Problem(
                code="second-opinion-not-possible",
                message=f"no second opinion on {count:,} {'tensor' if count == 1 else 'tensors'}: {reason}",
                severity="note",
            )
            for reason, count in self._reasons.items()
        )
        return (*dict.fromkeys(self._faults), *notes)


# What to look at


def take_sample(
    tensors: Mapping[str, TensorInfo], sample: int, chance: random.Random, problems: _Problems
) -> Iterator[Part]:
    """Return parts of different tensors, as long as they fit into ``sample`` bytes, from files in turn."""
    used: Counter[str] = Counter()
    names = list(tensors)
    chance.shuffle(names)
    for name in names:
        if used.total() >= MOST_PARTS or not sample:
            return
        tensor = tensors[name]
        if not tensor.numel:
            continue
        piece = _choose(tensor, used, chance)
        if piece is None:
            problems.not_possible(f"torch reads items whole, and those larger than {MOST_ITEM >> 20} MiB are left out")
            continue
        part = _part(tensor, piece, min(sample, PART), chance)
        if part is not None:
            used[piece.place.file] += 1
            sample -= _nbytes(part)
            yield part


def _choose(tensor: TensorInfo, used: Mapping[str, int], chance: random.Random) -> Piece | None:
    """Return a piece or a copy of one that can be read, of the file that has been sampled least."""
    own, count = len(tensor.pieces), len(tensor.pieces) + len(tensor.copies)
    numbers = chance.sample(range(count), min(count, LOOKED_AT))
    pieces = (tensor.pieces[number] if number < own else tensor.copies[number - own] for number in numbers)
    fitting = (piece for piece in pieces if piece.numel and _is_small_enough(piece))
    return min(fitting, key=lambda piece: used.get(piece.place.file, 0), default=None)


def _is_small_enough(piece: Piece) -> bool:
    return piece.place.wrap is not Wrap.ZIP_ARCHIVE or piece.place.length <= MOST_ITEM


def _part(tensor: TensorInfo, piece: Piece, most: int, chance: random.Random) -> Part | None:
    """Return a box of a piece that is contiguous in it, somewhere, of at most ``most`` bytes; none if nothing fits."""
    elements = most * 8 // DTYPE_BITS[tensor.dtype]
    if not elements:
        return None
    offset: Index = ()
    size: Index = ()
    for axis, (begin, n) in enumerate(zip(piece.offset, piece.size, strict=True)):
        behind = math.prod(piece.size[axis + 1 :])
        take = min(n, max(1, elements // behind))
        offset, size = (*offset, begin + chance.randrange(n - take + 1)), (*size, take)
    return Part(tensor, piece, (offset, size))


def _nbytes(part: Part) -> int:
    return math.prod(part.box[1]) * dtype_of(part.tensor.dtype).itemsize


# Reading twice


def _compare(reader: Reader, frameworks: Frameworks, part: Part, problems: _Problems) -> int:
    """Read a part twice and report what differs; return how many bytes both have read."""
    try:
        theirs = frameworks.read(part)
    except NotPossible as reason:
        problems.not_possible(str(reason))
        return 0
    except Refused:
        raise
    except Exception as error:  # noqa: BLE001 - a reader that is not ours may raise anything
        problems.failed(error, part)
        return 0
    ours = np.empty(part.box[1], dtype_of(part.tensor.dtype))
    try:
        reader.read_piece(part.tensor, part.piece, part.box, ours)
    except CkpttoolError as error:
        if isinstance(error, Refused):
            raise
        problems.fault(error.code, error.message, part.piece.place.file, error.hint)
        return 0
    _report(part, ours, theirs, problems)
    return ours.nbytes


def _report(part: Part, ours: Array, theirs: Array, problems: _Problems) -> None:
    """Report a part of which the framework reads other bits."""
    raw = ours.reshape(-1).view(np.uint8).reshape(-1, ours.itemsize)
    differ = int(np.count_nonzero((raw != theirs.reshape(raw.shape)).any(axis=1)))
    if differ:
        where = f"{part.piece.place.file}: {part.tensor.name}"
        message = f"{where}: {differ:,} of {ours.size:,} elements are others by the framework's own reader"
        problems.fault("second-opinion-differs", message, part.piece.place.file)


def _said(error: Exception) -> str:
    """Say in a line what a framework raised."""
    if isinstance(error, CkpttoolError):
        return error.message
    first = next(iter(str(error).strip().splitlines()), "")
    return f"the framework's own reader fails ({type(error).__name__}: {first[:300]})"
