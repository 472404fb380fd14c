"""`--exec`: commands as actions. Values of any kind reach them whole, and none of them is read as code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ckpttool import environment
from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import UsageError
from ckpttool.watching.actions import ActionFailed, children, commands
from ckpttool.watching.actions.commands import Exec

EVENT = CheckpointEvent(
    run="/runs/a b",
    name="global_step_20/actor",
    path="/runs/a b/.ckpttool-pins/global_step_20/actor",
    original="/runs/a b/global_step_20/actor",
    step=20,
    role="actor",
    kind="fsdp",
    attempt=2,
)
SHELLS = [shell for shell in ("/bin/sh", "/bin/bash") if Path(shell).exists()]
HOSTILE = (
    *("$(touch gone)", "`touch gone`", '"; touch gone; "', "'; touch gone; '", "\n touch gone\n#", "a  b\t*"),
    *("a[$(touch gone)]", "$((1+1)) $HOME ~", "\\", "-n", "{step}{path}", "\U0001f642 \udcff", "&& touch gone"),
)
LINES = (
    "printf %s {role} > out",
    'printf %s "{role}" > out',
    "printf %s ''{role}\"\" > out",
    'printf %s "$(printf %s {role}; printf .)" > out',
    'printf %s "$(printf %s "{role}")." > out',
    'printf %s "`printf %s "{role}"`." > out',
    'x={role}; printf %s "$x" > out',
    "(printf %s {role}) > out # it's {path}",
    "# it's \"one\nprintf %s {role} > out",
    "case x in x) printf %s {role} > out;; esac",
    'printf %s "\\"$(({step}+1))"{role} > out',
    "printf %s '\\'{role}'{step}' > out; cat << end\nit's\nend",
)
"""Lines that write the role to a file, some of them with something around it."""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


def failure(command: str, event: CheckpointEvent = EVENT, *, shell: bool = False) -> ActionFailed:
    with pytest.raises(ActionFailed) as caught:
        Exec(command, shell).run(event)
    assert str(caught.value).startswith(f"exec {command}: ")
    return caught.value


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_is_one_word_whatever_is_in_it(value: str, tmp_path: Path) -> None:
    script(tmp_path / "save", '#!/bin/sh\nprintf %s "$2" > out; printf %s "$#$1$3" > words\n')
    assert Exec("./save {step} {role} '{kind} {x} {\"a\": 1}'").run(replace(EVENT, role=value)).endswith(": done")
    assert (tmp_path / "out").read_bytes() == os.fsencode(value)
    assert (tmp_path / "words").read_text() == '320fsdp {x} {"a": 1}'


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("line", LINES)
def test_no_value_is_code_for_a_shell(shell: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "SHELL", shell)
    action = Exec(line, shell=True)
    around = (b'"21', b"") if "+1" in line else (b"\\", b"20") if "cat" in line else (b"", b"." * ("." in line))
    for value in HOSTILE:
        action.run(replace(EVENT, role=value))
        assert (tmp_path / "out").read_bytes() == around[0] + os.fsencode(value) + around[1], value
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("echo '{path}'", "in single quotes"),
        ("sh -c 'upload {role}'", "in single quotes"),
        ("echo $(( {role} + 1 ))", "in arithmetic"),
        ('echo "$(( ({role}) ))"', "in arithmetic"),
        ("(( {role} ))", "in arithmetic"),
        ("cat << end\n{path}\nend", "after a here-document"),
    ],
)
def test_where_a_shell_would_not_put_the_value_is_refused(line: str, where: str) -> None:
    with pytest.raises(UsageError, match=where) as caught:
        Exec(line, shell=True)
    assert '"$CKPTTOOL_' in caught.value.hint


def test_what_is_no_placeholder_stays(tmp_path: Path) -> None:
    line = "printf '%s ' '{attempt}' {words} '{\"path\": 1}' \\{path} ${CKPTTOOL_PATH##*/} > out"
    Exec(line, shell=True).run(EVENT)
    assert (tmp_path / "out").read_text() == '{attempt} {words} {"path": 1} {path} actor '


def test_a_command_is_told_of_the_event(tmp_path: Path) -> None:
    Exec("cat > event.json; env -0 > environment", shell=True).run(EVENT)
    text = (tmp_path / "event.json").read_text()
    assert json.loads(text) == EVENT.as_json()
    assert text.count("\n") == 1
    told = dict(line.split("=", 1) for line in (tmp_path / "environment").read_text().split("\0")[:-1])
    names = ("path", "step", "role", "kind", "run", "name", "original", "attempt")
    assert {f"CKPTTOOL_{name.upper()}": str(getattr(EVENT, name)) for name in names}.items() <= told.items()


@pytest.mark.parametrize("words", [["true"], ["sh", "-c", "exec <&-; exit 0"], ["head", "-c", "1"]])
def test_an_event_need_not_be_read(words: list[str]) -> None:
    """Also where it is bigger than any pipe."""
    assert children.run(words, os.environ, b"x" * (4 << 20)) == 0


def test_what_a_command_prints_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    Exec("echo out; echo err >&2", shell=True).run(EVENT)
    assert capfd.readouterr() == ("", "out\nerr\n")


def test_a_command_runs_in_the_environment_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_ours", set())
    for name in environment.BLAS_THREADS:
        monkeypatch.setenv(name, "1")
        monkeypatch.delenv(name)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    environment.limit_threads()
    assert [os.environ[name] for name in environment.BLAS_THREADS] == ["1", "7", "1", "1"]
    Exec("env > out", shell=True).run(EVENT)
    told = (tmp_path / "out").read_text().splitlines()
    assert [line for line in told if line.partition("=")[0] in environment.BLAS_THREADS] == ["MKL_NUM_THREADS=7"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_command_has_the_signals_that_a_shell_gives(tmp_path: Path) -> None:
    Exec("grep -E 'Sig(Ign|Blk)' /proc/self/status > out; ps -o sid= -p $$ >> out; echo $$ >> out", shell=True).run(
        EVENT
    )
    ignored, blocked, session, pid = (line.split()[-1] for line in (tmp_path / "out").read_text().splitlines())
    assert session == pid
    assert int(ignored, 16) & sum(1 << number - 1 for number in (signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ)) == 0
    assert int(blocked, 16) == 0


@pytest.mark.parametrize(
    ("command", "status", "message", "hint"),
    [
        ("exit 3", 3, "ended with code 3", ""),
        ("exit 137", 137, "ended with code 137", "killed by SIGKILL (signal 9)"),
        ("kill -9 $$", -9, "was killed by SIGKILL (signal 9)", ""),
        ("kill -TERM $$", -15, "was killed by SIGTERM (signal 15)", ""),
        ("nothing-of-this-name", 127, "ended with code 127", ""),
    ],
)
def test_a_code_is_told(command: str, status: int, message: str, hint: str) -> None:
    error = failure(command, shell=True)
    assert (error.status, error.exit_code, error.message) == (status, 1, f"exec {command}: {message}")
    assert hint in error.hint


def test_a_program_that_cannot_be_run_says_why(tmp_path: Path) -> None:
    script(tmp_path / "closed", "#!/bin/sh\n").chmod(0o644)
    script(tmp_path / "bare", "echo\n")
    script(tmp_path / "strange", "#!/nowhere/sh\n")
    found = {name: failure(f"./{name} x") for name in ("absent", "closed", "bare", "strange")}
    assert [error.status for error in found.values()] == [127, 126, 126, 127]
    assert [error.message.rpartition(": ")[2] for error in found.values()] == [
        *("No such file or directory", "Permission denied", "Exec format error", "No such file or directory"),
    ]
    assert [found[name].hint.split()[-1] for name in found if found[name].hint] == ["./closed", "#!/bin/sh", "names?"]
    assert failure("true", replace(EVENT, role="x" * (1 << 18))).status == 126


@pytest.mark.parametrize(
    ("command", "shell", "message"),
    [
        ("", False, "an empty command"),
        (" \n", True, "an empty command"),
        ("a\0b", False, "a NUL byte"),
        ("''", False, "names no program"),
        ("upload.sh '{path}", False, "no closing quotation"),
        ("upload-of-nobody {path}", False, "there is no program upload-of-nobody"),
        ("~/upload.sh {path}", False, "there is no program ~/upload.sh"),
        ("A=1 true", False, "there is no program A=1"),
        ("true {path} | cat", False, "| is a word like others"),
        ("true {path} && true", False, "&& is a word like others"),
        ("echo 'a", True, "(?i)unterminated quoted string|unexpected EOF"),
        ("if true", True, "(?i)syntax error"),
    ],
)
def test_what_can_never_run_is_refused_early(command: str, shell: bool, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("|", "\\|") if not shell else message):
        Exec(command, shell)


@pytest.mark.parametrize("command", ["grep '|' {path}", "./made-later {path}", "{kind}-upload {path}", "true 'a | b'"])
def test_what_may_run_is_taken(command: str) -> None:
    assert Exec(command).label == f"exec {command}"


class Interrupted(BaseException):
    pass


@pytest.fixture
def interrupt() -> Any:
    """Raise in the middle of whatever runs when SIGUSR1 arrives."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, stop)
    yield stop
    signal.signal(signal.SIGUSR1, before)


