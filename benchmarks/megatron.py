"""Megatron ``torch_dist`` archives for the benchmarks: one that Megatron-Core saves, two with torch's own classes.

Each is a role of verl's layout v1: ``dist_ckpt/`` and ``huggingface/`` with the configuration.
"""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import windows

ITEM = 2
"""Bytes of a value: all tensors are bfloat16."""
OVERHEAD = 1600
"""What torch adds to the bytes of one tensor, about."""
FILES_PER_RANK = 2


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an archive: its leading axes have one record for each index, one axis is cut into equal pieces."""

    key: str
    shape: tuple[int, ...]
    stacked: int = 0
    axis: int = 0
    pieces: int = 1
    spread: bool = False
    """Whether each rank has some of the experts; otherwise each has some of the pieces, as many as the others."""


@dataclass(frozen=True, slots=True)
class Record:
    """One chunk of a tensor and the rank that saves it."""

    tensor: Tensor
    offset: tuple[int, ...]
    size: tuple[int, ...]
    rank: int

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.size) * ITEM


Write = Callable[[Any, Record], None]
"""Appends a record to an open file."""


def dense_role(role: Path, *, layers: int = 12) -> None:
    """Write a Qwen2 of 1.3 GB, saved by Megatron-Core on two tensor-parallel ranks; more layers are more of it."""
    from tests.writers.ranks import run_ranks

    run_ranks(partial(_save_dense, layers=layers), role, world=2)


def _save_dense(role: Path, *, layers: int) -> None:
    from dataclasses import replace

    import torch
    import torch.distributed as dist
    from transformers import Qwen2Config

    from tests.writers import megatron_save
    from tests.writers.megatron_cpu import Parallel, Training, build_model, prepare_rank, start, transformer_config
    from tests.writers.side_files import write_side_files

    prepare_rank()
    start(Parallel(tp=2))
    hf = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=2,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    config = replace(transformer_config(hf, Parallel(tp=2)), perform_initialization=False)
    model = build_model(hf, config, hf.vocab_size)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    training = Training(model, None, None, config)
    metadata = megatron_save.content_metadata(megatron_save.FULLY_RESHARDABLE)
    state = megatron_save.model_part(training, metadata) | megatron_save.extra_part()
    megatron_save.save_archive(role / "dist_ckpt", state, metadata)
    if dist.get_rank() == 0:
        write_side_files(role / "huggingface", hf)
        megatron_save.write_transformer_config(role / "transformer_config.json", training)


def moe_role(role: Path, *, layers: int = 26, experts: int = 128, width: int = 512, tp: int = 2) -> int:
    """Write a Qwen3-MoE of 2.7 GB in many small records, and return how many there are."""
    from transformers import Qwen3MoeConfig

    from tests.writers.side_files import write_side_files

    hf = Qwen3MoeConfig(
        architectures=["Qwen3MoeForCausalLM"],
        hidden_size=256,
        intermediate_size=768,
        moe_intermediate_size=width,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    layer = "decoder.layers"
    tensors = [
        *_outside(hf, hf.vocab_size, tp),
        *_attention(hf, tp),
        Tensor(f"{layer}.self_attention.q_layernorm.weight", (layers, 64), 1),
        Tensor(f"{layer}.self_attention.k_layernorm.weight", (layers, 64), 1),
        Tensor(f"{layer}.mlp.router.weight", (layers, experts, 256), 1),
        # Each rank saves its part of the gate and its part of the up projection as records of their own.
        Tensor(f"{layer}.mlp.experts.experts.linear_fc1.weight", (layers, experts, 2 * width, 256), 2, 2, 2 * tp),
        Tensor(f"{layer}.mlp.experts.experts.linear_fc2.weight", (layers, experts, 256, width), 2, 3, tp),
    ]
    window = windows("bfloat16")

    def write(file: Any, record: Record) -> None:
        import torch

        torch.save(window(*record.size), file)

    write_side_files(role / "huggingface", hf)
    return _write_archive(role / "dist_ckpt", tensors, tp, write)


def gpt_oss_role(role: Path, *, layers: int = 36, experts: int = 128, tp: int = 8, fc1_records: int = 2) -> int:
    """Write the shapes of gpt-oss-120b, its data files all holes, and return how many records there are."""
    from transformers import GptOssConfig

    from tests.writers.side_files import write_side_files

    hidden, heads, words = 2880, 64, 201088
    hf = GptOssConfig(
        architectures=["GptOssForCausalLM"],
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_local_experts=experts,
        num_experts_per_tok=4,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=words,
        attention_bias=True,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    layer, expert = "decoder.layers", "decoder.layers.mlp.experts.experts"
    tensors = [
        *_outside(hf, math.ceil(words / (128 * tp)) * 128 * tp, tp),
        *_attention(hf, tp),
        Tensor(f"{layer}.self_attention.linear_qkv.bias", (layers, (heads + 16) * 64), 1, 1, tp),
        Tensor(f"{layer}.self_attention.linear_proj.bias", (layers, hidden), 1),
        Tensor(f"{layer}.self_attention.core_attention.softmax_offset", (layers, heads), 1, 1, tp),
        Tensor(f"{layer}.mlp.router.weight", (layers, experts, hidden), 1),
        Tensor(f"{layer}.mlp.router.bias", (layers, experts), 1),
        Tensor(f"{expert}.linear_fc1.weight", (layers, experts, 2 * hidden, hidden), 2, 2, fc1_records, spread=True),
        Tensor(f"{expert}.linear_fc1.bias", (layers, experts, 2 * hidden), 2, 2, fc1_records, spread=True),
        Tensor(f"{expert}.linear_fc2.weight", (layers, experts, hidden, hidden), 2, spread=True),
        Tensor(f"{expert}.linear_fc2.bias", (layers, experts, hidden), 2, spread=True),
    ]

    def write(file: Any, record: Record) -> None:
        file.seek(record.nbytes + OVERHEAD, 1)

    write_side_files(role / "huggingface", hf)
    return _write_archive(role / "dist_ckpt", tensors, tp, write)


def _outside(hf: Any, words: int, tp: int) -> list[Tensor]:
    """What lies outside the layers."""
    return [
        Tensor("embedding.word_embeddings.weight", (words, hf.hidden_size), pieces=tp),
        Tensor("output_layer.weight", (words, hf.hidden_size), pieces=tp),
        Tensor("decoder.final_layernorm.weight", (hf.hidden_size,)),
    ]


def _attention(hf: Any, tp: int) -> list[Tensor]:
    """The attention of all layers and both norms, as Transformer Engine names them before experts."""
    layers, hidden, attention = hf.num_hidden_layers, hf.hidden_size, "decoder.layers.self_attention"
    queries, rows = hf.num_attention_heads, hf.num_attention_heads + 2 * hf.num_key_value_heads
    return [
        Tensor(f"{attention}.linear_qkv.layer_norm_weight", (layers, hidden), 1),
        Tensor(f"{attention}.linear_qkv.weight", (layers, rows * hf.head_dim, hidden), 1, 1, tp),
        Tensor(f"{attention}.linear_proj.weight", (layers, hidden, queries * hf.head_dim), 1, 2, tp),
        Tensor("decoder.layers.pre_mlp_layernorm.weight", (layers, hidden), 1),
    ]


def _records(tensor: Tensor, ranks: int) -> Iterator[Record]:
    size = [1] * tensor.stacked + list(tensor.shape[tensor.stacked :])
    size[tensor.axis] //= tensor.pieces
    for index in itertools.product(*map(range, tensor.shape[: tensor.stacked])):
        for piece in range(tensor.pieces):
            offset = [*index, *([0] * (len(size) - len(index)))]
            offset[tensor.axis] += piece * size[tensor.axis]
            rank = index[1] * ranks // tensor.shape[1] if tensor.spread else piece % ranks
            yield Record(tensor, tuple(offset), tuple(size), rank)


def _buckets(records: Sequence[Record]) -> list[list[Record]]:
    """The files of one rank: the largest record first, each into the file with the fewest bytes, as Megatron does."""
    buckets: list[list[Record]] = [[] for _ in range(FILES_PER_RANK)]
    heap = [(0, number) for number in range(FILES_PER_RANK)]
    for record in sorted(records, key=lambda r: -r.nbytes):
        total, number = heapq.heappop(heap)
        buckets[number].append(record)
        heapq.heappush(heap, (total + record.nbytes, number))
    return buckets


def _write_archive(archive: Path, tensors: Sequence[Tensor], ranks: int, write: Write) -> int:
    """Write the files of all ranks and the metadata with the plans of all of them; return how many records it has."""
    import torch
    from torch.distributed.checkpoint import metadata as dcp
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    archive.mkdir(parents=True)
    records = [record for tensor in tensors for record in _records(tensor, ranks)]
    properties = dcp.TensorProperties(dtype=torch.bfloat16)
    state = {t.key: dcp.TensorStorageMetadata(properties, torch.Size(t.shape), []) for t in tensors}
    storage, plans = {}, []
    for rank in range(ranks):
        own = [record for record in records if record.rank == rank]
        items = []
        for record in own:
            chunk = dcp.ChunkStorageMetadata(torch.Size(record.offset), torch.Size(record.size))
            state[record.tensor.key].chunks.append(chunk)
            data = TensorWriteData(chunk, dcp.TensorProperties(dtype=torch.bfloat16), torch.Size(record.tensor.shape))
            index = dcp.MetadataIndex(record.tensor.key, chunk.offsets)
            items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        plans.append(SavePlan(items=items))
        for number, bucket in enumerate(_buckets(own)):
            name = f"__{rank}_{number}.distcp"
            with (archive / name).open("wb") as file:
                for record in bucket:
                    start = file.tell()
                    write(file, record)
                    index = dcp.MetadataIndex(record.tensor.key, torch.Size(record.offset))
                    storage[index] = _StorageInfo(name, start, file.tell() - start)
                file.truncate()  # where holes were written: up to here
    whole = dcp.Metadata(state, None, storage, dcp.StorageMeta())
    whole.all_local_plans = plans
    (archive / ".metadata").write_bytes(pickle.dumps(whole))
    torch.save({"content_metadata": {"singleton_local_shards": False}}, archive / "common.pt")
    (archive / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1, '
        '"common_backend": "torch", "common_backend_version": 1}'
    )
    return len(records)


KINDS: Mapping[str, Callable[[Path], object]] = {
    "real": dense_role,
    "larger": partial(dense_role, layers=48),
    "moe": moe_role,
    "gptoss120b": gpt_oss_role,
}


def write(kind: str, role: Path) -> None:
    """Write one of ``KINDS`` in a process of its own: Megatron's helpers import its main module, this one, anew."""
    subprocess.run([sys.executable, "-W", "ignore", "-m", "benchmarks.megatron", kind, str(role)], check=True)


if __name__ == "__main__":
    KINDS[sys.argv[1]](Path(sys.argv[2]))
