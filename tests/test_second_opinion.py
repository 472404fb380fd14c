"""`verify --second-opinion`: what frameworks read is what we read, and where it is not, that is found."""

from __future__ import annotations

import random
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from ckpttool import reading
from ckpttool.errors import BrokenCheckpoint, Problem, Refused, UsageError
from ckpttool.formats.payload import Payload, locate
from ckpttool.formats.safetensorsfile import Entry, header_bytes
from ckpttool.source import Source, open_checkpoint
from ckpttool.tensors import Piece, Place, TensorInfo, overlap
from ckpttool.verification import frameworks, second_opinion
from ckpttool.verification.frameworks import Frameworks, NotPossible, Part
from ckpttool.verification.second_opinion import SecondOpinion
from tests.builders import copy
from tests.conftest import DATA
from tests.looking import BOMBS, bombs, repack, save_dcp

CHECKPOINTS = sorted(path for kind in ("fsdp", "megatron") for path in (DATA / kind).iterdir() if path.is_dir())
SHIFTED = ("fsdp/torch2.9-fsdp2", "fsdp/torch2.6-fsdp1-shardedtensor", "megatron/mcore0.16-qk-tp1")
TORCH = f"torch {metadata.version('torch')}"
EXTRA = "pip install 'ckpttool[torch]'"

VALUES = {
    "plain": torch.arange(24.0).reshape(6, 4),
    "turned": torch.arange(24.0).reshape(6, 4).T,
    "cut": torch.arange(40.0).reshape(10, 4)[3:7, 1:3],
    "scalar": torch.tensor(7),
    "bfloat16": torch.arange(9).to(torch.bfloat16),
    "float8": torch.arange(5.0).to(torch.float8_e4m3fn),
    "complex": torch.complex(torch.arange(4.0), torch.ones(4)),
    "bool": torch.tensor([True, False, True]),
    "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "none": torch.empty(0, 4),
}
FLOAT4 = torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
NOT_EMPTY = len(VALUES) - 1


@dataclass(frozen=True)
class Other:
    """A source that says something else of its tensors."""

    root: Path
    format: str
    tensors: dict[str, TensorInfo]
    objects: dict[str, Place] = field(default_factory=dict)
    unsharded: None = None
    problems: tuple[Problem, ...] = ()

    def part_of(self, _name: str) -> str:
        return "model"


def ask(root: Path, source: Source | None = None, sample: int = 1 << 30, seed: int = 0) -> SecondOpinion:
    return second_opinion.second_opinion(root, source or open_checkpoint(root), sample, seed)


def moved(root: Path, name: str, change: Callable[[Piece], Piece], *, copies: bool = False) -> Other:
    """What lies in a directory, but for the pieces of one tensor, or the copies of them."""
    source = open_checkpoint(root)
    tensor = source.tensors[name]
    if copies:
        tensor = replace(tensor, copies=tuple(map(change, tensor.copies)))
    else:
        tensor = replace(tensor, pieces=tuple(map(change, tensor.pieces)))
    return Other(root, source.format, {**source.tensors, name: tensor})


def placed(**changes: Any) -> Callable[[Piece], Piece]:
    return lambda piece: replace(piece, place=replace(piece.place, **changes))


def part(root: Path, name: str | None = None) -> Part:
    """All of the first piece of a tensor that has elements."""
    tensors = open_checkpoint(root).tensors
    tensor = tensors[name] if name else next(t for t in tensors.values() if t.numel)
    return Part(tensor, tensor.pieces[0], (tensor.pieces[0].offset, tensor.pieces[0].size))


# What frameworks read alike


