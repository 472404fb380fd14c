"""The bytes of files, read once through one buffer a thread, against checksums of records and for hashes of all."""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from zlib import crc32

from ckpttool.crew import Crew, Ready
from ckpttool.errors import BrokenCheckpoint, CkpttoolError, Problem
from ckpttool.formats.torchzip import index_archive, open_file
from ckpttool.verification.records import Alike, Span, are_recorded, span_of
from ckpttool.verification.tree import Entry, stamp_of
from ckpttool.verification.work import Task, Unit, Work, is_raw, tasks

BUFFER = 1 << 20
"""Bytes that are read at once. Measured: more leaves the cache of a core, less costs more calls."""

COPY = "Copy the file again from where it was written."


@dataclass(slots=True)
class Checked:
    """What came of a file: records that were looked at and that have checksums, bytes read and held against one.

    ``headers`` tells where the record of a problem begins, in files whose tensors have no names of their own.
    """

    entry: Entry
    records: int = 0
    recorded: int = 0
    covered: int = 0
    read: int = 0
    problems: list[Problem] = field(default_factory=list)
    headers: dict[Problem, int] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def join(self, other: Checked) -> None:
        """Add what came of another part of the file."""
        self.records += other.records
        self.recorded += other.recorded
        self.covered += other.covered
        self.read += other.read
        self.problems += (problem for problem in other.problems if problem not in self.problems[-1:])
        self.headers.update(other.headers)
        self.digests.update(other.digests)

    def fault(self, code: str, message: str, hint: str = "") -> None:
        """Note something that speaks against the file."""
        self.problems.append(
            Problem(code=code, message=f"{self.entry.shown}: {message}", path=self.entry.shown, hint=hint)
        )


def check_bytes(works: Sequence[Work], threads: int, ready: Ready) -> list[Checked]:
    """Read what there is to read, and return what came of each file; no more is held than a buffer a thread."""
    todo = list(tasks(works))
    crew: Crew[_Eye] = Crew(threads, lambda: (_Eye(crew.advance), _nothing), ready(sum(task.nbytes for task in todo)))
    found = {id(work): Checked(work.entry, records=work.unrecorded) for work in works}
    for task, checked in zip(todo, crew.run(_look, todo), strict=True):
        found[id(task.work)].join(checked)
    return list(found.values())


def _nothing() -> None:
    """Nothing is to be closed."""


def _look(eye: _Eye, task: Task) -> Checked:
    return eye.look(task)


