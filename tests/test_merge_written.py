"""What `merge-fsdp` writes: dtypes, files and their index, the config, side files, modes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open

from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.merging import Options, merge
from tests.merged import QWEN2, config_of, tensors_in, unequal, write_config, write_role

EMBEDDINGS = {"model.embed_tokens.weight": torch.randn(10, 4), "lm_head.weight": torch.randn(10, 4)}
EVERY_DTYPE = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
CASTABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def of_every_dtype() -> dict[str, torch.Tensor]:
    return {f"w.{str(dtype)[6:]}": torch.arange(6).reshape(3, 2).to(dtype) for dtype in EVERY_DTYPE}


def test_dtypes_are_kept(tmp_path: Path) -> None:
    """No silent cast."""
    weights = of_every_dtype()
    merge(write_role(tmp_path / "role", weights), tmp_path / "out", Options())
    assert unequal(tensors_in(tmp_path / "out"), weights) == set()


@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_only_floats_are_cast(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Integers, bools and fp8 are never cast, nor are buffers."""
    weights, buffers = of_every_dtype(), {f"b.{k}": v for k, v in of_every_dtype().items()}
    merge(write_role(tmp_path / "role", weights, buffers), tmp_path / "out", Options(dtype=name))
    cast = {k: v.to(dtype) if v.dtype in CASTABLE else v for k, v in weights.items()}
    assert unequal(tensors_in(tmp_path / "out"), {**cast, **buffers}) == set()


def test_buffers_are_cast_when_asked(tmp_path: Path) -> None:
    buffers = of_every_dtype()
    role = write_role(tmp_path / "role", {"w": torch.ones(2)}, buffers)
    result = merge(role, tmp_path / "out", Options(dtype="bfloat16", cast_buffers=True))
    expected = {k: v.bfloat16() if v.dtype in CASTABLE else v for k, v in {"w": torch.ones(2), **buffers}.items()}
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()
    assert {(cast.dtype, cast.to) for cast in result.casts} == {(str(d)[6:], "bfloat16") for d in CASTABLE[:3]}


@pytest.mark.parametrize("name", ["mlp.gate.e_score_correction_bias", "layers.0.layer_scalar", "bn.running_mean"])
def test_one_rank_keeps_what_is_known_to_be_a_buffer(name: str, tmp_path: Path) -> None:
    """At world size 1 parameters and buffers look alike: a list of names is kept."""
    (tmp_path / "role").mkdir()
    state = {name: torch.randn(3), "w": torch.randn(3), f"not.{name}.weight": torch.randn(2)}
    torch.save(state, tmp_path / "role" / "model_world_size_1_rank_0.pt")
    result = merge(tmp_path / "role", tmp_path / "out", Options(dtype="bfloat16"))
    expected = {k: v if k == name else v.bfloat16() for k, v in state.items()}
    assert unequal(tensors_in(tmp_path / "out"), expected) == set()
    assert result.kept == (name,)


def test_rounding_is_to_nearest_even_and_nan_stays(tmp_path: Path) -> None:
    raw = torch.randint(-(2**31), 2**31, (4000, 4), dtype=torch.int64).to(torch.int32)
    weights = {"w": raw.view(torch.float32), "ties": torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, float("nan"), -0.0])}
    options = Options(dtype="bfloat16", allow_overflow=True)
    merge(write_role(tmp_path / "role", weights), tmp_path / "out", options)
    found = tensors_in(tmp_path / "out")
    for name, value in weights.items():
        nan = value.isnan()
        assert torch.equal(found[name].isnan(), nan)
        assert torch.equal(found[name][~nan].view(torch.int16), value[~nan].bfloat16().view(torch.int16))


def test_values_that_do_not_fit_are_counted_and_refused(tmp_path: Path) -> None:
    weights = {"fits": torch.tensor([65504.0, float("inf")]), "not": torch.tensor([65520.0, -1e30, 1.0, float("nan")])}
    role = write_role(tmp_path / "role", weights)
    with pytest.raises(BrokenCheckpoint) as caught:
        merge(role, tmp_path / "out", Options(dtype="float16"))
    assert (caught.value.exit_code, caught.value.code) == (4, "overflow")
    assert [problem.message for problem in caught.value.problems] == ["not: 2 values would become infinite"]
    assert not (tmp_path / "out").exists()
    result = merge(role, tmp_path / "out", Options(dtype="float16", allow_overflow=True))
    assert [cast.overflowed for cast in result.casts] == [{"not": 2}]
    assert tensors_in(tmp_path / "out")["not"].isinf().tolist() == [True, True, False, False]


