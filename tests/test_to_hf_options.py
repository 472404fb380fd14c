"""Options of `to-hf`: dtypes, weight maps, who ordered rows, what interleaves them, and which checkpoint is meant."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, UsageError
from tests import builders
from tests.conversions import Role, done, make, only, refused, wrong
from tests.looking import write_json
from tests.merged import config_of, leftovers, tensors_in

NORM, ROUTER = "decoder.final_layernorm.weight", "decoder.layers.1.mlp.router.weight"
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"
BLOCKS = "moe_mlp_glu_interleave_size"
SHARED_BLOCKS = "moe_shared_expert_glu_interleave_size"


@pytest.mark.parametrize("name", ["bf16", "float16"])
def test_a_model_of_float32_is_cast_whole(name: str, tmp_path: Path) -> None:
    role = make(tmp_path)
    dtype = {"bf16": torch.bfloat16, "float16": torch.float16}[name]
    result = done(role, dtype=name)
    role.state = {n: value.to(dtype) for n, value in role.state.items()}
    assert wrong(role) == set()
    assert config_of(role.output)["dtype"] == str(dtype).removeprefix("torch.")
    assert [(c.dtype, c.to, len(c.names)) for c in result.casts] == [("float32", config_of(role.output)["dtype"], 30)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_bias_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3", dtype=dtype)
    result = done(role, dtype="bf16")
    kept = {name for name in role.state if name.endswith("e_score_correction_bias")}
    role.state = {n: value if n in kept else value.bfloat16() for n, value in role.state.items()}
    assert wrong(role) == set()
    assert set(result.kept) == kept


@pytest.mark.parametrize("dtype", [None, "bf16", "fp16"])
def test_what_is_wider_than_the_rest_is_kept(dtype: str | None, tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    wide = torch.randn(4, 32)
    role.put_all({ROUTER: wide})
    role.state["model.layers.1.mlp.gate.weight"] = wide
    result = done(role, dtype=dtype)
    if dtype == "fp16":
        role.state = {n: v.half() if v.dtype == torch.bfloat16 else v for n, v in role.state.items()}
    assert wrong(role) == set()
    assert ("model.layers.1.mlp.gate.weight" in result.kept) == (dtype is not None)


def test_a_model_of_bfloat16_can_be_widened(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    done(role, dtype="fp32")
    role.state = {n: value.float() for n, value in role.state.items()}
    assert wrong(role) == set()


def test_values_that_are_no_numbers_stay_so(tmp_path: Path) -> None:
    role = make(tmp_path)
    value = torch.ones(32)
    value[:3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    role.put_all({NORM: value})
    result = done(role, dtype="fp16")
    found = tensors_in(role.output)["model.norm.weight"]
    assert torch.equal(torch.nan_to_num(found.float(), 7, 8, 9), torch.nan_to_num(value, 7, 8, 9))
    assert all(cast.overflowed == {} for cast in result.casts)


def test_what_does_not_fit_into_float16_is_refused_by_name(tmp_path: Path) -> None:
    role = make(tmp_path)
    value = torch.ones(32)
    value[4:6] = torch.tensor([7e4, -1e30])
    role.put_all({NORM: value})
    error = refused(role, BrokenCheckpoint, dtype="fp16")
    assert error.exit_code == 4
    assert only(error, "overflow").message == "model.norm.weight: 2 values would become infinite"
    result = done(role, dtype="fp16", allow_overflow=True)
    assert tensors_in(role.output)["model.norm.weight"].isinf().sum() == 2
    assert [dict(cast.overflowed) for cast in result.casts] == [{"model.norm.weight": 2}]


def test_a_config_of_another_dtype_than_the_weights(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(dtype="bfloat16")
    result = done(role)
    assert wrong(role) == set()
    assert config_of(role.output)["dtype"] == "float32"
    assert "--dtype bf16" in next(note.hint for note in result.notes if note.code == "dtype")


def test_quantisation_that_is_not_there_is_taken_out_of_the_config(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(quantization_config={"quant_method": "fp8"}, compression_config={"format": "int"})
    result = done(role)
    assert not {"quantization_config", "compression_config"} & config_of(role.output).keys()
    assert sum("removed, the weights are not quantised" in change for change in result.config_changes) == 2


def test_the_vocabulary_is_cut_and_said(tmp_path: Path) -> None:
    role = make(tmp_path, padding=32)
    cut = {drop.name: drop.reason for drop in done(role).dropped}
    assert wrong(role) == set()
    assert cut.keys() == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert all("vocab_size 96: 32 rows" in reason for reason in cut.values())


def test_arch_takes_the_map_of_another(tmp_path: Path) -> None:
    role = make(tmp_path)
    role.say(model_type="my_llama")
    assert done(role, arch="llama").family == "llama"
    assert wrong(role) == set()
    assert config_of(role.output)["model_type"] == "my_llama"


def test_arch_takes_a_model_type_too(tmp_path: Path) -> None:
    role = make(tmp_path, "kimi_k2")
    role.say(model_type="mine")
    assert done(role, arch="kimi_k2").family == "deepseek_v3"
    assert wrong(role) == set()


def gated(tmp_path: Path, producer: str) -> Role:
    """Attention with gates in every layer, so that no key of a delta net tells who wrote it; its config elsewhere."""
    role = make(tmp_path, "qwen3_next", producer=producer, config={"layer_types": ["full_attention"] * 4})
    (role.path / "huggingface").rename(tmp_path / "config")
    return role


def test_who_ordered_the_rows_is_asked_for(tmp_path: Path) -> None:
    role = gated(tmp_path, "nvidia")
    error = refused(role, UsageError, hf_config=str(tmp_path / "config"))
    assert error.exit_code == 2
    assert "self_attention.linear_qkv.weight" in error.message
    assert "--producer nvidia" in error.hint
    assert "--producer swift" in error.hint


@pytest.mark.parametrize("producer", ["nvidia", "swift"])
def test_who_ordered_the_rows_can_be_said(producer: str, tmp_path: Path) -> None:
    role = gated(tmp_path, producer)
    done(role, hf_config=str(tmp_path / "config"), producer=producer)
    assert wrong(role) == set()


def test_the_two_orders_are_not_the_same(tmp_path: Path) -> None:
    role = gated(tmp_path, "nvidia")
    done(role, hf_config=str(tmp_path / "config"), producer="swift")
    assert wrong(role) == {name for name in role.state if name.endswith("self_attn.q_proj.weight")} != set()


@pytest.mark.parametrize(
    ("producer", "file"),
    [
        ("swift", "dist_ckpt/args.json"),
        ("swift", "args.json"),
        ("nvidia", "dist_ckpt/run_config.yaml"),
        ("nvidia", "ckpt_contents.json"),
    ],
)
def test_who_ordered_the_rows_is_seen_by_what_lies_around(producer: str, file: str, tmp_path: Path) -> None:
    role = gated(tmp_path, producer)
    (role.path / file).write_text("{}")
    done(role, hf_config=str(tmp_path / "config"))
    assert wrong(role) == set()


@pytest.mark.parametrize("producer", ["nvidia", "swift", "slime"])
def test_who_ordered_the_rows_is_seen_by_the_keys(producer: str, tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_next", producer=producer)
    (role.path / "huggingface").rename(tmp_path / "config")
    done(role, hf_config=str(tmp_path / "config"))
    assert wrong(role) == set()


def in_blocks(value: torch.Tensor, block: int, axis: int) -> torch.Tensor:
    """All of a gate, then all of its up: now a block of rows of one, a block of the other."""
    rows = value.shape[axis] // 2
    order = [half * rows + first + n for first in range(0, rows, block) for half in (0, 1) for n in range(block)]
    return value.index_select(axis, torch.tensor(order))


def interleave(role: Role, experts: int, shared: int) -> None:
    """Lay the halves of experts and of shared experts in blocks of so many rows."""
    changed = {}
    for key, entry in role.entries.items():
        block = shared if ".shared_experts.linear_fc1." in key else experts if ".experts.linear_fc1." in key else 0
        if block:
            changed[key] = in_blocks(entry.value, block, -1 if key.endswith(".bias") else -2)
    assert changed
    role.put_all(changed)


def say_json(role: Role, **sizes: int) -> None:
    write_json(role.path / "transformer_config.json", {"num_layers": 3, **sizes})


def say_args(role: Role, **sizes: int) -> None:
    torch.save({"args": argparse.Namespace(num_layers=3, **sizes)}, role.archive / "common.pt")


def say_yaml(role: Role, **sizes: int) -> None:
    lines = "".join(f"  {name}: {size}\n" for name, size in sizes.items())
    (role.archive / "run_config.yaml").write_text(f"model:\n  num_layers: 3\n{lines}")


@pytest.mark.parametrize("say", [say_json, say_args, say_yaml])
def test_interleaved_halves_are_taken_apart(say: Callable[..., None], tmp_path: Path) -> None:
    role = make(tmp_path, "qwen2_moe")
    interleave(role, 8, 4)
    say(role, **{BLOCKS: 8, SHARED_BLOCKS: 4})
    done(role)
    assert wrong(role) == set()


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe", "mixtral", "qwen3_next"])
def test_interleaved_halves_of_other_families(family: str, tmp_path: Path) -> None:
    role = make(tmp_path, family)
    shared = family in ("glm4_moe", "qwen3_next")
    interleave(role, 6, 2)
    say_json(role, **({BLOCKS: 6, SHARED_BLOCKS: 2} if shared else {BLOCKS: 6}))
    done(role)
    assert wrong(role) == set()


def test_shared_experts_may_be_interleaved_alone(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen2_moe")
    shared = [key for key in role.entries if ".shared_experts.linear_fc1." in key]
    role.put_all({key: in_blocks(role.entries[key].value, 10, -2) for key in shared})
    say_json(role, **{SHARED_BLOCKS: 10})
    done(role)
    assert wrong(role) == set()


def test_blocks_that_do_not_divide_the_rows(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe")
    say_json(role, **{BLOCKS: 7})
    assert "48 rows" in str(refused(role))


def test_the_nearest_settings_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe")
    interleave(role, 8, 8)
    say_json(role, **{BLOCKS: 8})
    write_json(tmp_path / "transformer_config.json", {BLOCKS: 4})
    done(role)
    assert wrong(role) == set()


def test_settings_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    """They may say that rows are interleaved: shapes do not."""
    role = make(tmp_path, "qwen3_moe")
    (role.path / "transformer_config.json").write_text(f'{{"{BLOCKS}": 8')
    try:
        told = " ".join(note.message for note in done(role).notes)
    except CkpttoolError as error:
        told = str(error)
    assert "transformer_config.json" in told


def test_a_run_with_one_checkpoint_is_enough(tmp_path: Path) -> None:
    role = make(tmp_path / "run" / "global_step_10")
    role.path = tmp_path / "run"
    done(role)
    assert wrong(role) == set()


def run_of_two(tmp_path: Path) -> tuple[Role, Role]:
    """Two steps of an actor, of which the second one is the newest."""
    roles = []
    for step in (10, 20):
        role = make(tmp_path / f"global_step_{step}", seed=step)
        role.path = role.path.rename(role.path.with_name("actor"))
        roles.append(role)
    builders.write_tracker(tmp_path, 20)
    return roles[0], roles[1]


@pytest.mark.parametrize(("step", "which"), [("10", 0), ("20", 1), ("latest", 1)])
def test_step_chooses(step: str, which: int, tmp_path: Path) -> None:
    role = run_of_two(tmp_path / "run")[which]
    archive, role.path = role.archive, tmp_path / "run"
    assert done(role, step=step, role="actor").path == str(archive)
    assert wrong(role) == set()


def test_role_chooses(tmp_path: Path) -> None:
    actor, _ = run_of_two(tmp_path / "run")
    critic = make(tmp_path / "other", "qwen3", head="value")
    critic.path = critic.path.rename(actor.path.with_name("critic"))
    critic.path = critic.path.parent
    assert done(critic, role="critic").family == "qwen3"
    assert wrong(critic) == set()


@pytest.mark.parametrize("given", ["run", "iteration"])
def test_a_run_of_megatron_itself(given: str, tmp_path: Path) -> None:
    role = make(tmp_path)
    (tmp_path / "run").mkdir()
    iteration = role.archive.rename(tmp_path / "run" / "iter_0000100")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("100")
    config = str(role.path / "huggingface")
    role.path = tmp_path / "run" if given == "run" else iteration
    done(role, hf_config=config)
    assert wrong(role) == set()


def test_a_role_of_the_second_layout(tmp_path: Path) -> None:
    role = make(tmp_path)
    (role.path / "model").mkdir()
    for name in ("dist_ckpt", "huggingface"):
        (role.path / name).rename(role.path / "model" / name)
    done(role)
    assert wrong(role) == set()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda archive: (archive / "metadata.json").unlink(), "not-finalised"),
        (
            lambda archive: write_json(
                archive / "metadata.json", {"sharded_backend": "torch_dist", "common_backend": "torch"}
            ),
            "common-missing",
        ),
        (lambda archive: (archive / "common.pt").write_bytes(b"PK\x03\x04 no archive"), "common-unreadable"),
    ],
)
def test_what_is_not_needed_is_noted(change: Callable[[Path], Any], code: str, tmp_path: Path) -> None:
    role = make(tmp_path)
    change(role.archive)
    assert code in [note.code for note in done(role).notes]
    assert wrong(role) == set()


def test_shards_have_an_index(tmp_path: Path) -> None:
    role = make(tmp_path, "qwen3_moe")
    result = done(role, max_shard_size=40_000)
    assert wrong(role) == set()
    weights = sorted(path.name for path in role.output.glob("*.safetensors"))
    count = len(weights)
    assert weights == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert count > 2
    found = json.loads((role.output / "model.safetensors.index.json").read_text())
    assert found["weight_map"].keys() == role.state.keys()
    assert found["metadata"]["total_size"] == sum(value.nbytes for value in role.state.values())
    assert result.tensors == len(role.state)


def test_threads_change_no_byte(tmp_path: Path) -> None:
    role = make(tmp_path, "deepseek_v3")
    done(role, max_shard_size=30_000)
    first = {path.name: path.read_bytes() for path in role.output.iterdir()}
    done(role, max_shard_size=30_000, threads=2, force=True)
    assert {path.name: path.read_bytes() for path in role.output.iterdir()} == first
    assert leftovers(role.output) == []
