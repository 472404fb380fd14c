"""A watch that acts, pins and deletes, as what is killed, starved and raced: see `subjects`.

Its action notes that it begins and that it ends, and looks meanwhile whether all files are there.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ckpttool.layout import TRACKER
from tests.campaign.children import End, run
from tests.campaign.subjects import UNWRITTEN, Content, content, said, shards

STATE = ".ckpttool-watch.json"
SCRIPT = """#!/bin/sh
echo "begin $CKPTTOOL_STEP $CKPTTOOL_ATTEMPT" >> "$1"
for file in model_world_size_2_rank_0.pt model_world_size_2_rank_1.pt huggingface/config.json; do
    test -s "$CKPTTOOL_PATH/$file" || echo "lost $CKPTTOOL_STEP $CKPTTOOL_ATTEMPT $file" >> "$1"
done
echo "end $CKPTTOOL_STEP $CKPTTOOL_ATTEMPT" >> "$1"
"""
_NOT_DELETED = re.compile(r"not deleted|is deleted[^\n]*\n +! |begun to delete[^\n]*\n +! ")
"""What a watch says of a step that it could not delete, or of which something stays: it ends with 1."""

STEPS = (10, 20)
"""The second one is kept, the first one deleted."""

Line = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Following:
    """``watch --once`` with a program, pins and retention, on a run of two finished steps."""

    role: Path
    more: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return " ".join(("watch", *self.more))

    def arrange(self, here: Path) -> list[str]:
        folder = here / "run"
        for number in STEPS:
            shutil.copytree(self.role, folder / f"global_step_{number}" / "actor", copy_function=shutil.copyfile)
        (folder / TRACKER).write_text(f"{STEPS[-1]}")
        script = here / "act"
        script.write_text(SCRIPT)
        script.chmod(0o755)
        return self.words(here)

    def words(self, here: Path, *more: str) -> list[str]:
        """The command line."""
        options = ("--once", "--exec", f"{here}/act {here}/log", "--keep-last", "1", "--yes", "--pin", "--keep-going")
        return ["watch", str(here / "run"), *options, *self.more, *more]

    def wrong(self, here: Path, end: End, codes: Collection[int] = UNWRITTEN) -> Iterator[str]:
        lines = log(here)
        for number in STEPS:
            state = self.step(here, number)
            if state == "mixed":
                yield f"step {number} is neither whole nor gone"
            if state == "gone" and (number == STEPS[-1] or not any(("end", f"{number}") == line[:2] for line in lines)):
                yield f"step {number} is gone"
        yield from _log_faults(lines)
        if strangers := {path.name for path in here.iterdir()} - {"run", "act", "log"}:
            yield f"files beside the run: {strangers}"
        yield from said(end, {*codes, 1} if _NOT_DELETED.search(end.text) else codes, here)
        done = Counter(line[0] for line in lines)["end"] == len(STEPS)
        if end.code == 0 and done is ("waits for" in end.text):
            yield f"it does not say what is done: {lines}, {end.text}"

    def step(self, here: Path, number: int) -> str:
        """What is left of a step: whole, gone, or a mixture that may not be."""
        path = here / "run" / f"global_step_{number}"
        if not path.exists():
            return "gone"
        return "whole" if content(path) == {"actor": b"a directory", **self._as_it_was} else "mixed"

    @property
    def _as_it_was(self) -> Content:
        return {f"actor/{name}": value for name, value in content(self.role).items()}

    @cached_property
    def merged(self) -> Content:
        """What ``merge-fsdp`` makes of a step."""
        here = self.role.with_name("merged")
        here.mkdir()
        end = run(["merge-fsdp", self.role, "-o", here / "out"], here, here / "text")
        assert end.code == 0, end.text
        return content(here / "out")

    def left(self, here: Path) -> list[str]:
        names = (".ckpttool-pins", ".ckpttool-removing")
        found = [path for path in (here / "run").iterdir() if path.name in names or ".partial-" in path.name]
        return [path.name for path in found]

    def wrong_after(self, here: Path) -> Iterator[str]:
        done = recorded(here)
        before = {line[1] for line in log(here) if line[0] == "end"}
        end = run(self.words(here), here, here.with_name("text"))
        if end.code:
            yield f"the next run ended with {end.code}: {end.text}"
        lines = log(here)
        yield from _log_faults(lines)
        for number in STEPS:
            attempts = [line[2] for line in lines if line[:2] == ("end", f"{number}")]
            wanted = {"done": {"1"}, "running": {"1", "2"}}.get(done.get(number, ""), {"1"})
            if not attempts or not set(attempts) <= wanted or (done.get(number) == "running" and "2" not in attempts):
                yield f"step {number} was acted on in attempts {attempts}, recorded as {done.get(number)} ({before})"
        if [self.step(here, number) for number in STEPS] != ["gone", "whole"]:
            yield f"after the next run, steps are {[self.step(here, number) for number in STEPS]}: {end.text}"
        if left := self.left(here):
            yield f"the next run left {left}"


def log(here: Path) -> list[Line]:
    """What actions have noted."""
    path = here / "log"
    return [tuple(line.split()) for line in path.read_text().splitlines()] if path.exists() else []


def _log_faults(lines: list[Line]) -> Iterator[str]:
    for line, count in Counter(lines).items():
        if line[0] == "lost":
            yield f"an action did not find a file: {line}"
        if count > 1:
            yield f"twice in one attempt: {line}"


def recorded(here: Path) -> dict[int, str]:
    """What the state has of the action on each step."""
    path = here / "run" / STATE
    if not path.exists():
        return {}
    entries = json.loads(path.read_bytes())["checkpoints"].values()
    return {entry["step"]: "done" if entry["actions"] else "running" for entry in entries}


def following(folder: Path, *more: str) -> Following:
    """Make the checkpoint that the steps have."""
    return Following(shards(folder / "shards"), more)
