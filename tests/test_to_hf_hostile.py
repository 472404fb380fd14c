"""Small damage and odd values that random ones found: each ends in a code of the table or in the right tensors."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo

from ckpttool.converting import Options, convert
from ckpttool.errors import BrokenCheckpoint, Refused
from tests.conversions import Role, done, make, only, refused, wrong
from tests.damaging import payloads
from tests.synthetic.hub import write_hub


def edit(role: Role, change: Callable[[Any], None]) -> None:
    """Change the index of an archive."""
    path = role.archive / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def flip(role: Role, find: Callable[[bytes, int, int], int], value: int) -> None:
    """Change one byte of the first data file, found by its bytes and where its first elements begin and end."""
    path = role.archive / "__0_0.distcp"
    raw = bytearray(path.read_bytes())
    begin, end = payloads(role.archive)[path.name][0]
    at = find(bytes(raw), begin, end)
    assert raw[at] != value
    raw[at] = value
    path.write_bytes(raw)


@pytest.fixture
def in_time() -> Any:
    """Stop what hangs before it fills the memory."""

    def stop(_number: int, _frame: object) -> None:
        pytest.fail("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(3)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_blocks_of_a_negative_size_are_refused(family: str, tmp_path: Path) -> None:
    role = make(tmp_path, family)
    (role.path / "transformer_config.json").write_text('{"moe_mlp_glu_interleave_size": -4}')
    refused(role, BrokenCheckpoint)


def test_a_record_without_its_elements_is_damaged(tmp_path: Path) -> None:
    """One byte of the name in the zip directory."""
    role = make(tmp_path)
    flip(role, lambda raw, _, end: raw.index(b"archive/data/0PK", end) + len("archive/data/"), ord("9"))
    refused(role, BrokenCheckpoint)


@pytest.mark.parametrize("length", [0, 104])
def test_a_local_header_of_another_length_is_damaged(length: int, tmp_path: Path) -> None:
    """One byte before the elements says where they begin."""
    role = make(tmp_path)
    flip(role, lambda raw, begin, _: raw.rindex(b"PK\x03\x04", 0, begin) + 28, length)
    refused(role, BrokenCheckpoint)


def test_a_key_with_a_nul_is_named(tmp_path: Path) -> None:
    role = make(tmp_path)

    def change(metadata: Any) -> None:
        key, new = "decoder.final_layernorm.weight", "decoder.final\0layernorm.weight"
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(key)
        for index in [index for index in metadata.storage_data if index.fqn == key]:
            metadata.storage_data[dataclasses.replace(index, fqn=new)] = metadata.storage_data.pop(index)

    edit(role, change)
    assert "final\\x00layernorm" in str(refused(role)) or "final\0layernorm" in str(refused(role))


@pytest.mark.parametrize("name", ["__0_0\0.distcp", "\ud800__0_0.distcp"])
def test_names_that_no_file_can_have_are_no_files(name: str, tmp_path: Path) -> None:
    role = make(tmp_path)

    def change(metadata: Any) -> None:
        index = next(iter(metadata.storage_data))
        info = metadata.storage_data[index]
        metadata.storage_data[index] = _StorageInfo(name, info.offset, info.length)

    edit(role, change)
    with pytest.raises((BrokenCheckpoint, Refused)):
        convert(role.path, role.output, Options())


def test_two_keys_of_one_record(tmp_path: Path) -> None:
    """An index that names the bytes of one tensor for another, too: one of them is lost."""
    role = make(tmp_path, dialect="indexed")

    def change(metadata: Any) -> None:
        norms = {i.fqn: i for i in metadata.storage_data if i.fqn.endswith("linear_qkv.layer_norm_weight")}
        one, other = (f"decoder.layers.{n}.self_attention.linear_qkv.layer_norm_weight" for n in (0, 1))
        metadata.storage_data[norms[one]] = metadata.storage_data[norms[other]]

    edit(role, change)
    refused(role, BrokenCheckpoint)


def test_text_with_nuls_in_a_config_is_kept(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(note="\0one\0", torch_dtype="bfloat16", dtype=...)
    done(role)
    assert json.loads((role.output / "config.json").read_text())["note"] == "\0one\0"


def reference(role: Role, folder: Path) -> Path:
    """A reference in bfloat16, in two files and an index."""
    state = {name: value.to(torch.bfloat16) for name, value in role.state.items()}
    write_hub(folder, role.path / "huggingface" / "config.json", {"x": torch.zeros(1)})
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    files = {name: f"model-0000{1 + at % 2}-of-00002.safetensors" for at, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: state[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize("how", ["cut", "gone"])
def test_a_reference_that_is_half_there_is_refused(how: str, tmp_path: Path) -> None:
    """As a download that was stopped leaves it."""
    role = make(tmp_path)
    like = reference(role, tmp_path / "like")
    file = like / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    if how == "gone":
        file.unlink()
    error = refused(role, BrokenCheckpoint, like=str(like))
    assert error.code == "reference-broken"
    assert file.name in only(error, error.problems[0].code).message


def test_files_of_a_reference_that_its_index_does_not_name_are_none_of_it(tmp_path: Path) -> None:
    """Mistral's repositories have the weights a second time, in one file under other names."""
    role = make(tmp_path, "mistral")
    like = reference(role, tmp_path / "like")
    save_file({"layers.0.attention.wq.weight": torch.zeros(2, 2)}, like / "consolidated.safetensors")
    done(role, like=str(like))


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_a_reference_that_would_run_code_is_refused(tmp_path: Path) -> None:
    role = make(tmp_path)
    like = tmp_path / "like"
    like.mkdir()
    torch.save({"a": Bomb()}, like / "pytorch_model.bin")
    refused(role, Refused, like=str(like))


def test_a_padded_vocabulary_is_no_value_head(tmp_path: Path) -> None:
    role = make(tmp_path, padding=5)
    role.say(num_labels=101, id2label=..., label2id=...)
    done(role)
    assert wrong(role) == set()
