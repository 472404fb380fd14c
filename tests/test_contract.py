"""One contract, every format: what an opened checkpoint promises, held against torch's own reading."""

from __future__ import annotations

import json
import math
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex

from ckpttool.errors import NotACheckpoint, Refused
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.source import open_checkpoint
from ckpttool.tensors import dtype_bytes
from tests import builders
from tests.conftest import DATA
from tests.hostile import bomb, save_bomb
from tests.pieces import differing
from tests.writers.reading import read_tensors

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A checkpoint and how torch reads it."""

    root: Path
    format: str
    expected: Callable[[], Tensors]


FSDP_DATA = sorted(path.name for path in (DATA / "fsdp").iterdir() if path.is_dir())
FSDP_BUILT = (
    *("critic", "fsdp-tp", "fsdp1", "fsdp1-shardedtensor", "fsdp2", "hsdp", "lora", "lora-only", "single"),
    "tied-bf16",
)
MEGATRON_DATA = sorted(path.name for path in (DATA / "megatron").iterdir())
MEGATRON_BUILT = (
    *("dense-v1/dist_ckpt", "dense-v1-bridge/dist_ckpt", "moe-v1/dist_ckpt", "moe-v2/model/dist_ckpt"),
    *("dense-v2/model/dist_ckpt", "dense-v2/optimizer/dist_ckpt", "dense-v2/extra/dist_ckpt"),
    "megatron-lm/iter_0000010",
)
DCP_BUILT = ("dcp/step-10", "accelerate/pytorch_model_fsdp_0", "accelerate/optimizer_0")
HF = ("single", "sharded", "bin", "sharded-bin", "adapter")

NAMES = [
    *(f"data/fsdp/{name}" for name in FSDP_DATA),
    *(f"built/fsdp/{name}" for name in FSDP_BUILT),
    *(f"data/dcp/{name}" for name in MEGATRON_DATA),
    *(f"built/megatron/{name}" for name in MEGATRON_BUILT),
    *(f"built/dcp/{name}" for name in DCP_BUILT),
    *(f"hf/{name}" for name in HF),
]
OPENERS: dict[str, ModuleType] = {"fsdp": fsdp, "torch_dist": dcp, "dcp": dcp, "huggingface": hf}


def test_no_fixture_is_left_out() -> None:
    assert (len(FSDP_DATA), len(MEGATRON_DATA)) == (8, 8)


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Case:
    origin, kind, name = request.param.split("/", 2) if request.param[0] != "h" else ("", *request.param.split("/"))
    if kind == "hf":
        return hugging_face(tmp_path / name, name)
    if origin == "data":
        root = DATA / ("fsdp" if kind == "fsdp" else "megatron") / name
        if kind == "fsdp":
            return Case(root, "fsdp", lambda: load_file(DATA / "fsdp/expected.safetensors"))
        return Case(root, "torch_dist", lambda: read_tensors(root))
    built: Path = request.getfixturevalue("megatron_checkpoints" if kind == "megatron" else "fsdp_checkpoints")
    if kind == "fsdp":
        return Case(built / name, "fsdp", lambda: load_file(built / f"expected/{name}.safetensors"))
    return Case(built / name, "torch_dist" if kind == "megatron" else "dcp", lambda: read_tensors(built / name))


def weights() -> Tensors:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(7, 3),
        "a.turned": torch.randn(5, 4).T,
        "b.half": torch.randn(4, 2).to(torch.bfloat16),
        "b.slice": torch.randn(9, 4)[2:5, 1:3],
        "b.flags": torch.tensor([True, False]),
        "b.scalar": torch.tensor(7),
        "c.float8": torch.randn(8).to(torch.float8_e4m3fn),
        "c.none": torch.empty(0, 4),
    }


def hugging_face(root: Path, kind: str) -> Case:
    """A directory as transformers or peft writes it."""
    tensors = weights()
    halves = [{k: v for n, (k, v) in enumerate(tensors.items()) if n % 2 == half} for half in (0, 1)]
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama"}')
    if kind == "adapter":
        (root / "config.json").rename(root / "adapter_config.json")
        save_file({k: v.contiguous() for k, v in tensors.items()}, root / "adapter_model.safetensors")
    elif kind == "single":
        save_file({k: v.contiguous() for k, v in tensors.items()}, root / "model.safetensors")
    elif kind == "bin":
        torch.save(tensors, root / "pytorch_model.bin")
    else:
        stem, suffix = ("model", "safetensors") if kind == "sharded" else ("pytorch_model", "bin")
        files = [f"{stem}-{n}-of-00002.{suffix}" for n in ("00001", "00002")]
        for file, half in zip(files, halves, strict=True):
            if kind == "sharded":
                save_file({k: v.contiguous() for k, v in half.items()}, root / file)
            else:
                torch.save(half, root / file)
        index = {"metadata": {}, "weight_map": {k: f for f, h in zip(files, halves, strict=True) for k in h}}
        (root / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return Case(root, "huggingface", lambda: tensors)


@pytest.mark.filterwarnings("ignore")  # of torch's reader, which imports megatron for some of them
def test_what_is_read_is_what_was_written(case: Case) -> None:
    source = open_checkpoint(case.root)
    assert (source.root, source.format, source.problems) == (case.root, case.format, ())
    assert differing(source, case.expected()) == []


def test_detect_names_its_own_and_no_other(case: Case) -> None:
    mine = OPENERS[case.format]
    assert mine.detect(case.root)
    assert [other.detect(case.root) for other in (fsdp, dcp, hf) if other is not mine] == [None, None]
    assert mine.open_(case.root).tensors == open_checkpoint(case.root).tensors


def test_infos_are_consistent(case: Case) -> None:
    for name, info in open_checkpoint(case.root).tensors.items():
        assert info.name == name
        assert sum(piece.numel for piece in info.pieces) == info.numel == math.prod(info.shape)
        assert info.nbytes == dtype_bytes(info.dtype, info.numel)
        boxes = {(piece.offset, piece.size) for piece in info.pieces}
        assert len(boxes) == len(info.pieces)
        assert all((copy.offset, copy.size) in boxes for copy in info.copies)


_OPEN = """
import sys
from pathlib import Path
from ckpttool.source import open_checkpoint
names = [len(open_checkpoint(Path(path)).tensors) > 0 for path in sys.argv[1:]]
print(all(names), sorted({"torch", "megatron", "transformers", "rich", "typer"} & sys.modules.keys()))
"""


def test_opens_without_torch(fsdp_checkpoints: Path, megatron_checkpoints: Path, tmp_path: Path) -> None:
    roots = [
        *(fsdp_checkpoints / name for name in ("fsdp2", "fsdp1-shardedtensor", "dcp/step-10")),
        megatron_checkpoints / "moe-v1/dist_ckpt",
        *(hugging_face(tmp_path / kind, kind).root for kind in ("sharded", "bin")),
    ]
    command = [sys.executable, "-c", _OPEN, *map(str, roots)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "True []\n"


# Damage


@pytest.fixture(params=("fsdp", "dcp", "hf"))
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint of each format that may be changed."""
    if request.param == "hf":
        return hugging_face(tmp_path / "sharded", "sharded").root
    root = DATA / ("fsdp/torch2.13-fsdp2" if request.param == "fsdp" else "megatron/mcore0.19-dense-tp2")
    return builders.copy(root, tmp_path / "copy")


