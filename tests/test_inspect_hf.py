"""`inspect` on Hugging Face directories: weights in one file or many, adapters, configurations alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.errors import Refused
from ckpttool.inspection import inspect
from tests import builders
from tests.looking import BOMBS, bombs, codes, elements, faults, headers, holds, listed, problem, repack, write_json

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
HALVES = {
    FIRST: {"model.embed.weight": torch.zeros(6, 4), "model.layers.0.w": torch.zeros(4, 4, dtype=torch.bfloat16)},
    SECOND: {"model.layers.1.w": torch.zeros(4, 4, dtype=torch.bfloat16), "lm_head.weight": torch.zeros(6, 4)},
}
ELEMENTS = 24 + 16 + 16 + 24
BYTES = 24 * 4 + 16 * 2 + 16 * 2 + 24 * 4


@pytest.fixture
def single(tmp_path: Path, megatron_checkpoints: Path) -> Path:
    """A model in one file, by transformers."""
    return builders.copy(megatron_checkpoints / "expected/dense-hf", tmp_path / "hf")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model in two files with their index, by safetensors."""
    folder = tmp_path / "hf"
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {})
    for file, tensors in HALVES.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
    write_index(folder)
    return folder


def write_index(folder: Path, total: object = BYTES, name: str = INDEX, **changes: str) -> None:
    """The index as it ought to be, but for some names (`_` stands for a dot)."""
    weight_map = {key: file for file, tensors in HALVES.items() for key in tensors}
    weight_map |= {key.replace("__", "."): file for key, file in changes.items()}
    metadata = {} if total is None else {"total_size": total}
    write_json(folder / name, {"metadata": metadata, "weight_map": weight_map})


def test_one_file(single: Path) -> None:
    found = inspect(single, tensors="*")
    assert (found.kind, found.title, found.state) == ("huggingface", "Hugging Face model", "complete")
    assert found.problems == ()
    assert found.evidence == ("config.json", "model.safetensors")
    assert found.parameters == elements(single / "model.safetensors")
    assert listed(found) == headers(single / "model.safetensors")
    assert found.facts["model"] == "qwen2 (Qwen2ForCausalLM)"
    assert {row.placement for row in found.tensors} == {"whole"}


def test_two_files_and_their_index(sharded: Path) -> None:
    found = inspect(sharded, tensors="*")
    assert (found.kind, found.state, found.problems) == ("huggingface", "complete", ())
    assert found.evidence == ("config.json", INDEX, f"{FIRST}, {SECOND}")
    assert listed(found) == headers(sharded / FIRST, sharded / SECOND)
    assert found.parameters == ELEMENTS
    assert [(use.dtype, use.bytes) for use in found.dtypes] == [("float32", 192), ("bfloat16", 64)]


def test_dtypes_of_safetensors(tmp_path: Path) -> None:
    state = {
        "a": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "b": torch.zeros(2, dtype=torch.bool),
        "c": torch.zeros(()),
    }
    save_file(state, tmp_path / "model.safetensors")
    found = inspect(tmp_path, tensors="*")
    assert listed(found) == {"a": ("float8_e4m3fn", (3,)), "b": ("bool", (2,)), "c": ("float32", ())}
    assert found.parameters == 6


def test_a_file_of_the_index_is_missing(sharded: Path) -> None:
    (sharded / SECOND).unlink()
    found = inspect(sharded)
    assert found.state == "incomplete"
    assert set(faults(found)) == {"file-missing"}
    assert all(SECOND in told.message for told in found.faults)


def test_a_file_of_the_numbering_is_missing_and_there_is_no_index(sharded: Path) -> None:
    (sharded / FIRST).unlink()
    (sharded / INDEX).unlink()
    found = inspect(sharded)
    assert (found.state, faults(found)) == ("incomplete", ["file-missing"])
    message = problem(found, "file-missing").message
    assert "1 of 2" in message
    assert message.endswith(f": {FIRST}")


def test_an_index_alone(sharded: Path) -> None:
    for file in HALVES:
        (sharded / file).unlink()
    found = inspect(sharded)
    assert (found.state, faults(found)) == ("incomplete", ["file-missing"])
    assert "2 files" in problem(found, "file-missing").message


def test_the_index_names_a_key_that_its_file_does_not_have(sharded: Path) -> None:
    write_index(sharded, lm_head__bias=SECOND)
    found = inspect(sharded)
    assert (found.state, faults(found)) == ("incomplete", ["index-disagrees"])
    message = problem(found, "index-disagrees").message
    assert SECOND in message
    assert message.endswith(": lm_head.bias")


def test_the_index_names_the_wrong_file_for_a_key(sharded: Path) -> None:
    write_index(sharded, lm_head__weight=FIRST)
    found = inspect(sharded)
    assert set(faults(found)) == {"index-disagrees"}
    assert "lm_head.weight" in found.faults[0].message
    assert FIRST in found.faults[0].message


def test_the_index_does_not_know_a_key_of_its_file(sharded: Path) -> None:
    save_file({**HALVES[SECOND], "extra": torch.zeros(1)}, sharded / SECOND)
    found = inspect(sharded)
    assert faults(found) == ["index-disagrees"]
    assert problem(found, "index-disagrees").message.endswith(": extra")


