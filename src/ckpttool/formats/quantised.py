"""Whether stored weights are quantised, by their dtypes and by the names of what goes with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol


class Stored(Protocol):
    """A tensor as it is stored or written: its name, its dtype by torch's name, its shape."""

    @property
    def name(self) -> str:
        """The name, with dots."""

    @property
    def dtype(self) -> str:
        """The dtype."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""


_LOW = ("float8", "float6", "float4", "qint", "quint")
_SMALL_INTS = frozenset({"int8", "uint8", "int16", "uint16", "int32", "uint32"})
_NAMES = re.compile(
    r".*\.(qweight|qzeros|g_idx|SCB|W_q|weight_(packed|scale|scale_inv|scale_2|zero_point|shape|format)"
    r"|weight\.(absmax|nested_absmax|quant_map|nested_quant_map|quant_state\..+))"
    r"|.*_(blocks|scales|scale_inv)"
)
"""What GPTQ, AWQ, bitsandbytes, HQQ, compressed-tensors, fp8 and MXFP4 call the parts of a quantised weight."""


def is_quantised(tensors: Iterable[Stored]) -> bool:
    """Tell whether any weight is quantised: in doubt it is, because what is said of that must not be taken away.

    Integers count where they are matrices of less than eight bytes an element; positions are int64.
    """
    return any(map(_is_part, tensors))


def _is_part(tensor: Stored) -> bool:
    if tensor.dtype.startswith(_LOW) or _NAMES.fullmatch(tensor.name):
        return True
    return tensor.dtype in _SMALL_INTS and len(tensor.shape) > 1
