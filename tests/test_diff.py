"""`ckpttool diff`: which names, which kinds, which answer. The measures have a file of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckpttool.cli import main
from ckpttool.comparison import Options, prove
from ckpttool.comparison.pairing import _joined
from ckpttool.comparison.values import compare_values
from ckpttool.plan import Rows, Target
from tests.conftest import Call
from tests.hostile import save_bomb
from tests.looking import save_dcp
from tests.merged import QWEN2, bits, fingerprint, tensors_in, write_role

Run = Callable[..., Call]
State = dict[str, torch.Tensor]

CONVERTED = (
    *("llama-tp2-pp2", "llama-indexed", "llama-critic-tp1", "deepseek-v3-singleton", "mixtral-pp2-ep2", "qwen2-pp2"),
    *("qwen3-moe-mixed-tp2-ep2", "qwen2-moe-singleton", "qwen3-vpp"),
)
MERGED = ("fsdp1", "fsdp1-hsdp", "fsdp1-shardedtensor", "fsdp-tp", "critic", "random-2x2", "tied-bf16", "gemma4")
SERVED = ("mixtral", "qwen2-vl", "gemma3", "qwen3-vl-moe", "deepseek-v3")


def told(call: Call) -> dict[str, dict[str, Any]]:
    """The tensors of a result by name."""
    return {tensor["name"]: tensor for tensor in call.json["data"]["tensors"]}


def states(call: Call) -> dict[str, str]:
    return {name: tensor["state"] for name, tensor in told(call).items()}


def unlike(call: Call) -> dict[str, str]:
    return {name: state for name, state in states(call).items() if state != "equal"}


def change(file: Path, name: str) -> None:
    """Flip the lowest bit of the last element of a tensor."""
    tensors = load_file(file)
    bits(tensors[name])[-tensors[name].element_size()] ^= 1
    save_file(tensors, file, {"format": "pt"})


def holding(output: Path, name: str) -> Path:
    return next(file for file in output.glob("*.safetensors") if name in load_file(file))


@pytest.fixture
def state() -> State:
    chance = torch.Generator().manual_seed(7)
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        **{f"model.layers.{n}.self_attn.q_proj.weight": (4, 4) for n in range(3)},
        **{f"model.layers.{n}.mlp.up_proj.weight": (8, 4) for n in range(3)},
        "model.norm.weight": (4,),
        "lm_head.weight": (10, 4),
    }
    return {name: torch.randn(shape, generator=chance) for name, shape in shapes.items()}


# --- one kind ---------------------------------------------------------------------------------------------------


def test_the_same(ckpttool: Run, state: State, tmp_path: Path) -> None:
    role = write_role(tmp_path / "a", state)
    other = write_role(tmp_path / "b", state, ranks=3)
    before = fingerprint(tmp_path)
    call = ckpttool("diff", role, other, "--json")
    assert (call.code, call.json["ok"], call.json["data"]["same"]) == (0, True, True)
    assert set(states(call)) == set(state)
    assert set(states(call).values()) == {"equal"}
    assert call.json["data"]["bytes_read"] == 2 * sum(t.nbytes for t in state.values())
    assert fingerprint(tmp_path) == before


def test_what_a_step_has_moved(ckpttool: Run, state: State, tmp_path: Path) -> None:
    """Layers, modules and all measures; the frozen ones are equal."""
    role = write_role(tmp_path / "a", state)
    moved = {name: t + 0.01 * t.sign() if ".1." in name or "norm" in name else t for name, t in state.items()}
    call = ckpttool("diff", role, write_role(tmp_path / "b", moved), "--json")
    assert call.code == 1
    expected = {name for name in state if ".1." in name or "norm" in name}
    assert unlike(call) == dict.fromkeys(expected, "differs")
    data = call.json["data"]
    assert {cell["layer"]: cell["changed"] for cell in data["layers"]} == {0: 0, 1: 48, 2: 0}
    strips = {strip["module"]: strip for strip in data["strips"]}
    assert list(strips) == [
        *("model.embed_tokens.weight", "self_attn.q_proj.weight", "mlp.up_proj.weight", "model.norm.weight"),
        "lm_head.weight",
    ]
    q_proj = {cell["layer"]: cell for cell in strips["self_attn.q_proj.weight"]["layers"]}
    assert [q_proj[n]["changed"] for n in range(3)] == [0, 16, 0]
    a, b = (side["model.layers.1.self_attn.q_proj.weight"].double() for side in (state, moved))
    assert q_proj[1]["rel_l2"] == pytest.approx(float((b - a).norm() / a.norm()), rel=1e-12)
    layer = torch.cat([state[n].reshape(-1).double() for n in state if ".1." in n])
    after = torch.cat([moved[n].reshape(-1).double() for n in state if ".1." in n])
    assert data["layers"][1]["rel_l2"] == pytest.approx(float((after - layer).norm() / layer.norm()), rel=1e-12)


def test_names_and_shapes(ckpttool: Run, state: State, tmp_path: Path) -> None:
    other = dict(state)
    del other["model.norm.weight"]
    other["lm_head.weight"] = torch.zeros(12, 4)
    other["extra"] = torch.zeros(3)
    save_file(state, tmp_path / "a.safetensors")
    save_file(other, tmp_path / "b.safetensors")
    call = ckpttool("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert call.code == 1
    assert unlike(call) == {"model.norm.weight": "only in A", "lm_head.weight": "differs", "extra": "only in B"}
    assert told(call)["lm_head.weight"]["why"] == "shape"
    assert call.json["data"]["counts"] == {"equal": 7, "close": 0, "differs": 1, "only in A": 1, "only in B": 1}


def test_tensors_of_one_content_are_suggested_as_renamed(ckpttool: Run, state: State, tmp_path: Path) -> None:
    """Also several of one content, by the likeness of their names; one value throughout says little."""
    ones = {"gate.offset": torch.full((7,), 0.5), **{f"model.layers.{n}.norm.weight": torch.ones(4) for n in range(3)}}
    save_file({**state, **ones}, tmp_path / "a.safetensors")
    renamed = {
        name.replace("self_attn", "attention").replace(".norm", ".ln"): t for name, t in {**state, **ones}.items()
    }
    renamed["model.layers.2.attention.q_proj.weight"] = torch.zeros(4, 4)
    renamed["visual.patch_embed.scale"] = renamed.pop("gate.offset")
    save_file(renamed, tmp_path / "b.safetensors")
    call = ckpttool("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert call.code == 1
    found = {pair["a"]: pair["b"] for pair in call.json["data"]["renamed"]}
    assert found == {
        **{f"model.layers.{n}.self_attn.q_proj.weight": f"model.layers.{n}.attention.q_proj.weight" for n in range(2)},
        **{f"model.layers.{n}.norm.weight": f"model.layers.{n}.ln.weight" for n in range(3)},
        "model.norm.weight": "model.ln.weight",
    }


def test_names_are_chosen_by_globs(ckpttool: Run, state: State, tmp_path: Path) -> None:
    save_file(state, tmp_path / "a.safetensors")
    save_file({name: t + 1 for name, t in state.items()}, tmp_path / "b.safetensors")
    sides = (tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    call = ckpttool("diff", *sides, "--json", "--include", "*layers*", "--include", "*norm*", "--exclude", "*.2.*")
    assert set(states(call)) == {n for n in state if ("layers" in n and ".2." not in n) or "norm" in n}
    assert call.json["data"]["excluded"] == len(state) - len(states(call))
    call = ckpttool("diff", *sides, "--json", "--include", "nothing")
    assert call.code == 2
    assert "nothing" in call.err


@pytest.mark.parametrize(("tolerance", "code"), [("1e-3", 0), ("1e-9", 1), ("1ulp", 1), ("300000 ulps", 0), ("0", 1)])
def test_tolerance(ckpttool: Run, tolerance: str, code: int, state: State, tmp_path: Path) -> None:
    save_file(state, tmp_path / "a.safetensors")
    save_file({name: t * (1 + 1e-5) for name, t in state.items()}, tmp_path / "b.safetensors")
    call = ckpttool("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json", "--tolerance", tolerance)
    assert call.code == code
    assert set(states(call).values()) <= {"equal", "close" if code == 0 else "differs"}


def test_trusted_checksums(ckpttool: Run, state: State, tmp_path: Path) -> None:
    """What has the same checksums is not read, which is said; a byte that has changed since is missed then."""
    role, other = write_role(tmp_path / "a", state), write_role(tmp_path / "b", state)
    call = ckpttool("diff", role, other, "--trust-crc", "--json")
    assert (call.code, call.json["data"]["trusted"], call.json["data"]["bytes_read"]) == (0, len(state), 0)
    shard = other / "model_world_size_2_rank_1.pt"
    raw = shard.read_bytes()
    payload = bits(state["lm_head.weight"].chunk(2)[1]).numpy().tobytes()
    assert raw.count(payload) == 1
    shard.write_bytes(raw.replace(payload, payload[:-1] + bytes([payload[-1] ^ 1])))
    assert ckpttool("diff", role, other, "--trust-crc").code == 0
    call = ckpttool("diff", role, other, "--json")
    assert unlike(call) == {"lm_head.weight": "differs"}
    changed = {**state, "lm_head.weight": state["lm_head.weight"] + 1}
    call = ckpttool("diff", role, write_role(tmp_path / "c", changed), "--trust-crc", "--json")
    assert unlike(call) == {"lm_head.weight": "differs"}
    assert call.json["data"]["trusted"] == len(state) - 1


def test_checksums_of_an_archive_are_trusted(ckpttool: Run, data: Path) -> None:
    one, other = data / "megatron/mcore0.12-dense-tp2", data / "megatron/mcore0.14-dense-tp2"
    call = ckpttool("diff", one, other, "--trust-crc", "--json")
    assert (call.code, call.json["data"]["bytes_read"]) == (0, 0)
    assert call.json["data"]["trusted"] == len(states(call)) > 20


def test_layers_of_archives_are_compared_whatever_the_dialect(ckpttool: Run, converted_checkpoints: Path) -> None:
    """Stacked, one key a layer, one key an expert; any tensor and pipeline parallelism."""
    for family, layouts in {
        "llama": ("indexed", "tp2-pp2", "tp4"),
        "qwen3-moe": ("singleton", "pp2-ep2", "ep4"),
    }.items():
        first = converted_checkpoints / f"{family}-tp1"
        for layout in layouts:
            call = ckpttool("diff", first, converted_checkpoints / f"{family}-{layout}", "--json")
            assert call.code == 0, (family, layout, unlike(call))
            assert len(states(call)) > 20


def test_the_optimizer_with_all(ckpttool: Run, megatron_checkpoints: Path, fsdp_checkpoints: Path) -> None:
    """Of an archive; that of FSDP shards has no names, which is said."""
    archive = megatron_checkpoints / "megatron-lm/iter_0000010"
    alone = ckpttool("diff", archive, archive, "--json")
    whole = ckpttool("diff", archive, archive, "--all", "--json")
    assert alone.code == whole.code == 0
    assert not any("exp_avg" in name for name in states(alone))
    assert alone.json["data"]["a"]["left_out"]["optimizer"] > 10
    assert any("exp_avg" in name for name in states(whole))
    call = ckpttool("diff", fsdp_checkpoints / "fsdp2", fsdp_checkpoints / "fsdp2", "--all", "--json")
    assert [problem["code"] for problem in call.json["problems"]] == ["not-compared", "not-compared"]
    only = megatron_checkpoints / "dense-v2/optimizer/dist_ckpt"
    call = ckpttool("diff", only, only)
    assert call.code == 3
    assert "--all" in call.err
    assert ckpttool("diff", only, only, "--all").code == 0


# --- across kinds -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONVERTED)
def test_an_archive_and_what_it_was_converted_to(
    ckpttool: Run, name: str, converted_checkpoints: Path, tmp_path: Path
) -> None:
    role, output = converted_checkpoints / name, tmp_path / "out"
    assert ckpttool("to-hf", role, "-o", output).code == 0
    for sides in ((role, output), (output, role)):
        call = ckpttool("diff", *sides, "--json")
        assert call.code == 0, unlike(call)
        assert set(states(call)) == set(tensors_in(output))
        assert "weight map" in call.json["data"]["plan"]
        left_out = [problem["message"] for problem in call.json["problems"] if problem["code"] == "left-out"]
        assert any("vocabulary-padding" in message for message in left_out) or not name.startswith("llama")
    chosen = sorted(tensors_in(output))[len(name) % 7]
    change(holding(output, chosen), chosen)
    assert unlike(ckpttool("diff", role, output, "--json")) == {chosen: "differs"}


@pytest.mark.parametrize("name", MERGED)
def test_shards_and_what_they_were_merged_to(ckpttool: Run, name: str, fsdp_checkpoints: Path, tmp_path: Path) -> None:
    role, output = fsdp_checkpoints / name, tmp_path / "out"
    assert ckpttool("merge-fsdp", role, "-o", output).code == 0
    for sides in ((role, output), (output, role)):
        call = ckpttool("diff", *sides, "--json")
        assert call.code == 0, unlike(call)
    chosen = sorted(tensors_in(output))[-1]
    change(holding(output, chosen), chosen)
    assert unlike(ckpttool("diff", role, output, "--json")) == {chosen: "differs"}


@pytest.mark.parametrize("name", SERVED)
def test_shards_and_the_model_under_the_names_of_the_hub(ckpttool: Run, name: str, served_checkpoints: Path) -> None:
    """What `save_pretrained` wrote, renamed, joined, split and turned; both ways."""
    role, hub = served_checkpoints / name, served_checkpoints / "expected" / name
    for sides in ((role, hub), (hub, role)):
        call = ckpttool("diff", *sides, "--json")
        assert call.code == 0, unlike(call)
        assert ("rules" in call.json["data"]["plan"]) == (name != "qwen3-vl-moe"), "saved as it was in memory"


def test_an_archive_and_shards(ckpttool: Run, converted_checkpoints: Path, tmp_path: Path) -> None:
    """Megatron's weights and the same ones sharded by FSDP, whose config says what model it is."""
    output = tmp_path / "out"
    archive = converted_checkpoints / "qwen3-moe-tp1"
    assert ckpttool("to-hf", archive, "-o", output).code == 0
    role = write_role(tmp_path / "role", tensors_in(output), config=json.loads((output / "config.json").read_text()))
    assert ckpttool("diff", archive, role).code == 0
    assert ckpttool("diff", role, archive).code == 0


