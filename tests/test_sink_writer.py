"""The thread that writes full buffers: what it is late with, what it fails at, what it is told to stop."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpttool import gathering, reading, sink
from ckpttool.plan import WeightFile, weight_files, whole
from ckpttool.sink import write_weights
from ckpttool.tensors import TensorInfo
from tests.arranging import store

PWRITE = os.pwrite


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bands of a kibibyte, no blocks shared, and no thread left behind."""
    before = threading.active_count()
    for module in (sink, gathering, reading):
        monkeypatch.setattr(module, "BAND", 1024)
    monkeypatch.setattr(os, "copy_file_range", None)
    yield
    assert threading.active_count() == before


def made(root: Path, files: int = 1) -> tuple[list[WeightFile], dict[str, TensorInfo], dict[str, bytes]]:
    """Some files of tensors of all sizes, their sources, and their bytes."""
    (root / "out").mkdir()
    targets, sources, expected = [], {}, {}
    for count, size in enumerate([300, 1, 0, 1024, 5000, 17, 255, 3000][: 8 if files == 1 else 4] * files):
        values = np.random.default_rng(count).integers(0, 256, size, np.uint8)
        name = f"s{count}"
        sources[name] = store(root, name, "uint8", values, [((0,), (size,))], turned=False)
        targets.append(whole(sources[name]))
        expected[name] = values.tobytes()
    weights = weight_files(targets, 1 << 30 if files == 1 else 1400)
    assert (len(weights) > 1) == (files > 1)
    return list(weights), sources, expected


def content(file: WeightFile, folder: Path) -> dict[str, bytes]:
    raw, at, found = (folder / file.name).read_bytes(), len(file.header), {}
    assert raw[:at] == file.header
    for target in file.targets:
        found[target.name] = raw[at : at + target.nbytes]
        at += target.nbytes
    assert at == len(raw)
    return found


def late(handle: int, data: Any, at: int) -> int:
    time.sleep(0.005)
    return PWRITE(handle, data, at)


def a_few_bytes(handle: int, data: Any, at: int) -> int:
    return PWRITE(handle, data[:100], at)


def no_write(handle: int, data: Any, at: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("write", [PWRITE, late, a_few_bytes])
def test_a_buffer_is_not_filled_again_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., int]
) -> None:
    (file,), sources, expected = made(tmp_path)
    told: list[int] = []
    monkeypatch.setattr(os, "pwrite", write)
    write_weights([file], sources, tmp_path, tmp_path / "out", progress=told.append)
    assert content(file, tmp_path / "out") == expected
    assert sum(told) == file.nbytes


def failing_at(number: int, code: int, calls: list[int]) -> Callable[..., int]:
    def pwrite(handle: int, data: Any, at: int) -> int:
        calls.append(at)
        if len(calls) == number:
            raise OSError(code, os.strerror(code))
        return PWRITE(handle, data, at)

    return pwrite


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_error_of_any_write_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """The first one, one in the middle, the last one; and soon: nothing but one more buffer is read."""
    (file,), sources, _ = made(tmp_path)
    calls: list[int] = []
    monkeypatch.setattr(os, "pwrite", failing_at(0, code, calls))
    write_weights([file], sources, tmp_path, tmp_path / "out")
    writes = len(calls)
    assert writes > 5
    for number in range(1, writes + 1):
        (tmp_path / "out" / file.name).unlink()
        calls = []
        monkeypatch.setattr(os, "pwrite", failing_at(number, code, calls))
        handles = len(os.listdir("/proc/self/fd"))
        with pytest.raises(OSError, match=os.strerror(code)):
            write_weights([file], sources, tmp_path, tmp_path / "out")
        assert len(calls) == number
        assert len(os.listdir("/proc/self/fd")) == handles


def test_an_error_of_the_sync_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,), sources, _ = made(tmp_path)

    def fsync(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_weights([file], sources, tmp_path, tmp_path / "out")


def test_everything_is_written_before_the_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,), sources, _ = made(tmp_path)
    sizes = []
    monkeypatch.setattr(os, "pwrite", late)
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    write_weights([file], sources, tmp_path, tmp_path / "out")
    assert sizes == [file.nbytes]


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_waits_for_the_write_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, error: type[BaseException]
) -> None:
    """The file is closed after its last write, not during it."""
    (file,), sources, _ = made(tmp_path)
    bad: list[OSError] = []
    calls: list[int] = []

    def pwrite(handle: int, data: Any, at: int) -> int:
        time.sleep(0.01)
        try:
            return PWRITE(handle, data, at)
        except OSError as failure:
            bad.append(failure)
            raise

    def progress(count: int) -> None:
        calls.append(count)
        if len(calls) > after:
            raise error

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(error):
        write_weights([file], sources, tmp_path, tmp_path / "out", progress=progress)
    assert bad == []
    assert len(calls) == after + 1


def test_a_source_that_is_gone_is_told_while_a_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,), sources, _ = made(tmp_path)
    (tmp_path / "s7.raw").unlink()
    monkeypatch.setattr(os, "pwrite", late)
    with pytest.raises(Exception, match=r"s7\.raw"):
        write_weights([file], sources, tmp_path, tmp_path / "out")


@pytest.mark.parametrize("threads", [2, 4])
def test_several_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """Each thread has its own buffers; one that has no space ends all."""
    weights, sources, expected = made(tmp_path, files=5)
    told: list[int] = []
    monkeypatch.setattr(os, "pwrite", late)
    write_weights(weights, sources, tmp_path, tmp_path / "out", threads=threads, progress=told.append)
    found: dict[str, bytes] = {}
    for file in weights:
        found |= content(file, tmp_path / "out")
        (tmp_path / "out" / file.name).unlink()
    assert found == expected
    assert sum(told) == sum(file.nbytes for file in weights)
    monkeypatch.setattr(os, "pwrite", no_write)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        write_weights(weights, sources, tmp_path, tmp_path / "out", threads=threads)