class _Eye:
    """What a thread looks with: a buffer, and the layouts of archives that it has seen."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._buffer = memoryview(bytearray(BUFFER))
        self._alike = Alike()
        self._advance = advance

    def look(self, task: Task) -> Checked:
        """Read the bytes of a task; whatever goes wrong with the file is told of, and ends there."""
        entry = task.work.entry
        found = Checked(entry)
        try:
            handle = open_file(entry.path)
        except OSError as error:
            found.fault("unreadable", str(error.strerror).lower())
            return found
        try:
            _Pass(handle, task, found, self._buffer, self._alike, self._advance).run()
            self._check_unchanged(entry, handle, found)
        except OSError as error:
            found.fault("unreadable", f"{str(error.strerror).lower()}, after {found.read:,} bytes")
        except CkpttoolError as error:
            found.problems.append(Problem(code=error.code, message=error.message, path=entry.shown, hint=error.hint))
        finally:
            os.close(handle)
        return found

    def _check_unchanged(self, entry: Entry, handle: int, found: Checked) -> None:
        if not stamp_of(os.fstat(handle)) == stamp_of(os.stat(entry.path)) == entry.stamp:  # noqa: PTH116
            _changed(found)


def _changed(found: Checked) -> None:
    found.fault("changed-meanwhile", "was written to while it was read", "Is a training run saving here? Wait for it.")


class _Pass:
    """One way through a file, or through a part of it."""

    def __init__(
        self,
        handle: int,
        task: Task,
        found: Checked,
        buffer: memoryview,
        alike: Alike,
        advance: Callable[[int], None],
    ) -> None:
        self._handle, self._task, self._found = handle, task, found
        self._buffer, self._alike, self._advance = buffer, alike, advance
        self._hashes = {name: hashlib.new(name) for name in task.work.algorithms} if task.whole else {}
        self._path = task.work.entry.path

    def run(self) -> None:
        """Read everything, and keep the digests of what was read from begin to end."""
        size = self._task.work.entry.size
        for begin, end, units in segments(self._task.units, size, whole=self._task.whole):
            if end - begin <= BUFFER:
                view = self._fill(begin, end)
                for unit in units:
                    self._check(unit, view[unit.begin - begin : unit.end - begin])
            else:
                self._stream(begin, end, units)
        self._found.digests = {name: made.hexdigest() for name, made in self._hashes.items()}

    def _fill(self, begin: int, end: int) -> memoryview:
        """Return bytes of the file, at most a buffer full."""
        view = rest = self._buffer[: end - begin]
        while rest:
            count = os.preadv(self._handle, [rest], end - len(rest))
            if not count:
                name = self._found.entry.shown
                raise BrokenCheckpoint(f"{name}: ends early; was it changed meanwhile?", code="truncated")
            rest = rest[count:]
        for made in self._hashes.values():
            made.update(view)
        self._found.read += end - begin
        self._advance(end - begin)
        return view

    def _check(self, unit: Unit, view: memoryview) -> None:
        """Check a unit that is in memory as a whole."""
        try:
            if unit.archive is not None:
                span = span_of(unit.archive, unit.name, lambda at, count: bytes(view[at - unit.begin :][:count]))
                found = crc32(view[span.begin - unit.begin : span.end - unit.begin])
                self._conclude(span, unit, found)
            elif unit.bare and is_raw(bytes(view[:4]), bytes(view[-64:])):
                self._found.records += 1
            else:
                layout, faults = self._alike.check(view, self._path, unit.begin)
                self._found.records += len(layout.records)
                if layout.recorded:
                    self._found.recorded += len(layout.records)
                    self._found.covered += layout.size
                for fault in faults:
                    self._found.fault("crc-mismatch", f"{unit.name}: {fault}", COPY)
        except BrokenCheckpoint as error:
            self._damaged(unit, error)

    def _stream(self, begin: int, end: int, units: Sequence[Unit]) -> None:
        """Check a unit (there is at most one) that is larger than the buffer."""
        spans = deque[tuple[Unit, Span]]((unit, span) for unit in units for span in self._spans(unit))
        checksum = 0
        for at in range(begin, end, BUFFER):
            view = self._fill(at, min(at + BUFFER, end))
            stop = at + len(view)
            while spans and spans[0][1].begin < stop:
                unit, span = spans[0]
                checksum = crc32(view[max(span.begin - at, 0) : span.end - at], checksum)
                if span.end > stop:
                    break
                self._conclude(span, unit, checksum)
                spans.popleft()
                checksum = 0

    def _spans(self, unit: Unit) -> list[Span]:
        """Return the records of a unit in the order of their bytes, from its headers."""
        try:
            if unit.archive is not None:
                return [span_of(unit.archive, unit.name, self._read)]
            if unit.bare and is_raw(self._read(unit.begin, 4), self._read(unit.end - 64, 64)):
                self._found.records += 1
                return []
            archive = index_archive(self._path, unit.begin, unit.end - unit.begin)
            if not are_recorded(archive):
                self._found.records += len(archive.entries)
                return []
            return sorted((span_of(archive, name, self._read) for name in archive.entries), key=lambda s: s.begin)
        except BrokenCheckpoint as error:
            self._damaged(unit, error)
            return []

    def _read(self, at: int, count: int) -> bytes:
        return os.pread(self._handle, count, at)

    def _conclude(self, span: Span, unit: Unit, checksum: int) -> None:
        """Count a record, and tell of one that has another checksum."""
        self._found.records += 1
        self._found.recorded += 1
        self._found.covered += span.end - span.begin
        fault = span.fault(checksum)
        if fault:
            self._found.fault("crc-mismatch", fault if unit.archive is not None else f"{unit.name}: {fault}", COPY)
            if unit.archive is not None:
                self._found.headers[self._found.problems[-1]] = unit.begin

    def _damaged(self, unit: Unit, error: BrokenCheckpoint) -> None:
        self._found.fault(error.code, f"{unit.name}: damaged at byte {unit.begin:,} ({error.message})", error.hint)


def segments(units: Sequence[Unit], size: int, *, whole: bool) -> Iterator[tuple[int, int, Sequence[Unit]]]:
    """Yield parts of a file with the units that lie in them: as many as fit into the buffer, or one that does not.

    With ``whole`` the parts are all of the file, and what belongs to no unit is in them as well.
    """
    begin = end = 0
    group: list[Unit] = []
    for unit in units:
        start = end if whole else unit.begin
        if group and (unit.end - begin > BUFFER or start != end):
            yield begin, end, group
            group, begin = [], start
        elif not group:
            begin = start
        group.append(unit)
        end = unit.end
    if group:
        yield begin, end, group
    if whole and end < size:
        yield end, size, ()
