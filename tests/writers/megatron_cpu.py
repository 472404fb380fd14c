"""Megatron-Core on CPU ranks: its own model, distributed optimizer and scheduler, without a GPU."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig
from torch.distributed import distributed_c10d
from torch.overrides import TorchFunctionMode

from tests.writers.ranks import seed_everything


class CpuAsCuda(TorchFunctionMode):  # type: ignore[misc]
    """Answers Megatron's "on the GPU, please" and "are you a CUDA tensor?" for CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        options = dict(kwargs or {})
        if str(options.get("device", "")).startswith("cuda"):
            options["device"] = "cpu"
        result = func(*args, **options)
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return result.replace("torch.", "torch.cuda.")
        return result


@dataclass(frozen=True)
class Parallel:
    """How many ways the model is cut; `None` means as Megatron does it by default."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    vpp: int | None = None


@dataclass(frozen=True)
class Training:
    """A Megatron model in the middle of its training."""

    model: Any
    optimizer: Any
    scheduler: Any
    config: TransformerConfig


def prepare_rank() -> None:
    """Must run in the rank before anything of Megatron does."""
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"
    # By default the queue lives in a spawned process, which would import torch again for each rank.
    filesystem_async._results_queue = multiprocessing.get_context("fork").Manager().Queue()


def start(parallel: Parallel) -> None:
    """A fresh set of process groups, with the RNG tracker a real run saves."""
    _end_groups()
    parallel_state.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        parallel.vpp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    seed_everything()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.states_ = {"model-parallel-rng": torch.get_rng_state()}


def _end_groups() -> None:
    """Megatron only forgets its groups: their threads would stay, dozens for each start."""
    parallel_state.destroy_model_parallel()
    dist.barrier()
    for group in list(distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def transformer_config(hf: Any, parallel: Parallel) -> TransformerConfig:
    """The same model in Megatron's words, every GPU-only fusion off."""
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        **WITHOUT_FUSION,
        **_family_options(hf),
    )


WITHOUT_FUSION: dict[str, Any] = dict.fromkeys(
    (
        "gradient_accumulation_fusion",
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "persist_layer_norm",
    ),
    False,
)


def _family_options(hf: Any) -> dict[str, Any]:
    """Qwen2 has a QKV bias; Qwen3-MoE has query and key norms and experts."""
    if hf.model_type == "qwen2":
        return {"add_qkv_bias": True}
    return {
        "qk_layernorm": True,
        "num_moe_experts": hf.num_experts,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "allgather",
    }


def build_model(hf: Any, config: TransformerConfig, vocab_size: int) -> Any:
    """This rank's part of the model, in bfloat16."""
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=vocab_size,
        max_sequence_length=hf.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=hf.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=10000,
    ).bfloat16()


def train(model: Any, config: TransformerConfig, *, distributed: bool = True) -> Training:
    """One step at the start of the warm-up, where the rate is zero: moments fill, weights stay."""
    with CpuAsCuda():
        buckets = DistributedDataParallelConfig(use_distributed_optimizer=distributed)
        wrapped = DistributedDataParallel(config, buckets, model)
        options = OptimizerConfig(
            lr=1e-3,
            min_lr=0.0,
            weight_decay=0.0,
            clip_grad=0.0,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=distributed,
        )
        optimizer = get_megatron_optimizer(options, [wrapped])
        scheduler = _scheduler(optimizer)
        for parameter in wrapped.parameters():
            parameter.main_grad.copy_(parameter.detach().float() * 0.1)
        optimizer.step()
        scheduler.step(1)
    return Training(model, optimizer, scheduler, config)


def _scheduler(optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=0.0,
        lr_warmup_steps=10,
        lr_decay_steps=100,
        lr_decay_style="cosine",
        start_wd=0.0,
        end_wd=0.0,
        wd_incr_steps=100,
        wd_incr_style="constant",
    )