@pytest.mark.parametrize("root", CHECKPOINTS, ids=lambda path: path.name)
def test_fixtures_are_read_alike(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Shards of every torch, also those that need a process group otherwise, and archives of every megatron-core."""
    tensors = open_checkpoint(root).tensors.values()
    found = ask(root)
    assert (found.problems, found.reader) == ((), TORCH)
    assert found.tensors == sum(tensor.numel > 0 for tensor in tensors)
    assert 0 < found.bytes <= sum(tensor.nbytes for tensor in tensors)
    assert capfd.readouterr() == ("", "")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("seed", range(4))
def test_every_rank_is_asked_sooner_or_later(seed: int) -> None:
    found = ask(DATA / "fsdp" / "torch2.6-fsdp1-shardedtensor", seed=seed)
    assert (found.problems, found.tensors) == ((), 16)


def test_safetensors(tmp_path: Path) -> None:
    save_file({name: value.contiguous() for name, value in VALUES.items()}, tmp_path / "model.safetensors")
    found = ask(tmp_path)
    assert (found.problems, found.tensors) == ((), NOT_EMPTY)
    assert found.reader == f"safetensors {metadata.version('safetensors')}, {TORCH}"


def test_bin_with_views(tmp_path: Path) -> None:
    more = {"parameter": torch.nn.Parameter(torch.ones(3)), "float4": FLOAT4}
    torch.save({**VALUES, **more}, tmp_path / "pytorch_model.bin")
    found = ask(tmp_path)
    assert (found.problems, found.tensors, found.reader) == ((), NOT_EMPTY + 2, TORCH)


def test_plain_dcp(tmp_path: Path) -> None:
    found = ask(save_dcp(tmp_path, {name: value.contiguous() for name, value in VALUES.items()}))
    assert (found.problems, found.tensors) == ((), NOT_EMPTY)
    assert found.bytes == sum(value.nbytes for value in VALUES.values())


def test_shards_after_real_dtensors_have_been_allowed() -> None:
    """Importing DTensor allows the classes that stand-ins are for; what is allowed is the same afterwards."""
    import torch.distributed.tensor

    before = torch.serialization.get_safe_globals()
    assert torch.distributed.tensor.DTensor in before
    assert [ask(DATA / "fsdp" / "torch2.6-fsdp2", seed=seed).problems for seed in range(4)] == [()] * 4
    after = torch.serialization.get_safe_globals()
    assert {str(one) for one in after} == {str(one) for one in before}
    assert len(after) == len(before)


# What is found


@pytest.mark.parametrize("kind", SHIFTED)
def test_elements_that_we_find_too_early(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever an archive has its elements: four bytes before them are others."""

    def early(*given: Any) -> Payload:
        payload = locate(*given)
        return payload._replace(offset=payload.offset - 4)

    monkeypatch.setattr(reading, "locate", early)
    found = ask(DATA / kind)
    assert {problem.code for problem in found.problems} == {"second-opinion-differs"}
    tensors = open_checkpoint(DATA / kind).tensors.values()
    assert len(found.problems) == found.tensors == sum(tensor.numel > 0 for tensor in tensors)


def test_a_shard_that_we_find_shorter() -> None:
    root = DATA / "fsdp" / "torch2.13-fsdp2"
    piece = open_checkpoint(root).tensors["embed.weight"].pieces[0]
    wrong = moved(root, "embed.weight", lambda _: replace(piece, size=(2, 8)))
    (problem,) = ask(root, wrong).problems
    assert problem.code == "second-opinion-fails"
    assert "embed.weight: [3, 8] at [0, 0] where we find [2, 8]" in problem.message


def test_a_shard_that_we_find_one_element_too_far() -> None:
    """The storage of a shard is padded: one element further there are still elements."""
    root = DATA / "fsdp" / "torch2.13-fsdp2"
    tensor = open_checkpoint(root).tensors["embed.weight"]
    last = tensor.pieces[-1]
    short = replace(tensor, pieces=(replace(last, place=replace(last.place, start=1)),))
    assert last.place.length > last.numel * 4
    found = ask(root, Other(root, "fsdp", {"embed.weight": short}))
    (problem,) = found.problems
    assert (problem.code, problem.severity, problem.path) == ("second-opinion-differs", "error", last.place.file)
    assert f"{last.place.file}: embed.weight: {last.numel} of {last.numel} elements are others" in problem.message


def test_a_shard_that_is_another_rank_s() -> None:
    root = DATA / "fsdp" / "torch2.6-fsdp1-shardedtensor"
    tensor = open_checkpoint(root).tensors["layers.0.lin.weight"]
    first, second = tensor.pieces[:2]
    swapped = replace(tensor, pieces=(replace(first, place=second.place, rank=second.rank),))
    (problem,) = ask(root, Other(root, "fsdp", {tensor.name: swapped})).problems
    assert problem.code == "second-opinion-fails"
    assert f"0 shards at {list(first.offset)}" in problem.message


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_tensor_that_is_another(tmp_path: Path, file: str) -> None:
    values = {"a": torch.arange(6.0), "b": torch.arange(6.0)}
    values["b"][2] = -1
    (save_file if file.endswith("safetensors") else torch.save)(values, tmp_path / file)
    other = open_checkpoint(tmp_path).tensors["b"].pieces[0].place
    found = ask(tmp_path, moved(tmp_path, "a", lambda piece: replace(piece, place=other)))
    (problem,) = found.problems
    assert (problem.code, found.tensors, found.bytes) == ("second-opinion-differs", 2, 48)
    assert f"{file}: a: 1 of 6 elements are others" in problem.message


def test_strides_that_are_others(tmp_path: Path) -> None:
    torch.save({"square": torch.arange(9.0).reshape(3, 3)}, tmp_path / "pytorch_model.bin")
    (problem,) = ask(tmp_path, moved(tmp_path, "square", placed(strides=(1, 3)))).problems
    assert "6 of 9 elements are others" in problem.message


def test_a_sign_of_zero_is_a_difference(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([-0.0, 1.0])}, tmp_path / "model.safetensors")
    other = open_checkpoint(tmp_path).tensors["b"].pieces[0]
    (problem,) = ask(tmp_path, moved(tmp_path, "a", lambda _: other)).problems
    assert "a: 1 of 2 elements are others" in problem.message


