"""Runs with strange things in the places of steps, roles and trackers, each beside a step that is sound."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpttool.layout import TRACKER
from tests.campaign import broken
from tests.campaign.followed import is_kept
from tests.campaign.inputs import DATA
from tests.campaign.judging import UNSEEN
from tests.campaign.layouts import WEIRD
from tests.campaign.outcomes import Outcome, Outcomes

SHARDS = DATA / "fsdp" / "torch2.10-fsdp2"
SOUND = 10
STEP = f"global_step_{SOUND}"

NAMES = (
    *(
        name
        for name in WEIRD
        if name not in ("", ".", "..", "\ud800") and not set("/\0") & set(name) and len(name) < 200
    ),
    *("$(touch x)", "`touch x`", "{path}", "{step}{role}", "; touch x", "-rf", "--help", "'\"", "a b", "*", "~", "\\"),
    *("\udcff\udcfe", "$CKPTTOOL_PATH", "x" * 200),
)
"""Names of directories, as far as there can be such."""

Make = Callable[[Path], None]


class Strange(NamedTuple):
    """What is done to a run, and whether the sound step in it is acted on all the same."""

    make: Make
    fires: bool = True
    for_others: bool = False
    """Whether it is nothing strange to root, whom no mode keeps out."""


def role(path: Path) -> Path:
    """A role of four ranks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(SHARDS, path, copy_function=shutil.copyfile)
    return path


def sound(run: Path) -> None:
    """A run with one step, and its tracker."""
    role(run / f"global_step_{SOUND}" / "actor")
    (run / TRACKER).write_text("20")


def _link(name: str, to: str) -> Make:
    return lambda run: (run / name).symlink_to(to)


def _closed(name: str, mode: int) -> Make:
    def make(run: Path) -> None:
        role(run / name)
        (run / name).chmod(mode)

    return make


def _tracker(what: Callable[[Path], object]) -> Make:
    def make(run: Path) -> None:
        (run / TRACKER).unlink()
        what(run / TRACKER)

    return make


def _closed_tracker(path: Path) -> None:
    path.write_text("20")
    path.chmod(0)


def _moved(run: Path, name: str) -> None:
    role(run / name / "actor")


def _called(name: str, run: Path) -> None:
    role(run / STEP / name)


def _deep(run: Path) -> None:
    below = run / "global_step_5" / "actor" / "/".join(["d" * 50] * 70)
    below.mkdir(parents=True)


def _of_trainer(run: Path, content: str) -> None:
    (run / "checkpoint-5").mkdir()
    (run / "checkpoint-5" / "trainer_state.json").write_text(content)
    shutil.copyfile(DATA / "fsdp" / "expected.safetensors", run / "checkpoint-5" / "model.safetensors")


def _hole(run: Path) -> None:
    _of_trainer(run, "")
    _sparse(run / "checkpoint-5" / "trainer_state.json")


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)


CASES: dict[str, Strange] = {
    "a step that is a pipe": Strange(lambda run: os.mkfifo(run / "global_step_5")),
    "a step that is a file": Strange(lambda run: _sparse(run / "global_step_5")),
    "a role that is a pipe": Strange(lambda run: os.mkfifo(run / "global_step_10" / "critic")),
    "a step that leads to itself": Strange(_link("global_step_5", "global_step_5")),
    "a step that leads to the run": Strange(_link("global_step_5", ".")),
    "a step that leads above": Strange(_link("global_step_5", "..")),
    "a step that leads to another": Strange(_link("global_step_5", "global_step_10")),
    "a step that leads nowhere": Strange(_link("global_step_5", "gone")),
    "a step that leads where nobody may look": Strange(_link("global_step_5", "/root/closed/step")),
    "a role that leads to its step": Strange(_link("global_step_10/critic", ".")),
    "a role that leads to the run": Strange(_link("global_step_10/critic", "..")),
    "a step that is closed": Strange(_closed("global_step_5", 0o000)),
    "a step of a trainer that is closed": Strange(_closed("checkpoint-5", 0o000)),
    "a step that may be listed only": Strange(_closed("checkpoint-5", 0o444)),
    "a role that is closed": Strange(_closed("global_step_10/aaa", 0o000)),
    "a role that may be listed only": Strange(_closed("global_step_10/aaa", 0o444)),
    "a step of 2^63": Strange(lambda run: _moved(run, f"global_step_{1 << 63}")),
    "a step of many digits": Strange(lambda run: _moved(run, f"global_step_{'9' * 200}")),
    "the same step twice": Strange(lambda run: _moved(run, "global_step_0010")),
    "other digits": Strange(lambda run: _moved(run, "global_step_\u0661\u0660")),
    "a step in great depth": Strange(_deep),
    "a state of a trainer that is a hole": Strange(_hole),
    "a state of a trainer that is deep": Strange(lambda run: _of_trainer(run, "[" * 100_000)),
    "a state of a trainer that is no object": Strange(lambda run: _of_trainer(run, "3")),
    "a best model elsewhere": Strange(
        lambda run: _of_trainer(run, json.dumps({"best_model_checkpoint": "\x1b[31m/etc/passwd\n"}))
    ),
    "a tracker that is a pipe": Strange(_tracker(os.mkfifo), fires=False),
    "a tracker that is a directory": Strange(_tracker(Path.mkdir), fires=False),
    "a tracker that leads to itself": Strange(_tracker(lambda path: path.symlink_to(path.name)), fires=False),
    "a tracker that is a device": Strange(_tracker(lambda path: path.symlink_to("/dev/zero")), fires=False),
    "a tracker of a megabyte": Strange(_tracker(lambda path: path.write_text("9" * (1 << 20)))),
    "a tracker of a megabyte of nothing": Strange(
        _tracker(lambda path: path.write_text("\n" * (1 << 20))), fires=False
    ),
    "a tracker that is a hole": Strange(_tracker(_sparse), fires=False),
    "a tracker with escapes": Strange(_tracker(lambda path: path.write_text("\x1b[31m20")), fires=False),
    "a tracker with a sign": Strange(_tracker(lambda path: path.write_text("-20")), fires=False),
    "a tracker with other digits": Strange(_tracker(lambda path: path.write_text("\u0662\u0660")), fires=False),
    "a tracker that is closed": Strange(_tracker(_closed_tracker), fires=False, for_others=True),
    "an earlier step": Strange(_tracker(lambda path: path.write_text("9")), fires=False),
    "pins that lead elsewhere": Strange(_link(".ckpttool-pins", "elsewhere")),
    "removals that lead elsewhere": Strange(_link(".ckpttool-removing", "elsewhere")),
}
CASES |= {f"a role called {name!r}": Strange(partial(_called, name)) for name in NAMES}