def test_a_dcp_and_shards(ckpttool: Run, state: State, tmp_path: Path) -> None:
    """Names behind the `model.` of a state dict of several parts."""
    save_dcp(tmp_path / "dcp", {f"model.{name}": tensor for name, tensor in state.items()})
    call = ckpttool("diff", tmp_path / "dcp", write_role(tmp_path / "role", state), "--json")
    assert call.code == 0, unlike(call)
    assert "'model.'" in call.json["data"]["plan"]


def test_fused_adapters(ckpttool: Run, lora_checkpoints: Path, adapted_checkpoints: Path, tmp_path: Path) -> None:
    roles = {"merge-fsdp": lora_checkpoints / "plain", "to-hf": adapted_checkpoints / "llama-tp2"}
    for command, role in roles.items():
        output = tmp_path / command
        assert ckpttool(command, role, "-o", output, "--lora", "fuse").code == 0
        call = ckpttool("diff", role, output, "--lora", "fuse", "--json")
        assert call.code == 0, unlike(call)
        assert ckpttool("diff", role, output).code != 0


def test_a_cast_is_a_difference_of_the_dtype_alone(ckpttool: Run, state: State, tmp_path: Path) -> None:
    role = write_role(tmp_path / "a", state, config=QWEN2)
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--dtype", "bf16").code == 0
    call = ckpttool("diff", role, tmp_path / "out", "--json")
    assert call.code == 1
    assert {tensor["why"] for tensor in told(call).values()} == {"dtype"}
    assert ckpttool("diff", role, tmp_path / "out", "--ignore-dtype").code == 0


