"""Which dtype a tensor is written in: ``--dtype`` casts parameters, not what has to keep its precision."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from ckpttool.formats.rank import PLAIN, WHOLE
from ckpttool.tensors import CASTABLE, TensorInfo

SHORT: Mapping[str, str] = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
"""What people type for torch's names."""

DTYPES: Mapping[str, str] = MappingProxyType(
    {short: name for name, short in SHORT.items()} | {name: name for name in SHORT}
)
"""What ``--dtype`` takes, and torch's name of it."""

KEPT = (
    "e_score_correction_bias",
    "expert_bias",
    "layer_scalar",
    "running_mean",
    "running_var",
    "num_batches_tracked",
    "std_scale",
    "std_bias",
    "inv_freq",
)
"""Last parts of names that are buffers in every model we know: the bias of a router, scalars of a layer, statistics.

They are kept in a checkpoint of one rank, where a buffer looks like a parameter. With several ranks the checkpoint
itself tells: what is stored whole by every rank is a buffer.
"""

_KEPT = re.compile(rf"(?:.*\.)?(?:{'|'.join(KEPT)})")


def is_kept(name: str) -> bool:
    """Tell by its name a buffer that keeps its precision in every model we know."""
    return bool(_KEPT.fullmatch(name))


def is_buffer(tensor: TensorInfo) -> bool:
    """Tell a buffer from a parameter: by its placement, at world size 1 by its name."""
    if tensor.placement == WHOLE:
        return is_kept(tensor.name)
    return tensor.placement == PLAIN


def written_dtype(tensor: TensorInfo, dtype: str | None, *, cast_buffers: bool) -> str:
    """Return the dtype that a tensor is written in when ``dtype`` (torch's name) is asked for."""
    if dtype is None or tensor.dtype not in CASTABLE or (is_buffer(tensor) and not cast_buffers):
        return tensor.dtype
    return dtype
