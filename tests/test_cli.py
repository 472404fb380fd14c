"""The border: what reaches the terminal, which stream, which exit code."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import __version__, cli, demo
from ckpttool.cli import app, expand_tensors, main
from ckpttool.errors import CkpttoolError
from ckpttool.inspection.suggestions import COMMANDS
from ckpttool.render import terminal
from ckpttool.telling import tell
from tests.conftest import Call

Run = Callable[..., Call]


def test_suggested_commands_are_those_of_the_command_line() -> None:
    assert {command.name for command in app.registered_commands} == COMMANDS


def test_version(ckpttool: Run) -> None:
    assert ckpttool("--version").out == f"ckpttool {__version__}\n"


@pytest.mark.parametrize("arguments", [["inspect", "--no-such-option"], ["no-such-command"], ["inspect", "a", "b"]])
def test_wrong_usage_is_2_and_says_where_help_is(ckpttool: Run, arguments: list[str]) -> None:
    call = ckpttool(*arguments)
    assert call.code == 2
    assert call.out == ""
    assert "-h" in call.err


def test_unknown_color_is_wrong_usage(ckpttool: Run, data: Path) -> None:
    call = ckpttool("inspect", data / "fsdp" / "torch2.6-fsdp2", "--color", "pink")
    assert call.code == 2
    assert "auto, always, never" in call.err


def test_error_goes_to_stderr_as_fact_and_hint(ckpttool: Run, tmp_path: Path) -> None:
    call = ckpttool("inspect", tmp_path / "nothing")
    assert call.code == 3
    assert call.out == ""
    assert call.err.startswith("error: ")
    assert "hint:" in call.err


def test_paths_in_an_error_are_as_one_types_them(
    ckpttool: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    call = ckpttool("merge-fsdp", "run", "-o", "out")
    assert call.err.startswith("error: run: no FSDP shards")
    assert str(tmp_path) not in call.err
    monkeypatch.chdir(tmp_path / "run")
    call = ckpttool("merge-fsdp", tmp_path / "other", "-o", "out")
    assert call.err.startswith(f"error: {tmp_path / 'other'}: no such file or directory")


def test_error_with_json_is_an_envelope_on_stdout(ckpttool: Run, tmp_path: Path) -> None:
    call = ckpttool("inspect", tmp_path / "nothing", "--json")
    assert call.code == 3
    assert call.json["ok"] is False
    assert call.json["command"] == "inspect"
    assert "no such file" in call.json["problems"][0]["message"]


def test_our_bug_is_70_and_asks_for_a_report(ckpttool: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ckpttool.inspection.inspect", lambda *_, **__: 1 / 0)
    call = ckpttool("inspect", tmp_path)
    assert call.code == 70 == CkpttoolError.exit_code
    assert "ZeroDivisionError" in call.err
    assert "--debug" in call.err
    with pytest.raises(ZeroDivisionError):
        main(["--debug", "inspect", str(tmp_path)])


def test_an_empty_path_is_an_unset_variable(ckpttool: Run) -> None:
    assert ckpttool("inspect", "").code == 2


def test_debug_may_stand_after_the_command(ckpttool: Run, data: Path) -> None:
    assert ckpttool("inspect", data / "fsdp" / "torch2.6-fsdp2", "--debug").code == 0


@pytest.mark.parametrize("kind", ["empty", "config", "foreign"])
def test_strict_says_yes_to_what_is_whole_only(ckpttool: Run, tmp_path: Path, data: Path, kind: str) -> None:
    if kind == "config":
        (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    if kind == "foreign":
        (tmp_path / "zero_to_fp32.py").write_text("")
    assert ckpttool("inspect", tmp_path).code == 0
    assert ckpttool("inspect", tmp_path, "--strict").code == 1
    assert ckpttool("inspect", data / "fsdp" / "torch2.6-fsdp2", "--strict").code == 0


@pytest.mark.parametrize(
    ("arguments", "expanded"),
    [
        (["inspect", "--tensors"], ["inspect", "--tensors=*"]),
        (["inspect", "--tensors", "--json"], ["inspect", "--tensors=*", "--json"]),
        (["inspect", "--tensors", "*norm*"], ["inspect", "--tensors", "*norm*"]),
        (["inspect", "--tensors", "."], ["inspect", "--tensors=*", "."]),
    ],
)
def test_tensors_may_go_without_a_value(arguments: list[str], expanded: list[str]) -> None:
    assert expand_tensors(arguments) == expanded


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_have_their_exit_codes(tmp_path: Path, stop: signal.Signals, code: int) -> None:
    program = (
        "import sys, time, ckpttool.inspection as i; from ckpttool.cli import entry;"
        "i.inspect = lambda *a, **k: (print('ready', file=sys.stderr, flush=True), time.sleep(60));"
        f"sys.argv = ['ckpttool', 'inspect', {str(tmp_path)!r}]; entry()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "ready\n"
        time.sleep(0.1)
        process.send_signal(stop)
        assert process.wait(timeout=20) == code


def test_a_signal_before_the_command_is_parsed_and_after_it_is_done(
    ckpttool: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the exit code is left to say; a traceback would be wrong."""
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def stop(error: BaseException) -> Callable[..., int]:
        def raise_it(**_: object) -> int:
            raise error

        return raise_it

    monkeypatch.setattr(cli, "app", stop(KeyboardInterrupt()))
    assert ckpttool("inspect").code == 130
    for error, code in ((KeyboardInterrupt(), 130), (cli._Terminated(signal.SIGTERM), 143)):
        monkeypatch.setattr(cli, "main", stop(error))
        cli.entry()
        assert ends.pop() == code


