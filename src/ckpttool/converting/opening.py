"""Open the archive that is meant and what lies beside it, and refuse, with all reasons, what is no whole checkpoint."""

from __future__ import annotations

import os
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from ckpttool import layout
from ckpttool.architectures.slots import take_apart
from ckpttool.converting.adapters import check_choice
from ckpttool.converting.choosing import find_side_folder, has_weights
from ckpttool.converting.result import Options, Skipped
from ckpttool.converting.settings import started_from
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint, Problem, Unmapped, UsageError
from ckpttool.export.config import ModelConfig, read_side_config
from ckpttool.export.side_files import SideFiles, find_side_files, side_paths
from ckpttool.export.writing import Stamps, give_back, stamps
from ckpttool.formats import dcp
from ckpttool.formats.dcpkeys import COMMON_FILE
from ckpttool.formats.findings import Findings, counted, listing
from ckpttool.formats.folding import numbered
from ckpttool.tensors import TensorInfo

_REASONS = {
    "optimizer": "the state of the optimizer",
    "rng": "states of random generators",
    "extra_state": "Transformer Engine's own state",
    "scheduler": "the state of the scheduler",
    "dataloader": "the state of the data loader",
    "trainer": "the state of the trainer",
    "common": "settings of the run",
    "model": "pickled objects, no tensors",
}
_NOT_IN_THE_WAY = ("common-missing", "not-finalised")
"""What Megatron's own loader refuses: the index is complete without it, and every tensor is checked against that."""


_SAYING = (dcp.METADATA_FILE, dcp.BACKEND_FILE, COMMON_FILE)

EVERY = 1 << 30
"""Names of damaged parts that are told: all of them."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The archive and what lies beside it: the tensors of the model by their keys, and those of its adapters."""

    source: dcp.DcpSource
    tensors: Mapping[str, TensorInfo]
    skipped: Mapping[str, Skipped]
    config: ModelConfig
    side_folder: Path
    side: SideFiles
    notes: tuple[Problem, ...]
    stamps: Stamps
    adapters: Mapping[str, TensorInfo] = field(default_factory=dict)

    @property
    def sources(self) -> dict[str, TensorInfo]:
        """Everything that the output is made of."""
        return {**self.tensors, **self.adapters}


def open_archive(
    archive: Path, notes: tuple[Problem, ...], options: Options, source: dcp.DcpSource | None = None
) -> Opened:
    """Read all indexes and refuse, with everything that is wrong, what is no whole Megatron model.

    The archive itself is not read again where its ``source`` is given.
    """
    side_folder = find_side_folder(archive, options)
    before = {**stamps_of(archive), **stamps(side_paths(side_folder, crowded=side_folder == archive))}
    source = dcp.open_(archive, named=EVERY) if source is None else source
    tensors = {name: t for name, t in source.tensors.items() if source.part_of(name) == "model"}
    adapters = {name: t for name, t in source.tensors.items() if source.part_of(name) == "adapter"}
    used = (*tensors.values(), *adapters.values())
    problems = [*map(sorted_out, source.problems), *_overlaps(used)]
    _refuse(source, problems)
    check_choice(source.root, adapters, tensors, options)
    if not tensors:
        raise _no_weights(source)
    config, faults = read_side_config(side_folder, given=options.hf_config is not None)
    if faults and side_folder is not None:
        hint = faults[0].hint or "Mend it, or give the one of the model that was trained: --hf-config DIR."
        raise BrokenCheckpoint(f"{side_folder}/{faults[0].message}", hint=hint, code=faults[0].code)
    if config is None or side_folder is None:
        raise _no_config(source)
    give_back()
    return Opened(
        source=source,
        tensors=tensors,
        skipped=_skipped(source),
        config=config,
        side_folder=side_folder,
        side=find_side_files(side_folder, config, crowded=side_folder == archive),
        notes=(*notes, *(p for p in problems if p.severity == "note" and p.code != "unknown-file")),
        stamps=before,
        adapters=adapters,
    )


def stamps_of(root: Path) -> Stamps:
    """Return size and time of the index, of what is said beside it, and of every data file."""
    return stamps(root / name for name in os.listdir(root) if name in _SAYING or name.endswith(".distcp"))


