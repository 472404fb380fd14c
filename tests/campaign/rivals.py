"""Two at work on one run: watches with one state or with two, and a watch beside a command on the same step."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.acting import STEPS, Following, log
from tests.campaign.children import End, held, run
from tests.campaign.subjects import content, said

BUSY = "another watch is at work with this state"


def one_state(folder: Path, subject: Following, at: int) -> list[str]:
    """Start a second watch while the first one stands before a write; it is kept out, and the first goes on."""
    here = folder / "here"
    begun = held(subject.arrange(here), here, folder / "text", at, "write")
    begun.reached()
    late = run(subject.words(here), here, folder / "text 2")
    end = begun.end()
    found = [] if late.code == 6 and BUSY in late.text else [f"it was not kept out: {late}"]
    found += [*_both_done(subject, here, end, times=1), *subject.wrong(here, end, {0})]
    shutil.rmtree(here)
    return found


def two_states(folder: Path, subject: Following, at: int) -> tuple[set[str], list[str]]:
    """The same with a state of its own; return what the second one said of a step that it did not delete."""
    here = folder / "here"
    begun = held(subject.arrange(here), here, folder / "text", at, "write")
    begun.reached()
    state = here / "run" / ".second.json"
    second = run(subject.words(here, "--state", str(state)), here, folder / "text 2")
    end = begun.end()
    found = [*said(second, {0}, here), *_both_done(subject, here, end, times=None)]
    told = {word for word in ("pinned", "is deleted", "waits for") if word in second.text}
    shutil.rmtree(here)
    return told, found


def _both_done(subject: Following, here: Path, end: End, times: int | None) -> Iterator[str]:
    """Every step was acted on with all files there; the newest one is whole, and nothing is left."""
    yield from said(end, {0}, here)
    ends = Counter(line[1] for line in log(here) if line[0] == "end")
    begins = Counter(line[1] for line in log(here) if line[0] == "begin")
    if ends != begins or any(times not in (None, ends[f"{number}"]) or not ends[f"{number}"] for number in STEPS):
        yield f"acted {dict(begins)}, {dict(ends)}: {end.text}"
    if lost := [line for line in log(here) if line[0] == "lost"]:
        yield f"files were gone while an action read: {lost}"
    if subject.step(here, STEPS[-1]) != "whole":
        yield "the newest step is not whole"
    if subject.step(here, STEPS[0]) == "mixed":
        yield "the old step is neither whole nor gone"
    if left := subject.left(here):
        yield f"left: {left}"


def beside_merge(folder: Path, subject: Following, at: int, *, first: str) -> tuple[End, End, list[str]]:
    """A watch that deletes a step, and a merge of that step: the output is complete or absent, the watch goes on."""
    here = folder / "here"
    words = {"watch": subject.arrange(here)}
    words["merge"] = ["merge-fsdp", f"{here}/run/global_step_{STEPS[0]}/actor", "-o", f"{here}/out"]
    second = "merge" if first == "watch" else "watch"
    begun = held(words[first], here, folder / "text", at, "write" if first == "watch" else "read")
    begun.reached()
    other = run(words[second], here, folder / "text 2")
    ends = {first: begun.end(), second: other}
    found = [*said(ends["merge"], {0, 3, 4}, here), *_both_done(subject, here, ends["watch"], times=1)]
    made = content(here / "out") if (here / "out").exists() else None
    if (made is None) is not bool(ends["merge"].code):
        found.append(f"the output is {'absent' if made is None else 'there'}: {ends['merge']}")
    if made is not None and made != subject.merged:
        found.append("the output is not that of the checkpoint")
    if strangers := {path.name for path in here.iterdir()} - {"run", "act", "log", "out"}:
        found.append(f"left beside the output: {strangers}")
    shutil.rmtree(here)
    return ends["watch"], ends["merge"], found


def beside_migrate(folder: Path, v1: Path, at: int, *, first: str) -> tuple[End, End, list[str]]:
    """A watch that migrates, and a migration of the same role: the one that comes second may have to give way."""
    here = folder / "here"
    role = here / "run" / "global_step_10" / "actor"
    shutil.copytree(v1, role, copy_function=shutil.copyfile, symlinks=True)
    (here / "run" / "latest_checkpointed_iteration.txt").write_text("10")
    words = {"watch": ["watch", here / "run", "--once", "--migrate"], "migrate": ["migrate", role]}
    begun = held(words.pop(first), here, folder / "text", at, "write")
    begun.reached()
    ((second, other),) = words.items()
    ends = {second: run(other, here, folder / "text 2"), first: begun.end()}
    found = [*said(ends["watch"], {0, 1}, here), *said(ends["migrate"], {0, 4, 6}, here)]
    if ends[first].code:
        found.append(f"it failed, and was the first: {ends[first]}")
    again = run(["watch", here / "run", "--once", "--migrate"], here, folder / "text")
    found += said(again, {0}, here)
    if not (role / "model" / "dist_ckpt").is_dir() or not (role / "ckpt_contents.json").is_file():
        found.append(f"it is not migrated: {again.text}")
    if left := [path.name for path in role.iterdir() if path.name.startswith(".")]:
        found.append(f"left: {left}")
    shutil.rmtree(here)
    return ends["watch"], ends["migrate"], found
