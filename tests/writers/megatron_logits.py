"""What the Megatron model itself answers: the oracle for the meaning of the rows, not only the bytes."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import save_file

from tests.writers.megatron_cpu import Parallel, build_model, start, transformer_config
from tests.writers.megatron_names import Tensors, load

LENGTH = 12


def save_logits(path: Path, hf: Any, weights: Tensors) -> None:
    """`ids` and `logits`, in float32 so that a comparison can be strict."""
    start(Parallel())
    allow_forward()
    config = replace(
        transformer_config(hf, Parallel()),
        bf16=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )
    model = build_model(hf, config, hf.vocab_size).float().eval()
    load(model, weights)
    ids = torch.arange(5, 5 + LENGTH).unsqueeze(0)
    places = torch.arange(LENGTH).unsqueeze(0)
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        logits = model(ids, places, future)
    if dist.get_rank() == 0:
        save_file({"ids": ids, "logits": logits.contiguous()}, path)


def allow_forward() -> None:
    """Two places that expect a GPU in a forward pass without dropout."""
    type(get_cuda_rng_tracker()).fork = lambda *_, **__: contextlib.nullcontext()
    moe_utils.te_general_gemm = None
