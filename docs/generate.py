"""Write what is made from the code: ``cli.md``, the matrix in ``verl-layouts.md``, the sessions in the README.

``python docs/generate.py`` writes; a test holds the pages to what this returns.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

from ckpttool import layout
from ckpttool.demo import write_demo
from ckpttool.inspection.suggestions import COMMANDS

DOCS = Path(__file__).parent
README = DOCS.parent / "README.md"

_SESSION = re.compile(r"```console\n\$ (ckpttool .+)\n(?:[^`]*\n)?```")
_AGE = re.compile(r"\b\d+ (s|min|h|d)\n")
_TIME = re.compile(r" in [\d.]+ (ms|s)\n")
_CLOCK = re.compile(r"^\d\d:\d\d:\d\d  ", re.MULTILINE)
_DAY = re.compile(r"^\d{4}-\d\d-\d\d\n", re.MULTILINE)


def pages() -> dict[Path, str]:
    """Return every page that is made from the code, by path."""
    return {
        DOCS / "cli.md": cli_page(),
        DOCS / "verl-layouts.md": with_matrix((DOCS / "verl-layouts.md").read_text(encoding="utf-8")),
        README: with_sessions(README.read_text(encoding="utf-8")),
    }


def cli_page() -> str:
    """Return the reference of the command line: the help of every command."""
    parts = ["# Command line\n\nMade from the code by `python docs/generate.py`.\n"]
    for command in ("", *sorted(COMMANDS)):
        words = ["ckpttool", *([command] if command else []), "--help"]
        parts.append(f"## {' '.join(words[:-1])}\n\n```console\n$ {' '.join(words)}\n{run(words)}```\n")
    return "\n".join(parts)


def with_matrix(page: str) -> str:
    """Return a page with the contents matrix between its markers."""
    lines = ["| bridge | dist ckpt | `save_contents` | model weights |", "|---|---|---|---|"]
    for bridge, dist, contents in product(
        (True, False), (False, True), (("model",), ("hf_model",), ("model", "hf_model"))
    ):
        trees = layout.expected_trees(contents, use_mbridge=bridge, use_dist_checkpointing=dist)
        where = (
            f"illegal: {trees.reason}"
            if isinstance(trees, layout.Illegal)
            else ", ".join(f"`{t.path}/`" for t in trees)
        )
        words = " and ".join(f"`{word}`" for word in contents)
        lines.append(f"| {'yes' if bridge else 'no'} | {'yes' if dist else 'no'} | {words} | {where} |")
    before, _, rest = page.partition("<!-- matrix -->\n")
    _, marker, after = rest.partition("<!-- end of matrix -->")
    return f"{before}<!-- matrix -->\n" + "\n".join(lines) + f"\n{marker}{after}"


def with_sessions(page: str) -> str:
    """Return a page whose console blocks show what their command prints on the demo."""
    with tempfile.TemporaryDirectory() as folder:
        write_demo(Path(folder, "ckpttool-demo"))
        return _SESSION.sub(lambda m: f"```console\n$ {m[1]}\n{run(shlex.split(m[1]), folder)}```", page)


def run(words: list[str], folder: str | None = None) -> str:
    """Return what a command prints to a pipe, 100 columns wide, with every age, duration and time of day the same."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-m", "ckpttool", *words[1:]]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", check=False)  # noqa: S603
    if done.returncode > (words[1] == "diff"):  # which says by it that there are differences
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
    shown = _DAY.sub("2026-12-01\n", done.stdout)
    return _CLOCK.sub("12:00:00  ", _TIME.sub(" in 20 ms\n", _AGE.sub("1 min\n", shown)))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
