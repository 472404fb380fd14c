"""Plans carried out: every byte goes where the plan says, by any number of threads, which end together."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpttool import gathering, reading, sink
from ckpttool.elements import cast, dtype_of
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.plan import PAGE, Plan, Rows, SideFile, Target, WeightFile, weight_files, whole
from ckpttool.sink import check_written, execute, write_weights
from ckpttool.staging import staged
from ckpttool.tensors import CASTABLE, Index, Piece, Place, TensorInfo, Wrap, contiguous_strides

Array = np.ndarray[Any, np.dtype[Any]]
Arrays = Mapping[str, tuple[str, Array]]
"""Values by name, with torch's name of their dtype."""

bounded = settings(max_examples=250, deadline=None, derandomize=True)


def stored(root: Path, arrays: Arrays, before: int = 0) -> dict[str, TensorInfo]:
    """Write arrays into raw files behind so many bytes; pieces are halves, of rows or columns, the last ones first."""
    root.mkdir()
    infos = {}
    for count, (name, (dtype, values)) in enumerate(arrays.items()):
        (root / f"{name}.raw").write_bytes(bytes(before) + values.tobytes())
        steps, axis = contiguous_strides(values.shape), count % 2
        boxes: list[tuple[Index, Index]] = [((0,) * values.ndim, values.shape)]
        if values.ndim > axis:
            cuts = sorted({0, values.shape[axis] // 2, values.shape[axis]})
            sizes = [(*values.shape[:axis], b - a, *values.shape[axis + 1 :]) for a, b in pairwise(cuts)]
            boxes = [
                (tuple(a * (d == axis) for d in range(values.ndim)), size) for a, size in zip(cuts, sizes, strict=False)
            ]
        pieces = [
            Piece(offset, size, Place(f"{name}.raw", before, values.nbytes, Wrap.RAW, starts, steps))
            for offset, size in boxes
            for starts in [sum(map(int.__mul__, offset, steps))]
        ]
        infos[name] = TensorInfo(name, dtype, values.shape, tuple(pieces[::-1]))
    return infos


def some(shape: Index, dtype: str, seed: int = 0) -> Array:
    """Numbers of any size that fits most dtypes, so that some of a cast become infinite."""
    random = np.random.default_rng(seed)
    values: Array = np.asarray(random.integers(-3, 4, shape) * random.choice([1.0, 1e5, 1e-5], shape))
    return values.astype(bool if dtype == "bool" else dtype_of(dtype))


def made_of(target: Target, arrays: Arrays) -> tuple[bytes, int]:
    """The bytes of a target and its overflows, the slow and obvious way."""
    done, lost = b"", 0
    for part in target.parts:
        dtype, values = arrays[part.source]
        taken = values[part.start : part.start + part.count] if target.shape else values
        out = taken
        if dtype != target.dtype:
            out = np.empty(taken.shape, dtype_of(target.dtype))
            lost += cast(taken, out, dtype, target.dtype)
        done += out.tobytes()
    return done, lost


def written(folder: Path) -> dict[str, bytes]:
    """The bytes of every tensor of all safetensors files."""
    found: dict[str, bytes] = {}
    for path in folder.glob("*.safetensors"):
        raw = path.read_bytes()
        length = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:length])
        del header["__metadata__"]
        found |= {name: raw[length:][slice(*entry["data_offsets"])] for name, entry in header.items()}
    return found


# What is written


@st.composite
def plans(draw: st.DrawFn) -> tuple[Arrays, list[Target]]:
    """Tensors as they are or cast, whole or in runs of rows; and all of them that can be joined, joined."""
    behind = tuple(draw(st.lists(st.integers(1, 9), max_size=2)))
    arrays = {}
    for n in range(draw(st.integers(1, 5))):
        dtype = draw(st.sampled_from((*sorted(CASTABLE), "int64", "bool", "complex64", "float8_e5m2")))
        shape = draw(st.sampled_from(((), *((rows, *behind) for rows in (0, 1, 2, 5, 12)))))
        with np.errstate(over="ignore"):
            arrays[f"s{n}"] = dtype, some(shape, dtype, n)
    floats = st.sampled_from(sorted(CASTABLE))
    targets = []
    for name, (dtype, values) in arrays.items():
        to = draw(floats) if dtype in CASTABLE else dtype
        cuts = sorted(draw(st.sets(st.integers(1, max(1, len(values) - 1)), max_size=2))) if values.ndim else []
        if values.ndim and cuts and len(values) > 1:
            for a, b in pairwise((0, *cuts, len(values))):
                targets.append(Target(f"{name}.{a}", to, (b - a, *behind), (Rows(name, a, b - a),)))
        else:
            targets.append(whole(TensorInfo(name, dtype, values.shape, ()), "", to))
    rows = [Rows(name, 0, len(v)) for name, (dtype, v) in arrays.items() if v.ndim and dtype in CASTABLE]
    if rows:
        shape = (sum(part.count for part in rows), *behind)
        targets.append(Target("joined", draw(floats), shape, tuple(rows)))
    return arrays, targets


