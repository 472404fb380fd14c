"""Write every Megatron checkpoint of a world of four: `python -m tests.writers megatron OUT`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.writers import megatron_names
from tests.writers.megatron_cpu import (
    Parallel,
    Training,
    build_model,
    prepare_rank,
    start,
    train,
    transformer_config,
)
from tests.writers.megatron_logits import save_logits
from tests.writers.megatron_models import VOCABULARY, dense_model, moe_model
from tests.writers.megatron_save import (
    DP_RESHARDABLE,
    FULLY_RESHARDABLE,
    Contents,
    State,
    content_metadata,
    extra_part,
    model_part,
    optimizer_part,
    save_archive,
    write_manifest,
    write_transformer_config,
)
from tests.writers.ranks import make_directory
from tests.writers.side_files import write_side_files

STEP = 10


def write_all(out: Path) -> None:
    """Every variant; the process groups are made anew for each way of cutting the model."""
    prepare_rank()
    write_dense(out)
    write_moe(out)
    write_megatron_lm(out / "megatron-lm")
    for name, hf in (("dense", dense_model()), ("moe", moe_model())):
        weights = megatron_names.to_megatron(hf.state_dict(), hf.config)
        save_logits(out / "expected" / f"{name}-logits.safetensors", hf.config, weights)


def write_dense(out: Path) -> None:
    """A dense model, cut two by two, in four layouts."""
    hf = dense_model()
    training = trained(hf, Parallel(tp=2, pp=2))
    save_expected(out, "dense", hf)
    metadata = content_metadata(FULLY_RESHARDABLE)
    write_v1(out / "dense-v1", training, hf, metadata)
    write_v1_bridge(out / "dense-v1-bridge", training, hf, metadata)
    both = ("model", "hf_model", "optimizer", "extra")
    write_v2(out / "dense-v2", training, hf, Contents(True, True, both), metadata)
    write_v2(out / "dense-v2-bridge", training, hf, Contents(True, False), metadata)


def write_moe(out: Path) -> None:
    """Experts over two ranks, tensors over two; v2 with verl's default optimizer form."""
    hf = moe_model()
    training = trained(hf, Parallel(tp=2, ep=2))
    save_expected(out, "moe", hf)
    write_v1(out / "moe-v1", training, hf, content_metadata(FULLY_RESHARDABLE))
    contents = Contents(False, True, arch="Qwen3MoeForCausalLM")
    write_v2(out / "moe-v2", training, hf, contents, content_metadata(DP_RESHARDABLE))


def trained(hf: Any, parallel: Parallel, vocabulary: int = VOCABULARY, **options: Any) -> Training:
    """The same weights in Megatron, after one step of its own optimizer."""
    start(parallel)
    config = transformer_config(hf.config, parallel)
    model = build_model(hf.config, config, vocabulary)
    megatron_names.load(model, padded(hf, vocabulary))
    return train(model, config, **options)


def padded(hf: Any, vocabulary: int) -> megatron_names.Tensors:
    """Megatron's tensors; where its vocabulary is larger, rows of nine show any leak."""
    whole = megatron_names.to_megatron(hf.state_dict(), hf.config)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        missing = vocabulary - len(whole[name])
        filling = torch.full((missing, whole[name].shape[1]), 9.0, dtype=whole[name].dtype)
        whole[name] = torch.cat([whole[name], filling])
    return whole


def save_expected(out: Path, name: str, hf: Any, vocabulary: int = VOCABULARY) -> None:
    """The Hugging Face model, the tensors as the archive holds them."""
    folder = make_directory(out / "expected")
    if dist.get_rank() == 0:
        hf.save_pretrained(folder / f"{name}-hf")
        stored = {key: value.contiguous() for key, value in padded(hf, vocabulary).items()}
        save_file(stored, folder / f"{name}-megatron.safetensors")


def write_v1(role: Path, training: Training, hf: Any, metadata: State) -> None:
    """One archive with everything; the Hugging Face folder has no weights."""
    state = model_part(training, metadata) | optimizer_part(training, metadata) | extra_part()
    save_archive(role / "dist_ckpt", state, metadata)
    if dist.get_rank() == 0:
        write_side_files(role / "huggingface", hf.config)
        write_transformer_config(role / "transformer_config.json", training)


def write_v1_bridge(role: Path, training: Training, hf: Any, metadata: State) -> None:
    """The archive has no model: a bridge wrote the weights in Hugging Face form."""
    state = optimizer_part(training, metadata) | extra_part()
    save_archive(role / "dist_ckpt", state, metadata)
    if dist.get_rank() == 0:
        write_weights(role / "huggingface", hf)
        write_transformer_config(role / "transformer_config.json", training)


def write_v2(role: Path, training: Training, hf: Any, contents: Contents, metadata: State) -> None:
    """Three trees. verl makes both model folders before it knows which it needs: one may be empty."""
    for part in ("model/dist_ckpt", "model/huggingface"):
        make_directory(role / part)
    if contents.sharded_model:
        save_archive(role / "model/dist_ckpt", model_part(training, metadata), metadata)
    save_archive(role / "optimizer/dist_ckpt", optimizer_part(training, metadata), metadata)
    save_archive(role / "extra/dist_ckpt", extra_part(), metadata)
    if dist.get_rank() == 0:
        if contents.hf_model:
            write_weights(role / "model/huggingface", hf)
        write_transformer_config(role / "transformer_config.json", training)
        write_manifest(role, contents)


def write_weights(folder: Path, hf: Any) -> None:
    """A loadable Hugging Face model with its side files."""
    write_side_files(folder, hf.config)
    hf.save_pretrained(folder)


def write_megatron_lm(save: Path) -> None:
    """`iter_0000010/` and the tracker; a padded vocabulary, `args`, no distributed optimizer."""
    hf = dense_model()
    training = trained(hf, Parallel(tp=2, pp=2), 256, distributed=False)
    save_expected(save.parent, save.name, hf, 256)
    metadata = content_metadata(None)
    scheduler = {"opt_param_scheduler": training.scheduler.state_dict()}
    state = model_part(training, metadata) | scheduler | extra_part() | common_state(training)
    state["optimizer"] = optimizer_part(training, metadata)["optimizer"]
    save_archive(save / f"iter_{STEP:07d}", state, metadata)
    if dist.get_rank() == 0:
        (save / "latest_checkpointed_iteration.txt").write_text(str(STEP))


def common_state(training: Training) -> State:
    """What Megatron-LM adds: the arguments of the run and its counters."""
    config = training.config
    arguments = Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.ffn_hidden_size,
        num_attention_heads=config.num_attention_heads,
        group_query_attention=True,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        swiglu=True,
        normalization="RMSNorm",
        add_qkv_bias=True,
        untie_embeddings_and_output_weights=True,
        padded_vocab_size=256,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
    )
    return {
        "args": arguments,
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "num_floating_point_operations_so_far": 0.0,
    }
