"""Any of the tiny models in Megatron, in float32 and cut for this rank; a forward pass works without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import MLATransformerConfig

from tests.writers.converted_models import Model, Options
from tests.writers.megatron_cpu import WITHOUT_FUSION, CpuAsCuda, Parallel


@dataclass(frozen=True)
class Layout:
    """How a checkpoint is cut, and by which words: `metadata` for the save, `options` for the model.

    `te` gives the norms the names they have where Transformer Engine is installed.
    """

    parallel: Parallel = field(default_factory=Parallel)
    metadata: Options = field(default_factory=dict)
    options: Options = field(default_factory=dict)
    te: bool = False


def allow_latent_attention() -> None:
    """Megatron takes Transformer Engine for installed here, whose classes are then `None`."""
    multi_latent_attention.HAVE_TE = False


class LatentAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's own attention for CPUs, told that values may be narrower than keys."""

    def __init__(self, *, k_channels: int = 0, v_channels: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


class ValueHead(torch.nn.Linear):  # type: ignore[misc]
    """What verl puts in the place of the output layer of a critic."""

    def forward(self, hidden: Any, weight: Any = None, runtime_gather_output: Any = None) -> tuple[Any, None]:
        return super().forward(hidden).float(), None


def transformer_config(model: Model, layout: Layout) -> TransformerConfig:
    """Every size comes from the Hugging Face configuration."""
    hf = model.hf
    options: Options = {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "layernorm_epsilon": hf.rms_norm_eps,
        **ALWAYS,
        **WITHOUT_FUSION,
        **_parallel(layout.parallel),
        **model.options,
        **layout.options,
    }
    if "multi_latent_attention" in options:
        return MLATransformerConfig(**options)
    width = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return TransformerConfig(**options, kv_channels=width)


ALWAYS: Options = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "use_cpu_initialization": True,
}


def _parallel(parallel: Parallel) -> Options:
    return {
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
    }


def build_chunks(model: Model, config: TransformerConfig, *, te: bool = False) -> list[Any]:
    """This rank's part of the model: one chunk, or more where the pipeline is virtual."""
    virtual = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if virtual is None else list(range(virtual))
    with CpuAsCuda():
        return [_chunk(model, config, stage, te).eval() for stage in stages]


def _chunk(model: Model, config: TransformerConfig, stage: int | None, te: bool) -> Any:
    block = _block(config, stage, te)
    mtp = get_gpt_mtp_block_spec(config, block, False, vp_stage=stage) if config.mtp_num_layers else None
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=block,
        vocab_size=model.padded,
        max_sequence_length=model.hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=model.hf.rope_parameters["rope_theta"],
        mtp_block_spec=mtp,
        vp_stage=stage,
    )
    if model.critic and chunk.post_process:
        chunk.output_layer = ValueHead(config.hidden_size, 1, bias=False)
    return chunk


def _block(config: TransformerConfig, stage: int | None, te: bool) -> Any:
    """Megatron's own layers, changed where a CPU or the names of Transformer Engine ask for it."""
    block = get_gpt_decoder_block_spec(config, False, "RMSNorm", vp_stage=stage)
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        parts = layer.submodules
        if config.multi_latent_attention:
            parts.self_attention.submodules.core_attention = LatentAttention
        if te:
            parts.sharded_state_dict_keys_map = _fused_norms(
                latent=config.multi_latent_attention, experts=parts.mlp.module is MoELayer
            )
    return block


def _fused_norms(*, latent: bool, experts: bool) -> dict[str, str]:
    """Transformer Engine has a norm inside the projection that follows it; a router has none."""
    names = {} if experts else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    if not latent:
        return {"input_layernorm.": "self_attention.linear_qkv.layer_norm_", **names}
    for side in ("q", "kv"):
        names[f"self_attention.{side}_layernorm."] = f"self_attention.linear_{side}_up_proj.layer_norm_"
    return names
