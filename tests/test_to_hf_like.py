"""`to-hf --like`: names, form of the experts and dtypes are those of a reference, and nothing else is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from tests.conversions import Role, codes, done, make, only, refused, wrong
from tests.merged import Tensors, config_of, tensors_in, unequal

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def reference(role: Role, tensors: Mapping[str, torch.Tensor]) -> str:
    """A model directory with weights of these shapes and dtypes."""
    folder = role.path.parent / "reference"
    folder.mkdir(exist_ok=True)
    zeros = {name: torch.zeros_like(value) for name, value in tensors.items()}
    save_file(zeros, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def index(role: Role, names: Iterable[str]) -> str:
    """A model directory of an index alone."""
    folder = role.path.parent / "reference"
    folder.mkdir(exist_ok=True)
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return str(folder)


def packed(state: Tensors, experts: int = 4) -> dict[str, torch.Tensor]:
    """The same with all experts of a layer in one tensor, as transformers 5 saves them."""
    out = {name: value for name, value in state.items() if ".mlp.experts." not in name}
    for head in {name.split(".experts.")[0] + ".experts" for name in state if ".mlp.experts." in name}:
        several = [
            [state[f"{head}.{e}.{which}_proj.weight"] for which in ("gate", "up", "down")] for e in range(experts)
        ]
        out[f"{head}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in several])
        out[f"{head}.down_proj"] = torch.stack([down for _, _, down in several])
    return out


@pytest.mark.parametrize("dialect", ["stacked", "singleton"])
def test_experts_are_packed_as_in_the_reference(dialect: str, tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe", dialect=dialect)
    expected = packed(role.state)
    done(role, like=reference(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_experts_of_predictions_are_packed_too(tmp_path: Path) -> None:
    role = make(tmp_path, "glm4_moe")
    expected = packed(role.state)
    assert expected["model.layers.3.mlp.experts.gate_up_proj"].shape == (4, 48, 32)
    done(role, like=index(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_packed_in_some_layers_only(tmp_path: Path) -> None:
    """Qwen3.5 has its layers packed and those of multi-token prediction not."""
    role = make(tmp_path, "glm4_moe")
    last = {name: value for name, value in role.state.items() if name.startswith("model.layers.3.")}
    expected = {**packed({name: value for name, value in role.state.items() if name not in last}), **last}
    done(role, like=index(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_experts_stay_one_by_one_where_the_reference_has_them_so(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe")
    done(role, like=index(role, role.state))
    assert wrong(role) == set()


def test_dtypes_are_those_of_the_reference_one_by_one(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    norms = {n: v for n, v in role.state.items() if "norm" in n}
    expected = {n: v if n in norms else v.bfloat16() for n, v in role.state.items()}
    result = done(role, like=reference(role, expected))
    assert expected[BIAS].dtype == torch.bfloat16
    assert unequal(tensors_in(role.output), expected) == set()
    assert [(cast.dtype, cast.to, set(cast.names)) for cast in result.casts] == [
        ("float32", "bfloat16", set(expected) - set(norms))
    ]


def test_an_index_alone_changes_no_dtype(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    assert done(role, like=index(role, role.state)).casts == ()
    assert wrong(role) == set()


def test_weights_that_are_pointers_only(tmp_path: Path) -> None:
    """A clone without large files: the index has the names."""
    role = make(tmp_path)
    like = index(role, role.state)
    (Path(like) / "model-00001-of-00001.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    done(role, like=like)
    assert wrong(role) == set()


@pytest.mark.parametrize(
    ("dtype", "router", "rest"),
    [("bfloat16", torch.bfloat16, torch.bfloat16), (None, torch.bfloat16, torch.float32)],
)
def test_a_router_bias_is_cast_where_the_reference_says_so(
    dtype: str | None, router: torch.dtype, rest: torch.dtype, tmp_path: Path
) -> None:
    """`--dtype` alone does not touch it."""
    role = make(tmp_path, "deepseek_v3")
    expected = {n: v.to(router if n.endswith("correction_bias") else rest) for n, v in role.state.items()}
    done(role, like=reference(role, expected), dtype=dtype)
    assert unequal(tensors_in(role.output), expected) == set()


@pytest.mark.parametrize("head", [True, False])
def test_predictions_have_their_copies_where_the_reference_has(head: bool, tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3", padding=32)
    expected = {**role.state, "model.layers.3.embed_tokens.weight": role.state["model.embed_tokens.weight"]}
    if head:
        expected["model.layers.3.shared_head.head.weight"] = role.state["lm_head.weight"]
    done(role, like=index(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_predictions_of_a_tied_model_copy_the_embeddings(tmp_path: Path) -> None:
    role = make(tmp_path, "glm4_moe", config={"tie_word_embeddings": True})
    table = role.state["model.embed_tokens.weight"]
    expected = {**role.state, "model.layers.3.shared_head.head.weight": table}
    done(role, like=index(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_no_copies_without_predictions(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    kept = {name for name in role.state if not name.startswith("model.layers.3.")}
    done(role, like=index(role, kept), mtp=False)
    assert tensors_in(role.output).keys() == kept


def test_a_reference_of_eight_bits_is_followed_in_names(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    scales = {f"{n}_scale_inv": torch.ones(1, 1) for n, v in role.state.items() if v.ndim == 2 and "layers" in n}
    tensors = {n: v.to(torch.float8_e4m3fn) if f"{n}_scale_inv" in scales else v for n, v in role.state.items()}
    role.say(quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    result = done(role, like=reference(role, {**tensors, **scales}))
    assert wrong(role) == set()
    assert "quantization_config" not in config_of(role.output)
    assert any("quantization_config" in change for change in result.config_changes)


def test_a_reference_of_four_bits_is_followed_in_names(tmp_path: Path) -> None:
    role = make(tmp_path, "gpt_oss", dtype=torch.bfloat16)
    names = set()
    for name in role.state:
        whole = name.endswith(("experts.gate_up_proj", "experts.down_proj"))
        names |= {f"{name}_blocks", f"{name}_scales"} if whole else {name}
    done(role, like=index(role, names))
    assert wrong(role) == set()


def test_names_of_either_side_only_are_all_listed(tmp_path: Path) -> None:
    role = make(tmp_path)
    gone = {f"model.layers.{n}.{name}.weight" for n in (0, 2) for name in ("input_layernorm", "mlp.up_proj")}
    more = {f"model.layers.{n}.odd.{m}.weight" for n in (0, 1) for m in range(12)} | {"vision.patch.weight"}
    error = refused(role, like=index(role, (set(role.state) - gone) | more))
    assert (error.exit_code, set(codes(error))) == (5, {"only-in-reference", "not-in-reference"})
    told = {problem.message for problem in error.problems}
    assert told == {
        "in the reference only, 24 of them: model.layers.[0-1].odd.[0-11].weight",
        "in the reference only: vision.patch.weight",
        "not in the reference, 2 of them: model.layers.[0,2].input_layernorm.weight",
        "not in the reference, 2 of them: model.layers.[0,2].mlp.up_proj.weight",
    }
    assert all("reference" in problem.hint for problem in error.problems)


def test_what_is_computed_when_loading_is_not_wanted(tmp_path: Path) -> None:
    role = make(tmp_path)
    done(role, like=index(role, {*role.state, "model.layers.0.self_attn.rotary_emb.inv_freq"}))
    assert wrong(role) == set()


@pytest.mark.parametrize("said", [True, ...])
def test_a_tied_reference_has_no_head(said: object, tmp_path: Path) -> None:
    """The archive has an equal one; Gemma's config may leave out that it is tied."""
    role = make(tmp_path, "gemma2")
    role.put_all({"output_layer.weight": role.entries["embedding.word_embeddings.weight"].value.clone()})
    role.say(tie_word_embeddings=said)
    assert "lm_head.weight" not in role.state
    done(role, like=index(role, role.state))
    assert wrong(role) == set()


