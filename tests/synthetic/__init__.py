"""Megatron checkpoints of tiny models that transformers built: what `to-hf` must make of them is known beforehand.

Nothing here reads or imports the tool. A model gets random weights and says its logits; its tensors are put into
Megatron's order and written record by record as torch's distributed checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.synthetic import hub
from tests.synthetic.archive import Entries, lay_out, write_archive
from tests.synthetic.families import FAMILIES
from tests.synthetic.hub import Random, Tensors
from tests.synthetic.megatron import Naming, to_megatron

__all__ = ["FAMILIES", "Written", "write_role"]


@dataclass(frozen=True)
class Written:
    """What lies in a role, and what must come of it."""

    input_ids: torch.Tensor
    logits: torch.Tensor
    """In float32, of a float32 model with these weights."""
    state: Tensors
    """All tensors `to-hf` writes by default, MTP included, bit for bit."""
    model_class: str
    entries: Entries
    """What lies in the archive, under its keys."""


def write_role(
    role: Path,
    family: str,
    *,
    dialect: str = "stacked",
    head: str = "lm",
    norms: str = "te",
    post_norms: str = "te",
    producer: str = "nvidia",
    padding: int = 0,
    dtype: torch.dtype = torch.float32,
    extra: bool = False,
    mtp: int | None = None,
    config: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Written:
    """A role directory: `dist_ckpt/` and `huggingface/`.

    `dialect` is stacked, indexed or singleton; layers that are not alike are never stacked. `norms` is te or local,
    `post_norms` te or mbridge (Gemma), `producer` nvidia, swift or slime (gated delta nets), `head` lm or value.
    `padding` adds rows of nines to the vocabulary, `extra` adds what else a training keeps, `mtp` is how many layers
    of multi-token prediction are in the archive (as many as the family has), `config` changes the configuration.
    """
    known = FAMILIES[family]
    source = Random(torch.Generator().manual_seed(seed), known.zero_centred, dtype)
    settings = hub.configuration(known, config or {}, head)
    model = hub.build(settings, head, source)
    state = hub.hub_state(model, dtype)
    if layers := _mtp_layers(settings, known.mtp, mtp, head):
        state |= hub.mtp_state(known, settings, state, source, layers)
    naming = Naming(norms, post_norms, producer)
    entries = lay_out(to_megatron(state, settings, naming, padding), dialect)
    write_archive(role / "dist_ckpt", entries, extra=extra)
    hub.write_config(role / "huggingface", model, known, dtype)
    ids, logits = hub.run(model, seed)
    return Written(ids, logits, state, type(model).__name__, entries)


def _mtp_layers(settings: Any, where: str | None, asked: int | None, head: str) -> int:
    if where is None or head == "value":
        return 0
    if asked is not None:
        return asked
    return settings.num_nextn_predict_layers if where == "layers" else 1
