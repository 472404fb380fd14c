"""Plans: files as the Hub's library cuts them, headers as safetensors reads them, every fault by its code."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from ckpttool.formats.safetensorsfile import SAFETENSORS_NAMES, read_safetensors
from ckpttool.plan import PAGE, Dropped, Plan, Rows, SideFile, Target, WeightFile, faults, weight_files, whole
from ckpttool.tensors import Index, Piece, Place, TensorInfo, dtype_bytes

bounded = settings(max_examples=200, deadline=None, derandomize=True)
DTYPES = ("float64", "float32", "bfloat16", "int64", "uint8", "bool", "float8_e4m3fn", "complex64")


def info(name: str, shape: Index, dtype: str = "float32") -> TensorInfo:
    """A tensor in one piece."""
    place = Place("f", 0, dtype_bytes(dtype, math.prod(shape)))
    return TensorInfo(name, dtype, shape, (Piece((0,) * len(shape), shape, place),))


targets = st.lists(
    st.tuples(st.lists(st.sampled_from((0, 1, 2, 3, 32, 64)), max_size=3).map(tuple), st.sampled_from(DTYPES)),
    max_size=12,
).map(lambda drawn: [whole(info(f"t{n}", shape, dtype)) for n, (shape, dtype) in enumerate(drawn)])


def header_of(file: WeightFile) -> dict[str, Any]:
    length = int.from_bytes(file.header[:8], "little")
    assert len(file.header) == 8 + length
    header: dict[str, Any] = json.loads(file.header[8:])
    return header


def begins(file: WeightFile) -> dict[str, int]:
    """At which byte of the file each tensor begins."""
    return {t.name: len(file.header) + header_of(file)[t.name]["data_offsets"][0] for t in file.targets}


# Files


@bounded
@given(targets, st.integers(1, 100_000))
def test_files_are_those_of_the_hub(made: list[Target], most: int) -> None:
    """On the meta device, where tensors of no size share nothing."""
    state = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in made}
    files = weight_files(made, most)
    if not made:  # where the library writes nothing at all
        assert [(file.name, file.targets) for file in files] == [("model.safetensors", ())]
        return
    said = split_torch_state_dict_into_shards(state, max_shard_size=most)
    assert {f.name: sorted(t.name for t in f.targets) for f in files} == {
        name: sorted(tensors) for name, tensors in said.filename_to_tensors.items()
    }
    assert [file.name for file in files] == list(said.filename_to_tensors)
    assert sum(t.nbytes for f in files for t in f.targets) == said.metadata["total_size"]


def sizes(files: Iterable[WeightFile]) -> list[list[int]]:
    return [sorted(target.nbytes for target in file.targets) for file in files]


def test_a_tensor_larger_than_a_file_has_one_of_its_own() -> None:
    """It does not end the file that is being filled."""
    made = [whole(info(f"t{n}", (count,), "uint8")) for n, count in enumerate((4, 11, 5, 2, 10, 1))]
    files = weight_files(made, 10)
    assert sizes(files) == [[11], [4, 5], [2], [10], [1]]
    assert [file.name for file in files] == [f"model-{n:05d}-of-00005.safetensors" for n in range(1, 6)]


def test_what_fits_exactly_is_one_file() -> None:
    made = [whole(info(f"t{n}", (5,), "uint8")) for n in range(2)]
    assert [file.name for file in weight_files(made, 10)] == ["model.safetensors"]
    assert len(weight_files(made, 9)) == 2


def test_the_order_of_tensors_decides_which_file_they_are_in() -> None:
    made = [whole(info(f"t{n}", (count,), "uint8")) for n, count in enumerate((6, 5, 4))]
    assert sizes(weight_files(made, 10)) == [[6], [4, 5]]
    assert sizes(weight_files(made[::-1], 10)) == [[4, 5], [6]]


# Headers


def write(folder: Path, file: WeightFile) -> Path:
    """A file whose tensors are all ones, bit for bit."""
    path = folder / file.name
    path.write_bytes(file.header + b"\1" * (file.nbytes - len(file.header)))
    return path


@bounded
@given(targets, st.integers(1, 100_000))
def test_headers_are_whole_pages_and_tensors_follow_without_gaps(made: list[Target], most: int) -> None:
    for file in weight_files(made, most):
        assert len(file.header) % PAGE == 0
        header = header_of(file)
        assert header.pop("__metadata__") == {"format": "pt"}
        assert list(header) == [target.name for target in file.targets]
        at = 0
        for target in file.targets:
            kind, shape = SAFETENSORS_NAMES[target.dtype], list(target.shape)
            assert header[target.name] == {"dtype": kind, "shape": shape, "data_offsets": [at, at + target.nbytes]}
            at += target.nbytes
        assert file.nbytes == len(file.header) + at


@pytest.mark.parametrize("count", [0, 1, 40, 60])
def test_the_library_reads_what_a_header_says(tmp_path: Path, count: int) -> None:
    shapes: list[Index] = [(), (0, 3), (3, 5), (64, 64), (1,)]
    made = [
        whole(info(f"model.layers.{n}.größe", shapes[n % len(shapes)], DTYPES[n % len(DTYPES)])) for n in range(count)
    ]
    (file,) = weight_files(made, 1 << 30)
    path = write(tmp_path, file)
    assert len(file.header) == PAGE * (1 if count < 50 else 2)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    loaded = load_file(path)
    assert {name: (str(value.dtype), tuple(value.shape)) for name, value in loaded.items()} == {
        target.name: (f"torch.{target.dtype}", target.shape) for target in made
    }
    assert all(
        not value.numel() or value.view(torch.uint8).unique().tolist() == [1]
        for value in loaded.values()
        if value.dim()
    )
    ours = read_safetensors(path)
    assert {name: tensor.pieces[0].place.offset for name, tensor in ours.items()} == begins(file)


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_NAMES))
def test_every_dtype_can_be_planned(tmp_path: Path, dtype: str) -> None:
    (file,) = weight_files([whole(info("w", (4, 8), dtype))], 1 << 30)
    with safe_open(write(tmp_path, file), "np") as opened:
        part = opened.get_slice("w")
        assert (part.get_dtype(), part.get_shape()) == (SAFETENSORS_NAMES[dtype], [4, 8])
    assert file.nbytes == PAGE + dtype_bytes(dtype, 32)


@pytest.mark.parametrize("spare", range(-2, 3))
def test_a_header_is_no_page_longer_than_it_must_be(spare: int) -> None:
    """Whose text just fills a page, or just does not."""
    (short,) = weight_files([whole(info("n", (1,)))], 100)
    text = len(short.header.rstrip(b" "))
    (file,) = weight_files([whole(info("n" * (1 + PAGE - text - spare), (1,)))], 100)
    assert len(file.header) == (PAGE if spare >= 0 else 2 * PAGE)


@bounded
@given(targets)
def test_tensors_of_whole_pages_begin_at_a_page(made: list[Target]) -> None:
    """They come first, and then the others by the size of their elements; equal ones stay in their order."""
    (file,) = weight_files(made, 1 << 30)
    at = begins(file)
    paged = {t.name for t in made if t.nbytes % PAGE == 0}
    assert [name for name in paged if at[name] % PAGE] == []
    assert [t.name for t in file.targets if at[t.name] % dtype_bytes(t.dtype, 1)] == []
    order = [(t.name not in paged, -dtype_bytes(t.dtype, 1), made.index(t)) for t in file.targets]
    assert order == sorted(order)


# Faults

A, B = info("a", (4, 6)), info("b", (3, 6))
SOURCES = {"a": A, "b": B}
GOOD = (whole(A), whole(B))


def found(
    made: Iterable[Target], dropped: Iterable[Dropped] = (), sources: dict[str, TensorInfo] = SOURCES
) -> list[tuple[str, str]]:
    """Codes of faults, and of whom they are."""
    problems = faults(tuple(made), dropped, sources)
    assert {problem.severity for problem in problems} <= {"error"}
    return sorted((problem.code, problem.message.rpartition(": ")[2]) for problem in problems)


def test_a_good_plan_has_no_faults() -> None:
    assert found(GOOD) == []
    assert found([whole(A)], [Dropped("b", "rule", "why")]) == []
    assert found([whole(B), whole(A, "other", "bfloat16")]) == []
    assert found([], [], {}) == []


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1, 1), (7,)])
def test_tensors_of_any_shape_are_used_whole(shape: Index) -> None:
    assert found([whole(info("t", shape))], (), {"t": info("t", shape)}) == []


def test_parts_may_come_from_anywhere() -> None:
    """Split in two, with rows apart in blocks, and joined from two."""
    split = [
        Target("even", "float32", (2, 6), (Rows("a", 0, 2, block=1, step=2),)),
        Target("odd", "float32", (2, 6), (Rows("a", 1, 2, block=1, step=2),)),
    ]
    assert found([*split, whole(B)]) == []
    assert found([Target("ab", "float32", (7, 6), (Rows("a", 0, 4), Rows("b", 0, 3)))]) == []
    columns = [Target(f"c{n}", "float32", (4, 3), (Rows("a", 0, 4, column=n),)) for n in (0, 3)]
    assert found([*columns, whole(B)]) == []
    experts = [Target(f"e{n}", "float32", (6,), (Rows("a", 0, 6, lead=(n,)),)) for n in range(4)]
    assert found([*experts, whole(B)]) == []


def test_two_of_one_name() -> None:
    assert found([whole(A, "same"), whole(B, "same")]) == [("target-twice", "same")]


def test_a_source_that_is_forgotten() -> None:
    assert found([whole(B)]) == [("unused", "a")]


def test_a_source_that_is_dropped_and_used() -> None:
    assert found(GOOD, [Dropped("a", "rule", "why")]) == [("dropped-and-used", "a")]


@pytest.mark.parametrize(
    "parts",
    [
        (Rows("a", 0, 3),),
        (Rows("a", 1, 3),),
        (Rows("a", 0, 4), Rows("a", 2, 1)),
        (Rows("a", 0, 2), Rows("a", 1, 2)),
        (Rows("a", 1, 4),),
        (Rows("a", 0, 4, block=2, step=1),),
        (Rows("a", 0, 4, column=1),),
    ],
    ids=["missing", "first missing", "doubled", "doubled and missing", "outside", "blocks overlap", "columns outside"],
)
def test_rows_that_are_not_used_once(parts: tuple[Rows, ...]) -> None:
    rows = sum(part.count for part in parts)
    assert {code for code, _ in found([Target("a", "float32", (rows, 6), parts), whole(B)])} == {"not-once"}
    problems = faults([Target("a", "float32", (rows, 6), parts), whole(B)], (), SOURCES)
    assert [problem.message.endswith(": a") for problem in problems] == [True] * len(problems)


@pytest.mark.parametrize("shape", [(4, 5), (4, 7), (4,), (4, 6, 1), (4, 3, 2)])
def test_a_shape_that_is_not_that_of_its_source(shape: Index) -> None:
    assert {code for code, _ in found([Target("a", "float32", shape, (Rows("a", 0, 4),)), whole(B)])} == {"not-once"}


def test_a_target_that_has_not_as_many_rows_as_its_parts() -> None:
    assert found([Target("a", "float32", (5, 6), (Rows("a", 0, 4),)), whole(B)]) == [("rows-disagree", "a")]
    fewer = Target("a", "float32", (3, 6), (Rows("a", 0, 4),))
    assert [code for code, _ in found([fewer, whole(B)])] == ["not-once", "rows-disagree"]


@pytest.mark.parametrize("dtype", ["complex128", "qint8", "complex32", "float4_e2m1fn_x2"])
def test_a_dtype_that_safetensors_has_not(dtype: str) -> None:
    odd = replace(A, dtype=dtype)
    assert found([whole(odd), whole(B)], (), {"a": odd, "b": B}) == [("unwritable-dtype", "a")]


@pytest.mark.parametrize("name", ["__metadata__", "a\ud800b"])
def test_a_name_that_safetensors_cannot_hold(name: str) -> None:
    assert found([whole(A, name), whole(B)]) == [("unwritable-name", name)]


@pytest.mark.parametrize("name", ["größe", "名前", "a b", 'quote"', "back\\slash", "new\nline", "\U0001f916"])
def test_names_that_can_be_written_are_written(tmp_path: Path, name: str) -> None:
    made = [whole(A, name), whole(B)]
    assert found(made) == []
    (file,) = weight_files(made, 1 << 30)
    assert load_file(write(tmp_path, file)).keys() == {name, "b"}


def test_a_source_that_is_not_there() -> None:
    assert [code for code, _ in found([*GOOD, whole(info("c", (2, 6)))])] == ["source-missing"]
    (problem,) = faults([*GOOD, whole(info("c", (2, 6)), "new")], (), SOURCES)
    assert problem.message == "made of c, which the checkpoint does not have: new"


@pytest.mark.parametrize(
    ("stored", "written"), [("int64", "float32"), ("float32", "int64"), ("float8_e5m2", "bfloat16")]
)
def test_a_cast_that_cannot_be_done(stored: str, written: str) -> None:
    """Only floats of 16 bits and more are cast: anything else would fail while the files are written."""
    source = replace(A, dtype=stored)
    assert len(found([whole(source, "", written), whole(B)], (), {"a": source, "b": B})) == 1


def test_everything_that_is_wrong_is_told_at_once() -> None:
    made = [whole(A, "same"), whole(info("c", (2, 6)), "same"), whole(A, "__metadata__")]
    assert sorted({code for code, _ in found(made)}) == [
        *("not-once", "source-missing", "target-twice", "unused", "unwritable-name"),
    ]


# The whole directory


def test_a_plan_counts_everything_that_it_writes() -> None:
    weights = weight_files([whole(A), whole(B, "", "bfloat16")], 100)
    plan = Plan(weights, (SideFile("vocab.json", "/x/vocab.json", 1000),), {"config.json": b"{}"}, ())
    assert [file.nbytes for file in weights] == [PAGE + 96, PAGE + 36]
    assert plan.nbytes == 2 * PAGE + 96 + 36 + 1000 + 2
    assert [target.name for target in plan.targets] == ["a", "b"]
