"""What accelerate's FSDP plugin writes without DCP: one `.bin` a rank, beside each other in the checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import StateDictType

from tests.writers import fsdp1, fsdp_models
from tests.writers.fsdp_save import save_expected, train
from tests.writers.ranks import make_directory
from tests.writers.sharding import shard


def write_bins(folder: Path, mesh: DeviceMesh) -> None:
    """SHARDED_STATE_DICT and `use_dcp=False`, since accelerate 1.14: the rank's own state dict of DTensors."""
    training = train(shard(fsdp_models.policy(), mesh))
    model = get_model_state_dict(training.model)
    optimizer = get_optimizer_state_dict(training.model, training.optimizer)
    make_directory(folder)
    torch.save(model, folder / f"pytorch_model_fsdp_0_rank{dist.get_rank()}.bin")
    torch.save(optimizer, folder / f"optimizer_0_rank{dist.get_rank()}.bin")
    save_expected(folder, model)


def write_local(folder: Path) -> None:
    """LOCAL_STATE_DICT: flat parameters, whose layout no file tells. No merger can read them, so no oracle."""
    training = train(fsdp1.wrap(fsdp_models.policy(), None, use_orig_params=False))
    state = fsdp1.state_dict(training.model, StateDictType.LOCAL_STATE_DICT)
    make_directory(folder)
    torch.save(state, folder / f"pytorch_model_fsdp_rank{dist.get_rank()}.bin")
