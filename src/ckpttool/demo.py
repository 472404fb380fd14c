"""Small real checkpoints that ship with the package, set up as training runs to try the commands on."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ckpttool.errors import CannotWrite
from ckpttool.staging import staged

DATA = Path(__file__).parent / "demo_data"
LOST_RANK = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """One command to run on the demo, what to see in it, and the exit code that it has."""

    what: str
    command: tuple[str, ...]
    code: int = 0


@dataclass(frozen=True, slots=True)
class Demo:
    """Where the demo lies and the walk through it."""

    root: str
    scenes: tuple[Scene, ...]


def write_demo(root: Path, *, force: bool = False) -> Demo:
    """Write the demo's runs into ``root``, complete or not at all, and return the walk through them.

    Raises :class:`CannotWrite` when ``root`` exists, unless ``force`` replaces it.
    """
    if os.path.lexists(root) and not force:
        raise CannotWrite(f"{root}: exists already", hint="Name another folder, or replace it with --force.")
    if os.path.lexists(root) and not _is_demo(root):
        raise CannotWrite(f"{root}: is no demo of ckpttool, so --force does not replace it")
    try:
        with staged(root, force=force) as folder:
            _fill(folder)
    except shutil.Error as error:  # every file that could not be copied, with its reason
        raise CannotWrite(f"{root}: {error.args[0][0][2]}") from error
    return Demo(str(root), tuple(_scenes(root)))


def _is_demo(root: Path) -> bool:
    return (root / "fsdp-run").is_dir() and (root / "megatron-run").is_dir()


def _fill(root: Path) -> None:
    """An FSDP run whose last save lost a rank, adapters that were trained on it, a Megatron run in verl's layout v1."""
    run = root / "fsdp-run"
    for step in (10, 20):
        _copy(DATA / "fsdp", run / f"global_step_{step}" / "actor")
    for file in (run / "global_step_20" / "actor").glob(f"*_rank_{LOST_RANK}.pt"):
        file.unlink()
    (run / "latest_checkpointed_iteration.txt").write_text("20")
    _copy(DATA / "lora", root / "lora-run" / "global_step_5" / "actor")
    run = root / "megatron-run"
    _copy(DATA / "megatron", run / "global_step_10" / "actor")
    (run / "latest_checkpointed_iteration.txt").write_text("10")


def _copy(source: Path, target: Path) -> None:
    shutil.copytree(source, target, copy_function=shutil.copyfile)


def _scenes(root: Path) -> list[Scene]:
    fsdp, megatron = root / "fsdp-run", root / "megatron-run"
    merge = ("merge-fsdp", f"{fsdp}/global_step_10/actor", "-o", str(root / "merged"))
    lora = ("merge-fsdp", str(root / "lora-run"), "-o", str(root / "fused"))
    whole = f"{fsdp}/global_step_10/actor"
    base = ("--base", str(root / "merged"))
    watch = ("watch", str(fsdp), "--to-hf", f"{root}/models/{{step}}", "--once")
    broken = ("merge-fsdp", f"{fsdp}/global_step_20/actor")
    return [
        Scene("A run: which steps can be used?", ("inspect", str(fsdp))),
        Scene("The step that is whole", ("inspect", f"{fsdp}/global_step_10/actor")),
        Scene("A Hugging Face model of it: what would be written?", (*merge, "--dtype", "bf16", "--dry-run")),
        Scene("Write it: no torch, and memory that stays small", (*merge, "--dtype", "bf16", "--quiet")),
        Scene("The model, ready for from_pretrained", ("inspect", str(root / "merged"), "--strict")),
        Scene("Adapters that were trained on that model: what is to be written of them?", lora, code=2),
        Scene("Fuse them into it", (*lora, "--lora", "fuse", *base)),
        Scene("Is that model what the shards hold?", ("diff", whole, str(root / "merged"), "--ignore-dtype")),
        Scene("And what have those adapters changed?", ("diff", whole, str(root / "fused")), code=1),
        Scene("The step that is not", ("inspect", f"{fsdp}/global_step_20/actor")),
        Scene("It is refused, with the reason", (*broken, "-o", str(root / "no")), code=4),
        Scene("Megatron, in verl's layout v1", ("inspect", f"{megatron}/global_step_10/actor")),
        Scene("What would it take to load it in current verl?", ("migrate", str(megatron), "--dry-run")),
        Scene("Do it: names are added, no byte is copied", ("migrate", str(megatron))),
        Scene("The same role, in layout v2", ("inspect", f"{megatron}/global_step_10/actor")),
        Scene("A Hugging Face model of that, too", ("to-hf", str(megatron), "-o", str(root / "converted"))),
        Scene("Is every byte of it what was saved?", ("verify", str(megatron), "--values")),
        Scene("A run that trains: act on each checkpoint when it is finished", watch),
        Scene("Some of its tensors", ("inspect", f"{megatron}/global_step_10/actor", "--tensors", "decoder*norm*")),
    ]
