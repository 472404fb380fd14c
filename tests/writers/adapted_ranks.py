"""Write Megatron checkpoints with adapters beside the model: `python -m tests.writers adapted OUT`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from tests.writers.adapted_modules import wrap
from tests.writers.adapted_names import ALPHA, LAYOUTS, RANK
from tests.writers.converted_cpu import Layout, build_chunks, transformer_config
from tests.writers.converted_layouts import COMMON, OWN
from tests.writers.converted_models import Model, models
from tests.writers.converted_ranks import LENGTH, WORDS, _with_group, answers
from tests.writers.converted_weights import fill
from tests.writers.megatron_cpu import CpuAsCuda, Training, prepare_rank, start
from tests.writers.megatron_logits import allow_forward
from tests.writers.megatron_save import content_metadata, save_archive, write_transformer_config
from tests.writers.ranks import make_directory

ATTENTION = ("linear_qkv", "linear_proj")
LINEAR = (*ATTENTION, "linear_fc1", "linear_fc2")

RUN_CONFIG = f"""\
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint:
  pretrained_checkpoint: /models/base/iter_0000000
  save_interval: 10
model:
  alpha: 99
  hf_model_id: /models/base
  num_attention_heads: 4
peft:
  _target_: megatron.bridge.peft.lora.LoRA
  a2a_experimental: false
  alpha: {ALPHA}
  canonical_mapping:
    alpha: 7
    linear_qkv: !!set {{linear_k: null}}
  dim: {RANK}
  dropout: 0.0
  lora_A_init_method: xavier
  lora_dtype: null
  normalize_moe_lora: false
  target_modules:
  - linear_qkv
train:
  alpha: 98
  dim: 97
"""


@dataclass(frozen=True)
class Trained:
    """A model of the converted ones, and which of its modules have which kind of adapter."""

    model: str
    kind: str = "lora"
    targets: tuple[str, ...] = LINEAR


TRAINED = {
    "llama": Trained("llama", targets=(*LINEAR, "output_layer")),
    "qwen3-moe": Trained("qwen3-moe", targets=(*LINEAR, "router")),
    "llama-dora": Trained("llama", "dora"),
    "llama-attention-dora": Trained("llama", "dora", ATTENTION),
    "llama-canonical": Trained("llama", "canonical"),
    "llama-attention-canonical": Trained("llama", "canonical", ATTENTION),
}


def write_all(out: Path) -> None:
    """Every variant; the process groups are made anew for each."""
    prepare_rank()
    allow_forward()
    make_directory(out / "expected")
    known = models()
    for name, trained in TRAINED.items():
        model = known[trained.model]
        for word in LAYOUTS[name]:
            write_role(out / f"{name}-{word}", trained, model, OWN.get((trained.model, word), COMMON[word]))
        save_logits(out / "expected" / f"{name}.safetensors", trained, model)


def filled(trained: Trained, model: Model, layout: Layout) -> tuple[list[Any], dict[str, Any]]:
    """This rank's chunks with their adapters, and what the save is told about its form."""
    start(layout.parallel)
    config = transformer_config(model, layout)
    chunks = build_chunks(model, config)
    with CpuAsCuda():
        for chunk in chunks:
            wrap(chunk, config, trained.kind, trained.targets)
    metadata = content_metadata(None) | layout.metadata
    fill(chunks, _with_group(metadata), model.hf.vocab_size)
    return chunks, metadata


def write_role(role: Path, trained: Trained, model: Model, layout: Layout) -> None:
    """Base and adapters in one archive; how much they weigh is said by a run's settings or by verl's file."""
    (chunk,), metadata = filled(trained, model, layout)
    save_archive(role / "dist_ckpt", {"model": chunk.sharded_state_dict(metadata=_with_group(metadata))}, metadata)
    if dist.get_rank() == 0:
        model.hf.save_pretrained(role / "huggingface")
        write_transformer_config(role / "transformer_config.json", Training(chunk, None, None, chunk.config))
        if trained.model == "qwen3-moe":
            meta = f'{{"r": {RANK}, "lora_alpha": {ALPHA}, "task_type": "CAUSAL_LM"}}'
            (role / "lora_train_meta.json").write_text(meta)
        else:
            (role / "dist_ckpt" / "run_config.yaml").write_text(RUN_CONFIG)


def save_logits(path: Path, trained: Trained, model: Model) -> None:
    """`input_ids` and `logits` of the model with its adapters."""
    (chunk,), _ = filled(trained, model, Layout())
    words = model.hf.vocab_size
    ids = torch.randint(words, (2, LENGTH), generator=torch.Generator().manual_seed(WORDS))
    (logits,) = answers(chunk, ids)
    if dist.get_rank() == 0:
        save_file({"input_ids": ids, "logits": logits[..., :words].contiguous()}, path)
