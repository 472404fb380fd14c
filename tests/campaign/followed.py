"""A damaged input as the step of a run, its producer's sign given: what `watch` may make of it.

A command that has ``{run}`` gets a run that is made of the input. Beside its step lies a sound one, which has to be
acted on whatever the other is like.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpttool.errors import CkpttoolError
from ckpttool.inspection import inspect
from ckpttool.inspection.kinds import is_checkpoint
from ckpttool.layout import TRACKER
from tests.campaign.damages import Damage

Command = tuple[str, ...]

STATE = ".ckpttool-watch.json"
KEPT = (STATE, f"{STATE}.lock")
"""What a watch leaves in a run."""

STATE_OF_TRAINER = "trainer_state.json"
SIGNS = (TRACKER, "ckpt_contents.json", "metadata.json", ".metadata", "data.pt", STATE_OF_TRAINER)

STEP, SOUND = 20, 30
FIRED = "fired"
WHOLE = ("complete", "not opened", "no weights")
"""States that a checkpoint may have that is acted on once its sign is given."""


@contextmanager
def as_run(room: Path, base: Path) -> Iterator[None]:
    """Have ``room/in`` as a step of ``room/run`` for a while; ``base`` is the same undamaged, for the step after it."""
    name, kind = base.name, base.name.partition(" ")[0]
    if name in ("run", "role v2"):
        with placed(room, "", base, ""):
            yield
    else:
        with placed(room, _step(kind, name, STEP), base, _step(kind, name, SOUND)):
            yield


@contextmanager
def placed(room: Path, place: str, base: Path, after: str) -> Iterator[None]:
    """Move ``room/in`` to a place in ``room/run`` for a while, and copy ``base`` to the place of a step ``after`` it.

    The signs are given for both.
    """
    run, step = room / "run", room / "run" / place
    (room / FIRED).mkdir()
    step.parent.mkdir(parents=True, exist_ok=True)
    (room / "in").rename(step)
    if place:
        shutil.copytree(base, run / after)
        _complete(run, (step, run / after))
    _give_again(run)
    try:
        yield
    finally:
        for state in () if place else KEPT:
            (run / state).unlink(missing_ok=True)
        step.rename(room / "in")
        shutil.rmtree(room / FIRED)
        shutil.rmtree(run, ignore_errors=True)


def _complete(run: Path, steps: Iterable[Path]) -> None:
    """Write the signs that are no part of a checkpoint."""
    for step in steps:
        if step.name.startswith("checkpoint-") and not os.path.lexists(step / STATE_OF_TRAINER):
            (step / STATE_OF_TRAINER).write_text(json.dumps({"global_step": STEP}))
    if not any(step.name.startswith(("checkpoint-", "step-")) for step in steps):
        (run / TRACKER).write_text(f"{SOUND}")


def _step(kind: str, name: str, number: int) -> str:
    if kind in ("fsdp", "lora") or name == "role v1":
        return f"global_step_{number}/actor"
    return {"megatron": f"iter_{number:07d}", "plain": f"step-{number}"}.get(kind, f"checkpoint-{number}")


def _give_again(run: Path) -> None:
    """Have the signs that are there younger than the data, of which some were damaged just now."""
    for here, _, files in os.walk(run):
        for path in (Path(here, name) for name in files if name in SIGNS):
            if path.is_file() and not path.is_symlink():
                os.utime(path)


def is_kept(name: str) -> bool:
    """Tell whether a file below the room is one that a watch, or its action, leaves there."""
    return Path(name).name in KEPT or Path(name).parts[0] == FIRED


def step_faults(room: Path, command: Command, damage: Damage, said: str) -> Iterator[str]:
    """Say where checkpoints were acted on that ``inspect`` does not call whole, or were not and are."""
    fired = {path.name for path in (room / FIRED).iterdir()}
    found = {f"{number}-{role}": path for number, role, path in _checkpoints(room / "run")}
    for name in fired - found.keys():
        yield f"acted on {name}, which is not there"
    for name, path in found.items():
        whole, state = _state(path)
        if name in fired and not whole:
            yield f"acted on {name}, which is {state}"
        if name in fired or (damage.closed and "--pin" in command):  # nobody may not link what is root's
            continue
        spared = not damage.closed and damage.way != "named" and not set(damage.files) & set(SIGNS)
        if f"{SOUND}-" in name or (whole and spared):  # a directory that is named like data waits for their sign
            yield f"{name} is {state}, and was not acted on"
        if "--json" in command and path.parts[len(room.parts) + 1] not in said and is_checkpoint(path):
            yield f"{name} was not acted on, without a word"


def _checkpoints(run: Path) -> Iterator[tuple[int, str, Path]]:
    for step in run.iterdir():
        found = re.fullmatch(r"(?:global_step_|iter_|checkpoint-|step-)(\d+)", step.name)
        if found is not None:
            roles = [step / role for role in ("actor", "critic") if (step / role).is_dir()]
            yield from ((int(found[1]), path.name if path != step else "", path) for path in roles or [step])


def _state(path: Path) -> tuple[bool, str]:
    try:
        found = inspect(path)
    except (CkpttoolError, OSError) as error:
        return False, type(error).__name__
    return found.state in WHOLE and not found.faults, found.state
