"""The completion files: current, and completing in every shell that is here."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "completions"
GENERATE = runpy.run_path(str(FOLDER / "generate.py"))

ASK = {
    "bash": "source {file}; COMP_WORDS=({words}); COMP_CWORD={last}; _ckpttool_completion ckpttool;"
    ' echo "${{COMPREPLY[@]}}"',
    "zsh": "autoload -U compinit; compinit -D; source {file}; function _arguments {{ print -r -- $@ }};"
    " function _files {{ }}; words=({words}); CURRENT=$#words; _ckpttool_completion",
    "fish": "source {file}; complete --do-complete '{line}'",
}
SHELLS = [shell for shell in ASK if shutil.which(shell)]


@pytest.mark.parametrize(("shell", "name"), GENERATE["FILES"].items())
def test_files_are_current(shell: str, name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == GENERATE["script"](shell), "run completions/generate.py"


def complete(shell: str, words: list[str]) -> str:
    script = ASK[shell].format(
        file=FOLDER / GENERATE["FILES"][shell], words=" ".join(words), last=len(words) - 1, line=" ".join(words)
    )
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run([shell, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ckpttool", "ins"], {"inspect"}),
        (["ckpttool", "inspect", "--te"], {"--tensors"}),
        (["ckpttool", "inspect", "--color", "a"], {"auto", "always"}),
    ],
)
def test_shell_completes(shell: str, words: list[str], expected: set[str]) -> None:
    assert expected <= set(re.findall(r"[-\w]+", complete(shell, words)))


@pytest.mark.parametrize("shell", SHELLS)
def test_shell_completes_what_the_run_has(shell: str, tmp_path: Path) -> None:
    """Steps and roles come from the run on the command line; a path that is not there has none."""
    for name in ("global_step_5/actor", "global_step_20/actor", "global_step_20/critic", "logs/old"):
        (tmp_path / name).mkdir(parents=True)
    ask = ["ckpttool", "inspect", str(tmp_path)]
    steps = complete(shell, [*ask, "--step", "2"])
    assert "20" in re.findall(r"[-\w]+", steps)
    roles = complete(shell, [*ask, "--role", "c"])
    assert "critic" in re.findall(r"[-\w]+", roles)
    assert "old" not in complete(shell, [*ask, "--role", "o"])
    assert "critic" not in complete(shell, ["ckpttool", "inspect", str(tmp_path / "nothing"), "--role", "c"])


def test_bash_is_tested_everywhere() -> None:
    assert "bash" in SHELLS
