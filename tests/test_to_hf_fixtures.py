"""Archives of megatron-core 0.12 to 0.19: what one set of weights becomes does not depend on who wrote it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.converting import Options, convert
from ckpttool.errors import Unmapped
from tests.merged import tensors_in, unequal, write_generation
from tests.writers.reading import read_tensors

DATA = Path(__file__).parent / "data" / "megatron"
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FAMILY = {
    "mcore0.16-bias-tp2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "mcore0.16-qk-tp1": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
}
MODELS = sorted(path.name for path in DATA.iterdir() if "moe" not in path.name)


def converted(name: str, tmp_path: Path, **fields: Any) -> dict[str, torch.Tensor]:
    config = tmp_path / "config"
    config.mkdir(exist_ok=True)
    (config / "config.json").write_text(json.dumps({**CONFIG, **FAMILY.get(name, {}), **fields}))
    convert(DATA / name, tmp_path / name, Options(hf_config=str(config)))
    return tensors_in(tmp_path / name)


@pytest.mark.parametrize(
    "pair", [("mcore0.12-dense-tp2", "mcore0.14-dense-tp2"), ("mcore0.16-dense-tp2", "mcore0.19-dense-tp2")]
)
def test_two_versions_that_wrote_the_same_weights(pair: tuple[str, str], tmp_path: Path) -> None:
    one, other = (converted(name, tmp_path) for name in pair)
    assert len(one) == 4 * 9 + 3
    assert unequal(one, other) == set()
    assert (tmp_path / pair[0] / "model.safetensors").read_bytes() == (
        tmp_path / pair[1] / "model.safetensors"
    ).read_bytes()


@pytest.mark.filterwarnings("ignore")  # of torch, which imports megatron for some of them
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_that_torch_reads(name: str, tmp_path: Path) -> None:
    """Group by group with slices of torch, stacked or one key a layer."""
    found, state = converted(name, tmp_path), read_tensors(DATA / name)

    def of(layer: int, key: str) -> torch.Tensor:
        indexed = state.get(f"decoder.layers.{layer}.{key}")
        return state[f"decoder.layers.{key}"][layer] if indexed is None else indexed

    for n in range(4):
        groups = of(n, "self_attention.linear_qkv.weight").chunk(2)  # 2 groups of 2 queries, a key, a value of 8 rows
        wanted = {
            "self_attn.q_proj.weight": torch.cat([group[:16] for group in groups]),
            "self_attn.k_proj.weight": torch.cat([group[16:24] for group in groups]),
            "self_attn.v_proj.weight": torch.cat([group[24:] for group in groups]),
            "self_attn.o_proj.weight": of(n, "self_attention.linear_proj.weight"),
            "mlp.gate_proj.weight": of(n, "mlp.linear_fc1.weight")[:48],
            "mlp.up_proj.weight": of(n, "mlp.linear_fc1.weight")[48:],
            "mlp.down_proj.weight": of(n, "mlp.linear_fc2.weight"),
            "input_layernorm.weight": of(n, "self_attention.linear_qkv.layer_norm_weight"),
            "post_attention_layernorm.weight": of(n, "mlp.linear_fc1.layer_norm_weight"),
        }
        for key, value in wanted.items():
            assert torch.equal(found[f"model.layers.{n}.{key}"], value), key
    assert torch.equal(found["model.embed_tokens.weight"], state["embedding.word_embeddings.weight"])
    assert torch.equal(found["lm_head.weight"], state["output_layer.weight"])
    assert torch.equal(found["model.norm.weight"], state["decoder.final_layernorm.weight"])


@pytest.mark.parametrize("name", ["mcore0.12-dense-tp2", "mcore0.16-dense-tp2"])
def test_the_common_state_is_not_needed(name: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / name, tmp_path / "copy")
    (tmp_path / "copy" / "common.pt").unlink()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    write_generation(tmp_path / "config")
    result = convert(tmp_path / "copy", tmp_path / "out", Options(hf_config=str(tmp_path / "config")))
    assert [(note.code, note.severity) for note in result.notes] == [("common-missing", "note")]
    assert unequal(tensors_in(tmp_path / "out"), converted(name, tmp_path)) == set()


def test_a_model_that_is_of_no_family_is_refused_with_everything_that_does_not_fit(tmp_path: Path) -> None:
    """One shared expert of a width that no configuration of DeepSeek can have."""
    fields = {
        "model_type": "deepseek_v3",
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "num_nextn_predict_layers": 0,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "q_lora_rank": None,
    }
    with pytest.raises(Unmapped) as raised:
        converted("mcore0.16-moe-tp1-ep2", tmp_path, **fields)
    codes = {problem.code for problem in raised.value.problems}
    assert codes == {"shapes-disagree", "weight-missing", "weight-unknown"}
    assert any("[40, 32]" in p.message and "[24, 32]" in p.message for p in raised.value.problems)
