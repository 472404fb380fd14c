"""FSDP1 on CPU ranks: it asks for an accelerator, so the ranks hand it the CPU instead."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp import _init_utils as init_utils
from torch.distributed.fsdp import fully_sharded_data_parallel as fsdp_module
from torch.distributed.fsdp._common_utils import _FSDPDeviceHandle
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer


def _use_cpu(state: Any, *_: Any) -> Any:
    state._device_handle = _FSDPDeviceHandle(torch.device("cpu"), torch.cpu)
    return state


def wrap(model: Any, mesh: Any, *, use_orig_params: bool = True) -> Any:
    """Shard layer by layer, as verl does; without a mesh the shards are `ShardedTensor`, on two axes it is HSDP."""
    init_utils._init_device_handle = _use_cpu
    fsdp_module._init_device_handle = _use_cpu
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Qwen2DecoderLayer})
    hybrid = mesh is not None and mesh.ndim == 2
    wrapped: Any = FullyShardedDataParallel(
        model,
        auto_wrap_policy=layers,
        device_id=torch.device("cpu"),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if hybrid else ShardingStrategy.FULL_SHARD,
        use_orig_params=use_orig_params,
    )
    return wrapped


def state_dict(model: Any, kind: StateDictType) -> dict[str, Any]:
    """The state in the given form; torch warns that FSDP1 is on its way out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state: dict[str, Any] = model.state_dict()
    return state
