"""What is killed, starved and raced: commands that write, each with what was there before and what is to come of it.

A subject prepares a place, says the command line, and finds what is wrong with what is there afterwards.
"""

from __future__ import annotations

import json
import shutil
import signal
import warnings
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from ckpttool import layout
from tests.campaign.children import End, run
from tests.merged import QWEN2, fingerprint, write_config, write_generation, write_role
from tests.migrating import STAGING, Photograph, clone, move, outcome, part, photograph, reachable, tiny_role
from tests.synthetic.archive import Entry, write_archive
from tests.test_to_hf_fixtures import CONFIG, DATA
from tests.writers.reading import read_tensors

Content = Mapping[str, bytes]

UNWRITTEN = frozenset({0, 6})
"""Exit codes of a command to which the system refuses to write: what is only tidied up is no reason to fail."""


def content(folder: Path) -> Content:
    """Every file and directory below, with its bytes; nothing where there is nothing."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b"a directory"
        for path in sorted(folder.rglob("*"))
    }


class Subject(Protocol):
    """A command that writes."""

    @property
    def name(self) -> str:
        """The command and what is special."""

    def arrange(self, here: Path) -> list[str]:
        """Put there what the command finds; return the command line."""

    def wrong(self, here: Path, end: End, codes: Collection[int] = UNWRITTEN) -> Iterator[str]:
        """Say what may not be after a kill, or after an end, which has to be one of these."""

    def left(self, here: Path) -> list[str]:
        """Name what is there of ours that has no business to stay."""

    def wrong_after(self, here: Path) -> Iterator[str]:
        """Run it once more, unless all is as it was before, and say what may not be then."""


@dataclass(frozen=True, eq=False)
class Export:
    """A command that makes a directory of a checkpoint; with ``old`` it replaces one."""

    command: str
    source: Path
    old: Path | None = None
    more: tuple[str, ...] = ()
    _before: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.command}{' --force' if self.old is not None else ''}"

    def __post_init__(self) -> None:
        self._before.update(fingerprint(self.source))

    @cached_property
    def new(self) -> Content:
        """What the command writes when nothing disturbs it."""
        here = self.source.with_name(f"{self.source.name} of {self.name}")
        here.mkdir(exist_ok=True)
        end = run(self._words(here), here, here / "text")
        assert end.code == 0, end.text
        return content(here / "out")

    def _words(self, here: Path, *more: str) -> list[str]:
        return [self.command, str(self.source), "-o", str(here / "out"), *self.more, *more]

    def arrange(self, here: Path) -> list[str]:
        here.mkdir()
        if self.old is not None:
            shutil.copytree(self.old, here / "out")
        return self._words(here, *(["--force"] if self.old is not None else []))

    def wrong(self, here: Path, end: End, codes: Collection[int] = UNWRITTEN) -> Iterator[str]:
        if fingerprint(self.source) != self._before:
            yield "the source was changed"
        is_there = self.state(here)
        if is_there == "mixed":
            yield "the output is neither complete nor absent"
        if self.old is not None and is_there == "absent" and content(self.old) not in map(content, _aside(here)):
            yield "what was to be replaced is gone, and nothing is in its place"
        if strangers := [path.name for path in here.iterdir() if path.name != "out" and path not in _ours(here)]:
            yield f"files beside the output: {strangers}"
        yield from said(end, codes, here, self.source)
        if end.code == 0 and is_there != "new":
            yield f"it says that all is done, and the output is {is_there}"

    def left(self, here: Path) -> list[str]:
        return [path.name for path in _ours(here)]

    def state(self, here: Path) -> str:
        """What has the name of the output: new, old, absent, or a mixture that may not be."""
        if not (here / "out").exists():
            return "absent"
        found = content(here / "out")
        if found == self.new:
            return "new"
        return "old" if self.old is not None and found == content(self.old) else "mixed"

    def wrong_after(self, here: Path) -> Iterator[str]:
        if not self.left(here) and self.state(here) == ("absent" if self.old is None else "old"):
            return
        again = self._words(here, *(["--force"] if (here / "out").exists() or _aside(here) else []))
        end = run(again, here, here.with_name("text"))
        if end.code or self.state(here) != "new":
            yield f"the next run ended with {end.code}, the output is {self.state(here)}: {end.text}"
        if left := self.left(here):
            yield f"the next run left {left}"


def _aside(here: Path) -> list[Path]:
    return list(here.glob("out.replaced-????????"))


def _ours(here: Path) -> list[Path]:
    return [*_aside(here), *here.glob("out.partial-????????")]


def said(end: End, codes: Collection[int], *paths: Path) -> Iterator[str]:
    """Say what is wrong with how a command ended: it names one of the paths it is about, and is no fault of ours."""
    if end.code not in {*codes, -signal.SIGKILL}:
        yield f"exit code {end.code}: {end.text}"
    if "Traceback" in end.text or "Exception ignored" in end.text:
        yield f"a traceback: {end.text}"
    if 0 < end.code < 128 and not any("".join(str(path).split()) in "".join(end.text.split()) for path in paths):
        yield f"the message names no path: {end.text}"


@dataclass(frozen=True, eq=False)
class Migration:
    """A migration of a role in place."""

    v1: Path
    start: Path
    more: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return " ".join(("migrate", *self.more))

    @cached_property
    def before(self) -> Photograph:
        """The role of layout v1."""
        return photograph(self.v1)

    @cached_property
    def begun(self) -> Photograph:
        """The role that is migrated."""
        return photograph(self.start)

    @cached_property
    def new(self) -> Photograph:
        """The role when nothing disturbs it."""
        role = clone(self.start, self.start.with_name(f"{self.start.name} of {self.name}") / "global_step_10")
        move(role, **self.options)
        return outcome(role)

    def arrange(self, here: Path) -> list[str]:
        return ["migrate", str(clone(self.start, here / "global_step_10")), *self.more]

    def wrong(self, here: Path, end: End, codes: Collection[int] = UNWRITTEN) -> Iterator[str]:
        role = here / "global_step_10" / self.start.name
        if not reachable(self.before, role):
            yield "files of layout v1 are gone"
        keeps = not self.options.get("undo") and not self.options.get("remove_v1")
        if keeps and part(photograph(role), "dist_ckpt") != part(self.before, "dist_ckpt"):
            yield "the source was changed"
        if strangers := {path.name for path in here.iterdir()} - {"global_step_10"}:
            yield f"files beside the step: {strangers}"
        yield from said(end, codes, here)
        if end.code == 0 and outcome(role) != self.new:
            yield "it says that all is done, and it is not"

    def left(self, here: Path) -> list[str]:
        return [path.name for path in here.glob(f"*/*/{STAGING}")]

    def wrong_after(self, here: Path) -> Iterator[str]:
        role = here / "global_step_10" / self.start.name
        if photograph(role) == self.begun:
            return
        end = run(["migrate", role, *self.more], here, here.with_name("text"))
        if end.code or outcome(role) != self.new:
            yield f"the next run ended with {end.code} and not as it should: {end.text}"
        if left := self.left(here):
            yield f"the next run left {left}"


def shards(role: Path, seed: int = 0) -> Path:
    """FSDP shards of two ranks; two seeds differ in the values, and in nothing else."""
    torch.manual_seed(seed)
    names = ("model.embed_tokens.weight", *(f"model.layers.{n}.mlp.up_proj.weight" for n in range(3)), "lm_head.weight")
    write_role(role, {name: torch.randn(10, 128) for name in names}, config={**QWEN2, "seed": seed})
    return _with_side_files(role, seed)


def archive(role: Path, seed: int = 0) -> Path:
    """A Megatron role, its archive in four files; two seeds differ in the values, and in nothing else."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        tensors = read_tensors(DATA / "mcore0.16-dense-tp2")
    entries = {
        key: Entry(value + seed, int(key.startswith("decoder.layers.")))
        for key, value in tensors.items()
        if not key.startswith(("optimizer.", "rng_state")) and value.is_floating_point()
    }
    write_archive(role / "dist_ckpt", entries, extra=False)
    write_config(role, {**CONFIG, "seed": seed})
    return _with_side_files(role, seed)


