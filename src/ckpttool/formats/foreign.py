"""Checkpoints that we can name and do not open: what they are, and where their owners go next."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ckpttool.errors import CkpttoolError
from ckpttool.formats.findings import listing
from ckpttool.formats.jsonfile import read_object


@dataclass(frozen=True, slots=True)
class Foreign:
    """A kind of checkpoint that is recognised by name only."""

    kind: str
    title: str
    evidence: tuple[str, ...]
    hint: str


_BY_NAME = (
    (
        "deepspeed",
        "DeepSpeed ZeRO checkpoint",
        re.compile(
            r"(bf16_|fp16_)?zero_pp_rank_\d+_mp_rank_\d+_(optim|model)_states\.pt"
            r"|mp_rank_\d+_model_states\.pt|zero_to_fp32\.py"
        ),
        "DeepSpeed's own zero_to_fp32.py, which lies beside it, joins the shards.",
    ),
    (
        "accelerate-optimizer",
        "accelerate's optimizer shards of FSDP, without the model",
        re.compile(r"optimizer(_\d+)?_rank\d+\.bin"),
        "The weights are in pytorch_model_fsdp_*: copy them here too.",
    ),
    (
        "megatron-legacy",
        "legacy Megatron checkpoint, one directory a model-parallel rank",
        re.compile(r"mp_rank_\d{2,}(_\d{3,})?(_\d{3,})?"),
        "Convert it to torch_dist with the Megatron that wrote it (--ckpt-format torch_dist).",
    ),
    (
        "adapter-checkpoint",
        "Megatron PEFT adapters of verl's layout v1",
        re.compile(r"adapter_checkpoint"),
        "Current verl refuses this layout; load it with the verl that wrote it.",
    ),
    (
        "orbax",
        "Orbax checkpoint (JAX)",
        re.compile(r"_CHECKPOINT_METADATA|manifest\.ocdbt"),
        "Orbax reads it.",
    ),
)
_BACKENDS = {
    "zarr": "Load it with Megatron-Core 0.12 or older and save it as torch_dist.",
    "fsdp_dtensor": "Only Megatron-FSDP itself reads it.",
}


def detect(path: Path) -> Foreign | None:
    """Name the checkpoint in a directory by its file names and ``metadata.json``, or return ``None``."""
    names = sorted(os.listdir(path))
    backend = _backend(path) if "metadata.json" in names else None
    if backend in _BACKENDS:
        return Foreign(
            backend,
            f"Megatron distributed checkpoint of the {backend} backend",
            (f"metadata.json (sharded_backend {backend})",),
            _BACKENDS[backend],
        )
    if any(os.path.isfile(path / name / ".zarray") for name in names[:64]):  # noqa: PTH113 - closed ones are no error
        return Foreign("zarr", "zarr checkpoint", (".zarray",), _BACKENDS["zarr"])
    for kind, title, pattern, hint in _BY_NAME:
        hits = [name for name in (*names, path.name) if pattern.fullmatch(name)]
        if hits:
            return Foreign(kind, title, _evidence(hits), hint)
    return None


def _backend(path: Path) -> str | None:
    try:
        value = read_object(path / "metadata.json").get("sharded_backend")
    except CkpttoolError:
        return None
    return value if isinstance(value, str) else None


def _evidence(hits: Iterable[str]) -> tuple[str, ...]:
    return (listing(hits, 3),)
