"""What `watch` prints: a line for everything that happens, one object a line for programs, one line that moves."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import Problem
from ckpttool.render.watching import Display, status_line
from ckpttool.watching import Notice, Status
from tests.conftest import Call

NOW = 1_800_000_000.0
EVENT = CheckpointEvent(run="/r", name="global_step_20/actor", path="/r/p", original="/r/global_step_20/actor", step=20)
FAILED = Notice(
    what="failed",
    at=NOW,
    message="exec up.sh: ended with code 3",
    event=EVENT,
    data={"action": "exec up.sh", "status": 3, "attempts_left": 0},
    problems=(Problem(code="action-failed", message="exec up.sh: ended with code 3", hint="Look into it."),),
    detail='  File "hooks.py", line 5\x1b[31m',
)
FINISHED = Notice(
    what="finished",
    at=NOW,
    message="global_step_20/actor is finished: ckpt_contents.json",
    event=EVENT,
    data={"sign": "ckpt_contents.json", "bytes": 12_300_000_000, "files": 9},
)


def told(*notices: Notice, json: bool = False, quiet: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    with Display(console, console, json=json, quiet=quiet, progress=False) as shown:
        for notice in notices:
            shown.tell(notice)
    return out.getvalue()


def test_a_finished_checkpoint_is_one_line_below_the_day() -> None:
    day, at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(NOW)).split()
    line = f"{at}  global_step_20/actor is finished: ckpt_contents.json, 12.3 GB in 9 files\n"
    assert told(FINISHED) == f"{day}\n{line}"
    assert told(FINISHED, FINISHED) == f"{day}\n{line}{line}"
    assert told(FINISHED, replace(FINISHED, at=NOW + 86400)).count("\n20") == 1


def test_a_failure_says_the_code_the_hint_and_where_it_happened() -> None:
    at = time.strftime("%H:%M:%S", time.localtime(NOW))
    text = told(FAILED)
    assert text.splitlines()[1:] == [
        f"{at}  ! exec up.sh: ended with code 3",
        "            Look into it.",
        '              File "hooks.py", line 5\\x1b[31m',
    ]


def test_programs_get_an_object_a_line() -> None:
    lines = [json.loads(line) for line in told(FINISHED, FAILED, json=True).splitlines()]
    assert [(line["command"], line["ok"], line["data"]["event"]) for line in lines] == [
        ("watch", True, "finished"),
        ("watch", False, "failed"),
    ]
    assert lines[0]["data"]["checkpoint"] == EVENT.as_json()
    assert (lines[0]["data"]["bytes"], lines[0]["data"]["at"]) == (12_300_000_000, NOW)
    assert lines[1]["problems"][0]["code"] == "action-failed"
    assert lines[1]["data"]["status"] == 3


def test_quietly_there_are_failures_and_an_end_that_is_one() -> None:
    end = Notice(what="stopped", at=NOW, message="stopped: that was one look", data=END)
    text = told(FINISHED, FAILED, replace(end, problems=FAILED.problems), quiet=True)
    assert "is finished" not in text
    assert text.count("ended with code 3") == 1
    assert text.splitlines()[-1] == (
        "stopped: that was one look; 2 checkpoints done, 5 before; 1 failed, which the next watch tries again; "
        "a waits for b (and 1 more)"
    )
    assert told(FINISHED, end, quiet=True) == ""


WAITING = [{"checkpoint": "a", "waits_for": "b"}, {"checkpoint": "c", "waits_for": "d"}]
END = {"reason": "that was one look", "done": 2, "done_before": 5, "failed": 1, "unfinished": WAITING}


@pytest.mark.parametrize(
    ("status", "line"),
    [
        (Status(), "waiting: nothing yet"),
        (Status(last="global_step_20/actor"), "waiting: last global_step_20/actor"),
        (
            Status(last="iter_0000020", expected=30, due=NOW + 700),
            "waiting: last iter_0000020; next step 30 in about 11 min 40 s",
        ),
        (Status(last="iter_0000020", expected=30, due=NOW - 5), "waiting: last iter_0000020; next step 30 is due"),
        (
            Status(last="iter_0000020", expected=30, due=NOW - 700),
            "waiting: last iter_0000020; next step 30 was due 11 min 40 s ago",
        ),
        (
            Status(growing="iter_0000030", expected=30, bytes=5_000_000, rate=2_000_000.0, awaited="metadata.json"),
            "waiting: nothing yet; iter_0000030: 5 MB, 2 MB/s, waits for metadata.json",
        ),
    ],
)
def test_the_line_that_moves_says_where_things_stand(status: Status, line: str) -> None:
    assert status_line(status, NOW) == line


def test_it_is_drawn_on_a_terminal_and_erased_before_anything_else() -> None:
    out = io.StringIO()
    console = Console(file=out, width=60, force_terminal=True, highlight=False, color_system=None)
    with Display(console, console, json=False, quiet=False, progress=True) as shown:
        shown.wait(Status(last="global_step_20/actor" + "\x1b" * 60))
        shown.tell(FINISHED)
        shown.wait(Status())
    drawn, _, rest = out.getvalue().partition("\r\x1b[K")[2].partition("\r\x1b[K")
    assert len(drawn) == 59
    assert drawn.startswith("waiting: last global_step_20/actor\\x1b")
    assert rest.partition("\n")[0].endswith("12.3 GB in 9 files") or "is finished" in rest
    assert rest.endswith("\r\x1b[Kwaiting: nothing yet\r\x1b[K")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--interval", "soon"], "--interval soon: no time"),
        (["--timeout", "0s"], "--timeout 0s: no time at all"),
        (["--since", "-3"], "--since -3: no whole number"),
        (["--keep-last", "0"], "--keep-last 0: no whole number above 0"),
        (["--retries", "x"], "--retries x: no whole number"),
        (["--yes"], "--yes without --keep-last or --keep-every"),
        (["--exec", "echo {stp}"], "there is no {stp}"),
        (["--dtype", "int8"], "--dtype int8: not one of bf16, fp16, fp32"),
    ],
)
def test_words_that_make_no_sense(ckpttool: Callable[..., Call], tmp_path: Path, words: list[str], said: str) -> None:
    call = ckpttool("watch", tmp_path, *words)
    assert call.code == 2
    assert said in call.err


def test_programs_get_a_line_when_it_fails_too(ckpttool: Callable[..., Call], tmp_path: Path) -> None:
    (tmp_path / ".ckpttool-watch.json").write_text("no state")
    call = ckpttool("watch", tmp_path, "--once", "--json")
    assert call.code == 6
    (line,) = call.out.splitlines()
    assert json.loads(line)["problems"][0]["code"] == "bad-state"


def test_what_cannot_be_a_run(ckpttool: Callable[..., Call], tmp_path: Path, data: Path) -> None:
    call = ckpttool("watch", tmp_path / "none", "--once")
    assert call.code == 3
    assert f"mkdir -p {tmp_path / 'none'}" in call.err
    step = tmp_path / "run" / "global_step_5" / "actor"
    step.mkdir(parents=True)
    for path in (step, step.parent):
        call = ckpttool("watch", path, "--once")
        assert call.code == 2
        assert f"ckpttool watch {tmp_path / 'run'}" in call.err
    assert ckpttool("watch", data / "fsdp" / "torch2.13-fsdp2", "--once").code == 2