def test_a_file_is_not_in_the_index(sharded: Path) -> None:
    """The other way round: left over from another save."""
    save_file({"w": torch.zeros(2)}, sharded / "model.safetensors")
    found = inspect(sharded)
    assert (found.state, faults(found)) == ("incomplete", ["file-not-in-index"])
    assert problem(found, "file-not-in-index").path == "model.safetensors"


def test_a_tensor_lies_in_two_files_of_a_set(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    save_file({**HALVES[SECOND], "model.layers.0.w": torch.zeros(4, 4)}, sharded / SECOND)
    found = inspect(sharded)
    assert faults(found) == ["index-missing", "tensor-twice"]
    assert "transformers does not load the 2 files" in problem(found, "index-missing").message
    assert problem(found, "tensor-twice").message.endswith(": model.layers.0.w")


@pytest.mark.parametrize(
    ("total", "words"),
    [(ELEMENTS, "the number of elements, not of bytes"), (BYTES + 1, f"{BYTES + 1:,}"), ("many", "many")],
)
def test_total_size_is_no_count_of_bytes(sharded: Path, total: object, words: str) -> None:
    """Case 35."""
    write_index(sharded, total)
    found = inspect(sharded)
    assert (found.state, codes(found)) == ("complete", ["total-size"])
    message = problem(found, "total-size").message
    assert words in message
    assert f"{BYTES:,} bytes" in message


def test_no_total_size_is_no_problem(sharded: Path) -> None:
    write_index(sharded, None)
    assert inspect(sharded).problems == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "bad-json"),
        ("[]", "bad-json"),
        ("{}", "bad-index"),
        ('{"weight_map": []}', "bad-index"),
        ('{"weight_map": {"lm_head.weight": ["a"]}}', "bad-index"),
        ('{"weight_map": {"lm_head.weight": null}}', "bad-index"),
        ('{"metadata": 3, "weight_map": {"lm_head.weight": 7}}', "bad-index"),
    ],
)
def test_an_index_that_is_none(sharded: Path, text: str, code: str) -> None:
    (sharded / INDEX).write_text(text)
    found = inspect(sharded)
    assert (found.state, faults(found)) == ("incomplete", [code])
    assert INDEX in problem(found, code).message


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.999])
def test_a_file_is_cut_short(single: Path, fraction: float) -> None:
    """Case 74 for safetensors: name and size."""
    builders.truncate(single / "model.safetensors", fraction)
    size = (single / "model.safetensors").stat().st_size
    found = inspect(single)
    assert (found.kind, found.state, faults(found)) == ("huggingface", "incomplete", ["truncated"])
    told = problem(found, "truncated")
    assert told.path == "model.safetensors"
    assert f"{size:,} bytes" in told.message


def _header(text: bytes, data: int = 8) -> bytes:
    return len(text).to_bytes(8, "little") + text + b"\0" * data