def test_a_tied_reference_may_have_its_head_twice(tmp_path: Path) -> None:
    role = make(tmp_path, config={"tie_word_embeddings": True})
    assert "lm_head.weight" not in role.state
    done(role, like=index(role, {*role.state, "lm_head.weight"}))
    assert wrong(role) == set()


def renamed(role: Role, before: str, after: str) -> dict[str, torch.Tensor]:
    return {after + n.removeprefix(before) if n.startswith(before) else n: value for n, value in role.state.items()}


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model.", "transformer."])
def test_another_prefix_is_followed(prefix: str, tmp_path: Path) -> None:
    """What AutoModel saves has none; the head keeps its name."""
    role = make(tmp_path)
    expected = renamed(role, "model.", prefix)
    done(role, like=index(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_a_prefix_before_everything_is_followed(tmp_path: Path) -> None:
    """Kimi-K2.5 keeps its model of text there, the head too."""
    role = make(tmp_path)
    expected = renamed(role, "", "language_model.")
    done(role, like=index(role, expected))
    assert unequal(tensors_in(role.output), expected) == set()


def test_packed_experts_under_another_prefix(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe")
    role.state = packed(role.state)
    expected = renamed(role, "model.", "")
    done(role, like=reference(role, {n: v.bfloat16() for n, v in expected.items()}))
    assert unequal(tensors_in(role.output), {n: v.bfloat16() for n, v in expected.items()}) == set()


def test_a_reference_without_a_head_cannot_take_one(tmp_path: Path) -> None:
    role = make(tmp_path)
    names = {n.removeprefix("model.") for n in role.state} - {"lm_head.weight"}
    assert "lm_head.weight" in only(refused(role, like=index(role, names)), "not-in-reference").message


@pytest.mark.parametrize("content", [None, "{}"])
def test_a_reference_of_nothing(content: str | None, tmp_path: Path) -> None:
    role = make(tmp_path)
    (tmp_path / "empty").mkdir()
    if content is not None:
        (tmp_path / "empty" / "config.json").write_text(content)
    assert "--like" in refused(role, NotACheckpoint, like=str(tmp_path / "empty")).message


def test_the_config_of_the_reference_serves_where_there_is_no_other(tmp_path: Path) -> None:
    role = make(tmp_path)
    like = index(role, role.state)
    (role.path / "huggingface" / "config.json").rename(Path(like) / "config.json")
    assert done(role, like=like).side_files_from == like
    assert wrong(role) == set()


def test_packed_experts_of_two_dtypes_lose_nothing(tmp_path: Path) -> None:
    """Neither of bfloat16 and float16 holds all of the other."""
    role = make(tmp_path, "qwen3_moe", dialect="singleton", dtype=torch.bfloat16)
    key = "decoder.layers.0.mlp.experts.experts.1.linear_fc2.weight"
    odd = torch.full((32, 24), 1.0 + 2.0**-10, dtype=torch.float16)
    role.put_all({key: odd})
    done(role, like=index(role, packed(role.state)))
    assert torch.equal(tensors_in(role.output)["model.layers.0.mlp.experts.down_proj"][1].float(), odd.float())


def test_packed_experts_of_another_shape_are_not_written_without_a_word(tmp_path: Path) -> None:
    """Models of vision keep them transposed under the same names: the header of the reference shows it."""
    role = make(tmp_path, "qwen3_moe")
    expected = packed(role.state)
    turned = {n: v.transpose(1, 2).contiguous() if v.ndim == 3 else v for n, v in expected.items()}
    assert "[4, 32, 48]" in str(refused(role, like=reference(role, turned)))


def test_a_cast_that_a_reference_asks_for_may_not_overflow(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({"decoder.final_layernorm.weight": torch.full((32,), 1e6)})
    like = reference(role, {n: v.half() for n, v in role.state.items()})
    assert "model.norm.weight: 32 values" in str(refused(role, BrokenCheckpoint, like=like))


def test_a_reference_of_another_size_is_said_to_be_that_first(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe")
    small = make(tmp_path / "small", "qwen3_moe", config={"num_hidden_layers": 2})
    done(small)
    error = refused(role, like=str(small.output))
    assert error.problems[0].message == "the reference has 2 layers, the checkpoint 3"
    assert error.problems[0].code == "reference-disagrees"
