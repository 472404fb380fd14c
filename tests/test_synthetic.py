"""The synthetic checkpoints say the truth: their states are hub files, and torch reads what is in their archives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from transformers.modeling_layers import MtpModel

from tests.synthetic import FAMILIES, Written, write_role
from tests.synthetic.archive import DIALECTS
from tests.synthetic.hub import load, logits, write_hub
from tests.writers.reading import read_metadata, read_tensors, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

ALL_ALIKE = ("llama", "mixtral", "qwen2_moe", "gpt_oss", "gemma3_text")
NOT_ALIKE = ("glm4_moe", "deepseek_v2", "deepseek_v3", "qwen3_next")


def is_mtp(name: str, layers: int) -> bool:
    """Whether transformers passes over a tensor because only prediction of further tokens needs it."""
    return name.startswith(("mtp.", f"model.layers.{layers}.", f"model.layers.{layers + 1}."))


def check(role: Path, written: Written) -> None:
    """Transformers gives the recorded logits from the state, and misses no name."""
    hub = write_hub(role.with_name("hub"), role / "huggingface" / "config.json", written.state)
    model, info = load(hub, written.model_class)
    assert set(info["missing_keys"]) <= {"score.bias"}
    assert all(is_mtp(name, model.config.num_hidden_layers) for name in info["unexpected_keys"]), info
    assert not info["mismatched_keys"]
    torch.testing.assert_close(logits(model, written.input_ids), written.logits, rtol=1e-5, atol=1e-5)


def check_archive(role: Path, written: Written) -> None:
    """Torch reads from the archive what was put there."""
    assert same(read_tensors(role / "dist_ckpt"), {key: entry.value for key, entry in written.entries.items()})


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_state_is_what_files_of_the_hub_have(family: str, tmp_path: Path) -> None:
    written = write_role(tmp_path / "role", family)
    assert torch.isfinite(written.logits).all()
    assert written.logits.std() > 0.5
    check(tmp_path / "role", written)
    check_archive(tmp_path / "role", written)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_state_of_a_value_head_is_a_score(family: str, tmp_path: Path) -> None:
    written = write_role(tmp_path / "role", family, head="value", padding=5)
    assert written.model_class.endswith("ForTokenClassification")
    assert written.state["score.weight"].shape == written.entries["output_layer.weight"].value.shape == (1, 32)
    assert written.logits.shape == (2, 14, 1)
    check(tmp_path / "role", written)


@pytest.mark.parametrize(
    ("family", "changes", "stacked"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, True),
        ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}, True),
        ("qwen3_moe", {"mlp_only_layers": [0]}, False),
        ("deepseek_v2", {"first_k_dense_replace": 0, "q_lora_rank": 20}, True),
        ("deepseek_v3", {"num_nextn_predict_layers": 2}, False),
        ("qwen3_next", {"decoder_sparse_step": 2}, False),
    ],
)
def test_configurations_may_change(family: str, changes: dict[str, object], stacked: bool, tmp_path: Path) -> None:
    written = write_role(tmp_path / "role", family, norms="local", config=changes)
    assert stacked == any(key.startswith("decoder.layers.self_attention.") for key in written.entries)
    check(tmp_path / "role", written)


def test_layers_of_further_tokens_may_be_left_out(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "glm4_moe", "qwen3_next"):
        written = write_role(tmp_path / family, family, mtp=0)
        assert not any(key.startswith("mtp.") for key in written.entries)
        assert not any(is_mtp(name, 4 if family == "qwen3_next" else 3) for name in written.state)


def test_bfloat16_is_exact_and_keeps_the_expert_bias(tmp_path: Path) -> None:
    for family in ("deepseek_v3", "qwen3_next"):
        written = write_role(tmp_path / family / "role", family, dtype=torch.bfloat16)
        kept = {name for name, value in written.state.items() if value.dtype == torch.float32}
        assert all(name.endswith(".e_score_correction_bias") for name in kept)
        assert json.loads((tmp_path / family / "role/huggingface/config.json").read_text())["dtype"] == "bfloat16"
        check(tmp_path / family / "role", written)
    delta = "self_attention.out_norm.weight"
    shifted = written.entries[f"decoder.layers.0.{delta}"].value
    assert torch.equal((shifted.float() + 1).bfloat16(), written.state["model.layers.0.linear_attn.norm.weight"])


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_layers_of_further_tokens_have_names_that_transformers_loads(family: str, tmp_path: Path) -> None:
    role = tmp_path / "role"
    written = write_role(role, family)
    hub = write_hub(tmp_path / "hub", role / "huggingface" / "config.json", written.state)
    model, _ = load(hub, written.model_class)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3\."]
    model.config.name_or_path = str(hub)
    loaded = MtpModel.from_pretrained(model).state_dict()
    names = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "post_norm": "shared_head.norm"}
    for own, name in names.items():
        assert torch.equal(loaded[f"layers.0.{own}.weight"], written.state[f"model.layers.3.{name}.weight"])
    expert = written.state["model.layers.3.mlp.experts.2.down_proj.weight"]
    assert torch.equal(loaded["layers.0.mtp_block.mlp.experts.down_proj"][2], expert)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("family", ALL_ALIKE + NOT_ALIKE)
def test_torch_reads_every_dialect(family: str, dialect: str, tmp_path: Path) -> None:
    written = write_role(tmp_path, family, dialect=dialect, extra=family == "mixtral")
    kept = {key: v for key, v in read_tensors(tmp_path / "dist_ckpt").items() if not key.startswith("optimizer.")}
    assert same(kept, {key: entry.value for key, entry in written.entries.items()})
    stacked = any(key.startswith("decoder.layers.self_attention.") for key in kept)
    assert stacked == (dialect == "stacked" and family in ALL_ALIKE)
    assert any(key.endswith("linear_fc1.weight_w") for key in kept) == (dialect == "singleton")


def test_chunks_are_cut_as_ranks_cut_them(tmp_path: Path) -> None:
    write_role(tmp_path, "mixtral", padding=32)
    found = read_metadata(tmp_path / "dist_ckpt").state_dict_metadata

    def sizes(key: str) -> tuple[tuple[int, ...], set[tuple[int, ...]], int]:
        entry = found[key]
        assert isinstance(entry, TensorStorageMetadata)
        return tuple(entry.size), {tuple(chunk.sizes) for chunk in entry.chunks}, len(entry.chunks)

    layers = "decoder.layers."
    assert sizes("embedding.word_embeddings.weight") == ((128, 32), {(64, 32)}, 2)
    assert sizes(layers + "self_attention.linear_qkv.weight") == ((3, 64, 32), {(1, 32, 32)}, 6)
    assert sizes(layers + "self_attention.linear_proj.weight") == ((3, 32, 32), {(1, 32, 16)}, 6)
    assert sizes(layers + "mlp.experts.experts.linear_fc1.weight") == ((3, 4, 96, 32), {(1, 1, 24, 32)}, 48)
    assert sizes(layers + "mlp.experts.experts.linear_fc2.weight") == ((3, 4, 32, 48), {(1, 1, 32, 24)}, 24)
    assert sizes(layers + "pre_mlp_layernorm.weight") == ((3, 32), {(1, 32)}, 3)
    assert len(list((tmp_path / "dist_ckpt").glob("*.distcp"))) == 4


def test_extra_is_what_else_a_training_keeps(tmp_path: Path) -> None:
    written = write_role(tmp_path, "qwen3_moe", extra=True)
    found = read_metadata(tmp_path / "dist_ckpt").state_dict_metadata
    objects = {key for key, entry in found.items() if isinstance(entry, BytesStorageMetadata)}
    layers = "decoder.layers."
    assert objects >= {"rng_state/shard_0_1", f"{layers}self_attention.linear_qkv._extra_state/shard_2_3"}
    assert f"{layers}mlp.experts.experts.linear_fc1._extra_state/shard_1.3_3.4" in objects
    assert found.keys() - objects == {f"{p}{key}" for key in written.entries for p in ("", "optimizer.state.exp_avg.")}


@pytest.mark.parametrize(
    ("family", "options", "keys"),
    [
        ("qwen3_moe", {}, {"self_attention.linear_qkv.layer_norm_weight", "pre_mlp_layernorm.weight"}),
        ("qwen3_moe", {"norms": "local"}, {"mlp.linear_fc1.layer_norm_weight"}),
        ("deepseek_v2", {}, {"input_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"}),
        ("deepseek_v2", {"norms": "local"}, {"pre_mlp_layernorm.weight", "self_attention.kv_layernorm.weight"}),
        ("gemma2", {}, {"self_attention.linear_proj.post_layernorm.weight", "mlp.linear_fc2.post_layernorm.weight"}),
        ("gemma2", {"post_norms": "mbridge"}, {"post_attention_layernorm.weight", "post_feedforward_layernorm.weight"}),
        ("qwen3_next", {}, {"self_attention.in_proj.layer_norm_weight", "self_attention.conv1d.weight.query"}),
        ("qwen3_next", {"norms": "local"}, {"input_layernorm.weight", "self_attention.in_proj.weight.alpha"}),
        ("qwen3_next", {"producer": "swift"}, {"self_attention.in_proj.weight", "self_attention.conv1d.weight"}),
        ("qwen3_next", {"producer": "slime"}, {"self_attention.linear_attn.in_proj_ba.weight"}),
    ],
)
def test_options_choose_names(family: str, options: dict[str, str], keys: set[str], tmp_path: Path) -> None:
    written = write_role(tmp_path, family, dialect="indexed", **options)  # type: ignore[arg-type]
    assert {f"decoder.layers.0.{key}" for key in keys} <= written.entries.keys()
    plain = write_role(tmp_path / "plain", family)
    assert same(written.state, plain.state)


def test_rows_of_attention_lie_by_group(tmp_path: Path) -> None:
    written = write_role(tmp_path, "seed_oss", dialect="indexed")
    for kind in ("weight", "bias"):
        rows = written.entries[f"decoder.layers.1.self_attention.linear_qkv.{kind}"].value
        q, k, v = (written.state[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv")
        for group, column in ((0, 3), (1, 11)):
            for head in range(2):
                assert torch.equal(rows[(group * 4 + head) * 12 + column], q[(group * 2 + head) * 12 + column])
            assert torch.equal(rows[(group * 4 + 2) * 12 + column], k[group * 12 + column])
            assert torch.equal(rows[(group * 4 + 3) * 12 + column], v[group * 12 + column])


@pytest.mark.parametrize(("producer", "order"), [("nvidia", (0, 2, 1, 3)), ("swift", (0, 1, 2, 3))])
def test_gates_of_attention_lie_where_a_producer_puts_them(
    producer: str, order: tuple[int, ...], tmp_path: Path
) -> None:
    written = write_role(tmp_path, "qwen3_next", producer=producer)
    rows = written.entries["decoder.layers.1.self_attention.linear_qkv.weight"].value
    q = written.state["model.layers.1.self_attn.q_proj.weight"].view(2, 4, 12, 32)  # head, gate, head, gate of a group
    for group in range(2):
        start = group * 6 * 12
        assert torch.equal(rows[start : start + 48].view(4, 12, 32), q[group, list(order)])


def test_columns_of_gpt_oss_experts_alternate(tmp_path: Path) -> None:
    written = write_role(tmp_path, "gpt_oss")
    fc1 = written.entries["decoder.layers.mlp.experts.experts.linear_fc1.weight"].value
    fused = written.state["model.layers.2.mlp.experts.gate_up_proj"]
    assert fc1.shape == (3, 4, 96, 32)
    assert torch.equal(fc1[2, 1, 5], fused[1, :, 10])
    assert torch.equal(fc1[2, 1, 48 + 5], fused[1, :, 11])


def test_rows_of_delta_nets_lie_by_kind(tmp_path: Path) -> None:
    written = write_role(tmp_path, "qwen3_next")
    own, hub = "decoder.layers.2.self_attention.", "model.layers.2.linear_attn."
    mixed = written.state[f"{hub}in_proj_qkvz.weight"].view(2, 8 + 8 + 12 + 12, 32)
    gates = written.state[f"{hub}in_proj_ba.weight"].view(2, 4, 32)
    bounds = {"query": (0, 8), "key": (8, 16), "value": (16, 28), "z": (28, 40)}
    for name, (start, stop) in bounds.items():
        found = written.entries[f"{own}in_proj.weight.{name}"].value
        assert torch.equal(found, mixed[:, start:stop].reshape(-1, 32))
    assert torch.equal(written.entries[f"{own}in_proj.weight.beta"].value, gates[:, :2].reshape(4, 32))
    assert torch.equal(written.entries[f"{own}in_proj.weight.alpha"].value, gates[:, 2:].reshape(4, 32))
    parts = [written.entries[f"{own}conv1d.weight.{name}"].value for name in ("query", "key", "value")]
    assert torch.equal(torch.cat(parts), written.state[f"{hub}conv1d.weight"])


def test_padding_is_behind_the_vocabulary(tmp_path: Path) -> None:
    written = write_role(tmp_path, "llama", padding=7)
    for key, name in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        value = written.entries[key].value
        assert torch.equal(value[:96], written.state[name])
        assert (value[96:] == 9).all()
        assert len(value) == 103


def test_tied_models_have_no_output_layer(tmp_path: Path) -> None:
    written = write_role(tmp_path / "role", "qwen3", config={"tie_word_embeddings": True})
    assert "output_layer.weight" not in written.entries
    assert "lm_head.weight" not in written.state
    check(tmp_path / "role", written)