def running(pids: Path) -> list[int]:
    return [pid for pid in map(int, pids.read_text().split()) if not ended(pid)]


def ended(pid: int) -> bool:
    """Also where nobody has asked how it ended."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip()[:1] in ("", "Z")


@pytest.mark.parametrize(
    ("trap", "grace", "left"),
    [
        ("trap 'echo told > out; exit' TERM", 60.0, ["out", "pids"]),
        ("trap '' TERM", 0.0, ["pids"]),
    ],
)
@pytest.mark.usefixtures("interrupt")
def test_an_interruption_ends_the_whole_group(
    trap: str, grace: float, left: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SIGTERM, and those that do not heed it with SIGKILL."""
    monkeypatch.setattr(children, "GRACE", grace)
    inner = f"echo $$ $PPID > pids; kill -USR1 {os.getpid()}; exec sleep 1000"
    line = f"{trap}; sh -c '{inner}' & wait; sleep 1000"
    with pytest.raises(Interrupted):
        Exec(line, shell=True).run(EVENT)
    assert sorted(os.listdir(tmp_path)) == left
    assert running(tmp_path / "pids") == []


@pytest.mark.usefixtures("interrupt")
def test_a_second_interruption_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "GRACE", 60.0)
    line = "trap 'kill -USR1 $PPID' TERM; echo $$ > pids; kill -USR1 $PPID; while :; do sleep 0.1; done"
    with pytest.raises(Interrupted):
        Exec(line, shell=True).run(EVENT)
    assert running(tmp_path / "pids") == []