def _with_side_files(role: Path, seed: int) -> Path:
    (write_generation(role / "huggingface").parent / "LICENSE").write_text(f"of {seed}\n")
    return role


def exports(folder: Path) -> list[Export]:
    """Both converters, to a new place and over what is there; each writes two files."""
    made = [("merge-fsdp", shards(folder / "shards"), "24KB"), ("to-hf", archive(folder / "archive"), "48KB")]
    old = folder / "old"
    old.mkdir()
    (old / "config.json").write_text(json.dumps(CONFIG))
    (old / "model.safetensors").write_bytes(b"old")
    return [
        Export(command, source, before, ("--max-shard-size", size))
        for before in (None, old)
        for command, source, size in made
    ]


def migrations(folder: Path) -> list[Migration]:
    """Every mode, the removal of the old names, and the way back."""
    v1 = tiny_role(folder / "v1" / "global_step_10" / "actor", rng=False)
    (v1 / layout.MANIFEST).write_text('{"schema_version": 1}\n')
    done = clone(v1, folder / "done" / "global_step_10")
    move(done)
    modes = [Migration(v1, v1, ("--mode", mode), {"mode": mode}) for mode in ("hardlink", "symlink", "copy")]
    removed = Migration(v1, v1, ("--remove-v1",), {"remove_v1": True})
    return [*modes, removed, Migration(v1, done, ("--undo",), {"undo": True})]
