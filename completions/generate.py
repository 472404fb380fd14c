"""Write the shell completion files of this folder: ``python completions/generate.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {"bash": "ckpttool.bash", "zsh": "_ckpttool", "fish": "ckpttool.fish"}


def script(shell: str) -> str:
    """Return the completion script that the command line prints for a shell."""
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "ckpttool", "--show-completion", shell]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)  # noqa: S603
    return done.stdout


if __name__ == "__main__":
    for shell, name in FILES.items():
        Path(__file__).with_name(name).write_text(script(shell), encoding="utf-8")