def test_copies_are_looked_at_too() -> None:
    root = DATA / "fsdp" / "torch2.13-fsdp2-hsdp"
    tensors = open_checkpoint(root).tensors
    name = "layers.0.lin.weight"
    wrong = tensors["layers.1.lin.weight"].pieces[0].place
    source = moved(root, name, lambda piece: replace(piece, place=replace(wrong, file=piece.place.file)), copies=True)
    outcomes = {tuple(problem.code for problem in ask(root, source, seed=seed).problems) for seed in range(12)}
    assert outcomes == {(), ("second-opinion-differs",)}


# What is looked at


@pytest.mark.parametrize("sample", [0, 1, 100, 5000])
def test_a_sample_is_bounded_in_bytes(sample: int) -> None:
    found = ask(DATA / "megatron" / "mcore0.16-het-tp1", sample=sample)
    assert found.bytes <= sample
    assert (found.tensors > 0) == (sample > 1)
    assert found.problems == ()


def test_a_sample_is_bounded_in_tensors(tmp_path: Path) -> None:
    save_file({f"t{n}": torch.ones(2) for n in range(second_opinion.MOST_PARTS + 9)}, tmp_path / "model.safetensors")
    assert ask(tmp_path).tensors == second_opinion.MOST_PARTS


def test_a_large_tensor_is_compared_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_opinion, "PART", 64)
    value = torch.arange(1000.0).reshape(10, 2, 50)
    torch.save({"large": value.transpose(0, 2)}, tmp_path / "pytorch_model.bin")
    assert [(ask(tmp_path, seed=n).problems, ask(tmp_path, seed=n).bytes) for n in range(9)] == [((), 40)] * 9
    (tmp_path / "pytorch_model.bin").unlink()
    save_file({"large": value}, tmp_path / "model.safetensors")
    assert [(ask(tmp_path, seed=n).problems, ask(tmp_path, seed=n).bytes) for n in range(9)] == [((), 64)] * 9
    save_dcp(tmp_path / "dcp", {"large": value})
    assert [ask(tmp_path / "dcp", seed=n).problems for n in range(9)] == [()] * 9


