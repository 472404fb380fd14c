"""verl's directories as data: runs, steps, role directories of Megatron in layouts v1 and v2, the manifest.

Layout v2 (August 2026)::

    model/huggingface/  model/dist_ckpt/  optimizer/dist_ckpt/  extra/dist_ckpt/
    transformer_config.json  ckpt_contents.json

Layout v1 keeps ``huggingface/`` and one mixed archive ``dist_ckpt/`` in the role directory itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

TRACKER = "latest_checkpointed_iteration.txt"
MANIFEST = "ckpt_contents.json"
SCHEMA_VERSION = 2
TRANSFORMER_CONFIG = "transformer_config.json"
LORA_META = "lora_train_meta.json"

MIGRATION_STAGING = ".ckpttool-migration"
"""Where a migration builds trees before it renames them in; a killed one leaves it behind."""

V1_ARCHIVE = "dist_ckpt"
V1_HUGGINGFACE = "huggingface"

MODEL = "model/dist_ckpt"
HUGGINGFACE = "model/huggingface"
OPTIMIZER = "optimizer/dist_ckpt"
EXTRA = "extra/dist_ckpt"
ARCHIVES = (MODEL, OPTIMIZER, EXTRA)
V2_PARENTS = ("model", "optimizer", "extra")
ROLES = ("actor", "critic", "policy", "ref", "reward")
"""Usual names of role directories; any other name will do as well."""

HUGGINGFACE_FORMAT = "huggingface"
ARCHIVE_FORMAT = "megatron_dist_checkpoint"
JSON_FORMAT = "json"

TRANSFER_QUEUE = "transfer_queue"
"""What verl's asynchronous trainer leaves in a step beside the roles."""

STEP = re.compile(r"(?:global_steps?_|step[_-]|checkpoint-|iter_)([0-9]+)")
"""Step directories: verl and SkyRL, NeMo-RL and torchtitan, transformers, Megatron-LM."""

_CONTENTS = ("model", "hf_model", "optimizer", "extra")


@dataclass(frozen=True, slots=True)
class Tree:
    """A directory or file that a save must leave: its path in the role directory, what it holds, how, and by what."""

    path: str
    holds: str
    format: str
    backend: str


@dataclass(frozen=True, slots=True)
class Illegal:
    """Why no save can have these contents."""

    reason: str


def expected_trees(
    save_contents: Collection[str],
    *,
    use_mbridge: bool | None = None,
    use_dist_checkpointing: bool | None = None,
    peft: bool = False,
    megatron_fsdp: bool = False,
) -> tuple[Tree, ...] | Illegal:
    """Return the trees that a save of these contents leaves in layout v2, or why the combination is illegal.

    ``save_contents`` are the words of verl's ``checkpoint.save_contents``. Given only one of the two flags, the other
    is its negation; given neither, verl's defaults hold (a bridge, no dist checkpointing). Adapters of ``peft`` lie in
    ``model/dist_ckpt`` even with a bridge; ``megatron_fsdp`` puts everything into one archive there.
    """
    bridge, dist = _flags(use_mbridge, use_dist_checkpointing)
    unknown = sorted(set(save_contents) - set(_CONTENTS))
    if unknown:
        return Illegal(f"save_contents has {', '.join(unknown)}; known are {', '.join(_CONTENTS)}")
    if megatron_fsdp:
        return (Tree(MODEL, "model, optimizer, extra", ARCHIVE_FORMAT, "megatron_fsdp"),) if save_contents else ()
    if "hf_model" in save_contents and not bridge:
        return Illegal("hf_model needs a bridge (use_mbridge): without one nothing can write Hugging Face weights")
    if "model" in save_contents and not bridge and not dist:
        return Illegal("model needs a bridge or use_dist_checkpointing: nothing could hold the weights")
    return (*_model_trees(save_contents, dist=dist, peft=peft), *_state_trees(save_contents))


def _flags(bridge: bool | None, dist: bool | None) -> tuple[bool, bool]:
    if bridge is None and dist is None:
        return True, False
    return (not dist if bridge is None else bridge), (not bridge if dist is None else dist)


def _model_trees(save_contents: Collection[str], *, dist: bool, peft: bool) -> tuple[Tree, ...]:
    trees = []
    if ("model" in save_contents and not dist) or "hf_model" in save_contents:
        trees.append(Tree(HUGGINGFACE, "model weights", HUGGINGFACE_FORMAT, "bridge"))
    if "model" in save_contents and dist:
        trees.append(Tree(MODEL, "model weights", ARCHIVE_FORMAT, "dist_checkpointing"))
    elif peft and {"model", "hf_model"} & set(save_contents):
        trees.append(Tree(MODEL, "adapters", ARCHIVE_FORMAT, "dist_checkpointing"))
    return tuple(trees)


def _state_trees(save_contents: Collection[str]) -> tuple[Tree, ...]:
    trees = []
    if "optimizer" in save_contents:
        trees.append(Tree(OPTIMIZER, "optimizer, lr_scheduler", ARCHIVE_FORMAT, "dist_checkpointing"))
    if "extra" in save_contents:
        trees.append(Tree(EXTRA, "rng_state", ARCHIVE_FORMAT, "dist_checkpointing"))
        trees.append(Tree(TRANSFORMER_CONFIG, "transformer_config", JSON_FORMAT, "verl"))
    return tuple(trees)


TREE_OF_PART: Mapping[str, str] = MappingProxyType(
    {"model": MODEL, "adapter": MODEL, "optimizer": OPTIMIZER, "scheduler": OPTIMIZER, "rng": EXTRA}
)
"""The tree in which a part of a mixed archive belongs (the words of :func:`ckpttool.formats.dcpkeys.part_of`)."""


def numbered(path: PurePath) -> int | None:
    """Return the step that a checkpoint is of, by its own name or that of a directory around it, or ``None``.

    NeMo-RL keeps every step in ``step_N/policy/weights/iter_0000000``, whose last name is of no step.
    """
    own = () if path.parent.name == "weights" else (path.name,)
    names = (*own, *(parent.name for parent in list(path.parents)[:3]))
    return next((step for step in map(step_of, names) if step is not None), None)


def step_of(name: str) -> int | None:
    """Return the step that a directory name carries, or ``None``."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else None