def _overlaps(tensors: Iterable[TensorInfo]) -> Iterator[Problem]:
    """Yield the tensors whose records lie over one another: the bytes of one of them are nowhere."""
    records = sorted((p.place.file, p.place.offset, p.place.length, t.name) for t in tensors for p in t.pieces)
    found = Findings(most=EVERY)
    for (file, offset, length, name), (other, following, _, another) in pairwise(records):
        if file == other and following < offset + length:
            found.group("records-overlap", f"records lie over one another in {file}", f"{name} and {another}")
    yield from found.all()


def sorted_out(problem: Problem) -> Problem:
    """Make a note of what only stands in the way of Megatron's own loader."""
    if problem.code not in _NOT_IN_THE_WAY:
        return problem
    hint = "Every file that the index names is there, and the chunks cover every tensor: it is converted all the same."
    return replace(problem, severity="note", hint=hint)


def _refuse(source: dcp.DcpSource, problems: list[Problem]) -> None:
    faults = [problem for problem in problems if problem.severity == "error"]
    if faults:
        raise BrokenCheckpoint(
            f"{source.root}: cannot be converted; nothing was written",
            hint="Mend or complete what is listed, then run again.",
            code="broken-source",
            problems=faults,
        )
    backend = (source.backend or {}).get("sharded_backend", dcp.TORCH_DIST)
    if backend != dcp.TORCH_DIST:
        raise Unmapped(
            f"{source.root}: saved with the back end {backend!r}; only {dcp.TORCH_DIST} is read",
            hint="Save it with --ckpt-format torch_dist, by the Megatron that wrote it.",
            code="other-backend",
        )
    if source.format != dcp.TORCH_DIST:
        raise NotACheckpoint(
            f"{source.root}: a plain distributed checkpoint of torch, not one of Megatron",
            hint=f"More about it: ckpttool inspect {shlex.quote(str(source.root))}",
        )


def _no_weights(source: dcp.DcpSource) -> NotACheckpoint:
    parts = sorted({source.part_of(name) for name in (*source.tensors, *source.objects)})
    message = f"{source.root}: no weights of a model in it, but {listing(parts)}"
    return NotACheckpoint(message, hint=_beside(source.root), code="no-weights")


def _beside(archive: Path) -> str:
    """Say where the weights of a role are, one of whose archives has none."""
    role = archive.parent.parent
    model = role / layout.MODEL
    if model != archive and model.is_dir() and dcp.detect(model) is not None:
        return f"The model is beside it: ckpttool to-hf {shlex.quote(str(role))} -o OUTPUT"
    for folder in (archive.parent / layout.V1_HUGGINGFACE, role / layout.HUGGINGFACE):
        if has_weights(folder):
            return f"They are in Hugging Face form already: {folder}. Nothing needs converting."
    return f"More about it: ckpttool inspect {shlex.quote(str(archive))}"


def _no_config(source: dcp.DcpSource) -> UsageError:
    trained = started_from(source)
    was = f" it was started from {trained}." if trained else ""
    command = f"ckpttool to-hf {shlex.quote(str(source.root))} -o OUTPUT --hf-config MODEL"
    return UsageError(
        f"{source.root}: no config.json in or beside it, which says what model this is{_shown(source)}",
        hint=f"Give the directory of the model that was trained:{was}\n  {command}",
    )


def _shown(source: dcp.DcpSource) -> str:
    """Say what the shapes show of a model: enough to tell a 4B from a 7B."""
    embedding = next(
        (t for name, t in source.tensors.items() if name.endswith("embedding.word_embeddings.weight")), None
    )
    if embedding is None or len(embedding.shape) != 2:
        return ""
    slots, _ = take_apart({name: t for name, t in source.tensors.items() if source.part_of(name) == "model"})
    layers = len(numbered(slots, r"decoder\.layers\."))
    words, hidden = embedding.shape
    return f" (it has {counted(layers, 'layer')}, hidden size {hidden}, a vocabulary of {words})"


def _skipped(source: dcp.DcpSource) -> dict[str, Skipped]:
    tensors = Counter(map(source.part_of, source.tensors))
    objects = Counter(map(source.part_of, source.objects))
    for part in ("model", "adapter"):
        tensors.pop(part, None)
    return {
        part: Skipped(tensors=tensors[part], objects=objects[part], reason=_REASONS.get(part, part))
        for part in sorted({*tensors, *objects})
    }