@pytest.mark.parametrize("seed", range(4))
def test_files_take_turns(seed: int) -> None:
    """A replicated tensor lies in every file; each is asked for one before any is asked for two."""
    tensors = open_checkpoint(DATA / "fsdp" / "torch2.13-fsdp2").tensors
    buffers = {name: tensor for name, tensor in tensors.items() if len(tensor.copies) == 3}
    parts = list(second_opinion.take_sample(buffers, 1 << 20, random.Random(seed), second_opinion._Problems()))
    assert len(parts) >= 4
    assert {one.piece.rank for one in parts[:4]} == {0, 1, 2, 3}


def test_the_same_seed_takes_the_same_sample() -> None:
    tensors = open_checkpoint(DATA / "fsdp" / "torch2.9-fsdp2").tensors

    def taken(seed: int) -> list[Part]:
        return list(second_opinion.take_sample(tensors, 200, random.Random(seed), second_opinion._Problems()))

    assert taken(5) == taken(5)
    assert taken(5) != taken(6)


@given(
    st.lists(st.integers(1, 9), max_size=4).map(tuple),
    st.integers(2, 400),
    st.sampled_from(["float32", "bfloat16", "complex128", "bool"]),
    st.integers(0, 99),
)
def test_parts_lie_in_their_piece(size: tuple[int, ...], most: int, dtype: str, seed: int) -> None:
    offset = tuple(range(3, 3 + len(size)))
    shape = tuple(o + n for o, n in zip(offset, size, strict=True))
    piece = Piece(offset, size, Place("f", 0, 1))
    found = second_opinion._part(TensorInfo("t", dtype, shape, (piece,)), piece, most, random.Random(seed))
    width = {"float32": 4, "bfloat16": 2, "complex128": 16, "bool": 1}[dtype]
    if found is None:
        assert most < width
        return
    assert overlap(found.box, (offset, size)) == found.box
    elements = second_opinion._nbytes(found) // width
    assert 1 <= elements <= most // width
    assert elements * 2 > min(most // width, piece.numel) or 0 not in size


# What is not possible


def test_large_items_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    root = DATA / "megatron" / "mcore0.19-dense-tp2"
    monkeypatch.setattr(second_opinion, "MOST_ITEM", 2000)
    found = ask(root)
    large = sum(max(p.place.length for p in t.pieces) > 2000 for t in open_checkpoint(root).tensors.values())
    (note,) = found.problems
    assert (note.code, note.severity) == ("second-opinion-not-possible", "note")
    assert f"no second opinion on {large} tensors: torch reads items whole" in note.message
    assert found.tensors == 9 - large > 0


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    header = header_bytes([Entry("a", "float32", (2,)), Entry("b", "float6_e2m3fn", (4,))], 8)
    (tmp_path / "model.safetensors").write_bytes(header + bytes(8 + 3))
    found = ask(tmp_path)
    (note,) = found.problems
    assert (note.severity, note.message) == ("note", "no second opinion on 1 tensor: torch has no dtype float6_e2m3fn")
    assert found.tensors == 1


def test_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match="needs torch, which is not installed") as caught:
        ask(DATA / "fsdp" / "torch2.6-fsdp2")
    assert caught.value.hint == EXTRA


