"""The opened archives of a directory, and what each part of them adds up to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ckpttool.formats import dcp
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

    def part_of(self, name: str) -> str:
        """Say what a tensor or object of this archive belongs to."""
        if isinstance(self.source, dcp.DcpSource):
            return dcp.part_of(name)
        return "adapter" if "lora_" in name or ".adapter_" in name else "model"

    def tensors(self, *parts: str) -> list[TensorInfo]:
        """Return the tensors of these parts."""
        return [info for name, info in self.source.tensors.items() if self.part_of(name) in parts]


def contents(section: Section) -> Iterator[Content]:
    """Yield one line for every part that an archive holds."""
    source = section.source
    objects = source.objects if isinstance(source, dcp.DcpSource) else {}
    names = {section.part_of(name) for name in (*source.tensors, *objects)}
    for part in sorted(names, key=list(_TITLES).index):
        tensors = section.tensors(part)
        places = [place for key, place in objects.items() if section.part_of(key) == part]
        yield Content(
            _TITLES[part],
            section.where,
            len(tensors),
            sum(t.numel for t in tensors),
            sum(t.nbytes for t in tensors) + sum(place.length for place in places),
            _detail(source, len(tensors), len(places)),
        )
    yield from _common_parts(section)


def _detail(source: Source, tensors: int, objects: int) -> str:
    words = [{"fsdp": "FSDP shards", "torch_dist": "torch_dist", "dcp": "DCP"}.get(source.format, "safetensors")]
    if objects:
        words.append(f"{objects:,} objects" if tensors else f"{objects:,} pickled objects")
    return ", ".join(words)


def _common_parts(section: Section) -> Iterator[Content]:
    """Yield what lies in the unsharded state of Megatron: the scheduler above all."""
    common = section.source.common if isinstance(section.source, dcp.DcpSource) else None
    kind = section.source.common_kind if isinstance(section.source, dcp.DcpSource) else ""
    for key in ("lr_scheduler", "opt_param_scheduler"):
        if common and key in common:
            yield Content("scheduler", section.where, detail=f"{key} in {kind}")
    if common and kind == dcp.COMMON_FILE:
        path = section.source.root / kind
        yield Content("common state", section.where, bytes=path.stat().st_size, detail=f"{kind}: {', '.join(common)}")


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
                    section.part_of(name),
                    section.where,
                )
