"""The state of a watch, cut, flipped, or with something else in its place: a message and exit code 6, or it is sound.

What cannot be read is never replaced: it would have every checkpoint acted on anew.
"""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpttool.errors import CannotWrite
from ckpttool.watching.scanning import is_rewritten
from ckpttool.watching.state import State
from tests.campaign.strange import sound
from tests.conftest import Call

NAME = ".ckpttool-watch.json"
FLIPS = 400
STATUSES: tuple[object, ...] = ("x", [[]], {"a": None})


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of which everything was acted on."""
    from ckpttool.cli import main

    run = tmp_path_factory.mktemp("watched") / "run"
    run.mkdir()
    sound(run)
    assert main(["watch", str(run), "--once", "--quiet", "--exec", "true"]) == 0
    return run


@pytest.fixture
def state(watched: Path) -> Iterator[Path]:
    path = watched / NAME
    content = path.read_bytes()
    yield path
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    path.write_bytes(content)


Ask = Callable[[], Call]


@pytest.fixture
def ask(state: Path, ckpttool: Callable[..., Call]) -> Ask:
    """Watch once, with an action that would leave a file beside the run."""

    def once() -> Call:
        (state.parent.parent / "acted").unlink(missing_ok=True)
        line = ("watch", state.parent, "--once", "--exec", f"touch {state.parent.parent}/acted")
        return ckpttool(*line)

    return once


def read(path: Path) -> dict[str, Any] | None:
    """The entries, and nothing where it is no state, which is said with its name."""
    error = None
    try:
        with State(path, path.parent) as state:
            for name, entry in state.entries.items():
                _ = entry.anchor is None or is_rewritten(path.parent / name, entry.anchor)
            return dict(state.entries)
    except CannotWrite as found:
        error = found
    assert str(path) in error.message
    assert error.hint
    return None


def test_cut_at_every_byte_it_is_none(state: Path) -> None:
    whole = state.read_bytes()
    for length in range(len(whole) - 1):  # the last byte ends the line
        state.write_bytes(whole[:length])
        assert read(state) is None, length
        assert state.read_bytes() == whole[:length]


def test_with_bits_flipped_it_is_none_or_of_the_right_types(state: Path) -> None:
    whole, chance, none = state.read_bytes(), random.Random(8), 0
    for _ in range(FLIPS):
        raw = bytearray(whole)
        for _ in range(chance.choice((1, 1, 3))):
            raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        state.write_bytes(raw)
        none += read(state) is None
        assert state.read_bytes() == raw
    assert FLIPS // 3 < none < FLIPS


def other(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        (entry,) = content["checkpoints"].values()
        entry[key] = value

    return change


def renamed(name: str) -> Callable[[dict[str, Any]], None]:
    def change(content: dict[str, Any]) -> None:
        (entry,) = content["checkpoints"].values()
        content["checkpoints"] = {name: entry}

    return change


@pytest.mark.parametrize(
    "change",
    [
        *map(renamed, ("a\0b", "\ud800", "../elsewhere", "/etc", "", "x" * 5000, "global_step_10/../../x", "\x1b[31m")),
        *(other("anchor", {"file": file, "written": 1}) for file in ("a\0b", "\ud800", "../../x", "/etc/passwd", "")),
        other("anchor", {"file": "a", "written": 10**30}),
        *(other("at", at) for at in (float("nan"), float("inf"), -1e300)),
        *(other("status", status) for status in STATUSES),
        *(other("attempts", count) for count in (-1, 10**30)),
        other("actions", ["\ud800", "\x1b[31m", "x" * 100_000]),
        *(other("course", course) for course in ("running", "failed", "gone")),
    ],
)
@pytest.mark.parametrize("course", ["done", "running"])
def test_values_that_are_none_end_nothing(
    state: Path, ask: Ask, change: Callable[[dict[str, Any]], None], course: str
) -> None:
    content = json.loads(state.read_bytes())
    other("course", course)(content)
    change(content)
    raw = json.dumps(content).encode()
    state.write_bytes(raw)
    call = ask()
    assert call.code in (0, 6), call.err
    assert "\x1b" not in call.out + call.err
    if call.code == 6:
        assert state.read_bytes() == raw


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(5 << 30)


PLACED: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a hole": _hole,
    "a link to nowhere": lambda path: path.symlink_to("gone"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to zeros": lambda path: path.symlink_to("/dev/zero"),
    "a link to a text": lambda path: path.symlink_to("latest_checkpointed_iteration.txt"),
    "a link to a state": lambda path: path.symlink_to(_elsewhere(path)),
}


def _elsewhere(path: Path) -> Path:
    there = path.parent.parent / "elsewhere.json"
    there.write_text('{"ckpttool_watch": 1, "checkpoints": {}}')
    return there


@pytest.mark.parametrize("name", PLACED)
def test_something_else_in_its_place_stays(state: Path, ask: Ask, name: str) -> None:
    state.unlink()
    PLACED[name](state)
    before = state.lstat()
    call = ask()
    assert call.code == 6
    assert NAME in call.err
    assert "--state" in call.err
    after = state.lstat()
    assert (after.st_ino, after.st_mtime_ns, after.st_size) == (before.st_ino, before.st_mtime_ns, before.st_size)
    assert not (state.parent.parent / "acted").exists()
    assert not (state.parent.parent / "gone").exists()


@pytest.mark.parametrize("name", PLACED)
def test_something_else_in_the_place_of_the_lock(state: Path, ask: Ask, name: str) -> None:
    lock = state.with_name(f"{NAME}.lock")
    lock.unlink()
    PLACED[name](lock)
    call = ask()
    is_link = lock.is_symlink()
    kind = lock.lstat().st_mode
    (lock.rmdir if stat.S_ISDIR(kind) else lock.unlink)()
    lock.touch()
    assert call.code == (6 if is_link or stat.S_ISDIR(kind) else 0), call.err
    assert not (state.parent / "gone").exists()