def codes(root: Path) -> set[str]:
    """Codes of the errors that opening reports, notes left out."""
    return {problem.code for problem in open_checkpoint(root).problems if problem.severity == "error"}


def data_files(root: Path) -> list[Path]:
    return sorted(path for path in root.iterdir() if path.suffix in (".pt", ".distcp", ".safetensors"))


def test_a_missing_file_is_an_error(copy: Path) -> None:
    assert codes(copy) == set()
    data_files(copy)[-1].unlink()
    assert codes(copy) & {"rank-missing", "file-missing"}


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_a_short_file_is_an_error(copy: Path, fraction: float) -> None:
    builders.truncate(data_files(copy)[0], fraction)
    assert "truncated" in codes(copy)


def test_a_save_that_never_ended_is_an_error(tmp_path: Path) -> None:
    root = builders.copy(DATA / "megatron/mcore0.16-dense-tp2", tmp_path / "copy")
    (root / "metadata.json").unlink()
    assert codes(root) == {"not-finalised"}
    (root / ".metadata").unlink()
    assert "metadata-missing" in codes(root)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.9])
def test_a_short_index_is_an_error(tmp_path: Path, fraction: float) -> None:
    root = builders.copy(DATA / "megatron/mcore0.16-dense-tp2", tmp_path / "copy")
    builders.truncate(root / ".metadata", fraction)
    assert codes(root) == {"unreadable-pickle"}