def test_files_and_index_as_transformers_writes_them(tmp_path: Path) -> None:
    """Case 35: total_size is in bytes; case 55: the index names what was written."""
    weights = {f"model.layers.{n}.weight": torch.randn(n + 1, 50) for n in range(12)}
    buffers = {"model.step": torch.tensor(3)}
    merge(write_role(tmp_path / "role", weights, buffers), tmp_path / "out", Options(max_shard_size=3000))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    everything = {**buffers, **weights}
    split = split_torch_state_dict_into_shards(
        everything, filename_pattern="model{suffix}.safetensors", max_shard_size=3000
    )
    assert index["weight_map"] == dict(sorted(split.tensor_to_filename.items()))
    assert len(split.filename_to_tensors) > 3
    assert index["metadata"] == {
        "total_size": sum(value.nbytes for value in everything.values()),
        "total_parameters": sum(value.numel() for value in weights.values()),
    }
    on_disk = {path.name for path in (tmp_path / "out").glob("*.safetensors")}
    assert on_disk == set(split.filename_to_tensors)
    assert unequal(tensors_in(tmp_path / "out"), everything) == set()


def test_one_file_has_no_index(tmp_path: Path) -> None:
    merge(write_role(tmp_path / "role", EMBEDDINGS), tmp_path / "out", Options())
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_every_file_says_format_pt(tmp_path: Path) -> None:
    """Case 36."""
    merge(write_role(tmp_path / "role", EMBEDDINGS), tmp_path / "out", Options(max_shard_size=100))
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize(("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0, 0o666, 0o777)])
def test_modes_are_what_the_umask_leaves(mask: int, file: int, folder: int, tmp_path: Path) -> None:
    """Case 37: never 0600 by itself."""
    role = write_role(tmp_path / "role", EMBEDDINGS, config=QWEN2)
    (role / "huggingface" / "tokenizer.json").write_text("{}")
    (role / "huggingface" / "tokenizer.json").chmod(0o400)
    before = os.umask(mask)
    try:
        merge(role, tmp_path / "out", Options(max_shard_size=100))
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert (modes, (tmp_path / "out").stat().st_mode & 0o777) == ({file}, folder)


@pytest.mark.parametrize(
    ("said", "written"),
    [
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({"dtype": "float32", "torch_dtype": "float16"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({}, {"torch_dtype": "bfloat16"}),
        (
            {"transformers_version": "5.1.0"},
            {"transformers_version": "5.1.0", "dtype": "bfloat16", "torch_dtype": "bfloat16"},
        ),
        ({"dtype": None}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({"dtype": "auto"}, {"dtype": "bfloat16", "torch_dtype": "bfloat16"}),
        ({"dtype": "auto", "model_type": "my_own"}, {"dtype": "bfloat16", "model_type": "my_own"}),
    ],
)
def test_the_config_says_what_was_written(said: dict[str, Any], written: dict[str, Any], tmp_path: Path) -> None:
    base = {name: value for name, value in QWEN2.items() if name != "torch_dtype"}
    role = write_role(tmp_path / "role", EMBEDDINGS, config={**base, **said})
    merge(role, tmp_path / "out", Options(dtype="bfloat16"))
    assert config_of(tmp_path / "out") == {**base, **written}


def test_nested_configs_say_it_too_and_others_are_left(tmp_path: Path) -> None:
    nested = {
        "text_config": {"dtype": "float32", "hidden_size": 4},
        "vision_config": {"torch_dtype": "float32"},
        "other": {"dtype": "float32"},
    }
    role = write_role(tmp_path / "role", EMBEDDINGS, config={**QWEN2, **nested})
    merge(role, tmp_path / "out", Options(dtype="bfloat16"))
    found = config_of(tmp_path / "out")
    assert found["text_config"] == {"dtype": "bfloat16", "hidden_size": 4}
    assert found["vision_config"] == {"torch_dtype": "bfloat16"}
    assert found["other"] == {"dtype": "float32"}


def test_a_config_that_is_right_stays_byte_for_byte(tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", EMBEDDINGS, config=QWEN2)
    raw = b'{"torch_dtype":"float32", "model_type": "qwen2",\t"eps": 1e-06, "tie_word_embeddings": false}'
    (role / "huggingface" / "config.json").write_bytes(raw)
    result = merge(role, tmp_path / "out", Options())
    assert (tmp_path / "out" / "config.json").read_bytes() == raw
    assert result.config_changes == ()


def test_what_lies_beside_the_weights(tmp_path: Path) -> None:
    """Cases 31 and 32: side files are taken byte for byte, weights and indexes are not, what is left is said."""
    role = write_role(tmp_path / "role", EMBEDDINGS, config=QWEN2)
    taken = {
        "generation_config.json": b'{"eos_token_id": [1, 2]}',
        "tokenizer.json": b"{}\n\n",
        "merges.txt": b"a b\r\n",
        "chat_template.jinja": b"{{ x }}",
        "modeling_odd.py": b"raise SystemExit\n",
        "spiece.model": bytes(range(9)),
        "preprocessor_config.json": b" {}",
        "additional_chat_templates/rag.jinja": b"{{ y }}",
    }
    left = {"model.safetensors": b"x", "model.safetensors.index.json": b"{}", "pytorch_model.bin": b"x", "a.gguf": b""}
    for name, content in {**taken, **left, "notes.bin": b"", ".hidden": b""}.items():
        (role / "huggingface" / name).parent.mkdir(exist_ok=True)
        (role / "huggingface" / name).write_bytes(content)
    os.mkfifo(role / "huggingface" / "pipe.json")
    (role / "huggingface" / "gone.json").symlink_to("nowhere")
    result = merge(role, tmp_path / "out", Options())
    for name, content in taken.items():
        assert (tmp_path / "out" / name).read_bytes() == content
    written = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == {*taken, "config.json", "model.safetensors"}
    assert set(result.left) == {*left, "notes.bin", ".hidden", "pipe.json", "gone.json"}
    assert result.missing == ("tokenizer_config.json",)


def test_code_that_the_config_names_is_missed(tmp_path: Path) -> None:
    config = {**QWEN2, "auto_map": {"AutoModel": "modeling_odd.Odd", "AutoTokenizer": ["tok.A", None], "X": "hub--m.C"}}
    result = merge(write_role(tmp_path / "role", EMBEDDINGS, config=config), tmp_path / "out", Options())
    assert result.missing[-2:] == ("modeling_odd.py", "tok.py")


def test_another_directory_of_side_files(tmp_path: Path) -> None:
    """Case 8."""
    role = write_role(tmp_path / "role", EMBEDDINGS, config={"model_type": "wrong"})
    write_config(tmp_path, QWEN2, "base")
    result = merge(role, tmp_path / "out", Options(hf_config=str(tmp_path / "base")))
    assert config_of(tmp_path / "out") == QWEN2
    assert result.side_files_from == str(tmp_path / "base")


def test_no_config_is_a_note(tmp_path: Path) -> None:
    result = merge(write_role(tmp_path / "role", EMBEDDINGS), tmp_path / "out", Options())
    assert [note.code for note in result.notes] == ["no-config"]
    assert unequal(tensors_in(tmp_path / "out"), EMBEDDINGS) == set()


def test_a_directory_given_without_a_config_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    with pytest.raises(NotACheckpoint, match=r"no config\.json in it"):
        merge(write_role(tmp_path / "role", EMBEDDINGS), tmp_path / "out", Options(hf_config=str(tmp_path / "base")))


def test_side_files_that_verls_script_moved(tmp_path: Path) -> None:
    """Case 76: `huggingface/` of an FSDP role under `model/`."""
    role = write_role(tmp_path / "role", EMBEDDINGS)
    write_config(role, QWEN2, "model/huggingface")
    merge(role, tmp_path / "out", Options())
    assert config_of(tmp_path / "out") == QWEN2


def test_a_config_beside_the_shards(tmp_path: Path) -> None:
    """Only what is known to belong to a model is taken from a directory that holds more."""
    role = write_role(tmp_path / "role", EMBEDDINGS)
    write_config(role, QWEN2, ".")
    for name in ("fsdp_config.json", "trainer_state.json", "tokenizer.json"):
        (role / name).write_text("{}")
    result = merge(role, tmp_path / "out", Options())
    assert {path.name for path in (tmp_path / "out").glob("*.json")} == {"config.json", "tokenizer.json"}
    assert result.left == ()
