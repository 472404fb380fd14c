"""A trainer that keeps to the contract of verl's checkpoint callback, without verl: ``python -m tests.verl_stub JSON``.

What it saves was written by the real libraries (``tests/data``). As verl does, it builds the callback first of all,
saves every role, then the state of the dataloader, then writes the tracker, and calls ``on_save`` with keywords only;
an asynchronous save is called for at once and finished by the training loop: archives, manifest, tracker.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from ckpttool.callbacks import CheckpointCallback, CheckpointEvent

DATA = Path(__file__).parent / "data"
OURS = "ckpttool.integrations.verl.CkpttoolCallback"
TRACKER = "latest_checkpointed_iteration.txt"
CONTENTS = {"model": {"path": "model/dist_ckpt", "format": "megatron_dist_checkpoint", "backend": "dist_checkpointing"}}
ROLES = {"actor": "fsdp", "critic": "fsdp"}
LAST_IN_ARCHIVE = (".metadata", "metadata.json")


class SaveFailed(Exception):
    """A worker could not save."""


class Actions(CheckpointCallback):
    """A callback that notes what it is told, from threads of a pool as uploads do, once ``hold`` is gone."""

    def on_save(self, event: CheckpointEvent, **_more: Any) -> None:
        Path(self.config["begun"]).touch()
        while Path(self.config["hold"]).exists():
            threading.Event().wait(0.02)
        with ThreadPoolExecutor(2) as pool:
            pool.submit(note, Path(self.config["log"]), f"{event.name} {os.getpid()}").result()


def note(log: Path, line: str) -> None:
    with log.open("a") as file:
        file.write(f"{line}\n")


def build(config: Mapping[str, Any]) -> Any:
    """The callback of a configuration; verl's own function is tried in a test."""
    module, _, name = config["trainer"]["checkpoint_callback_class"].rpartition(".")
    return getattr(import_module(module), name)(config=config)


class Trainer:
    """Trains, which is nothing but to save. ``roles`` are how each role is saved: fsdp, v1 or v2 (of Megatron)."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        roles: Mapping[str, str] = ROLES,
        total: int = 1000,
        build_callback: Callable[[Any], Any] = build,
        **more: Any,
    ) -> None:
        self.config, self.roles, self.total_training_steps = config, roles, total
        self.checkpoint_callback = build_callback(config)
        self.run = Path(config["trainer"]["default_local_dir"])
        self.more = more
        self.scheduled: list[Callable[[], None]] = []
        self.lock = threading.Lock()
        """That no trainer can be pickled."""

    def save(self, step: int, *, async_save: bool = False, fails: bool = False, seen: bool = True) -> None:
        """Save a step; ``seen`` is whether this node sees what the workers write."""
        folder = self.run / f"global_step_{step}"
        for role, how in self.roles.items():
            if fails:
                raise SaveFailed(role)
            if seen:
                self._save_role(folder / role, how, step, async_save=async_save)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data.pt").write_bytes(b"the state of a dataloader")
        if async_save:
            self.scheduled.append(lambda: self._track(step))
        else:
            self._track(step)
        self.checkpoint_callback.on_save(
            trainer=self, global_step=step, checkpoint_dir=str(folder), async_save=async_save, **self.more
        )

    def finalise(self) -> None:
        """What the training loop does for asynchronous saves."""
        for finish in self.scheduled:
            finish()
        self.scheduled.clear()

    def _track(self, step: int) -> None:
        (self.run / TRACKER).write_text(str(step))

    def _save_role(self, role: Path, how: str, step: int, *, async_save: bool) -> None:
        if how == "fsdp":
            _copy(DATA / "fsdp" / "torch2.13-fsdp2", role)
            return
        archive = role / {"v1": "dist_ckpt", "v2": "model/dist_ckpt"}[how]
        source = DATA / "megatron" / "mcore0.16-dense-tp2"
        _copy(source, archive, without=LAST_IN_ARCHIVE if async_save else ())
        rest = [lambda: _copy(source, archive)] if async_save else []
        rest += [lambda: _write_manifest(role, step)] if how == "v2" else []
        if async_save:
            self.scheduled += rest
        else:
            for write in rest:
                write()


def _copy(source: Path, target: Path, *, without: tuple[str, ...] = ()) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name not in without and not (target / path.name).exists():
            shutil.copyfile(path, target / path.name)


def _write_manifest(role: Path, step: int) -> None:
    manifest = {
        "schema_version": 2,
        "framework": "megatron",
        "role": role.name,
        "global_step": step,
        "world_size": 2,
        "save_contents": ["model"],
        "backend": {"has_bridge": False, "use_dist_checkpointing": True, "peft": False},
        "contents": CONTENTS,
        "directories": {"model/dist_ckpt": "model weights"},
        "saved_any_dist_ckpt": True,
    }
    made = role / "ckpt_contents.json.tmp"
    made.write_text(json.dumps(manifest, indent=2, sort_keys=True))
    made.replace(role / "ckpt_contents.json")


def main(told: Mapping[str, Any]) -> None:
    """Train as a process of its own: save ``steps``, and ``end`` in the way that is told, once ``gate`` is there.

    ``hold`` is removed when the main thread has ended.
    """
    trainer = Trainer(told["config"], roles=told["roles"])
    globals()["kept"] = trainer  # as verl's task runner does
    for step in told["steps"]:
        trainer.save(step, async_save=told["async_save"])
    while not Path(told["gate"]).exists():
        threading.Event().wait(0.02)
    if told["finalised"]:
        trainer.finalise()
    threading.Thread(target=_release, args=(Path(told["hold"]),), daemon=True).start()
    if told["end"] == "exit":
        sys.exit(5)
    if told["end"] == "raise":
        raise SaveFailed("training has crashed")


def _release(hold: Path) -> None:
    threading.main_thread().join()
    hold.unlink(missing_ok=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
