"""What is to be done with each checkpoint, as data: the options of ``watch``, or a file that a trainer names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The actions on a checkpoint, in the order in which they are done, and how.

    ``verify`` checks it as ``ckpttool verify`` does; ``migrate`` gives a role of verl's Megatron layout v1 the trees of
    v2; ``to_hf`` is a template of an output directory (``models/{step}``), ``dtype``, ``lora`` and ``hf_config`` are
    the options of the converters for it; ``callbacks`` name classes, ``callback_config`` is what they are made with;
    ``exec`` are command lines, run by ``/bin/sh`` if ``shell`` is set. After them comes retention: ``keep_last`` steps
    and every ``keep_every``-th are kept; without ``yes`` it only says what it would delete. ``pin`` hard-links the
    checkpoint while actions run. ``retries`` are further attempts at an action that fails; ``keep_going`` goes on with
    the next checkpoint after that. ``roles`` limits everything to these roles; no role means all.

    ``state`` is the file that remembers what was done, where it is not the run's own, and ``interval`` the seconds
    between two looks. Two are for a callback in a trainer only: ``background`` lets training go on while actions run,
    ``patience`` is how many seconds it waits for a save that others finish; without one, as long as training lasts.
    """

    verify: bool = False
    migrate: bool = False
    to_hf: str | None = None
    dtype: str | None = None
    lora: str | None = None
    hf_config: str | None = None
    callbacks: tuple[str, ...] = ()
    callback_config: Mapping[str, Any] = field(default_factory=dict)
    exec: tuple[str, ...] = ()
    shell: bool = False
    keep_last: int | None = None
    keep_every: int | None = None
    yes: bool = False
    pin: bool = False
    retries: int = 0
    keep_going: bool = False
    roles: tuple[str, ...] = ()
    state: str | None = None
    interval: float = 30.0
    background: bool = False
    patience: float | None = None
