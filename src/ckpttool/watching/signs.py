"""Signs: what each producer writes last, so that a checkpoint is known to be finished.

===============================  ===========================================================================
verl's Megatron layout v2        ``ckpt_contents.json`` of the role, by renaming
verl and SkyRL, other roles      the tracker of the run says this step; or a later one, and ``data.pt`` is there
Megatron-LM, slime, NeMo         ``metadata.json`` of the archive; the tracker for formats without it
Megatron-Bridge                  ``run_config.yaml`` of the step, from the second step on
torch DCP (torchtitan)           ``.metadata``, by renaming
Hugging Face Trainer             ``trainer_state.json`` of the step
NeMo-RL                          the name of the step: it is ``tmp_step_N`` while it is written
===============================  ===========================================================================

A sign may be left from an earlier save of the same step: it counts where it is not older than the data.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, NotACheckpoint
from ckpttool.formats import dcp
from ckpttool.formats.jsonfile import read_object
from ckpttool.formats.torchzip import read_range
from ckpttool.inspection import runs

TRAINER_STATE = "trainer_state.json"
TRAINING_INFO = "training_info.json"
"""What NeMo-RL writes first into ``tmp_step_N``."""

BRIDGES, RUN_CONFIG = "latest_train_state.pt", "run_config.yaml"
"""What Megatron-Bridge leaves in a run, and what it writes into a step after the archive and ``train_state.pt``."""

SLACK = 1.0
"""Seconds by which the clocks of machines that write into one file system differ, at most."""

SETTLED = 600.0
"""Seconds without a change after which nothing is written any more, for a save whose sign cannot be told."""

_SHORT = 1 << 16
"""Bytes of JSON up to which it is read; the state of a trainer has the whole history of its losses, indented."""

LOADER = "data.pt"
"""Where verl and SkyRL keep the state of the data loader; verl's supervised trainer has one file a rank."""

