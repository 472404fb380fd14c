"""A reference model: the names, the form of the experts and the dtypes that an output is to have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint, Problem, Refused
from ckpttool.formats import hf
from ckpttool.formats.findings import counted
from ckpttool.formats.hf import CONFIG
from ckpttool.formats.jsonfile import INDEX_MOST, read_object
from ckpttool.tensors import CASTABLE, Index

_SCALES = re.compile(r"(?P<weight>.*?)_?(scale|scale_inv|scales|zero_point|qzeros|g_idx|input_scale|absmax|shape)")
"""Names of what quantised weights carry along, where there is such a weight: a model may have a scale of its own."""

_OF_CACHE = re.compile(r"(.*\.)?([kqv]|prob)_(scale|zero_point)")
"""Scales of the cache of keys and values."""

_QUANTISED = ("_blocks", "_packed")
"""What the names of weights end with that are quantised."""

_COMPUTED = re.compile(r".*rotary_emb\.inv_freq|.*\.(masked_bias|attn\.bias)")


@dataclass(frozen=True, slots=True)
class Reference:
    """Names with their dtype and shape, as far as headers say; ``None`` where only an index is there.

    ``renamed`` has what the reference itself calls those that go by another name here (see :func:`as_mapped`).
    """

    path: str
    tensors: Mapping[str, tuple[str, Index] | None]
    renamed: Mapping[str, str] = field(default_factory=dict)
    model_type: str | None = None

    def dtype(self, name: str) -> str | None:
        """Return the plain floating dtype that a tensor has there, if it has one."""
        known = self.tensors.get(name)
        return known[0] if known is not None and known[0] in CASTABLE else None

    def shape(self, name: str) -> Index | None:
        """Return the shape of a tensor that is a plain float there: quantised ones may be packed."""
        known = self.tensors.get(name)
        return known[1] if known is not None and known[0] in CASTABLE else None

    @property
    def wanted(self) -> frozenset[str]:
        """What an output has to hold: every name but scales of quantised weights and what is computed when loading.

        Weights that are quantised have to be there under their plain names.
        """
        names = (name for name in self.tensors if not self._is_scale(name) and not _COMPUTED.fullmatch(name))
        return frozenset(_plain(name) for name in names)

    def _is_scale(self, name: str) -> bool:
        match = _SCALES.fullmatch(name)
        weights = (f"{name.rpartition('.')[0]}.{weight}" for weight in ("weight", "qweight"))
        return match is not None and bool(
            self.has(match["weight"]) or any(map(self.has, weights)) or _OF_CACHE.fullmatch(name)
        )

    def has(self, name: str) -> bool:
        """Tell whether a tensor is there, be it quantised under other names."""
        return name in self.tensors or any(f"{name}{suffix}" in self.tensors for suffix in _QUANTISED)


def _plain(name: str) -> str:
    """Return the name of a weight that is quantised where it is not."""
    return next((name.removesuffix(suffix) for suffix in _QUANTISED if name.endswith(suffix)), name)


def read_reference(folder: Path, given: str) -> Reference:
    """Read the index and the headers of a model directory, ``given`` by the user as this; no weight is read.

    Raises :class:`NotACheckpoint` for a directory without either.
    """
    files = _files(folder)
    tensors: dict[str, tuple[str, Index] | None] = dict.fromkeys(name for names in files.values() for name in names)
    read, unread = 0, []
    for file in files:
        try:
            tensors |= {name: (t.dtype, t.shape) for name, t in hf.read_weights(folder / file).items()}
            read += 1
        except Refused:
            raise
        except CkpttoolError as error:
            unread.append(error)
    if unread and (read or not tensors):
        raise BrokenCheckpoint(
            f"--like {given}: of {counted(len(files), 'file')} of weights, {len(unread)} cannot be read",
            hint="Take the reference whole, or only its config and index: then every tensor keeps its own dtype.",
            code="reference-broken",
            problems=[Problem(code=error.code, message=error.message) for error in unread],
        )
    if not tensors:
        raise NotACheckpoint(
            f"--like {given}: neither an index nor weights in it",
            hint="Give the directory of a model as it is on the hub; its index and headers suffice.",
        )
    return Reference(str(folder), tensors, model_type=_model_type(folder))


def _model_type(folder: Path) -> str | None:
    try:
        said = read_object(folder / CONFIG).get("model_type") if (folder / CONFIG).is_file() else None
    except BrokenCheckpoint:
        return None
    return said if isinstance(said, str) else None


def as_mapped(reference: Reference) -> Reference:
    """Return a reference under the names of weight maps (``model.layers...``), whatever its own prefix is."""
    prefix = _prefix(reference.tensors)
    usual = {_usual(name, prefix): name for name in reference.tensors}
    renamed = {name: theirs for name, theirs in usual.items() if name != theirs}
    return Reference(reference.path, {name: reference.tensors[theirs] for name, theirs in usual.items()}, renamed)


def _files(folder: Path) -> dict[str, list[str]]:
    """Return the files of weights with the names that an index gives them; without one all that lie there."""
    for index in hf.INDEXES:
        if (folder / index).is_file():
            names = read_object(folder / index, INDEX_MOST).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise BrokenCheckpoint(f"--like {folder}: {index} has no weight_map", code="bad-json")
            files: dict[str, list[str]] = {}
            for name, file in names.items():
                if Path(file).name != file or "\0" in file:
                    raise BrokenCheckpoint(f"--like {folder}: {index} names a file {file!r}", code="bad-json")
                files.setdefault(file, []).append(name)
            return files
    return {file: [] for file in hf.weight_files(path.name for path in folder.iterdir())}


_EMBEDDINGS = "embed_tokens.weight"
_MODEL = "model."


def _prefix(names: Iterable[str]) -> str:
    """Return what stands before the names of the language model: ``model.``, nothing, ``language_model.model.``."""
    found = sorted((name for name in names if name.endswith(_EMBEDDINGS) and ".layers." not in name), key=len)
    return found[0].removesuffix(_EMBEDDINGS) if found else _MODEL


def _usual(name: str, prefix: str) -> str:
    """Return the name that a weight map has for a tensor of a reference."""
    if prefix == _MODEL:
        return name
    if prefix.endswith("." + _MODEL) and name.startswith(prefix.removesuffix(_MODEL)):
        return name.removeprefix(prefix.removesuffix(_MODEL))  # language_model.model., and its lm_head
    if name.startswith(("lm_head.", "score.")) or not name.startswith(prefix):
        return name
    return _MODEL + name.removeprefix(prefix)
