"""What `to-hf` refuses because archive and configuration do not fit: both sides are shown, and every name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import UsageError
from tests.conftest import Call
from tests.conversions import codes, done, make, only, refused, unfolded, wrong

Run = Callable[..., Call]
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
LAYERS = "decoder.layers."


@pytest.mark.parametrize(
    ("family", "field", "value", "code", "held", "said"),
    [
        ("llama", "num_hidden_layers", 5, "layers-disagree", "3 layers", "num_hidden_layers 5"),
        ("llama", "num_hidden_layers", 2, "layers-disagree", "3 layers", "num_hidden_layers 2"),
        ("qwen3_moe", "num_experts", 8, "experts-disagree", "4 experts", "num_experts 8"),
        ("mixtral", "num_local_experts", 3, "experts-disagree", "4 experts", "num_local_experts 3"),
        ("deepseek_v3", "num_nextn_predict_layers", 2, "mtp-disagree", "1 block of", "num_nextn_predict_layers 2"),
        ("deepseek_v3", "num_nextn_predict_layers", 0, "mtp-disagree", "1 block of", "num_nextn_predict_layers 0"),
    ],
)
def test_counts_that_disagree(
    family: str, field: str, value: int, code: str, held: str, said: str, tmp_path: Path
) -> None:
    role = make(tmp_path, family)
    role.say(**{field: value})
    error = refused(role)
    assert error.exit_code == 5
    message = only(error, code).message
    assert held in message
    assert said in message


def test_all_counts_that_disagree_are_told_at_once(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    role.say(num_hidden_layers=4, n_routed_experts=6, num_nextn_predict_layers=2)
    assert codes(refused(role)) == ["layers-disagree", "experts-disagree", "mtp-disagree"]


def test_layers_with_a_gap_are_named(tmp_path: Path) -> None:
    role = make(tmp_path, dialect="indexed")
    role.put_all({key: None for key in role.entries if key.startswith("decoder.layers.1.")})
    error = refused(role)
    assert "the layers 0, 2 alone," in error.problems[0].message
    assert codes(error) == ["layers-disagree", *["weight-missing"] * 9]


def test_mtp_that_is_configured_and_not_there_names_the_option(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3", mtp=0)
    problem = only(refused(role), "mtp-disagree")
    assert "no blocks" in problem.message
    assert "--no-mtp" in problem.hint
    done(role, mtp=False)
    assert wrong(role) == set()


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"head_dim": 16}, ("self_attention.linear_qkv.weight", "96 rows", "head_dim 16")),
        ({"num_key_value_heads": 4}, ("self_attention.linear_qkv.weight", "96 rows", "num_key_value_heads 4")),
        ({"num_attention_heads": 8}, ("self_attention.linear_qkv.weight", "96 rows", "num_attention_heads 8")),
        ({"num_attention_heads": 6, "num_key_value_heads": 1}, ("[32, 48]", "[32, 72]", "num_attention_heads 6")),
        ({"hidden_size": 40}, ("[96, 32]", "[96, 40]", "hidden_size 40")),
        ({"intermediate_size": 40}, ("[48, 32]", "[40, 32]", "intermediate_size 40")),
        ({"vocab_size": 97}, ("96 rows", "vocab_size 97")),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, ("num_attention_heads 3, num_key_value_heads 2",)),
    ],
)
def test_sizes_that_disagree_show_both_sides(changes: dict[str, Any], shown: tuple[str, ...], tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(**changes)
    error = refused(role)
    assert error.exit_code == 5
    assert set(codes(error)) == {"shapes-disagree"}
    assert [words for words in shown if words not in str(error)] == []


def test_sizes_that_disagree_are_told_of_every_layer(tmp_path: Path) -> None:
    role = make(tmp_path, dialect="indexed")
    role.say(head_dim=16)
    expected = {f"model.layers.{n}.self_attn.{which}_proj.weight" for n in range(3) for which in "qkvo"}
    assert expected <= unfolded(str(refused(role)))


def test_heads_in_other_groups_of_as_many_rows(tmp_path: Path) -> None:
    """Two groups of two queries are as many rows as one group of six: the projection behind tells."""
    role = make(tmp_path)
    role.say(num_attention_heads=6, num_key_value_heads=1)
    assert "o_proj" in str(refused(role))


def test_a_missing_tensor_is_named_with_its_key(tmp_path: Path) -> None:
    role = make(tmp_path, dialect="indexed")
    role.put_all({"decoder.layers.1.self_attention.linear_qkv.weight": None, "decoder.final_layernorm.weight": None})
    error = refused(role)
    assert (error.exit_code, set(codes(error))) == (5, {"weight-missing"})
    expected = {"model.norm.weight"} | {f"model.layers.1.self_attn.{which}_proj.weight" for which in "qkv"}
    assert set(error.data["missing"]) == expected
    assert expected <= unfolded(str(error))
    assert "(from decoder.layers.*.self_attention.linear_qkv.weight)" in str(error)
    assert "(from decoder.final_layernorm.weight)" in str(error)


def test_a_tensor_of_either_name_says_both(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({f"{LAYERS}self_attention.linear_qkv.layer_norm_weight": None})
    told = str(refused(role))
    assert {f"model.layers.{n}.input_layernorm.weight" for n in range(3)} <= unfolded(told)
    assert "linear_qkv.layer_norm_weight or decoder.layers.*.input_layernorm.weight" in told


def test_missing_experts_of_all_layers_are_all_named(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe", dialect="singleton")
    gone = [k for k in role.entries if ".experts.experts.2.linear_fc2." in k and not k.startswith("decoder.layers.0.")]
    role.put_all(dict.fromkeys(gone))
    error = refused(role)
    expected = {f"model.layers.{n}.mlp.experts.2.down_proj.weight" for n in (1, 2)}
    assert set(error.data["missing"]) == expected
    assert expected <= unfolded(str(error))


def test_missing_and_unknown_are_told_together(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({"decoder.final_layernorm.weight": None, "decoder.odd.weight": torch.ones(2), "more": torch.ones(1)})
    error = refused(role)
    assert sorted(codes(error)) == ["weight-missing", "weight-unknown", "weight-unknown"]
    assert error.data["missing"] == ["model.norm.weight"]
    assert set(error.data["unknown"]) == {"decoder.odd.weight", "more"}


def test_unknown_tensors_are_all_named(tmp_path: Path) -> None:
    role = make(tmp_path)
    names = [f"decoder.layers.{n}.self_attention.odd{m}.weight" for n in (0, 2) for m in range(10)]
    role.put_all({name: torch.ones(2) for name in names})
    error = refused(role)
    assert set(error.data["unknown"]) == set(names)
    assert set(names) <= unfolded(str(error))


def test_a_bias_that_the_config_does_not_have_is_not_lost(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen2")
    role.say(model_type="llama", architectures=["LlamaForCausalLM"])
    error = refused(role)
    assert set(codes(error)) == {"weight-unknown"}
    assert "self_attention.linear_qkv.bias" in str(error)


def test_a_bias_that_only_the_config_has_is_missing(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(mlp_bias=True)
    assert len(refused(role).data["missing"]) == 9


@pytest.mark.parametrize("dialect", ["stacked", "singleton"])
def test_what_is_stored_in_two_dialects_at_once(dialect: str, tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe", dialect=dialect)
    if dialect == "stacked":
        role.put_all({"decoder.layers.1.mlp.router.weight": torch.randn(4, 32)})
    else:
        role.put_all({"decoder.layers.1.mlp.experts.experts.linear_fc2.weight": torch.randn(4, 32, 24)})
    error = refused(role)
    assert (error.exit_code, set(codes(error))) == (5, {"stored-twice"})
    both = {
        "stacked": ("decoder.layers.mlp.router.weight", "decoder.layers.1.mlp.router.weight"),
        "singleton": (
            "decoder.layers.*.mlp.experts.experts.*.linear_fc2.weight",
            "decoder.layers.1.mlp.experts.experts.linear_fc2.weight",
        ),
    }
    assert all(name in str(error) for name in both[dialect])


def test_halves_and_the_whole_of_a_projection(tmp_path: Path) -> None:
    role = make(tmp_path, dialect="singleton")
    role.put_all({"decoder.layers.0.mlp.linear_fc1.weight": torch.randn(96, 32)})
    assert set(codes(refused(role))) == {"weight-unknown"}


@pytest.mark.parametrize("norm", ["input_layernorm.weight", "pre_mlp_layernorm.weight"])
def test_a_norm_under_both_of_its_names(norm: str, tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({f"decoder.layers.0.{norm}": torch.ones(32)})
    assert refused(role).data["unknown"] == [f"decoder.layers.0.{norm}"]


@pytest.mark.parametrize("vision", ["vision_model.patch_embed.weight", "visual.patch_embed.weight"])
def test_models_of_vision_and_language_are_said_to_be_that(vision: str, tmp_path: Path) -> None:
    role = make(tmp_path)
    role.entries = {f"language_model.{key}": entry for key, entry in role.entries.items()}
    role.put_all({vision: torch.randn(4, 4)})
    error = refused(role)
    assert error.exit_code == 5
    assert any("vision and language" in problem.hint for problem in error.problems)
    assert vision in error.data["unknown"]


@pytest.mark.parametrize("prefix", ["model.", "module.", "model.module."])
def test_prefixes_of_wrappers_are_taken_off(prefix: str, tmp_path: Path) -> None:
    role = make(tmp_path, dialect="indexed")
    role.entries = {f"{prefix}{key}": entry for key, entry in role.entries.items()}
    role.put_all({})
    done(role)
    assert wrong(role) == set()


def test_a_prefix_before_some_of_the_keys_is_none(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({"model.decoder.final_layernorm.weight": torch.ones(32)})
    assert refused(role).data["unknown"] == ["model.decoder.final_layernorm.weight"]


def test_an_untied_model_without_a_head(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({HEAD: None})
    assert "LlamaForCausalLM" in only(refused(role), "head-missing").message


def test_vocabularies_that_are_too_small_are_both_named(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.put_all({key: role.entries[key].value[:90] for key in (EMBEDDING, HEAD)})
    error = refused(role)
    assert codes(error) == ["shapes-disagree", "shapes-disagree"]
    assert all(f"{key} has 90 rows" in str(error) for key in (EMBEDDING, HEAD))
    assert "vocab_size 96" in str(error)


def test_a_refusal_as_json_has_every_name(tmp_path: Path, ckpttool: Run) -> None:
    role = make(tmp_path)
    names = {f"decoder.odd{n}": torch.ones(2) for n in range(20)}
    role.put_all({"decoder.final_layernorm.weight": None, **names})
    call = ckpttool("to-hf", role.path, "-o", role.output, "--json")
    assert (call.code, call.json["ok"], call.json["command"]) == (5, False, "to-hf")
    assert call.json["data"]["missing"] == ["model.norm.weight"]
    assert set(call.json["data"]["unknown"]) == set(names)
    assert {problem["code"] for problem in call.json["problems"]} >= {"weight-missing", "weight-unknown"}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 2),
        (["-o", ""], 2),
        (["-o", "out", "--dtype", "int8"], 2),
        (["-o", "out", "--max-shard-size", "5 apples"], 2),
        (["-o", "out", "--threads", "0"], 2),
        (["-o", "out", "--producer", "me"], 2),
        (["-o", "out", "--arch", "lama"], 2),
        (["-o", "out", "--untie", "--drop-lm-head"], 2),
        (["-o", "out", "--allow-overflow"], 2),
        (["-o", "out", "--step", "new"], 2),
        (["-o", "out", "--role", "../x"], 2),
        (["-o", "out", "--color", "green"], 2),
        (["-o", "out", "--hf-config", "nowhere"], 3),
        (["-o", "out", "--hf-config", "role"], 3),
        (["-o", "out", "--like", "nowhere"], 3),
        (["-o", "out", "--like", "role"], 3),
        (["-o", "out", "--step", "3"], 3),
        (["-o", "out", "--role", "critic"], 3),
        (["-o", "out", "--untie"], 4),
        (["-o", "out", "--drop-lm-head"], 4),
    ],
)
def test_exit_codes(
    options: list[str], code: int, ckpttool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    call = ckpttool("to-hf", "role", *options)
    assert (call.code, call.out) == (code, "")
    assert call.err
    assert not (tmp_path / "out").exists()


def test_an_unknown_map_has_a_hint(tmp_path: Path) -> None:
    assert "Did you mean llama?" in refused(make(tmp_path), UsageError, arch="lama").hint


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3_moe", "mlp_only_layers", 3),
        ("qwen3_moe", "decoder_sparse_step", "x"),
        ("deepseek_v3", "first_k_dense_replace", "1"),
        ("llama", "vocab_size", 0),
    ],
)
def test_fields_that_no_model_can_have_are_no_fault_of_ours(
    family: str, field: str, value: Any, tmp_path: Path, ckpttool: Run
) -> None:
    role = make(tmp_path, family)
    role.say(**{field: value})
    call = ckpttool("to-hf", role.path, "-o", role.output)
    assert (call.code, field in call.err) == (5, True)


@pytest.mark.parametrize("key", ["decoder.layers.{}.mlp.linear_fc2.weight", "decoder.odd.{}.weight"])
def test_keys_with_numbers_that_are_too_long(key: str, tmp_path: Path, ckpttool: Run) -> None:
    role = make(tmp_path, dialect="indexed")
    role.put_all({key.format("9" * 5000): torch.ones(32, 48)})
    assert ckpttool("to-hf", role.path, "-o", role.output).code == 5


def test_an_expert_that_is_missing_makes_no_other_unknown(tmp_path: Path) -> None:
    role = make(tmp_path, "gpt_oss", dialect="singleton")
    gone = [f"decoder.layers.0.mlp.experts.experts.{e}.linear_fc2.weight" for e in (0, 2)]
    role.put_all(dict.fromkeys(gone))
    error = refused(role)
    assert error.data["missing"] == ["model.layers.0.mlp.experts.down_proj"]
    assert error.data["unknown"] == []


@pytest.mark.parametrize("family", ["qwen2_moe", "gemma3_text", "deepseek_v3"])
def test_without_a_model_type_the_class_decides(family: str, tmp_path: Path) -> None:
    role = make(tmp_path, family)
    role.say(model_type=...)
    assert done(role).family == family
    assert wrong(role) == set()


def test_a_model_type_that_is_not_known_is_not_overruled_by_the_class(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(model_type="llama_of_ours")
    assert refused(role).code == "unknown-architecture"


@pytest.mark.parametrize(("trained", "said"), [("qwen3", "llama"), ("qwen2", "llama"), ("llama", "qwen3")])
def test_the_map_that_would_fit_is_named(trained: str, said: str, tmp_path: Path) -> None:
    role = make(tmp_path, trained)
    role.say(model_type=said)
    error = refused(role)
    assert trained in error.hint.partition(".")[0]
    assert said not in error.hint.partition(".")[0]
    assert "--hf-config" in error.hint