def test_a_renamed_rank_is_an_error(tmp_path: Path) -> None:
    root = builders.copy(DATA / "fsdp/torch2.13-fsdp2", tmp_path / "copy")
    names = [root / f"model_world_size_4_rank_{rank}.pt" for rank in (1, 2)]
    names[0].rename(root / "aside")
    names[1].rename(names[0])
    (root / "aside").rename(names[1])
    assert "rank-disagrees" in codes(root)


def test_a_directory_of_something_else_is_none(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    for name in ("model.pt", "readme.md", "model_world_size_4_rank_x.pt", "a.distcp", "pytorch_model.bin.bak"):
        (other / name).write_bytes(b"hello")
    for folder in (empty, other):
        assert [module.detect(folder) for module in (fsdp, dcp, hf)] == [None, None, None]
        with pytest.raises(NotACheckpoint):
            open_checkpoint(folder)


# Bombs


def into_shard(root: Path, marker: Path) -> None:
    save_bomb(root / "model_world_size_4_rank_1.pt", marker)


def into_metadata(root: Path, marker: Path) -> None:
    (root / ".metadata").write_bytes(bomb(marker))


def into_common(root: Path, marker: Path) -> None:
    save_bomb(root / "common.pt", marker)


def into_common_state(root: Path, marker: Path) -> None:
    """Replace one record of a data file by a bomb of the same length."""
    place = dcp.open_(root).objects[dcp.COMMON_OBJECT]
    save_bomb(root / "bomb", marker)
    with zipfile.ZipFile(root / "bomb", "a") as archive:
        archive.comment = bytes(place.length - (root / "bomb").stat().st_size)
    raw = (root / place.file).read_bytes()
    whole = raw[: place.offset] + (root / "bomb").read_bytes() + raw[place.offset + place.length :]
    assert len(whole) == len(raw)
    (root / place.file).write_bytes(whole)


def into_bin(root: Path, marker: Path) -> None:
    (root / "config.json").write_text("{}")
    save_bomb(root / "pytorch_model.bin", marker)


@pytest.mark.parametrize(
    ("origin", "put"),
    [
        ("fsdp/torch2.13-fsdp2", into_shard),
        ("megatron/mcore0.16-dense-tp2", into_metadata),
        ("megatron/mcore0.16-dense-tp2", into_common),
        ("megatron/mcore0.19-dense-tp2", into_common_state),
        ("", into_bin),
    ],
)
def test_a_bomb_is_refused_and_does_not_go_off(tmp_path: Path, origin: str, put: Callable[[Path, Path], None]) -> None:
    root, marker = tmp_path / "copy", tmp_path / "went-off"
    shutil.copytree(DATA / origin, root) if origin else root.mkdir()
    put(root, marker)
    with pytest.raises(Refused, match=r"posix\.system"):
        open_checkpoint(root)
    assert not marker.exists()


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    """Otherwise the test above proves nothing."""
    marker, file = tmp_path / "went-off", tmp_path / "bomb.pt"
    save_bomb(file, marker)
    torch.load(file, weights_only=False)
    assert marker.exists()


def write_index(root: Path, info: _StorageInfo) -> None:
    index = Metadata({"key": BytesStorageMetadata()}, storage_data={MetadataIndex("key"): info})
    (root / ".metadata").write_bytes(pickle.dumps(index))


def test_compressed_records_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(b"x")
    write_index(tmp_path, _StorageInfo("__0_0.distcp", 0, 1))
    assert codes(tmp_path) == set()
    write_index(tmp_path, _StorageInfo("__0_0.distcp", 0, 1, transform_descriptors=["zstd"]))
    assert codes(tmp_path) == {"compressed-item"}


@pytest.mark.parametrize("path", ["../outside.distcp", "/etc/passwd", "a/../../b.distcp", ""])
def test_metadata_that_names_a_file_outside_is_refused(tmp_path: Path, path: str) -> None:
    write_index(tmp_path, _StorageInfo(path, 0, 1))
    with pytest.raises(Refused, match="outside its directory"):
        open_checkpoint(tmp_path)
