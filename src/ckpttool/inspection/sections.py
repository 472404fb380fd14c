"""The opened archives of a directory, and what each part of them adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckpttool.formats.findings import counted
from ckpttool.inspection.result import Content, TensorRow
from ckpttool.source import Source
from ckpttool.tensors import TensorInfo

_TITLES = {
    "model": "model weights",
    "adapter": "adapters",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "rng": "rng",
    "dataloader": "dataloader state",
    "trainer": "trainer state",
    "extra_state": "extra state",
    "common": "common state",
}


@dataclass(frozen=True, slots=True)
class Section:
    """An opened archive at ``where``, relative to the inspected directory ("" for the directory itself)."""

    where: str
    source: Source

    def tensors(self, *parts: str) -> list[TensorInfo]:
        """Return the tensors of these parts."""
        return [info for name, info in self.source.tensors.items() if self.source.part_of(name) in parts]


def contents(section: Section) -> Iterator[Content]:
    """Yield one line for every part that an archive holds."""
    source = section.source
    names = {source.part_of(name) for name in (*source.tensors, *source.objects)}
    for part in sorted(names, key=list(_TITLES).index):
        tensors = section.tensors(part)
        places = [place for key, place in source.objects.items() if source.part_of(key) == part]
        yield Content(
            _TITLES[part],
            section.where,
            len(tensors),
            sum(t.numel for t in tensors),
            sum(t.nbytes for t in tensors) + sum(place.length for place in places),
            _detail(source, len(tensors), len(places)),
        )
    yield from _common_parts(section)


_FORMATS = {"fsdp": "FSDP shards", "torch_dist": "torch_dist", "dcp": "DCP"}


def _detail(source: Source, tensors: int, objects: int) -> str:
    words = [_FORMATS.get(source.format, "safetensors")]
    if any(piece.place.file.endswith(".bin") for tensor in source.tensors.values() for piece in tensor.pieces[:1]):
        words = ["pytorch_model.bin"]
    if objects:
        words.append(counted(objects, "object" if tensors else "pickled object"))
    return ", ".join(words)


def _common_parts(section: Section) -> Iterator[Content]:
    """Yield the scheduler where it lies in the unsharded state of Megatron."""
    for key in ("lr_scheduler", "opt_param_scheduler"):
        if key in (section.source.unsharded or {}):
            yield Content("scheduler", section.where, detail=f"{key}, in the common state")


def rows(sections: Iterable[Section], pattern: str) -> Iterator[TensorRow]:
    """Yield the tensors whose name matches a glob, in the order of the archives."""
    for section in sections:
        for name, info in section.source.tensors.items():
            if fnmatchcase(name, pattern):
                yield TensorRow(
                    name,
                    info.dtype,
                    info.shape,
                    info.placement,
                    info.nbytes,
                    section.source.part_of(name),
                    section.where,
                )
