"""The PEFT models behind the LoRA checkpoints: what is trained of which model, one variant a role directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, GptOssConfig, GptOssForCausalLM

from tests.writers.fsdp_families import qwen3_moe, varied
from tests.writers.fsdp_models import SIZES, critic, plain_policy
from tests.writers.ranks import seed_everything

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Variant:
    """One role directory: a base model, its adapters, how it is cut and where its `adapter_config.json` lies."""

    name: str
    base: Callable[[], Any]
    adapters: Mapping[str, LoraConfig]
    mesh: str = "line"
    fsdp: int = 2
    cast_adapters: bool = True
    only: bool = False
    config_at: str | None = None
    base_shards: str = "1GB"


@dataclass
class Trained:
    """A PEFT model in which every trained value is random, and its base as it was before."""

    model: Any
    base: Any = field(repr=False)


def build(variant: Variant) -> Trained:
    """The same on every rank; `base` is a second model of the same weights."""
    base, below = variant.base(), variant.base()
    first, *further = variant.adapters
    cast = variant.cast_adapters
    model = get_peft_model(below, variant.adapters[first], adapter_name=first, autocast_adapter_dtype=cast)
    for name in further:
        model.add_adapter(name, variant.adapters[name], autocast_adapter_dtype=cast)
    seed_everything()
    randomise(model)
    return Trained(model.eval(), base.eval())


def randomise(model: Any) -> None:
    """PEFT starts with B at zero and magnitudes at the norms: as if there were no adapter at all."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif parameter.requires_grad:  # modules_to_save, and biases that are trained
                parameter.add_(torch.randn_like(parameter) * 0.1)


def causal() -> Any:
    """A Qwen2 whose norms and biases are not those of its start."""
    return varied(plain_policy())


def half() -> Any:
    """The same in bfloat16."""
    return causal().to(torch.bfloat16)


def tied() -> Any:
    """Embeddings and head in one tensor."""
    return varied(plain_policy(tie_word_embeddings=True))


def value_model() -> Any:
    """A critic: `score` is trained whole, PEFT decides that by itself."""
    return varied(critic())


def gpt2() -> Any:
    """`Conv1D`: the weights lie transposed."""
    seed_everything()
    config = GPT2Config(
        vocab_size=130,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        eos_token_id=1,
        bos_token_id=1,
        pad_token_id=0,
        attn_implementation="eager",
        architectures=["GPT2LMHeadModel"],
    )
    return varied(GPT2LMHeadModel(config))


def gpt_oss() -> Any:
    """Packed experts that lie (experts, in, out); the second projection is square, no shape tells which it is."""
    seed_everything()
    sizes = {**SIZES, "intermediate_size": SIZES["hidden_size"]}
    config = GptOssConfig(
        **sizes,
        head_dim=8,
        num_local_experts=6,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        architectures=["GptOssForCausalLM"],
        experts_implementation="eager",
    )
    return varied(GptOssForCausalLM(config))


def lora(targets: list[str] | None, **changes: Any) -> LoraConfig:
    """Rank 4 and alpha 8 unless the variant says otherwise."""
    plain = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "lora_dropout": 0.0}
    return LoraConfig(target_modules=targets, **{**plain, **changes})


def one(targets: list[str] | None, **changes: Any) -> dict[str, LoraConfig]:
    """The adapter of most trainings, under the name that PEFT gives it."""
    return {"default": lora(targets, **changes)}


def variants() -> tuple[Variant, ...]:
    """All of them; made anew for each call, as PEFT writes into configurations."""
    return (*_kinds(), *_parts(), *_bases(), *_cuts())


def _kinds() -> tuple[Variant, ...]:
    """How a delta is made of its factors."""
    ranks = {"q_proj": 2, "layers.1.mlp.down_proj": 6}
    alphas = {"q_proj": 3, "v_proj": 16, "layers.1.mlp.down_proj": 5}
    return (
        Variant("plain", causal, one(ATTENTION)),
        Variant("patterns", causal, one(LINEAR, rank_pattern=ranks, alpha_pattern=alphas), config_at="."),
        Variant("rslora", causal, one(LINEAR, use_rslora=True, r=3), config_at="lora_adapter"),
        Variant("dora", causal, one(LINEAR, use_dora=True), config_at="huggingface/lora_adapter"),
        Variant("bias", causal, one(["q_proj", "k_proj", "v_proj"], lora_bias=True), config_at="huggingface"),
    )


def _parts() -> tuple[Variant, ...]:
    """What is trained besides linear layers, and more adapters than one."""
    style = lora(["q_proj", "down_proj"], r=3, lora_alpha=9)
    token = one(ATTENTION, task_type="TOKEN_CLS")
    return (
        Variant("embedding", causal, one(["embed_tokens", "q_proj"])),
        Variant("embedding-dora", causal, one(["embed_tokens", "q_proj"], use_dora=True)),
        Variant("head", causal, one(ATTENTION, modules_to_save=["lm_head"])),
        Variant("critic", value_model, token),
        Variant("trained-bias", causal, one(ATTENTION, bias="lora_only"), config_at="."),
        Variant("two", causal, {"default": lora(ATTENTION), "style": style}, config_at="lora_adapter"),
    )


def _bases() -> tuple[Variant, ...]:
    """Models whose weights are not those of a plain float32 linear layer."""
    packed = one(["q_proj"], target_parameters=EXPERTS)
    mixed = one(["q_proj"], target_parameters=EXPERTS)
    return (
        Variant("conv1d", gpt2, one(["c_attn", "c_proj"], fan_in_fan_out=True), config_at="."),
        Variant("conv1d-dora", gpt2, one(["c_attn", "c_proj"], fan_in_fan_out=True, use_dora=True), config_at="."),
        Variant("experts", qwen3_moe, packed, config_at="."),
        Variant("experts-transposed", gpt_oss, mixed, config_at="."),
        Variant("bf16", half, one(LINEAR), cast_adapters=False),
        Variant("bf16-fp32", half, one(LINEAR)),
        Variant("tied", tied, one(LINEAR)),
        Variant("tied-embedding", tied, one(["embed_tokens", "q_proj"])),
        Variant("tied-head", tied, one(ATTENTION, modules_to_save=["lm_head"])),
    )


def _cuts() -> tuple[Variant, ...]:
    """How the tensors are cut, and saves without the base."""
    return (
        Variant("fsdp1", causal, one(LINEAR), fsdp=1),
        Variant("hsdp", causal, one(LINEAR), mesh="square"),
        Variant("only", causal, one(LINEAR), only=True, base_shards="40KB"),
        Variant("only-dora", half, one(LINEAR, use_dora=True), only=True),
    )