def sharing(patch: pytest.MonkeyPatch, calls: int | None, most: int = 1 << 30) -> list[int]:
    """Let the file system share only so many bytes a call, and refuse after so many calls; tell the bytes."""
    shared: list[int] = []
    real = os.copy_file_range

    def copy_file_range(source: int, target: int, count: int, at: int, to: int) -> int:
        if len(shared) == calls:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        shared.append(real(source, target, min(count, most), at, to))
        return shared[-1]

    patch.setattr(os, "copy_file_range", copy_file_range)
    return shared


@bounded
@given(plans(), st.sampled_from((64, 512, 8 << 20)), st.integers(1, 3), st.integers(1, 2000), st.integers(0, 5))
def test_every_plan_is_carried_out(
    drawn: tuple[Arrays, list[Target]], band: int, threads: int, most: int, shares: int
) -> None:
    """In any bands, by any number of threads, into any files: the same bytes, and every overflow is counted."""
    arrays, targets = drawn
    expected = {target.name: made_of(target, arrays) for target in targets}
    files = weight_files(targets, most)
    told: list[int] = []
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "BAND", band)
        patch.setattr(sink, "BAND", band)
        patch.setattr(gathering, "BAND", band)
        patch.setattr(sink, "PAGE", 16)
        patch.setattr(os, "fsync", lambda _handle: None)
        sharing(patch, shares, 100)
        root, folder = Path(name, "in"), Path(name, "out")
        folder.mkdir()
        overflows = write_weights(files, stored(root, arrays), root, folder, threads=threads, progress=told.append)
        assert written(folder) == {name: content for name, (content, _) in expected.items()}
        assert overflows == {name: lost for name, (_, lost) in expected.items() if lost}
        assert sorted(os.listdir(folder)) == [file.name for file in files]
        assert sum(told) == sum(file.nbytes for file in files) == sum(f.stat().st_size for f in folder.iterdir())
        check_written(files, folder)