_LOADER = re.compile(r"data(_\d+)?\.pt")
_OF_A_TRAINER = ("training_args.bin", "optimizer.pt", "optimizer.bin", "scheduler.pt", "rng_state.pth")
_TREES = (*layout.ARCHIVES, layout.HUGGINGFACE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A producer's signal: ``what`` it is, whether it is ``given``, and when (seconds since 1970, where that is known).

    ``absent`` tells that not even an old one is there: this run may be of a trainer that gives none.
    """

    what: str
    given: bool
    at: float | None = None
    absent: bool = False
    said: str = ""
    """What it says instead, in words: ``says 15``, ``is not there``."""

    ended: float | None = None
    """When its producer ended an archive for which the sign did not wait; it tells nothing of which save that was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracker:
    """A run's tracker: its name, the step that it says (``None``: that cannot be told), and when it was written."""

    name: str
    step: int | None
    at: float
    said: str | None = None
    """What it holds, where that can be read."""


def read_tracker(run: Path) -> Tracker | None:
    """Return the tracker of a run, or ``None`` where there is none. Trainers write it in place: it may be empty.

    What lies in its place and cannot be read is one that does not tell its step, not one that is absent.
    """
    path = runs.tracker(run) or next((run / name for name in runs.TRACKERS if os.path.lexists(run / name)), None)
    if path is None:
        return None
    try:
        at = path.stat().st_mtime
        said = read_range(path, 0, 64).decode(errors="replace").strip()
    except (OSError, NotACheckpoint):
        return Tracker(name=path.name, step=None, at=0.0)
    step = int(said) if said.isascii() and said.isdigit() else None
    return Tracker(name=path.name, step=step, at=at, said=said)


def sign_of(checkpoint: Path, step: Path, number: int, tracker: Tracker | None, *, by_trainer: bool) -> Sign | None:
    """Return the sign of a checkpoint in a step directory, or ``None`` where none is known.

    ``by_trainer`` tells that other steps of the run are from Hugging Face's Trainer.
    """
    names = set(os.listdir(checkpoint))
    beside = names if checkpoint == step else set(os.listdir(step))
    if step.name.startswith("step_") and TRAINING_INFO in beside:
        return Sign(what=f"the name {step.name}", given=True)
    if layout.MANIFEST in names or (step.name.startswith("global_step") and _has(checkpoint, _TREES)):
        return _file(checkpoint, layout.MANIFEST)
    if step.name.startswith("global_step"):
        past = _gone_past(step, beside, number, tracker)
        return _with_archive(past, checkpoint) if past else _said(tracker, number, layout.TRACKER)
    is_megatrons = dcp.BACKEND_FILE in names or checkpoint.name.startswith("iter_")
    if TRAINER_STATE in beside or (step.name.startswith("checkpoint-") and not is_megatrons):
        known = TRAINER_STATE in beside or by_trainer or _is_trainers(beside)
        return replace(_file(step, TRAINER_STATE), absent=not known)
    if checkpoint == step and step.name.startswith("iter_") and (step.parent / BRIDGES).is_file():
        return _bridges(step)
    if dcp.BACKEND_FILE in names or dcp.METADATA_FILE in names or any(name.endswith(".distcp") for name in names):
        return _file(checkpoint, dcp.BACKEND_FILE if is_megatrons else dcp.METADATA_FILE)
    return _said(tracker, number, layout.TRACKER) if step.name.startswith("iter_") else None


def _bridges(step: Path) -> Sign:
    """Return the sign of a step in a run of Megatron-Bridge; others may have written steps there before."""
    try:
        status = (step / RUN_CONFIG).stat()
    except OSError:
        return Sign(what=RUN_CONFIG, given=False, absent=True)
    return Sign(what=RUN_CONFIG, given=status.st_size > 0, at=status.st_mtime)


def _has(path: Path, trees: Collection[str]) -> bool:
    return any((path / tree).is_dir() for tree in trees)


def _is_trainers(names: Collection[str]) -> bool:
    return any(name in names for name in _OF_A_TRAINER) or any(name.startswith("rng_state_") for name in names)


def _file(folder: Path, name: str) -> Sign:
    try:
        path = folder / name
        return Sign(what=name, given=name == dcp.METADATA_FILE or _is_whole(path), at=path.stat().st_mtime)
    except OSError:  # it is not there, or a link leads nowhere, in a circle or where one may not look
        return Sign(what=name, given=False)


def unreadable(error: OSError) -> Sign:
    """Return what stands for the sign of a checkpoint that cannot be looked at; no quiet replaces it."""
    return Sign(what=f"being readable ({error.strerror})", given=False)


def _is_whole(path: Path) -> bool:
    """Tell whether a JSON file was written to its end: not all programs rename it in, and a long one takes a while."""
    size = path.stat().st_size
    try:
        if size <= _SHORT:
            return bool(read_object(path))
        return read_range(path, size - 64, 64).rstrip().endswith(b"\n}")
    except (BrokenCheckpoint, NotACheckpoint):
        return False


def _said(tracker: Tracker | None, number: int, usual: str) -> Sign:
    if tracker is None:
        return Sign(what=usual, given=False, absent=True, said="is not there")
    given = tracker.step is not None and tracker.step >= number
    return Sign(what=tracker.name, given=given, at=tracker.at, said="" if given else _in_words(tracker))


def _in_words(tracker: Tracker) -> str:
    if tracker.said is None:
        return "cannot be read"
    return f"says {tracker.said}" if tracker.step is not None else f"holds {tracker.said!r}, not a step"


def _gone_past(step: Path, names: Collection[str], number: int, tracker: Tracker | None) -> Sign | None:
    """Return the sign of a step when the tracker says a later one, or ``None`` where the tracker has to do.

    The tracker says nothing of a step that a trainer died over, and that it did not come to again. The state of the
    data loader does: it is written after all roles. A run whose latest step has none has it nowhere.
    """
    if tracker is None or tracker.step is None or tracker.step <= number:
        return None
    written = [(step / name).stat() for name in names if _LOADER.fullmatch(name)]
    if written:
        at = min(tracker.at, max(status.st_mtime for status in written))
        return Sign(what=f"{tracker.name} and {LOADER}", given=all(status.st_size for status in written), at=at)
    latest = step.with_name(f"global_step_{tracker.step}")
    usual = latest.is_dir() and any(_LOADER.fullmatch(name) for name in os.listdir(latest))
    return Sign(what=LOADER, given=False) if usual else None


def _with_archive(sign: Sign, checkpoint: Path) -> Sign:
    """Return a sign with what verl's Megatron layout v1 adds to it: an asynchronous save ends after ``data.pt``."""
    archive = checkpoint / layout.V1_ARCHIVE
    if not sign.given or not archive.is_dir() or not any(name.endswith(".distcp") for name in os.listdir(archive)):
        return sign
    own = _file(archive, dcp.BACKEND_FILE)
    return replace(sign, ended=own.at) if own.given else own


def awaited(sign: Sign | None, *, newest: float, unchanged: bool, now: float, anew: float | None = None) -> str:
    """Return what a checkpoint has to wait for before it is finished; nothing where that has come.

    ``newest`` is when its data were written last (0: there are none), ``unchanged`` whether nothing in it has changed
    since the last look. Where an earlier save of it was finished, ``anew`` is when this one wrote a file that each save
    writes: a sign has to be newer, for what a trainer leaves that dies half way may be whole by its structure, and half
    of each save. It need not be newer than all data: other ranks may write a little after the one that gives it, but
    when it is looked at again that has to be over.
    """
    if sign is None:
        return "" if unchanged else "a second look: its trainer gives no sign that is known"
    settled = unchanged and 0 < newest < now - SETTLED
    if not sign.given:
        return "" if sign.absent and settled else f"{sign.what}, which {sign.said}" if sign.said else sign.what
    if sign.at is None or (settled and anew is None):
        return ""
    if max(sign.at, sign.ended or 0) >= newest - (SLACK if unchanged else 0) and sign.at >= (anew or 0):
        return ""
    return f"{sign.what}, which is older than its data, or {SETTLED / 60:.0f} minutes without a change"
