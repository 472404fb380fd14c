"""Write Megatron checkpoints of each family in each layout: `python -m tests.writers converted OUT`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import save_file

from tests.writers.converted_cpu import Layout, allow_latent_attention, build_chunks, transformer_config
from tests.writers.converted_layouts import layouts
from tests.writers.converted_models import Model, models
from tests.writers.converted_weights import fill
from tests.writers.megatron_cpu import Training, prepare_rank, start
from tests.writers.megatron_logits import allow_forward
from tests.writers.megatron_save import content_metadata, extra_part, save_archive, write_transformer_config
from tests.writers.ranks import make_directory

LENGTH = 9
# With these words every router asks each of its experts.
WORDS = 55


def write_all(out: Path) -> None:
    """Every variant; the process groups are made anew for each."""
    prepare_rank()
    allow_forward()
    allow_latent_attention()
    make_directory(out / "expected")
    for name, model in models().items():
        for word, layout in layouts(name).items():
            write_role(out / f"{name}-{word}", model, layout)
        save_logits(out / "expected" / f"{name}.safetensors", model)


def filled(model: Model, layout: Layout) -> tuple[list[Any], dict[str, Any]]:
    """This rank's chunks of the model, and what the save is told about its form."""
    start(layout.parallel)
    chunks = build_chunks(model, transformer_config(model, layout), te=layout.te)
    metadata = content_metadata(None) | layout.metadata
    fill(chunks, _with_group(metadata), model.hf.vocab_size)
    return chunks, metadata


def write_role(role: Path, model: Model, layout: Layout) -> None:
    """As verl's first layout; a virtual pipeline has a part `model0`, `model1`, ... for each chunk."""
    chunks, metadata = filled(model, layout)
    parts = [chunk.sharded_state_dict(metadata=_with_group(metadata)) for chunk in chunks]
    names = ["model"] if len(parts) == 1 else [f"model{at}" for at in range(len(parts))]
    save_archive(role / "dist_ckpt", dict(zip(names, parts, strict=True)) | extra_part(), metadata)
    if dist.get_rank() == 0:
        model.hf.save_pretrained(role / "huggingface")
        write_transformer_config(role / "transformer_config.json", Training(chunks[0], None, None, chunks[0].config))


def _with_group(metadata: dict[str, Any]) -> dict[str, Any]:
    return {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def save_logits(path: Path, model: Model) -> None:
    """`input_ids`, `logits` and, of a block that guesses the token after the next, `mtp_logits`."""
    (chunk,), _ = filled(model, Layout())
    words = model.hf.vocab_size
    ids = torch.randint(words, (2, LENGTH), generator=torch.Generator().manual_seed(WORDS))
    *guesses, logits = answers(chunk, ids)
    stored = {"input_ids": ids, "logits": logits[..., :words]}
    for guess in guesses:
        # The last position has no next token: Megatron takes the first word of the vocabulary there.
        stored["mtp_logits"] = guess[:, :-1, :words]
    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path)


def answers(chunk: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Everything the output layer says in one pass, the model itself last.

    Megatron guesses further tokens only on the way to a loss, which then overwrites what was said.
    """
    told: list[torch.Tensor] = []
    chunk.output_layer.register_forward_hook(
        lambda _module, _inputs, output: told.append(output[0].transpose(0, 1).clone())
    )
    places = torch.arange(LENGTH).expand(2, -1)
    future = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with torch.no_grad():
        chunk(ids, places, future, labels=ids if chunk.mtp_process else None)
    return told