@pytest.mark.parametrize(
    ("calls", "before", "shared"),
    [(None, 0, 4 * PAGE + 6144 + 6000), (0, 0, 0), (1, 0, 1000), (4, PAGE, 4000), (None, 8, 0)],
)
def test_what_begins_at_a_page_is_shared_as_far_as_the_file_system_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int | None, before: int, shared: int
) -> None:
    """Where it refuses, all is copied from the begin of that piece on, and told once."""
    arrays: Arrays = {
        "a": ("float32", some((4, PAGE // 4), "float32")),
        "columns": ("float32", some((4, PAGE // 4), "float32", 1)),
        "b": ("float32", some((2, 1536), "float32", 2)),  # whose second half begins in the middle of a page
        "first": ("float32", some((1500,), "float32", 3)),
        "small": ("float32", some((3, 5), "float32", 4)),
        "last": ("float32", some((1500,), "float32", 5)),  # which goes to the middle of a page
    }
    sources = stored(tmp_path / "in", arrays, before)
    told: list[int] = []
    counts = sharing(monkeypatch, calls, 1000 if calls else 1 << 30)
    files = weight_files([whole(tensor) for tensor in sources.values()], 1 << 30)
    write_weights(files, sources, tmp_path / "in", tmp_path, progress=told.append)
    assert written(tmp_path) == {name: values.tobytes() for name, (_, values) in arrays.items()}
    assert (sum(counts), sum(told)) == (shared, files[0].nbytes)


def test_files_are_on_the_disk_before_they_are_held_against_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, sources, _ = tiny(tmp_path / "in", tmp_path / "side")
    synced: list[tuple[str, int]] = []
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, os.fstat(handle).st_size)),
    )
    write_weights(plan.weights, sources, tmp_path / "in", tmp_path)
    assert synced == [(file.name, file.nbytes) for file in plan.weights]


def tiny(root: Path, side: Path) -> tuple[Plan, dict[str, TensorInfo], dict[str, bytes]]:
    """A plan with everything that a plan may have; its sources; and every file that it makes."""
    arrays: Arrays = {
        "a": ("float32", some((300, 5), "float32")),
        "b": ("float64", some((40,), "float32").astype(float)),
    }
    sources = stored(root, arrays)
    side.mkdir()
    (side / "vocab.json").write_bytes(b"v" * 3000)
    (side / "code.py").write_bytes(b"")
    files = weight_files([whole(sources["a"], "x", "bfloat16"), whole(sources["b"])], 3100)
    copies = (SideFile("vocab.json", f"{side}/vocab.json", 3000), SideFile("sub/code.py", f"{side}/code.py", 0))
    plan = Plan(files, copies, {"config.json": b'{"a": 1}'}, ())
    content = {copy.name: Path(copy.path).read_bytes() for copy in copies} | dict(plan.contents)
    for file in files:
        content[file.name] = file.header + b"".join(made_of(target, arrays)[0] for target in file.targets)
    assert len(files) == 2
    return plan, sources, content


def carry_out(plan: Plan, sources: Mapping[str, TensorInfo], root: Path, target: Path, **options: Any) -> None:
    with staged(target, force=options.pop("force", False)) as folder:
        execute(plan, sources, root, folder, **options)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_everything_of_a_plan_is_there(tmp_path: Path, threads: int) -> None:
    plan, sources, expected = tiny(tmp_path / "in", tmp_path / "side")
    before = content(tmp_path / "in")
    carry_out(plan, sources, tmp_path / "in", tmp_path / "out", threads=threads)
    assert content(tmp_path / "out") == expected
    assert content(tmp_path / "in") == before
    assert sum(map(len, expected.values())) == plan.nbytes


def test_progress_ends_when_everything_is_written(tmp_path: Path) -> None:
    """All bytes of the plan are told, so that what is shown of it comes to its end."""
    plan, sources, _ = tiny(tmp_path / "in", tmp_path / "side")
    told: list[int] = []
    carry_out(plan, sources, tmp_path / "in", tmp_path / "out", progress=told.append)
    assert sum(told) == plan.nbytes


def test_a_side_file_that_is_gone_is_named(tmp_path: Path) -> None:
    plan, sources, _ = tiny(tmp_path / "in", tmp_path / "side")
    (tmp_path / "side/vocab.json").unlink()
    with pytest.raises(NotACheckpoint, match=r"side/vocab\.json: No such file"):
        carry_out(plan, sources, tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What was written is held against the plan


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def much_shorter(path: Path) -> None:
    os.truncate(path, 100)


def garbled(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'{"', b"{{", 1))


def padded_otherwise(path: Path) -> None:
    """The same tensors, but no longer at whole pages."""
    raw = path.read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:length].rstrip() + b"  "
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[length:])


def renamed(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"b"', b'"c"'))


def reshaped(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"shape":[40]', b'"shape":[5,8]').replace(b"  ", b" ", 1))


def retyped(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"F64"', b'"I64"'))


@pytest.mark.parametrize(
    "damage", [longer, shorter, much_shorter, garbled, padded_otherwise, renamed, reshaped, retyped]
)
def test_a_file_that_is_not_as_planned_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    plan, sources, _ = tiny(tmp_path / "in", tmp_path / "side")
    write_weights(plan.weights, sources, tmp_path / "in", tmp_path)
    check_written(plan.weights, tmp_path)
    before = (tmp_path / "model-00002-of-00002.safetensors").read_bytes()
    damage(tmp_path / "model-00002-of-00002.safetensors")
    assert (tmp_path / "model-00002-of-00002.safetensors").read_bytes() != before
    with pytest.raises(BrokenCheckpoint, match=r"^model-00002-of-00002\.safetensors: ") as raised:
        check_written(plan.weights, tmp_path)
    assert raised.value.code == "not-as-planned"


# Threads that fail


def slow(root: Path, count: int) -> tuple[tuple[WeightFile, ...], dict[str, TensorInfo]]:
    """Files of many bands."""
    arrays: Arrays = {f"t{n}": ("uint8", np.zeros(400_000, np.uint8)) for n in range(count)}
    sources = stored(root, arrays)
    return weight_files([whole(sources[name]) for name in arrays], 400_000), sources


@pytest.fixture
def small_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BAND", 16)
    monkeypatch.setattr(sink, "BAND", 16)
    monkeypatch.setattr(gathering, "BAND", 16)


@pytest.mark.usefixtures("small_bands")
def test_an_error_in_one_thread_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the one that is told; what another thread has begun stays unfinished, the rest is not begun."""
    files, sources = slow(tmp_path / "in", 6)
    (tmp_path / "in/t1.raw").unlink()
    failed = threading.Event()
    real = reading.Reader.__exit__

    def leave(self: reading.Reader, kind: type[BaseException] | None, *more: Any) -> None:
        if kind is NotACheckpoint:
            failed.set()
        real(self, kind, *more)

    def progress(_count: int) -> None:
        time.sleep(0.001 if failed.is_set() else 0)

    monkeypatch.setattr(reading.Reader, "__exit__", leave)
    (tmp_path / "out").mkdir()
    with pytest.raises(NotACheckpoint, match=r"t1\.raw: No such file"):
        write_weights(files, sources, tmp_path / "in", tmp_path / "out", threads=2, progress=progress)
    assert {"model-00001-of-00006.safetensors"} <= set(os.listdir(tmp_path / "out"))
    assert "model-00006-of-00006.safetensors" not in os.listdir(tmp_path / "out")
    assert (tmp_path / "out/model-00001-of-00006.safetensors").stat().st_size < files[0].nbytes


@pytest.mark.usefixtures("small_bands")
def test_an_interruption_ends_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, sources = slow(tmp_path / "in", 4)
    running = threading.active_count()
    begun = threading.Event()

    def interrupted(*_arguments: Any, **_options: Any) -> None:
        assert begun.wait(60)
        raise KeyboardInterrupt

    def progress(_count: int) -> None:
        begun.set()
        time.sleep(0.001)

    monkeypatch.setattr(sink, "wait", interrupted)
    plan = Plan(files, (), {}, ())
    with pytest.raises(KeyboardInterrupt):
        carry_out(plan, sources, tmp_path / "in", tmp_path / "out", threads=2, progress=progress)
    assert sorted(os.listdir(tmp_path)) == ["in"]
    assert threading.active_count() == running