def test_a_file_that_cannot_be_read_is_named(ckpttool: Run, monkeypatch: pytest.MonkeyPatch, data: Path) -> None:
    """The system names no file where reading one that is open fails."""

    def fail(_handle: int, _length: int, _offset: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pread", fail)
    call = ckpttool("inspect", data / "fsdp" / "torch2.6-fsdp2", "--strict")
    assert call.code == 1
    assert "model_world_size_4_rank_0.pt: Input/output error" in call.out


def test_a_full_disk_behind_stdout_is_no_bug(data: Path) -> None:
    command = f"{sys.executable} -m ckpttool inspect {data / 'fsdp' / 'torch2.6-fsdp2'} > /dev/full"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, "No space left" in done.stderr) == (6, True)


def test_a_closed_pipe_is_no_traceback(data: Path) -> None:
    command = f"{sys.executable} -m ckpttool inspect {data / 'megatron' / 'mcore0.16-het-tp1'} --tensors | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr


def test_module_and_console_script_are_the_same_program() -> None:
    script, module = [str(Path(sys.executable).with_name("ckpttool"))], [sys.executable, "-m", "ckpttool"]
    helps = {subprocess.run([*c, "--help"], capture_output=True, check=True).stdout for c in (script, module)}
    assert len(helps) == 1


def test_color_only_where_asked_or_on_a_terminal(ckpttool: Run, data: Path) -> None:
    path = data / "fsdp" / "torch2.6-fsdp2"
    assert "\x1b[" not in ckpttool("inspect", path).out
    assert "\x1b[" in ckpttool("inspect", path, "--color", "always").out


def test_piped_lines_have_no_trailing_spaces(ckpttool: Run, data: Path) -> None:
    lines = ckpttool("inspect", data / "megatron" / "mcore0.16-het-tp1").out.splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_a_long_look_says_at_what_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE", -1.0)
    words = ["looking at run/a\\x1b[31m"]
    for color, shown, expected in (("always", True, words), ("always", False, []), ("never", True, [])):
        out = io.StringIO()
        with terminal.watching(terminal.console(out, color), shown=shown):
            time.sleep(0.15)
            tell("run/a\x1b[31m")
        assert re.findall(r"looking at \S+", out.getvalue()) == expected


def test_demo_walks_through_the_commands(ckpttool: Run, tmp_path: Path) -> None:
    call = ckpttool("demo", tmp_path / "demo")
    assert call.code == 0
    scenes = demo.write_demo(tmp_path / "again").scenes
    assert call.out.count("$ ckpttool ") == len(scenes)
    assert {scene.command[0] for scene in scenes} | {"demo"} == COMMANDS
    assert call.out.index("$ ckpttool inspect") < call.out.index("training run")
    assert "layout v1: complete" in call.out
    assert "shards of rank 3 are missing" in call.out


def test_demo_refuses_what_exists_and_replaces_a_demo_only(ckpttool: Run, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "precious").write_text("data")
    assert ckpttool("demo", mine).code == 6
    assert ckpttool("demo", mine, "--force").code == 6
    assert (mine / "precious").read_text() == "data"
    assert ckpttool("demo", tmp_path / "demo").code == 0
    assert ckpttool("demo", tmp_path / "demo").code == 6
    assert ckpttool("demo", tmp_path / "demo", "--force", "--json").json["ok"] is True
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo", "mine"]


def test_demo_leaves_nothing_when_it_fails(monkeypatch: pytest.MonkeyPatch, ckpttool: Run, tmp_path: Path) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ckpttool.demo.shutil.copytree", full)
    call = ckpttool("demo", tmp_path / "demo")
    assert call.code == 6
    assert "No space left" in call.err
    assert list(tmp_path.iterdir()) == []


def test_demo_respects_the_umask(tmp_path: Path) -> None:
    program = (
        f"import os; os.umask(0o027); from ckpttool.cli import main; main(['demo', {str(tmp_path / 'd')!r}, '--json'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["ok"] is True
    modes = {oct(p.stat().st_mode & 0o777) for p in (tmp_path / "d").rglob("*") if p.is_file()}
    assert modes == {"0o640"}
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o750