def test_an_output_is_proven_with_its_cast(ckpttool: Run, state: State, tmp_path: Path) -> None:
    """Rounded once to the dtype of the output, or not the same; a wider output holds the same values."""
    role = write_role(tmp_path / "a", state, config=QWEN2)
    for dtype in ("bf16", "fp16", "fp32"):
        output = tmp_path / dtype
        assert ckpttool("merge-fsdp", role, "-o", output, "--dtype", dtype).code == 0
        assert prove(str(role), str(output), Options()).same
        change(holding(output, "lm_head.weight"), "lm_head.weight")
        found = prove(str(role), str(output), Options())
        assert [tensor.name for tensor in found.of(["differs"])] == ["lm_head.weight"]
    twice = {name: tensor.to(torch.float16).to(torch.bfloat16) for name, tensor in state.items()}
    save_file(twice, tmp_path / "twice.safetensors")
    assert prove(str(role), str(tmp_path / "twice.safetensors"), Options()).counts["differs"] > 0


def test_a_head_that_is_tied_is_that_of_the_embeddings(ckpttool: Run, state: State, tmp_path: Path) -> None:
    """One side stores it, the other one's config says that it is an alias; one that differs is told."""
    tied = {**QWEN2, "tie_word_embeddings": True}
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    role = write_role(tmp_path / "a", state, config=tied)
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "out").code == 0
    assert "lm_head.weight" not in tensors_in(tmp_path / "out")
    call = ckpttool("diff", role, tmp_path / "out", "--json")
    assert call.code == 0
    assert told(call)["lm_head.weight"]["why"] == "tied to model.embed_tokens.weight"
    state["lm_head.weight"][0, 0] += 1
    other = write_role(tmp_path / "b", state, config=tied)
    assert unlike(ckpttool("diff", other, tmp_path / "out", "--json")) == {"lm_head.weight": "differs"}


