"""What a trained model answers: the oracle for the meaning of its weights, not only their bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.writers.fsdp_save import save_tensors

FIRST, PROMPTS, LENGTH = 5, 2, 12


def save_logits(role: Path, model: Any) -> None:
    """`expected/ROLE.logits.safetensors` by the very model that wrote the role, still sharded.

    Collective: every rank asks the same, and the layers gather their weights as they do in training.
    """
    ids = torch.arange(FIRST, FIRST + PROMPTS * LENGTH).view(PROMPTS, LENGTH)
    with torch.no_grad():
        logits = model.eval()(input_ids=ids, use_cache=False).logits
    save_tensors(role.with_name(f"{role.name}.logits"), {"input_ids": ids, "logits": logits})
