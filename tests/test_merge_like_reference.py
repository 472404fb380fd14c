"""What `merge-fsdp --like` takes for a reference: an index, headers and a config; not a byte of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.merged import Tensors, fingerprint, leftovers, tensors_in, unequal
from tests.served import Run, index_alone, merged_like, reference, refused_like


def test_only_headers_of_a_reference_are_read(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    """Behind its header a file is a hole of 64 GiB that no test could read in time."""
    like = sparse(tmp_path / "like", {**shapes(mixtral_hub), "odd.weight": ("F32", (1 << 34,))}, mixtral_config)
    merged_like(ckpttool, mixtral, tmp_path / "out", like, "--allow-missing", "odd.weight")
    assert unequal(tensors_in(tmp_path / "out"), mixtral_hub) == set()


SIZE = {"F32": 4, "BF16": 2}


def shapes(tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: ("F32", tuple(value.shape)) for name, value in tensors.items()}


def sparse(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any]) -> Path:
    """A model directory whose file of weights is a header and a hole."""
    folder.mkdir()
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + torch.Size(shape).numel() * SIZE[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_weights_that_are_pointers_only(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    """A clone without large files: the index has the names."""
    like = index_alone(tmp_path / "like", mixtral_hub, mixtral_config)
    (like / "model-00001-of-00001.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    merged_like(ckpttool, mixtral, tmp_path / "out", like)
    assert unequal(tensors_in(tmp_path / "out"), mixtral_hub) == set()


def test_what_is_no_reference(ckpttool: Run, mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").write_text("{}")
    for like in ("nowhere", "Qwen/Qwen3-8B", "empty", "config.json"):
        call = ckpttool("merge-fsdp", mixtral, "-o", "out", "--like", like)
        assert (call.code, like in call.err, "--like" in call.err) == (3, True, True), call.err
        assert not (tmp_path / "out").exists()


def test_an_empty_name_of_a_reference_is_wrong_usage(ckpttool: Run, mixtral: Path, tmp_path: Path) -> None:
    assert ckpttool("merge-fsdp", mixtral, "-o", tmp_path / "out", "--like", "").code == 2


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"model.norm.weight": 3}}',
        '{"weight_map": {"model.norm.weight": "../model.safetensors"}}',
    ],
)
def test_a_damaged_index_is_refused(content: str, ckpttool: Run, mixtral: Path, tmp_path: Path) -> None:
    (tmp_path / "like").mkdir()
    (tmp_path / "like" / "model.safetensors.index.json").write_text(content)
    refused_like(ckpttool, mixtral, tmp_path / "out", tmp_path / "like", code=(4, 7))


def test_the_reference_is_not_the_place_to_write_to(
    ckpttool: Run, mixtral: Path, mixtral_hub: Tensors, mixtral_config: dict[str, Any], tmp_path: Path
) -> None:
    like = reference(tmp_path / "like", mixtral_hub, mixtral_config)
    before = fingerprint(tmp_path)
    for output in (like, like / "out"):
        call = ckpttool("merge-fsdp", mixtral, "-o", output, "--like", like, "--force")
        assert call.code in (2, 6), call.err
        assert fingerprint(tmp_path) == before
        assert leftovers(output) == []