LINE = 'touch {fired}/{{step}}; : {{path}} "{{role}} $(echo {{name}})" `echo {{original}}`'


def main(folder: Path) -> None:
    """Print what each of them came to, a line of JSON an outcome; actions are words for root, a line for others."""
    signal.signal(signal.SIGALRM, broken._hangs)
    for (name, strange), is_root in itertools.product(CASES.items(), (True, False)):
        room = folder / "room"
        (room / "fired").mkdir(parents=True)
        sound(room / "run")
        strange.make(room / "run")
        sys.stdout.write(json.dumps(_attempt(name, strange, room, is_root=is_root)) + "\n")
        shutil.rmtree(room)


def _attempt(name: str, strange: Strange, room: Path, *, is_root: bool) -> Outcome:
    broken._open_to_all(room)
    before = _entries(room)
    action = (
        ["--exec", f"touch {room}/fired/{{step}}"]
        if is_root
        else ["--shell", "--exec", LINE.format(fired=room / "fired")]
    )
    with contextlib.nullcontext() if is_root else broken.nobody(), _inside(room):
        how = ("--once", "--interval", "10ms", "--keep-last", "9", "--yes")
        done = broken.tried(["watch", str(room / "run"), *how, *action])
    after = _entries(room)
    acted = (room / "fired" / f"{SOUND}").exists()
    wrong = [f"exit code {done.code}"] * (done.code != 0)
    if acted != strange.fires and not (is_root and strange.for_others):
        wrong.append(f"it has {'' if acted else 'not '}acted on the sound step")
    wrong += [f"raw {hidden[0]!r}" for hidden in UNSEEN.finditer(done.out + done.err)]
    wrong += ["a traceback"] * ("Traceback" in done.err)
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    wrong += [f"changed {path}" for path in changed if not is_kept(path)]
    return Outcome(
        (name, "root" if is_root else "others"),
        str(done.code),
        (*wrong, done.out[-900:] + done.err[-900:]) if wrong else (),
    )


def _entries(room: Path) -> dict[str, tuple[int, ...]]:
    """Every entry by its path, with its type, size and time; some files here are holes of gigabytes."""
    found = {os.path.relpath(path, room): path.lstat() for path in room.rglob("*")}
    return {
        name: (info.st_mode, info.st_size, info.st_mtime_ns) if not stat.S_ISDIR(info.st_mode) else (info.st_mode,)
        for name, info in found.items()
    }


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Whatever a name makes by a relative path is made there."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def campaign(folder: Path) -> Outcomes:
    """All of them, in a child process."""
    found = Outcomes()
    line = [sys.executable, "-m", "tests.campaign.strange", str(folder)]
    child = subprocess.run(line, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "200"})
    for said in child.stdout.splitlines():
        what, *rest = json.loads(said)
        found.add(Outcome(tuple(what), rest[0], tuple(rest[1])))
    if child.returncode:
        found.add(Outcome(("the child",), f"{child.returncode}", (child.stderr[-3000:],)))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