def test_two_tensors_that_rules_give_one_name_are_both_told(ckpttool: Run, tmp_path: Path) -> None:
    """Neither takes the place of the other."""
    one, other = torch.zeros(4, 4), torch.ones(4, 4)
    tensors = {"language_model.model.norm.weight": one, "model.norm.weight": other}
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({"model.language_model.norm.weight": other}, tmp_path / "b.safetensors")
    call = ckpttool("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert call.code == 1
    assert tensors.keys() <= states(call).keys()


def test_gate_and_up_of_two_dtypes_are_not_put_together() -> None:
    """A target has one dtype: up would be rounded to that of the gate before it is compared."""

    def half(which: str, dtype: str, rows: int = 2, name: str = "mlp.linear_fc1.weight") -> Target:
        return Target(f"{name}{which}", dtype, (rows, 3), (Rows(f"{name}{which}", 0, rows),))

    def joined(*targets: Target) -> list[str]:
        return list(_joined({target.name: target for target in targets}))

    gate = half("_w", "bfloat16")
    assert joined(gate, half("_v", "bfloat16")) == ["mlp.linear_fc1.weight"]
    for others in (
        [half("_v", "float32")],
        [half("_v", "bfloat16", 4)],
        [half("_v", "bfloat16"), half("", "bfloat16")],
    ):
        assert joined(gate, *others) == [gate.name, *(other.name for other in others)]


def test_a_choice_that_leaves_nothing_is_none(ckpttool: Run, tmp_path: Path) -> None:
    for name, value in (("a", 0.0), ("b", 1.0)):
        save_file({"w": torch.full((2,), value)}, tmp_path / f"{name}.safetensors")
    call = ckpttool("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--exclude", "*")
    assert call.code == 2
    assert "leave no tensor" in call.err


@pytest.mark.parametrize("key", ["model", 1])
def test_a_file_whose_tensors_are_not_all_compared_is_refused(ckpttool: Run, key: str | int, tmp_path: Path) -> None:
    """A state dict within another one, and two keys that are one name: else what differs there would be the same."""
    for name, value in (("a", 0.0), ("b", 1.0)):
        tensor = torch.full((2,), value)
        torch.save({"1": torch.ones(2), key: {"w": [tensor]} if key == "model" else tensor}, tmp_path / f"{name}.pt")
    call = ckpttool("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert call.code == 4
    assert "a.pt" in call.err


# --- the course of it -------------------------------------------------------------------------------------------


def test_a_step_and_a_role_of_both_runs(ckpttool: Run, state: State, tmp_path: Path) -> None:
    for run, shift in (("one", 0), ("two", 1)):
        for step in (10, 20):
            moved = {name: t + shift * (step == 20) for name, t in state.items()}
            write_role(tmp_path / run / f"global_step_{step}" / "actor", moved)
            write_role(tmp_path / run / f"global_step_{step}" / "critic", state)
    sides = (tmp_path / "one", tmp_path / "two")
    assert ckpttool("diff", *sides, "--step", "10", "--role", "actor").code == 0
    assert ckpttool("diff", *sides, "--step", "20", "--role", "actor").code == 1
    assert ckpttool("diff", *sides, "--step", "20", "--role", "critic").code == 0
    call = ckpttool("diff", *sides)
    assert call.code == 3
    assert str(tmp_path / "one/global_step_10/actor") in call.err
    assert ckpttool("diff", *(side / "global_step_20/critic" for side in sides)).code == 0


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_side_that_is_not_whole(ckpttool: Run, damaged: int, state: State, tmp_path: Path) -> None:
    sides = [write_role(tmp_path / name, state) for name in "ab"]
    (sides[damaged] / "model_world_size_2_rank_1.pt").unlink()
    call = ckpttool("diff", *sides)
    assert call.code == 4
    assert str(sides[damaged]) in call.err
    assert "rank" in call.err


def test_one_shard_alone(ckpttool: Run, state: State, tmp_path: Path) -> None:
    role = write_role(tmp_path / "a", state)
    call = ckpttool("diff", role / "model_world_size_2_rank_0.pt", role)
    assert call.code == 4
    assert "one rank's file" in call.err


def test_a_side_that_would_run_code(ckpttool: Run, state: State, tmp_path: Path) -> None:
    sides = [write_role(tmp_path / name, state) for name in "ab"]
    save_bomb(sides[1] / "model_world_size_2_rank_0.pt", tmp_path / "ran")
    assert ckpttool("diff", *sides).code == 7
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_written_meanwhile(
    ckpttool: Run, state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides = [write_role(tmp_path / name, state) for name in "ab"]
    compare = compare_values

    def meanwhile(*arguments: Any) -> Any:
        (sides[0] / "model_world_size_2_rank_0.pt").touch()
        return compare(*arguments)

    monkeypatch.setattr("ckpttool.comparison.compare_values", meanwhile)
    call = ckpttool("diff", *sides)
    assert call.code == 4
    assert "changed while it was read" in call.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["A"], "two checkpoints"),
        (["A", "B", "--tolerance", "much"], "--tolerance much"),
        (["A", "B", "--tolerance", "-1"], "--tolerance"),
        (["A", "B", "--lora", "both"], "--lora both"),
        (["A", "B", "--lora-alpha", "3"], "--lora-alpha without --lora"),
        (["A", "B", "--force"], "--force without --html"),
        (["A", "B", "--threads", "0"], "--threads 0"),
    ],
)
def test_wrong_usage(ckpttool: Run, options: list[str], said: str) -> None:
    call = ckpttool("diff", *options)
    assert call.code == 2
    assert said in call.err