@pytest.mark.parametrize("version", ["2.5.1+cpu", "1.13", "2.4.0a0"])
def test_with_a_torch_whose_weights_only_runs_code(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(metadata, "version", lambda _: version)
    with pytest.raises(UsageError, match=r"needs torch 2\.6 or newer") as caught:
        ask(DATA / "fsdp" / "torch2.6-fsdp2")
    assert caught.value.hint == EXTRA


def test_what_torch_alone_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a framework raises is a fault with its words, once a file that it cannot open."""

    def fails(*_: object, **__: object) -> None:
        raise LookupError("no such thing\nand more")

    monkeypatch.setattr(torch, "load", fails)
    found = ask(DATA / "fsdp" / "torch2.6-fsdp2")
    assert (found.tensors, {problem.code for problem in found.problems}) == (0, {"second-opinion-fails"})
    assert len(found.problems) == 4
    assert all("own reader fails (LookupError: no such thing)" in problem.message for problem in found.problems)


# Files that change, and hostile ones


def test_an_index_that_turns_hostile_is_never_opened(tmp_path: Path) -> None:
    root = copy(DATA / "megatron" / "mcore0.16-qk-tp1", tmp_path / "role")
    source = open_checkpoint(root)
    for how in BOMBS:
        (root / ".metadata").write_bytes(bombs(tmp_path / "canary")[how])
        assert ask(root, source).problems == ()
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("how", BOMBS)
@pytest.mark.parametrize("vetted", [True, False], ids=["vetted", "by torch alone"])
def test_a_shard_that_turns_hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, vetted: bool) -> None:
    """Our reader refuses it before torch sees it; if it did not, torch would."""
    root = copy(DATA / "fsdp" / "torch2.13-fsdp2", tmp_path / "role")
    one = part(root)
    repack(root / one.piece.place.file, lambda _: bombs(tmp_path / "canary")[how])
    if not vetted:
        monkeypatch.setattr(frameworks, "vet", lambda *_, **__: None)
    with pytest.raises(Refused if vetted else Exception, match=r"can run code|Weights only load failed"):
        Frameworks(root).read(one)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("how", BOMBS)
@pytest.mark.parametrize("vetted", [True, False], ids=["vetted", "by torch alone"])
def test_an_item_that_turns_hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, vetted: bool) -> None:
    root = save_dcp(tmp_path / "dcp", {"a": torch.ones(2)})
    one = part(root)
    file = root / one.piece.place.file
    file.write_bytes(file.read_bytes()[: one.piece.place.length])  # one item and no other
    repack(file, lambda _: bombs(tmp_path / "canary")[how])
    place = replace(one.piece.place, length=file.stat().st_size)
    if not vetted:
        monkeypatch.setattr(frameworks, "vet", lambda *_, **__: None)
    with pytest.raises(Refused if vetted else Exception, match=r"can run code|Weights only load failed"):
        Frameworks(root).read(one._replace(piece=replace(one.piece, place=place)))
    assert not (tmp_path / "canary").exists()


def test_hostile_is_the_word_of_the_command(tmp_path: Path) -> None:
    """A shard that is refused ends it, as everywhere."""
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    source = open_checkpoint(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    data = file.read_bytes()
    assert data.count(b"_rebuild_tensor_v2") == 1
    file.write_bytes(data.replace(b"_rebuild_tensor_v2", b"_rebuild_device_te"))
    with pytest.raises(Refused, match=r"torch\._utils"):
        ask(tmp_path, source)


def test_a_compressed_record_does_not_reach_torch(tmp_path: Path) -> None:
    """torch reads the version of the format, which may become any number of bytes."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in records.items():
            packed = zipfile.ZIP_DEFLATED if name.endswith("/version") else zipfile.ZIP_STORED
            archive.writestr(name, b"3\n" + bytes(1 << 20) if packed else data, packed)
    (problem,) = ask(tmp_path).problems
    assert (problem.code, problem.severity) == ("compressed-zip", "error")


@pytest.mark.parametrize("change", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")])
def test_a_file_that_goes_meanwhile(tmp_path: Path, change: Callable[[Path], None]) -> None:
    root = copy(DATA / "fsdp" / "torch2.10-fsdp2", tmp_path / "role")
    source = open_checkpoint(root)
    change(root / "model_world_size_4_rank_2.pt")
    found = ask(root, source)
    assert {problem.path for problem in found.problems} == {"model_world_size_4_rank_2.pt"}
    assert all(problem.severity == "error" for problem in found.problems)
    assert 0 < found.tensors < 16


def test_a_tensor_that_only_we_see(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    tensor = replace(open_checkpoint(tmp_path).tensors["a"], name="b")
    with pytest.raises(BrokenCheckpoint, match="no such tensor"):
        Frameworks(tmp_path).read(Part(tensor, tensor.pieces[0], ((0,), (2,))))


def test_another_dtype_than_ours(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    one = part(tmp_path)
    with pytest.raises(BrokenCheckpoint, match=r"float32 \[2\] where we find int32 \[2\]"):
        Frameworks(tmp_path).read(one._replace(tensor=replace(one.tensor, dtype="int32")))
    with pytest.raises(NotPossible, match="torch has no dtype load"):
        Frameworks(tmp_path).read(one._replace(tensor=replace(one.tensor, dtype="load")))
