"""LoRA in `merge-fsdp`: combinations in which a tensor could be lost, or values written that nobody trained."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.adapters import CONFIG, LAYER, State, adapter_config, refused, settings
from tests.conftest import Call
from tests.merged import QWEN2, config_of, fingerprint, same, tensors_in, write_config, write_role

Run = Callable[..., Call]

PEFT = "base_model.model."
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
ALPHA = ("--lora-alpha", 4)
HEAD = "lm_head.modules_to_save.default.weight"


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values that differ."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


BASE: State = {
    WEIGHT: numbers(4, 6, seed=1),
    "model.embed_tokens.weight": numbers(10, 6, seed=2),
    "lm_head.weight": numbers(10, 6, seed=3),
}
FACTORS: State = {
    f"{LAYER}.lora_A.default.weight": numbers(2, 6, seed=4),
    f"{LAYER}.lora_B.default.weight": numbers(4, 2, seed=5),
}
PLAIN: State = {
    f"{LAYER}.base_layer.weight": BASE[WEIGHT],
    **{PEFT + name: value for name, value in BASE.items() if name != WEIGHT},
    **FACTORS,
}


def adapted(**changes: torch.Tensor) -> State:
    """The tensors of a PEFT model with a few that are others, by the ends of their names."""
    return {**PLAIN, **{f"{LAYER}.{name.replace('__', '.')}": value for name, value in changes.items()}}


def base_model(folder: Path, tensors: State = BASE) -> Path:
    """The directory of a base model."""
    write_config(folder, QWEN2, ".")
    save_file(tensors, folder / "model.safetensors")
    return folder


# Whole copies (modules_to_save)


def test_copies_take_the_place_of_weights_of_the_base(merge_lora: Run, tmp_path: Path) -> None:
    """The base lies elsewhere; what was trained as it is is not lost, and has the dtype of what it replaces."""
    copy = numbers(10, 6, seed=6)
    role = write_role(tmp_path / "role", {**FACTORS, PEFT + HEAD: copy}, config=QWEN2)
    base = base_model(tmp_path / "base", {**BASE, "lm_head.weight": BASE["lm_head.weight"].bfloat16()})
    assert merge_lora(role, "--lora", "both", *ALPHA, "--base", base).code == 0
    assert same(tensors_in(tmp_path / "out")["lm_head.weight"], copy.bfloat16())
    beside = tensors_in(tmp_path / "out" / "lora_adapter")
    assert same(beside[f"{PEFT}lm_head.weight"], copy)


def test_copies_that_the_base_does_not_have(merge_lora: Run, tmp_path: Path) -> None:
    score = numbers(2, 6, seed=6)
    classes = {**QWEN2, "architectures": ["Qwen2ForSequenceClassification"]}
    role = write_role(
        tmp_path / "role", {**FACTORS, f"{PEFT}score.modules_to_save.default.weight": score}, config=classes
    )
    base = base_model(tmp_path / "base", {name: BASE[name] for name in BASE if name != "lm_head.weight"})
    assert merge_lora(role, "--lora", "fuse", *ALPHA, "--base", base).code == 0
    assert same(tensors_in(tmp_path / "out")["score.weight"], score)


def test_two_adapters_with_copies_of_one_tensor(merge_lora: Run, tmp_path: Path) -> None:
    """None of them wins; each can be fused alone, and both can be written."""
    copies = {name: numbers(10, 6, seed=number) for number, name in enumerate(("default", "style"))}
    state = {
        **{name: value for name, value in PLAIN.items() if name != f"{PEFT}lm_head.weight"},
        **{f"{PEFT}lm_head.modules_to_save.{name}.weight": value for name, value in copies.items()},
        f"{PEFT}lm_head.original_module.weight": BASE["lm_head.weight"],
        f"{LAYER}.lora_A.style.weight": numbers(2, 6, seed=7),
        f"{LAYER}.lora_B.style.weight": numbers(4, 2, seed=8),
    }
    role = write_role(tmp_path / "role", state, config=QWEN2)
    both = ("--adapter", "default", "--adapter", "style")
    refused(merge_lora(role, "--lora", "fuse", *ALPHA, *both), 4, "lm_head.weight", "--adapter")
    assert not (tmp_path / "out").exists()
    assert merge_lora(role, "--lora", "adapter", *ALPHA, *both).code == 0
    for name, value in copies.items():
        assert same(tensors_in(tmp_path / "out" / name)[f"{PEFT}lm_head.weight"], value)


def test_a_copy_of_what_another_adapter_is_on(merge_lora: Run, tmp_path: Path) -> None:
    state = {**PLAIN, f"{LAYER}.modules_to_save.style.weight": numbers(4, 6, seed=7)}
    del state[f"{LAYER}.base_layer.weight"]
    role = write_role(tmp_path / "role", {**state, f"{LAYER}.original_module.weight": BASE[WEIGHT]}, config=QWEN2)
    both = ("--adapter", "default", "--adapter", "style")
    refused(merge_lora(role, "--lora", "fuse", *ALPHA, *both), 4, WEIGHT)


# Nothing is lost


def test_a_copy_beside_the_weight_itself(merge_lora: Run, tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {**PLAIN, PEFT + HEAD: numbers(10, 6, seed=6)}, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", *ALPHA), 4, "lm_head.weight")


def test_an_original_beside_the_weight_itself(merge_lora: Run, tmp_path: Path) -> None:
    state = {**PLAIN, f"{PEFT}lm_head.original_module.weight": numbers(10, 6, seed=6)}
    refused(
        merge_lora(write_role(tmp_path / "role", state, config=QWEN2), "--lora", "fuse", *ALPHA), 4, "lm_head.weight"
    )


def test_factors_under_two_names(merge_lora: Run, tmp_path: Path) -> None:
    """With the prefix of PEFT and without it: one of them would be passed over."""
    name = f"{LAYER}.lora_A.default.weight"
    state = {**PLAIN, name.removeprefix(PEFT): numbers(2, 6, seed=6)}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", *ALPHA), 4, "lora_A.default.weight")


def test_magnitudes_under_two_names(merge_lora: Run, tmp_path: Path) -> None:
    """As newer and as older versions of PEFT call them."""
    state = adapted(lora_magnitude_vector__default__weight=torch.ones(4), lora_magnitude_vector__default=torch.ones(4))
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", *ALPHA), 4, "lora_magnitude_vector.default")


# What is written can be computed with


def test_a_row_of_zeros_has_no_direction(merge_lora: Run, tmp_path: Path) -> None:
    """DoRA divides by its length: PEFT itself makes NaN of it."""
    weight, up = BASE[WEIGHT].clone(), FACTORS[f"{LAYER}.lora_B.default.weight"].clone()
    weight[1] = up[1] = 0
    state = adapted(
        base_layer__weight=weight, lora_B__default__weight=up, lora_magnitude_vector__default__weight=torch.ones(4)
    )
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", *ALPHA), 4, WEIGHT, "not finite", "DoRA")


@pytest.mark.parametrize("alpha", [1e39, 1e300])
def test_sums_that_float32_does_not_hold(merge_lora: Run, tmp_path: Path, alpha: float) -> None:
    role = write_role(tmp_path / "role", PLAIN, config=QWEN2)
    refused(merge_lora(role, "--lora", "fuse", "--lora-alpha", alpha), 4, WEIGHT, "not finite", "alpha")


def test_dora_on_packed_experts(merge_lora: Run, tmp_path: Path) -> None:
    """PEFT has none: a magnitude for each row of all experts, or of each?"""
    experts = f"{PEFT}model.layers.0.mlp.experts"
    state = {
        **PLAIN,
        f"{experts}.base_layer.gate_up_proj": numbers(3, 8, 5),
        f"{experts}.lora_A.default.weight": numbers(6, 5),
        f"{experts}.lora_B.default.weight": numbers(8, 6),
        f"{experts}.lora_magnitude_vector.default.weight": torch.ones(8),
    }
    refused(
        merge_lora(write_role(tmp_path / "role", state, config=QWEN2), "--lora", "fuse", *ALPHA), 4, "DoRA", "experts"
    )


def test_a_rank_of_nothing(merge_lora: Run, tmp_path: Path) -> None:
    state = adapted(lora_A__default__weight=torch.ones(0, 6), lora_B__default__weight=torch.ones(4, 0))
    call = merge_lora(write_role(tmp_path / "role", state, config=QWEN2), "--lora", "fuse", *ALPHA)
    refused(call, 4, "rank 0")
    assert "None" not in call.err


# What is said of them


def test_orthogonal_factors_leave_the_base_as_it_is(merge_lora: Run, tmp_path: Path) -> None:
    """Their product is zero when training begins: the model on the hub is their base."""
    role = write_role(tmp_path / "role", FACTORS, config=QWEN2)
    settings(role / CONFIG, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "init_lora_weights": "orthogonal"})
    assert merge_lora(role, "--lora", "fuse", "--base", base_model(tmp_path / "base")).code == 0
    factors = (FACTORS[f"{LAYER}.lora_{side}.default.weight"].double() for side in "BA")
    expected = BASE[WEIGHT].double() + 2 * torch.linalg.multi_dot(list(factors))
    torch.testing.assert_close(tensors_in(tmp_path / "out")[WEIGHT].double(), expected, rtol=1e-5, atol=1e-6)


def test_an_adapter_with_a_name_too_long_for_a_folder(merge_lora: Run, tmp_path: Path) -> None:
    name = "ü" * 200
    state = {key.replace(".default.", f".{name}."): value for key, value in PLAIN.items()}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    refused(merge_lora(role, "--lora", "adapter", *ALPHA), 4, "no directory")


# Tied heads


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_a_tied_head_that_was_not_trained_with_its_embeddings(
    merge_lora: Run, tmp_path: Path, copied: bool, elsewhere: bool
) -> None:
    """It is not stored, being an alias; the embeddings are no longer what it was in training."""
    module, config = f"{PEFT}model.embed_tokens", {**QWEN2, "tie_word_embeddings": True}
    down, up, copy = numbers(2, 10, seed=6), numbers(6, 2, seed=7), numbers(10, 6, seed=8)
    state = {f"{module}.lora_embedding_A.default": down, f"{module}.lora_embedding_B.default": up}
    if copied:
        state = {f"{module}.modules_to_save.default.weight": copy, **FACTORS}
    weights = {name: value for name, value in BASE.items() if name != "lm_head.weight"}
    more: tuple[object, ...] = ()
    if elsewhere:
        more = ("--base", base_model(tmp_path / "base", weights))
    else:
        state[f"{module}.{'original_module' if copied else 'base_layer'}.weight"] = weights["model.embed_tokens.weight"]
        state[f"{LAYER}.base_layer.weight" if copied else PEFT + WEIGHT] = weights[WEIGHT]
    role = write_role(tmp_path / "role", state, config=config)
    refused(merge_lora(role, "--lora", "fuse", *ALPHA, *more), 4, "embed_tokens", "--drop-lm-head", "tied")
    assert merge_lora(role, "--lora", "fuse", *ALPHA, *more, "--drop-lm-head").code == 0
    found = tensors_in(tmp_path / "out")
    assert found.keys() == weights.keys()
    expected = copy if copied else weights["model.embed_tokens.weight"] + 2 * (up @ down).T
    torch.testing.assert_close(found["model.embed_tokens.weight"], expected, rtol=1e-5, atol=1e-6)


def test_adapters_of_two_ranks_on_one_module(merge_lora: Run, tmp_path: Path) -> None:
    """Each is written with its own; no file says either."""
    style = {f"{LAYER}.lora_A.style.weight": numbers(3, 6), f"{LAYER}.lora_B.style.weight": numbers(4, 3)}
    role = write_role(tmp_path / "role", {**PLAIN, **style}, config=QWEN2)
    both = ("--adapter", "default", "--adapter", "style")
    call = merge_lora(role, "--lora", "adapter", *ALPHA, *both, "--json")
    assert call.code == 0, call.err
    assert {one["name"]: one["ranks"] for one in call.json["data"]["adapters"]} == {"default": [2], "style": [3]}
    for name, rank in (("default", 2), ("style", 3)):
        config = adapter_config(tmp_path / "out" / name)
        assert (config["r"], config["rank_pattern"]) == (rank, {})


@pytest.mark.parametrize(
    ("path", "field", "module"),
    [
        ("model.visual.merger", "mlp.0.weight", "merger"),
        ("model.visual.mergers.0", "weight", "model.visual.mergers.0"),
        ("lm_head", "weight", "lm_head"),
        ("model.embed_tokens", "weight", "embed_tokens"),
    ],
)
def test_copies_are_named_by_their_module(merge_lora: Run, tmp_path: Path, path: str, field: str, module: str) -> None:
    """PEFT takes every module for one that is to be copied whose path ends with the name, as `layers.0` with `0`."""
    value = numbers(4, 6, seed=6)
    copies = {f"{PEFT}{path}.{place}.{field}": value for place in ("modules_to_save.default", "original_module")}
    state = {name: tensor for name, tensor in PLAIN.items() if name != f"{PEFT}{path}.{field}"}
    role = write_role(tmp_path / "role", {**state, **copies}, config=QWEN2)
    assert merge_lora(role, "--lora", "adapter", *ALPHA).code == 0
    assert adapter_config(tmp_path / "out")["modules_to_save"] == [module]
    assert f"{PEFT}{path}.{field}" in tensors_in(tmp_path / "out")


@pytest.mark.parametrize("said", [False, True])
@pytest.mark.parametrize("how", ["fuse", "adapter"])
def test_magnitudes_that_the_settings_contradict(merge_lora: Run, tmp_path: Path, said: bool, how: str) -> None:
    """DoRA without its magnitudes would be fused as another adapter; with them, PEFT would pass over them."""
    state = PLAIN if said else adapted(lora_magnitude_vector__default__weight=torch.ones(4))
    role = write_role(tmp_path / "role", state, config=QWEN2)
    settings(role / CONFIG, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": said})
    refused(merge_lora(role, "--lora", how), 4, "use_dora", "magnitude", "q_proj")
    settings(role / CONFIG, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_dora": not said})
    assert merge_lora(role, "--lora", how).code == 0


@pytest.mark.parametrize("others", [False, True])
def test_which_axis_of_a_square_weight_is_which(merge_lora: Run, tmp_path: Path, others: bool) -> None:
    """Other layers show it, if there are any; else `fan_in_fan_out` says it."""
    weight, down, up = numbers(6, 6, seed=1), numbers(2, 6, seed=2), numbers(6, 2, seed=3)
    module = "model.layers.0.self_attn.o_proj"
    square = {f"{module}.base_layer.weight": weight, f"{module}.lora_A.default.weight": down}
    square[f"{module}.lora_B.default.weight"] = up
    state = {PEFT + name: value for name, value in square.items()}
    state |= PLAIN if others else {PEFT + name: value for name, value in BASE.items()}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    settings(role / CONFIG, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "fan_in_fan_out": True})
    assert merge_lora(role, "--lora", "fuse").code == 0
    expected = weight + 2 * (up @ down if others else (up @ down).T)
    torch.testing.assert_close(tensors_in(tmp_path / "out")[f"{module}.weight"], expected, rtol=1e-5, atol=1e-5)


# A base that is quantised where no adapter is


def test_what_is_quantised_in_the_base_is_said_to_be(merge_lora: Run, tmp_path: Path) -> None:
    """As GPT-OSS with an adapter on its attention, whose experts were bf16 in training."""
    role = write_role(tmp_path / "role", FACTORS, config={**QWEN2, "quantization_config": {"dequantize": True}})
    experts = {
        f"model.layers.0.mlp.experts.gate_up_proj_{part}": torch.ones(2, 4, dtype=torch.uint8)
        for part in ("blocks", "scales")
    }
    base, method = base_model(tmp_path / "base", {**BASE, **experts}), {"quant_method": "mxfp4"}
    write_config(base, {**QWEN2, "quantization_config": method}, ".")
    assert merge_lora(role, "--lora", "fuse", *ALPHA, "--base", base).code == 0
    assert tensors_in(tmp_path / "out").keys() == {**BASE, **experts}.keys()
    assert config_of(tmp_path / "out")["quantization_config"] == method


def test_an_adapter_on_what_is_quantised_is_refused(merge_lora: Run, tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", FACTORS, config=QWEN2)
    base = base_model(tmp_path / "base", {**BASE, WEIGHT: BASE[WEIGHT].to(torch.float8_e4m3fn)})
    refused(merge_lora(role, "--lora", "fuse", *ALPHA, "--base", base), 4, WEIGHT, "cannot be fused")


# Written over


def test_force_replaces_what_was_written_with_adapters(ckpttool: Run, tmp_path: Path) -> None:
    more = {name.replace(".default.", ".style."): value for name, value in FACTORS.items()}
    role, out = write_role(tmp_path / "role", {**PLAIN, **more}, config=QWEN2), tmp_path / "out"
    both = ("--adapter", "default", "--adapter", "style")
    for ways in (("both", *both), ("both", *both[:2]), ("adapter", *both), ("fuse", *both[:2])):
        assert ckpttool("merge-fsdp", role, "-o", out, "--lora", *ways, *ALPHA, "--force").code == 0
    assert not [path for path in out.iterdir() if path.is_dir()]


@pytest.mark.parametrize("place", [".", "lora_adapter", "lora_adapter/default"])
def test_force_keeps_what_is_not_of_an_adapter(ckpttool: Run, tmp_path: Path, place: str) -> None:
    more = {name.replace(".default.", ".style."): value for name, value in FACTORS.items()}
    role, out = write_role(tmp_path / "role", {**PLAIN, **more}, config=QWEN2), tmp_path / "out"
    line = ("merge-fsdp", role, "-o", out, "--lora", "both", *ALPHA, "--adapter", "default", "--adapter", "style")
    assert ckpttool(*line).code == 0
    (out / place / "notes.md").write_text("mine")
    before = fingerprint(out)
    refused(ckpttool(*line, "--force"), 6, "--force")
    assert fingerprint(out) == before


# Time


def timed(merge_lora: Run, role: Path, *more: object) -> float:
    """Seconds of a dry run that succeeds."""
    started = time.monotonic()
    call = merge_lora(role, *more, "--dry-run")
    assert call.code == 0, call.err
    return time.monotonic() - started


def many(layers: int) -> State:
    """The factors of many layers, and what they are on."""
    state = {f"{PEFT}model.embed_tokens.weight": torch.ones(10, 1), f"{PEFT}lm_head.weight": torch.ones(10, 1)}
    for layer in range(layers):
        module = f"{PEFT}model.layers.{layer}.self_attn.q_proj"
        state |= {f"{module}.{name}.weight": torch.ones(1, 1) for name in ("base_layer", "lora_A.default")}
        state[f"{module}.lora_B.default.weight"] = torch.ones(1, 1)
    return state


def test_a_rank_for_every_module(merge_lora: Run, tmp_path: Path) -> None:
    """As EVA writes them: more patterns than `re` keeps, each held against every module."""
    role = write_role(tmp_path / "role", many(700), config=QWEN2, ranks=1)
    ranks = {f"model.layers.{layer}.self_attn.q_proj": 1 for layer in range(700)}
    settings(role / CONFIG, {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "rank_pattern": ranks})
    timed(merge_lora, role, "--lora", "fuse")
    assert timed(merge_lora, role, "--lora", "fuse") < 4


def test_names_that_are_too_long_for_patterns(merge_lora: Run, tmp_path: Path) -> None:
    state = {name.replace("self_attn", "a." * 400 + "self_attn"): value for name, value in PLAIN.items()}
    role = write_role(tmp_path / "role", state, config=QWEN2)
    pattern = {"[a-z.]*[a-z.]*_proj": 2}
    settings(role / CONFIG, {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "rank_pattern": pattern})
    refused(merge_lora(role, "--lora", "fuse"), 4, "name of")


def test_square_weights_that_may_be_conv1d_need_their_config(merge_lora: Run, tmp_path: Path) -> None:
    """GPT-2 stores `[in, out]`; of `c_proj` alone neither shapes nor a config say it."""
    module = f"{PEFT}transformer.h.0.attn.c_proj"
    state = {
        f"{module}.base_layer.weight": numbers(6, 6, seed=1),
        f"{module}.lora_A.default.weight": numbers(2, 6, seed=2),
        f"{module}.lora_B.default.weight": numbers(6, 2, seed=3),
    }
    role = write_role(tmp_path / "role", state)
    refused(merge_lora(role, "--lora", "fuse", *ALPHA), 4, "square")
    config = write_config(tmp_path / "gpt2", {"model_type": "gpt2", "architectures": ["GPT2Model"]}, ".").parent
    assert merge_lora(role, "--lora", "fuse", *ALPHA, "--hf-config", config).code == 0
    down, up = (state[f"{module}.lora_{side}.default.weight"] for side in "AB")
    found = tensors_in(role.parent / "out")["transformer.h.0.attn.c_proj.weight"]
    torch.testing.assert_close(found, state[f"{module}.base_layer.weight"] + 2 * (up @ down).T)