@pytest.mark.parametrize(
    "content",
    [
        _header(b"[]"),
        _header(b'{"w": 3}'),
        _header(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}', 9),
        _header(b'{"w": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}'),
        _header(b'{"w": {"dtype": "X32", "shape": [2], "data_offsets": [0, 8]}}'),
        _header(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}'),
        _header(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}', 12),
        _header(b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 9),
        _header(b'{"w": {"dtype": ["F32"], "shape": 2, "data_offsets": {}}}'),
    ],
)
def test_a_header_that_cannot_be(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    found = inspect(tmp_path)
    assert (found.kind, faults(found)) == ("huggingface", ["bad-header"])
    assert "model.safetensors" in problem(found, "bad-header").message


@pytest.mark.parametrize("length", [1 << 40, 200])
def test_a_header_longer_than_the_file(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    assert faults(inspect(tmp_path)) == ["truncated"]


def test_safetensors_without_anything_else(sharded: Path) -> None:
    """Case 44: a layout without DCP and without a configuration is Hugging Face already."""
    for name in ("config.json", INDEX):
        (sharded / name).unlink()
    (sharded / FIRST).rename(sharded / "shard-00001-model-00001-of-00002.safetensors")
    (sharded / SECOND).rename(sharded / "shard-00001-model-00002-of-00002.safetensors")
    found = inspect(sharded)
    assert (found.kind, found.title, found.state) == ("huggingface", "Hugging Face model", "complete")
    assert codes(found) == ["no-config"]
    assert found.parameters == ELEMENTS


def _one_bin(folder: Path, state: dict[str, torch.Tensor]) -> None:
    torch.save(state, folder / "pytorch_model.bin")


def _two_bins(folder: Path, state: dict[str, torch.Tensor]) -> None:
    names = {file: file.replace("model-", "pytorch_model-").replace("safetensors", "bin") for file in HALVES}
    for file, name in names.items():
        torch.save({key: state[key] for key in HALVES[file]}, folder / name)
    weight_map = {key: names[file] for file, tensors in HALVES.items() for key in tensors}
    write_json(folder / "pytorch_model.bin.index.json", {"metadata": {"total_size": BYTES}, "weight_map": weight_map})


@pytest.mark.parametrize("write", [_one_bin, _two_bins])
def test_weights_by_torch_save(tmp_path: Path, write: Callable[[Path, dict[str, torch.Tensor]], None]) -> None:
    """pytorch_model.bin: the index of the zip is enough."""
    state = HALVES[FIRST] | HALVES[SECOND]
    write_json(tmp_path / "config.json", CONFIG)
    write_json(tmp_path / "generation_config.json", {})
    write(tmp_path, state)
    found = inspect(tmp_path, tensors="*")
    assert (found.kind, found.state, found.problems) == ("huggingface", "complete", ())
    assert {name: shape for name, (_, shape) in listed(found).items()} == {k: tuple(v.shape) for k, v in state.items()}
    assert (found.parameters, sum(use.bytes for use in found.dtypes)) == (ELEMENTS, BYTES)


@pytest.mark.parametrize("way", BOMBS)
def test_a_hostile_bin_is_refused_and_nothing_runs(tmp_path: Path, way: str) -> None:
    marker, folder = tmp_path / "it-ran", tmp_path / "hf"
    folder.mkdir()
    _one_bin(folder, HALVES[FIRST])
    repack(folder / "pytorch_model.bin", lambda _: bombs(marker)[way])
    with pytest.raises(Refused, match=r"pytorch_model\.bin"):
        inspect(folder)
    assert not marker.exists()


def test_a_bin_cut_short(tmp_path: Path) -> None:
    """Case 74."""
    _one_bin(tmp_path, HALVES[FIRST])
    builders.truncate(tmp_path / "pytorch_model.bin")
    found = inspect(tmp_path)
    assert faults(found) == ["truncated"]
    assert "pytorch_model.bin" in problem(found, "truncated").message


def test_an_adapter_alone(tmp_path: Path) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {f"{layer}.lora_A.weight": torch.zeros(2, 8), f"{layer}.lora_B.weight": torch.zeros(8, 2)}
    write_json(tmp_path / "adapter_config.json", {"r": 2, "lora_alpha": 4})
    save_file(state, tmp_path / "adapter_model.safetensors", metadata={"format": "pt"})
    found = inspect(tmp_path)
    assert (found.kind, found.title, found.state) == ("hf-adapter", "PEFT adapter (Hugging Face)", "complete")
    assert found.problems == ()
    assert found.evidence == ("adapter_config.json", "adapter_model.safetensors")
    assert ("adapters", "") in holds(found)
    assert found.parameters == 32


def test_a_configuration_without_weights(fsdp_checkpoints: Path) -> None:
    """Case 42: huggingface/ of a role, given by itself."""
    found = inspect(fsdp_checkpoints / "fsdp2/huggingface")
    assert (found.kind, found.state) == ("hf-config", "no weights")
    assert found.title == "Hugging Face configuration without weights"
    assert "the weights are somewhere else" in problem(found, "no-weights").message
    assert found.parameters is None


def test_a_tokenizer_alone(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    shutil.copy(fsdp_checkpoints / "fsdp2/huggingface/tokenizer.json", tmp_path)
    found = inspect(tmp_path)
    assert (found.kind, found.evidence) == ("hf-config", ("tokenizer files",))


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({"model_type": "my_unknown"}, "my_unknown (no architectures)"),
        ({"architectures": ["A", "B"]}, "no model_type (A, B)"),
        ({}, None),
        ({"model_type": "x", "architectures": "A"}, "x (no architectures)"),
    ],
)
def test_models_that_no_library_knows(single: Path, config: dict[str, object], fact: str | None) -> None:
    """Case 8: words of the configuration are repeated, never looked up."""
    write_json(single / "config.json", config)
    found = inspect(single)
    assert (found.state, found.facts.get("model")) == ("complete", fact)


def test_a_configuration_that_is_no_json(single: Path) -> None:
    builders.truncate(single / "config.json")
    found = inspect(single)
    assert (found.kind, faults(found)) == ("huggingface", ["bad-json"])
    assert "config.json" in problem(found, "bad-json").message


def test_side_files_are_listed(sharded: Path) -> None:
    for name in ("tokenizer.json", "chat_template.jinja", "modeling_own.py", "vocab.txt"):
        (sharded / name).write_text("{}")
    (content,) = [c for c in inspect(sharded).contents if c.name == "side files"]
    names = "chat_template.jinja, config.json, generation_config.json, modeling_own.py, tokenizer.json, vocab.txt"
    assert content.detail.endswith(names)


def test_the_module_tree_of_numbered_layers(sharded: Path) -> None:
    modules = inspect(sharded).modules
    assert modules is not None
    tree = {module.name: (module.parameters, module.bytes) for module in modules.children}
    assert tree == {"model": (56, 160), "lm_head": (24, 96)}
    (model,) = [module for module in modules.children if module.name == "model"]
    assert [(m.name, m.tensors, m.parameters) for m in model.children] == [("embed", 1, 24), ("layers.* (2)", 2, 32)]
    assert modules.bytes == BYTES
