"""Every kind of input, by real libraries, and the commands that take it.

A command is a line of words: ``{}`` is the damaged input, ``{out}`` an output, ``{sound}`` the undamaged input,
``{bases}`` where all of them lie, ``{run}`` a run of which the input is a step (`followed`), ``{fired}`` where actions
leave a file. A new command is a line in `READING`, or in the list of those that write.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ckpttool
from ckpttool.cli import app, main

DATA = Path(__file__).resolve().parent.parent / "data"
DEMO = Path(ckpttool.__file__).parent / "demo_data"
KNOWN = {command.name for command in app.registered_commands}
Command = tuple[str, ...]

READING: tuple[Command, ...] = (
    ("inspect", "{}"),
    ("inspect", "{}", "--json"),
    ("inspect", "{}", "--strict", "--tensors"),
    ("diff", "{}", "{sound}"),
    ("diff", "{}", "{sound}", "--json"),
    ("diff", "{sound}", "{}", "--json", "--all", "--trust-crc"),
    ("verify", "{}", "--json"),
    ("verify", "{}", "--values"),
    ("watch", "{run}", "--once", "--interval", "10ms", "--exec", "touch {fired}/{{step}}-{{role}}"),
    ("watch", "{run}", "--once", "--interval", "10ms", "--exec", "touch {fired}/{{step}}-{{role}}", "--json", "--pin"),
)
MERGE: Command = ("merge-fsdp", "{}", "-o", "{out}")
TO_HF: Command = ("to-hf", "{}", "-o", "{out}")
MERGES = (MERGE, (*MERGE, "--json", "--dtype", "bf16"), (*MERGE, "--max-shard-size", "400B", "--threads", "2"))
TO_HFS = (TO_HF, (*TO_HF, "--json", "--dtype", "fp16"), (*TO_HF, "--max-shard-size", "20kB", "--threads", "2"))
MIGRATES: tuple[Command, ...] = (
    ("migrate", "{}"),
    ("migrate", "{}", "--json", "--mode", "copy"),
    ("migrate", "{}", "--mode", "symlink"),
    ("migrate", "{}", "--remove-v1"),
    ("migrate", "{}", "--dry-run"),
    ("migrate", "{}", "--skip-broken"),
    ("migrate", "{}", "--undo"),
)


class Input(NamedTuple):
    """One kind: how it is made, and the commands that write something of it."""

    make: Callable[[Path], None]
    writing: tuple[Command, ...] = ()
    target: str = ""
    """What commands are given, below the directory."""
    choice: tuple[str, ...] = ()
    """What more `diff` wants to know."""

    def commands(self) -> list[Command]:
        """All that take it and exist."""
        reading = [(*command, *self.choice) if command[0] == "diff" else command for command in READING]
        return [command for command in (*reading, *self.writing) if command[0] in KNOWN]


def copied(source: Path) -> Callable[[Path], None]:
    """A directory as it was written."""
    return lambda folder: void(shutil.copytree(source, folder))


def void(_: object) -> None:
    """Nothing, whatever there was."""


def accelerate(folder: Path) -> None:
    """Shards as accelerate names them."""
    shutil.copytree(DEMO / "fsdp", folder)
    (folder / "fsdp_config.json").unlink()
    for rank in range(4):
        (folder / f"model_world_size_4_rank_{rank}.pt").rename(folder / f"pytorch_model_fsdp_0_rank{rank}.bin")


def megatron(name: str) -> Callable[[Path], None]:
    """An archive and the config that `to-hf` wants."""

    def make(folder: Path) -> None:
        from tests.test_to_hf_fixtures import CONFIG, FAMILY

        shutil.copytree(DATA / "megatron" / name, folder / "dist_ckpt")
        (folder / "huggingface").mkdir()
        text = json.dumps({**CONFIG, **FAMILY.get(name, {})}, indent=2)
        (folder / "huggingface" / "config.json").write_text(text)
        (folder / "huggingface" / "generation_config.json").write_text('{"eos_token_id": 0}')

    return make


def plain(folder: Path) -> None:
    """What torch's own distributed checkpoint writes."""
    import torch
    import torch.distributed.checkpoint as dcp

    state = {f"model.layers.{n}.weight": torch.randn(6, 4) for n in range(3)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save({**state, "step": torch.tensor(3)}, checkpoint_id=folder, no_dist=True)


def hub(folder: Path) -> None:
    """A model in two files with an index."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(DEMO / "fsdp" / "huggingface", folder)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["merge-fsdp", str(DEMO / "fsdp"), "-o", str(folder / "merged"), "--quiet"]) == 0
    tensors = load_file(folder / "merged" / "model.safetensors")
    shutil.rmtree(folder / "merged")
    names, index = sorted(tensors), {}
    for part, some in enumerate((names[:5], names[5:]), 1):
        file = f"model-{part:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in some}, folder / file, {"format": "pt"})
        index.update(dict.fromkeys(some, file))
    size = sum(tensor.nbytes for tensor in tensors.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=2)
    (folder / "model.safetensors.index.json").write_text(text)


def single(folder: Path) -> None:
    """One file, and nothing around it."""
    folder.mkdir(parents=True)
    shutil.copyfile(DATA / "fsdp" / "expected.safetensors", folder / "model.safetensors")


def adapter(folder: Path) -> None:
    """A directory that `peft` loads."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        line = ["merge-fsdp", str(DEMO / "lora"), "-o", str(folder), "--lora", "adapter"]
        assert main([*line, "--lora-alpha", "16"]) == 0


def role_v2(folder: Path) -> None:
    """A migrated step of a run, with manifest and tracker."""
    role = folder / "global_step_10" / "actor"
    shutil.copytree(DEMO / "megatron", role)
    (folder / "latest_checkpointed_iteration.txt").write_text("10")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        assert main(["migrate", str(role), "--remove-v1", "--mode", "copy"]) == 0


def run(folder: Path) -> None:
    """A run of two steps and two roles, and its tracker."""
    for step in (10, 20):
        shutil.copytree(DATA / "fsdp" / "torch2.10-fsdp2", folder / f"global_step_{step}" / "actor")
        (folder / f"global_step_{step}" / "data.pt").write_bytes(b"the state of a data loader" * 9)
    shutil.copytree(DEMO / "lora", folder / "global_step_20" / "critic")
    (folder / "latest_checkpointed_iteration.txt").write_text("20")


LORA = ("merge-fsdp", "{}", "-o", "{out}", "--lora", "adapter", "--lora-alpha", "16")
LIKE = ("merge-fsdp", "{bases}/fsdp role", "-o", "{out}", "--like", "{}")
HF_CONFIG = (*MERGE, "--hf-config", "{}/huggingface")

INPUTS: dict[str, Input] = {
    **{f"fsdp {p.name}": Input(copied(p), MERGES) for p in sorted((DATA / "fsdp").iterdir()) if p.is_dir()},
    "fsdp role": Input(copied(DEMO / "fsdp"), MERGES),
    "accelerate": Input(accelerate, (HF_CONFIG, (*HF_CONFIG, "--json"))),
    "lora": Input(copied(DEMO / "lora"), (LORA, (*LORA, "--json"))),
    **{f"megatron {p.name}": Input(megatron(p.name), TO_HFS) for p in sorted((DATA / "megatron").iterdir())},
    "plain dcp": Input(plain),
    "hub": Input(hub, (LIKE, (*LIKE, "--json"))),
    "single file": Input(single, target="model.safetensors"),
    "adapter": Input(adapter),
    "role v1": Input(copied(DEMO / "megatron"), (*TO_HFS, *MIGRATES, *MIGRATES)),
    "role v2": Input(role_v2, (*TO_HFS, *MIGRATES)),
    "run": Input(
        run,
        (*MIGRATES[:4], (*MERGE, "--role", "actor", "--step", "20"), (*MERGE, "--role", "actor", "--step", "latest")),
        choice=("--step", "20", "--role", "actor"),
    ),
}


def prepare(folder: Path) -> None:
    """Make each of them once, for everyone to read."""
    for name, one in INPUTS.items():
        one.make(folder / name)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