def test_files_without_a_tensor_are_not_the_same(ckpttool: Run, tmp_path: Path) -> None:
    save_file({}, tmp_path / "a.safetensors")
    call = ckpttool("diff", tmp_path / "a.safetensors", tmp_path / "a.safetensors")
    assert call.code == 3
    assert "no tensor" in call.err


def test_what_is_not_there(ckpttool: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert ckpttool("diff", tmp_path / "absent", tmp_path).code == 3
    assert ckpttool("diff", tmp_path / "empty", tmp_path / "empty").code == 3
    (tmp_path / "a.txt").write_text("no tensors")
    assert ckpttool("diff", tmp_path / "a.txt", tmp_path / "a.txt").code == 3


@pytest.mark.parametrize("threads", [1, 3, 16])
def test_threads_change_nothing(ckpttool: Run, threads: int, data: Path, fsdp_checkpoints: Path) -> None:
    call = ckpttool("diff", data / "fsdp/torch2.6-fsdp2", fsdp_checkpoints / "fsdp2", "--json", "--threads", threads)
    one = ckpttool("diff", data / "fsdp/torch2.6-fsdp2", fsdp_checkpoints / "fsdp2", "--json", "--threads", 1)
    assert states(call) == states(one)
    assert call.json["data"]["strips"] == one.json["data"]["strips"]


def test_memory_does_not_follow_the_model(tmp_path: Path) -> None:
    """Ten times the bytes, the same peak, within what an allocator makes of it; and torch is never imported."""
    peaks = []
    for size in (8, 80):
        for side in "ab":
            tensors = {f"model.layers.{n}.w.weight": torch.ones(1 << 18) * (side == "b") for n in range(size)}
            save_file(tensors, tmp_path / f"{side}{size}.safetensors")
        script = (
            "import sys; from pathlib import Path; from ckpttool.cli import main\n"
            f"assert main(['diff', *{[str(tmp_path / f'{side}{size}.safetensors') for side in 'ab']}, '--json']) == 1\n"
            "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)\n"
            "sys.stderr.write(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])"
        )
        done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
        peaks.append(int(done.stderr))
    assert peaks[1] < peaks[0] * 1.1


def test_a_vanished_side(state: State, tmp_path: Path) -> None:
    role = write_role(tmp_path / "a", state)
    shutil.rmtree(role)
    assert main(["diff", str(role), str(role), "--json"]) == 3
