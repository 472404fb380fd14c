"""Bytes that the file system shares or copies by itself: taken where it can, and never wrong where it cannot."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.serialization
from safetensors import safe_open

from ckpttool.merging import Options, merge
from tests.merged import tensors_in, unequal, write_role

WEIGHTS = {
    "a": torch.randn(8, 1024),
    "odd": torch.randn(5, 7),
    "b": torch.randn(6, 2048),
    "long": torch.randn(40_000, 64),
    "tail": torch.randn(3, 1024),
}
Copy = Callable[..., int]


@pytest.fixture
def aligned() -> Iterator[None]:
    """Storages in the shards begin at multiples of a page, as a trainer may have it."""
    saving = torch.utils.serialization.config.save
    before, saving.storage_alignment = saving.storage_alignment, 4096
    yield
    saving.storage_alignment = before


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of every call that lets the system copy."""
    counts: list[int] = []
    real = os.copy_file_range

    def counted(*arguments: Any) -> int:
        counts.append(real(*arguments))
        return counts[-1]

    monkeypatch.setattr(os, "copy_file_range", counted)
    return counts


@pytest.mark.usefixtures("aligned")
def test_aligned_storages_are_shared(shared: list[int], tmp_path: Path) -> None:
    """Most bytes never come here: all of those that begin at a page on both sides."""
    merge(write_role(tmp_path / "role", WEIGHTS), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), WEIGHTS) == set()
    assert sum(shared) == sum(WEIGHTS[name].nbytes for name in ("a", "b", "long", "tail"))


def test_other_storages_are_moved(shared: list[int], tmp_path: Path) -> None:
    merge(write_role(tmp_path / "role", WEIGHTS), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), WEIGHTS) == set()
    assert shared == []


@pytest.mark.usefixtures("aligned")
def test_what_is_cast_is_moved(shared: list[int], tmp_path: Path) -> None:
    merge(write_role(tmp_path / "role", WEIGHTS), tmp_path / "out", Options(dtype="bfloat16"))
    assert unequal(tensors_in(tmp_path / "out"), {k: v.bfloat16() for k, v in WEIGHTS.items()}) == set()
    assert shared == []


@pytest.mark.usefixtures("aligned")
@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, None])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_system_that_refuses_falls_back(
    code: int | None, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, or after a part of a run; a call may also copy less than asked, or nothing."""
    role, calls = write_role(tmp_path / "role", WEIGHTS), 0
    real = os.copy_file_range
    told: list[int] = []

    def short(source: int, target: int, count: int, *offsets: int) -> int:
        nonlocal calls
        calls += 1
        if calls > after:
            if code is None:
                return 0
            raise OSError(code, os.strerror(code))
        return real(source, target, min(count, 5000), *offsets)

    monkeypatch.setattr(os, "copy_file_range", short)
    merge(role, tmp_path / "out", Options(), lambda _total: told.append)
    assert calls == after + 1
    assert unequal(tensors_in(tmp_path / "out"), WEIGHTS) == set()
    assert sum(told) == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_a_system_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "copy_file_range")
    monkeypatch.delattr(os, "posix_fadvise")
    merge(write_role(tmp_path / "role", WEIGHTS), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), WEIGHTS) == set()


def test_tensors_of_whole_pages_begin_at_one(tmp_path: Path) -> None:
    merge(write_role(tmp_path / "role", WEIGHTS), tmp_path / "out", Options())
    file = tmp_path / "out" / "model.safetensors"
    length = int.from_bytes(file.read_bytes()[:8], "little")
    with safe_open(file, "pt") as opened:
        first = [name for name in opened.offset_keys() if WEIGHTS[name].nbytes % 4096 == 0]
        assert opened.offset_keys()[: len(first)] == first == ["a", "b", "long", "tail"]
    assert (length + 8) % 4096 == 0