@pytest.mark.usefixtures("interrupt")
def test_an_interruption_while_a_program_starts_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows yet which program it is."""
    made: list[int] = []

    def starting(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.1)
        made.append((process := popen(*arguments, **options)).pid)
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", starting)
    with pytest.raises(Interrupted):
        Exec("sleep 1000").run(EVENT)
    monkeypatch.setattr(subprocess, "Popen", popen)
    assert [ended(pid) for pid in made] == [True]


def test_what_a_command_leaves_in_the_background_is_left(tmp_path: Path) -> None:
    Exec("sleep 1000 & echo $! > pids", shell=True).run(EVENT)
    (pid,) = running(tmp_path / "pids")
    os.kill(pid, signal.SIGKILL)


def test_control_c_ends_the_command_of_a_process(tmp_path: Path) -> None:
    code = (
        "from ckpttool.callbacks import CheckpointEvent\n"
        "from ckpttool.watching.actions.commands import Exec\n"
        "event = CheckpointEvent(run='', name='', path='', original='', step=1)\n"
        "Exec('sleep 1000 & echo $$ $! > pids; mv pids there; wait', True).run(event)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, start_new_session=True)
    while not (tmp_path / "there").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    assert b"KeyboardInterrupt" in process.communicate()[1]
    assert running(tmp_path / "there") == []
