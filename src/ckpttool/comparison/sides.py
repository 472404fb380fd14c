"""One side of a comparison: what is stored, by the names of its training; indexes are read, no values."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpttool.comparison.finding import Found
from ckpttool.comparison.result import Options, Side
from ckpttool.comparison.values import Stock
from ckpttool.converting.opening import sorted_out as without_loader
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint, Problem
from ckpttool.export.config import ModelConfig, read_side_config
from ckpttool.export.writing import Stamps, check_unchanged, stamps
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.formats.findings import counted, listing
from ckpttool.merging import opening as merging
from ckpttool.merging.adapting import adapt, is_adapted
from ckpttool.merging.choosing import find_side_folder
from ckpttool.merging.names import unwrap
from ckpttool.merging.planning import renamed
from ckpttool.merging.result import Options as MergeOptions
from ckpttool.source import Source
from ckpttool.tensors import TensorInfo

MODEL = ("model", "adapter")


@dataclass(frozen=True, slots=True)
class Opened:
    """A side with its indexes read. ``tensors`` are those to compare, ``stock`` where they come from.

    ``folder`` is where its configuration lies; ``before`` is what its files were like when they were opened;
    ``megatron`` is the archive, where it is one of Megatron.
    """

    found: Found
    side: Side
    tensors: Mapping[str, TensorInfo]
    stock: Stock
    before: Stamps
    folder: Path | None = None
    config: ModelConfig | None = None
    megatron: dcp.DcpSource | None = None
    notes: tuple[Problem, ...] = field(default_factory=tuple)

    def check(self) -> None:
        """Raise :class:`BrokenCheckpoint` where files have been written to since they were opened."""
        check_unchanged(self.stock.root, self.before)


def open_side(found: Found, given: str, options: Options) -> Opened:
    """Read the indexes of a side; raises :class:`BrokenCheckpoint` with all problems where it is not whole."""
    kinds: Mapping[str, Callable[[Found, str, Options], Opened]] = {
        "fsdp": _shards,
        "archive": _archive,
        "huggingface": _model,
        "file": _file,
    }
    early = _seen(found.path)
    opened = kinds[found.kind](found, given, options)
    return replace(opened, before={path: _earlier(found.path, path, early, now) for path, now in opened.before.items()})


_NOT_THERE = (-1, -1)


def _seen(path: Path) -> Stamps:
    """Return size and time of every file that lies in a directory, or of the one file."""
    with suppress(OSError):  # it is told of by whoever reads it
        return stamps([path] if path.is_file() else [path / name for name in os.listdir(path)])
    return {}


def _earlier(folder: Path, path: Path, early: Stamps, now: tuple[int, int]) -> tuple[int, int]:
    """Return what a file was like before the index was read; one that lies elsewhere was looked at after that."""
    return early.get(path, _NOT_THERE if path.parent == folder else now)


def _shards(found: Found, given: str, options: Options) -> Opened:
    source = fsdp.open_(found.path, kinds=("model",))
    names, _, collisions = unwrap(source.tensors)
    _refuse(found.path, [*merging.sorted_out(source), *collisions])
    chosen, left_out = _parts(source, options)
    tensors = renamed(chosen, {name: names[name] for name in chosen})
    settings = MergeOptions(
        hf_config=options.hf_config,
        lora="fuse" if options.lora == "fuse" else None,
        lora_alpha=options.lora_alpha,
    )
    folder = find_side_folder((found.path,), settings)
    config, _ = read_side_config(folder, given=options.hf_config is not None)
    stock = Stock(source.root, tensors)
    if settings.lora is not None and is_adapted(tensors, config):
        weights = adapt(source.root, (found.path,), tensors, None, config, settings)
        stock, tensors = Stock(source.root, weights.sources, weights.fusions), dict(weights.model)
    side = _side(found, given, "fsdp", f"FSDP shards of world size {source.world_size}", tensors, left_out)
    notes = (*found.notes, *([_OPTIMIZER] if options.everything else []))
    return Opened(found, side, tensors, stock, _stamps(stock), folder, config, notes=notes)


_OPTIMIZER = Problem(
    code="not-compared",
    severity="note",
    message="optim_*.pt: not compared; an optimizer numbers its parameters, in an order that only the model knows",
)


def _archive(found: Found, given: str, options: Options) -> Opened:
    source = dcp.open_(found.path)
    megatron = source.format == dcp.TORCH_DIST
    _refuse(found.path, map(without_loader, source.problems) if megatron else source.problems)
    tensors, left_out = _parts(source, options)
    title = f"{'Megatron' if megatron else 'torch DCP'} archive of {counted(source.ranks, 'rank')}"
    stock = Stock(source.root, tensors)
    side = _side(found, given, source.format, title, tensors, left_out)
    before = _stamps(stock, [dcp.METADATA_FILE])
    return Opened(found, side, tensors, stock, before, megatron=source if megatron else None, notes=found.notes)


def _model(found: Found, given: str, options: Options) -> Opened:
    source = hf.open_(found.path)
    _refuse(found.path, source.problems)
    config, _ = read_side_config(found.path, given=False)
    tensors, left_out = _parts(source, options)
    stock = Stock(source.root, tensors)
    title = f"Hugging Face {'adapter' if source.adapter else 'model'} in {counted(len(source.weights), 'file')}"
    side = _side(found, given, "huggingface", title, tensors, left_out)
    return Opened(found, side, tensors, stock, _stamps(stock), found.path, config, notes=found.notes)


def _file(found: Found, given: str, _options: Options) -> Opened:
    tensors = hf.read_weights(found.path)
    if not tensors:
        raise NotACheckpoint(f"{found.path}: no tensor in it", code="no-weights")
    short = [name for name, tensor in tensors.items() if sum(p.numel for p in tensor.pieces) != tensor.numel]
    if short:
        raise BrokenCheckpoint(
            f"{found.path}: a part of {counted(len(short), 'tensor')} only: it is one rank's file",
            hint=f"Give the directory of all of them: {found.path.parent}",
            code="rank-missing",
        )
    stock = Stock(found.path.parent, tensors)
    config, _ = read_side_config(found.path.parent, given=False)
    side = _side(found, given, "file", "a single file of tensors", tensors, {})
    return Opened(found, side, tensors, stock, _stamps(stock), found.path.parent, config)


def _side(
    found: Found, given: str, kind: str, title: str, tensors: Mapping[str, TensorInfo], left_out: Mapping[str, int]
) -> Side:
    return Side(path=given, root=str(found.path), kind=kind, title=title, tensors=len(tensors), left_out=left_out)


def _parts(source: Source, options: Options) -> tuple[dict[str, TensorInfo], Mapping[str, int]]:
    """Return the tensors that are compared, and how many of other parts are not; objects never are."""
    chosen, left_out = {}, Counter(map(source.part_of, source.objects))
    for name, tensor in source.tensors.items():
        part = source.part_of(name)
        if options.everything or part in MODEL:
            chosen[name] = tensor
        else:
            left_out[part] += 1
    if not chosen:
        raise NotACheckpoint(
            f"{source.root}: no weights of a model in it, but {listing(left_out) or 'nothing at all'}",
            hint="Other state is compared with --all." if left_out else "",
            code="no-weights",
        )
    return chosen, dict(left_out)


def _stamps(stock: Stock, others: Iterable[str] = ()) -> Stamps:
    files = {piece.place.file for tensor in stock.sources.values() for piece in tensor.pieces}
    return stamps(stock.root / name for name in sorted({*files, *others}))


def _refuse(path: Path, problems: Iterable[Problem]) -> None:
    """Raise the error that all faults together are."""
    faults = [problem for problem in problems if problem.severity == "error"]
    if faults:
        raise BrokenCheckpoint(
            f"{path}: is not whole, and cannot be compared",
            hint=f"More about it: ckpttool inspect {path}",
            code="broken-source",
            problems=faults,
        )
