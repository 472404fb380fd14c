"""``to-hf`` at its edges: names that nobody would give, settings that few have, what is told of what is missing."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpttool.architectures import slots
from ckpttool.architectures.experts import QWEN3_MOE
from ckpttool.architectures.model import Model
from ckpttool.converting import mapping, misfits
from tests.conftest import Call
from tests.synthetic import Written, write_role
from tests.synthetic.archive import Entries, Entry, write_archive

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Run = Callable[..., Call]


def role(folder: Path, family: str, change: Callable[[Entries], Entries] = dict, **options: Any) -> Written:
    """A role whose archive has other entries than it should have."""
    written = write_role(folder / "as-it-was", family, **options)
    (folder / "role").mkdir()
    (folder / "as-it-was" / "huggingface").rename(folder / "role" / "huggingface")
    write_archive(folder / "role" / "dist_ckpt", change(dict(written.entries)), extra=False)
    return written


def convert(ckpttool: Run, folder: Path, *options: str) -> Call:
    return ckpttool("to-hf", folder / "role", "-o", folder / "out", "--json", *options)


def differing(folder: Path, state: Mapping[str, torch.Tensor]) -> list[str]:
    made = load_file(folder / "out" / "model.safetensors")
    assert made.keys() == state.keys()
    return [name for name, value in state.items() if not torch.equal(made[name], value)]


LONG = "9" * 5000


@pytest.mark.parametrize("key", ["foo*.1", "decoder.layers.*.x", f"decoder.layers.{LONG}.x", f"a.{LONG}"])
def test_a_key_that_no_rule_knows_is_named(tmp_path: Path, ckpttool: Run, key: str) -> None:
    role(tmp_path, "llama", lambda entries: {**entries, key: Entry(torch.ones(2, 2))})
    assert convert(ckpttool, tmp_path).code == 5


def test_a_key_that_no_rule_knows_is_named_as_it_is(tmp_path: Path, ckpttool: Run) -> None:
    role(tmp_path, "llama", lambda entries: {**entries, "decoder.layers.00.x": Entry(torch.ones(2, 2))})
    said = convert(ckpttool, tmp_path).json["problems"]
    assert any("decoder.layers.00.x" in problem["message"] for problem in said)


def test_an_empty_stack_does_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ckpttool: Run
) -> None:
    made = []
    slot = slots.Slot

    def counted(*arguments: Any) -> Any:
        made.append(1)
        if len(made) > 100_000:
            pytest.fail("too many slots")
        return slot(*arguments)

    monkeypatch.setattr(slots, "Slot", counted)
    empty = torch.empty(1 << 40, 0)
    role(tmp_path, "llama", lambda entries: {**entries, "decoder.layers.x": Entry(empty)})
    assert convert(ckpttool, tmp_path).code in (4, 5)


def test_experts_of_two_dtypes_lose_nothing(tmp_path: Path, ckpttool: Run) -> None:
    def finer(value: torch.Tensor) -> torch.Tensor:
        return (value.float() * 1.002).half()

    def halves(entries: Entries) -> Entries:
        ups = [key for key in entries if key.endswith(".linear_fc1.weight_v")]
        assert ups
        return {**entries, **{key: Entry(finer(entries[key].value)) for key in ups}}

    written = role(tmp_path, "gpt_oss", halves, dialect="singleton", dtype=torch.bfloat16)
    assert convert(ckpttool, tmp_path).code == 0
    name = "model.layers.0.mlp.experts.gate_up_proj"
    wanted = written.state[name].float()
    wanted[..., 1::2] = finer(wanted[..., 1::2]).float()
    made = load_file(tmp_path / "out" / "model.safetensors")[name]
    assert torch.equal(made.float(), wanted)


def test_float32_parts_are_kept_beside_bfloat16(tmp_path: Path, ckpttool: Run) -> None:
    def half_of_them(entries: Entries) -> Entries:
        ups = [key for key in entries if key.endswith(".linear_fc1.weight_v")]
        return {**entries, **{key: Entry(entries[key].value.float() + 1e-4) for key in ups}}

    written = role(tmp_path, "gpt_oss", half_of_them, dialect="singleton", dtype=torch.bfloat16)
    assert convert(ckpttool, tmp_path).code == 0
    name = "model.layers.0.mlp.experts.gate_up_proj"
    wanted = written.state[name].float()
    wanted[..., 1::2] += 1e-4
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")[name], wanted)


def test_what_is_missing_everywhere_is_told_in_a_few_lines() -> None:
    missing: dict[str, tuple[str, ...]] = {
        f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": (
            f"decoder.layers.{layer}.mlp.experts.{expert}.linear_fc2.weight",
        )
        for layer in range(3, 12)
        for expert in range(16)
    }
    mapped = mapping.Mapped(missing=missing)
    told = list(misfits.misfits(mapped))
    assert len(told) <= 3


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("deepseek_v3", {"first_k_dense_replace": 3, "num_nextn_predict_layers": 0}),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}),
        ("qwen3_moe", {"decoder_sparse_step": 4}),
    ],
)
def test_experts_may_be_in_no_layer(tmp_path: Path, ckpttool: Run, family: str, config: dict[str, Any]) -> None:
    written = role(tmp_path, family, config=config)
    assert convert(ckpttool, tmp_path).code == 0
    assert differing(tmp_path, written.state) == []


def test_without_mtp_a_reference_may_have_it(tmp_path: Path, ckpttool: Run) -> None:
    written = role(tmp_path, "deepseek_v3", mtp=0)
    names = {*written.state, *(f"model.layers.3.{name}.weight" for name in ("enorm", "hnorm", "eh_proj"))}
    like = tmp_path / "like"
    like.mkdir()
    files = ", ".join(f'"{name}": "model.safetensors"' for name in sorted(names))
    (like / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{files}}}}}')
    assert convert(ckpttool, tmp_path, "--no-mtp", "--like", str(like)).code == 0
    assert differing(tmp_path, written.state) == []


def interleaved(entries: Entries, size: int) -> Entries:
    """Experts whose gates and ups lie in blocks of rows."""
    changed = dict(entries)
    for key, entry in entries.items():
        if ".experts.experts.linear_fc1." in key:
            axis, value = entry.leading, entry.value
            halves = value.unflatten(axis, (2, value.shape[axis] // 2 // size, size))
            changed[key] = Entry(halves.transpose(axis, axis + 1).reshape(value.shape).contiguous(), axis)
    return changed


SETTING = "moe_mlp_glu_interleave_size"


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dialect", ["stacked", "indexed"])
@pytest.mark.parametrize("file", ["dist_ckpt/run_config.yaml", "transformer_config.json"])
def test_interleaved_experts_are_taken_apart(
    tmp_path: Path, ckpttool: Run, family: str, dialect: str, file: str
) -> None:
    written = role(tmp_path, family, lambda entries: interleaved(entries, 4), dialect=dialect)
    text = f"model:\n  {SETTING}: 4\n" if file.endswith("yaml") else f'{{"{SETTING}": 4}}'
    (tmp_path / "role" / file).write_text(text)
    assert convert(ckpttool, tmp_path).code == 0
    assert differing(tmp_path, written.state) == []


@pytest.mark.parametrize("text", ["  %s: 4  # of rows\n", "  %s: '4'\n", "model: {%s: 4}\n", "  '%s': 4\n"])
def test_a_setting_of_blocks_is_understood_or_refused(tmp_path: Path, ckpttool: Run, text: str) -> None:
    written = role(tmp_path, "qwen3_moe", lambda entries: interleaved(entries, 4))
    (tmp_path / "role" / "dist_ckpt" / "run_config.yaml").write_text(text % SETTING)
    assert convert(ckpttool, tmp_path).code != 0 or differing(tmp_path, written.state) == []


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("qwen3_moe", "mlp_only_layers", 5),
        ("qwen3_moe", "decoder_sparse_step", "2"),
        ("deepseek_v3", "first_k_dense_replace", "1"),
        ("qwen3_next", "full_attention_interval", "4"),
    ],
)
def test_a_setting_of_another_type_is_named(
    tmp_path: Path, ckpttool: Run, family: str, field: str, value: object
) -> None:
    role(tmp_path, family)
    config = tmp_path / "role" / "huggingface" / "config.json"
    values = {**json.loads(config.read_text()), field: value}
    config.write_text(json.dumps({name: said for name, said in values.items() if name != "layer_types"}))
    result = convert(ckpttool, tmp_path, "--producer", "nvidia")
    assert result.code == 5
    assert field in result.out


@pytest.mark.parametrize("size", ["layers", "experts", "mtp"])
def test_claims_of_a_config_do_not_fill_the_memory(size: str) -> None:
    model = Model({}, {"layers": 1, "experts": 0, "mtp": 0, size: 1 << 20}, {})
    tracemalloc.start()
    problems, _ = mapping.counts(QWEN3_MOE, model, {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert f"{size}-disagree" in [problem.code for problem in problems]
    assert peak < 1 << 20
