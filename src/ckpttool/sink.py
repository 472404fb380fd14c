"""Carry a plan out: move the bytes band by band into safetensors files, in memory that does not depend on the model.

One thread fills a file and a second one hands its full buffers to the system, so that reading, casting and turning go
on meanwhile. The system is asked to write each band to the disk as soon as it is there, so that the sync at the end has
little left to wait for: measured, that nearly halves the time of a copy.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as Unfinished
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from ckpttool.elements import Array, dtype_of
from ckpttool.errors import BrokenCheckpoint
from ckpttool.formats.safetensorsfile import SAFETENSORS_NAMES
from ckpttool.gathering import Gatherer
from ckpttool.lowrank import Fusion
from ckpttool.plan import PAGE, Plan, Target, WeightFile
from ckpttool.reading import BAND, Reader, Run
from ckpttool.staging import copy_file, write_file
from ckpttool.tensors import Box, Piece, TensorInfo, is_cut_in_rows

Progress = Callable[[int], None]

PATIENCE = 2.0
"""Seconds that an interruption waits for the write that is under way."""

SHARED_AT_ONCE = 256 << 20
"""Bytes that the file system is asked to share or copy by one call."""


def execute(
    plan: Plan,
    sources: Mapping[str, TensorInfo],
    root: Path,
    folder: Path,
    *,
    threads: int = 1,
    progress: Progress = lambda _bytes: None,
) -> Mapping[str, int]:
    """Fill a folder with everything that a plan says, and open the result again to hold it against the plan.

    Returns by target how many finite elements a cast made infinite. Raises ``OSError`` when the system refuses to
    write, :class:`BrokenCheckpoint` when a source cannot be read any more.
    """
    overflows = write_weights(
        plan.weights, sources, root, folder, fusions=plan.fusions, threads=threads, progress=progress
    )
    for file in plan.copies:
        (folder / file.name).parent.mkdir(exist_ok=True)
        copy_file(Path(file.path), folder / file.name)
        progress(file.bytes)
    for name, content in plan.contents.items():
        write_file(folder / name, content)
        progress(len(content))
    check_written(plan.weights, folder)
    return overflows


class _Stopped(Exception):
    """Another thread has failed: its error is the one to tell."""


def write_weights(
    files: Sequence[WeightFile],
    sources: Mapping[str, TensorInfo],
    root: Path,
    folder: Path,
    *,
    fusions: Mapping[str, Fusion] = MappingProxyType({}),
    threads: int = 1,
    progress: Progress = lambda _bytes: None,
) -> Mapping[str, int]:
    """Write weight files into a folder, each by one thread, synced; see :func:`execute`."""
    job = _Job(sources, fusions, root, folder, progress)
    if threads == 1 or len(files) == 1:
        for file in files:
            job.write(file)
    else:
        _in_threads(job, files, threads)
    return dict(job.overflows)


def _in_threads(job: _Job, files: Sequence[WeightFile], threads: int) -> None:
    with ThreadPoolExecutor(min(threads, len(files))) as pool:
        futures = [pool.submit(job.write, file) for file in files]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            job.stop.set()
            pool.shutdown(cancel_futures=True)
    errors = [f.exception() for f in futures if not f.cancelled()]
    for error in sorted(filter(None, errors), key=lambda e: isinstance(e, _Stopped)):
        raise error


class _Job:
    """What the threads share."""

    def __init__(
        self,
        sources: Mapping[str, TensorInfo],
        fusions: Mapping[str, Fusion],
        root: Path,
        folder: Path,
        progress: Progress,
    ) -> None:
        self.sources, self.fusions, self.root, self.folder = sources, fusions, root, folder
        self.stop = threading.Event()
        self.overflows: Counter[str] = Counter()
        self._progress, self._lock = progress, threading.Lock()
        self._mine = threading.local()

    def _buffers(self) -> tuple[Array, Array]:
        """Return the bands of this thread: two for all of its files, or the allocator would keep several."""
        if not hasattr(self._mine, "buffers"):
            self._mine.buffers = np.empty(BAND, np.uint8), np.empty(BAND, np.uint8)
        buffers: tuple[Array, Array] = self._mine.buffers
        return buffers

    def write(self, file: WeightFile) -> None:
        """Write one file from its header to its last byte."""
        (self.folder / file.name).parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.folder / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        writer = ThreadPoolExecutor(1)
        try:
            with Reader(self.root) as reader:
                output = _Output(handle, self._buffers(), writer, self._advance)
                output.append(np.frombuffer(file.header, np.uint8))
                mover = _Mover(self.sources, Gatherer(self.sources, self.fusions, reader), reader, output)
                for target in file.targets:
                    if lost := mover.move(target):
                        self.overflows[target.name] += lost
                output.finish()
        except BaseException:  # a write that hangs must not keep the user: the file is closed when that ends
            closed = writer.submit(os.close, handle)
            with suppress(Unfinished, OSError):
                closed.result(PATIENCE)
            writer.shutdown(wait=closed.done())
            raise
        writer.submit(os.close, handle).result()
        writer.shutdown()

    def _advance(self, count: int) -> None:
        if self.stop.is_set():
            raise _Stopped
        with self._lock:
            self._progress(count)


class _Output:
    """A file that grows by whole buffers, so that many small tensors are one write.

    While one buffer is written by ``writer``, the other is filled.
    """

    def __init__(self, handle: int, buffers: tuple[Array, Array], writer: Executor, advance: Progress) -> None:
        self._handle, self._writer, self._advance = handle, writer, advance
        self._buffer, self._other = buffers
        self._held = self._at = 0
        self._written: Future[int] | None = None
        self._may_share = True

    def room(self, count: int) -> Array:
        """Return the next ``count`` bytes, to be filled before the next call; at most a band."""
        if self._held + count > self._buffer.size:
            self._flush()
        room = self._buffer[self._held : self._held + count]
        self._held += count
        return room

    @property
    def position(self) -> int:
        """Byte offset at which the next byte goes."""
        return self._at + self._held

    def share(self, run: Run) -> bool:
        """Append a run of another file without bringing it here; ``False``, with nothing done, where that is refused.

        File systems with copy-on-write (XFS, btrfs) share the blocks, network ones copy on the server.
        """
        if not self._may_share:
            return False
        self._flush()
        self._wait()
        left = run.length
        while left:
            try:
                source = run.offset + run.length - left
                count = os.copy_file_range(run.handle, self._handle, min(left, SHARED_AT_ONCE), source, self._at)
            except (AttributeError, OSError):
                count = 0
            if not count:
                self._may_share = False
                return self._refused(run, left)
            self._at += _hurry(self._handle, self._at, count)
            self._advance(count)
            left -= count
        return True

    def _refused(self, run: Run, left: int) -> bool:
        """Take back what was shared of a run before the system refused the rest of it."""
        self._at -= run.length - left
        self._advance(left - run.length)
        return False

    def append(self, content: Array) -> None:
        """Append bytes of any length."""
        for begin in range(0, content.size, BAND):
            part = content[begin : begin + BAND]
            self.room(part.size)[:] = part

    def finish(self) -> None:
        """Write what is left and wait until all of it is on the disk."""
        self._flush()
        self._wait()
        os.fsync(self._handle)

    def _flush(self) -> None:
        """Have the buffer written, and go on with the other one when that has been."""
        self._wait()
        self._written = self._writer.submit(_write, self._handle, self._buffer[: self._held], self._at)
        self._at += self._held
        self._held = 0
        self._buffer, self._other = self._other, self._buffer

    def _wait(self) -> None:
        """Wait until what was handed over is written; raises what went wrong with it."""
        if self._written is not None:
            self._advance(self._written.result())
            self._written = None


def _write(handle: int, content: Array, at: int) -> int:
    view, written = memoryview(content.data), 0
    while written < len(view):
        written += os.pwrite(handle, view[written:], at + written)
    return _hurry(handle, at, written)


def _hurry(handle: int, at: int, count: int) -> int:
    """Ask the system to bring what was written to the disk now; return its bytes."""
    with suppress(AttributeError, OSError):  # a hint, which not every system has
        os.posix_fadvise(handle, at, count, os.POSIX_FADV_DONTNEED)
    return count


class _Mover:
    """Appends targets to an output: shared by the file system where it can, otherwise band by band."""

    def __init__(self, sources: Mapping[str, TensorInfo], gatherer: Gatherer, reader: Reader, output: _Output) -> None:
        self._sources, self._gatherer, self._reader, self._output = sources, gatherer, reader, output

    def move(self, target: Target) -> int:
        """Append one target; return how many finite elements its cast made infinite."""
        tensor = self._sources[target.parts[0].source]
        if not self._gatherer.copies(target) or not is_cut_in_rows(tensor) or not _is_whole(tensor):
            return self._fill(target)
        for piece in sorted(tensor.pieces, key=lambda piece: piece.offset):
            if not self._share(tensor, piece):
                self._fill(target, (piece.offset, piece.size))
        return 0

    def _share(self, tensor: TensorInfo, piece: Piece) -> bool:
        """Append the bytes of a piece by letting the file system share their blocks, where both begin at one."""
        if self._output.position % PAGE or piece.numel * dtype_of(tensor.dtype).itemsize < PAGE:
            return False
        run = self._reader.run(tensor, piece)
        return run is not None and run.offset % PAGE == 0 and self._output.share(run)

    def _fill(self, target: Target, part: Box | None = None) -> int:
        """Append a target, or a part of it that is contiguous."""
        return sum(lost for _, lost in self._gatherer.bands(target, self._output.room, part))


def _is_whole(tensor: TensorInfo) -> bool:
    return sum(piece.numel for piece in tensor.pieces) == tensor.numel


def check_written(files: Sequence[WeightFile], folder: Path) -> None:
    """Open what was written with the safetensors library and hold it against the plan: names, shapes, dtypes, sizes.

    Raises :class:`BrokenCheckpoint` naming the first file that is not as planned.
    """
    for file in files:
        wanted = {t.name: (SAFETENSORS_NAMES[t.dtype], t.shape) for t in file.targets}
        size = (folder / file.name).stat().st_size
        if size != file.nbytes or _opened(folder / file.name) != wanted:
            raise BrokenCheckpoint(f"{file.name}: what was written is not what was planned", code="not-as-planned")


def _opened(path: Path) -> dict[str, Any] | None:
    """Return dtype and shape of every tensor, as the safetensors library reads them; ``None`` when it does not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except SafetensorError:
        return None
