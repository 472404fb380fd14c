"""What training has left to be done, in a process of its own: Python starts no thread pool in one that is ending."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckpttool.errors import CkpttoolError
from ckpttool.integrations.acting import Acting

_CODE = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["modules"]
from ckpttool.integrations.remaining import main
sys.exit(main(given))
"""


def do_elsewhere(acting: Acting, steps: Sequence[int]) -> int:
    """Act on steps in a child process that finds the same modules, and return its exit code, as of ``watch``.

    ``acting`` is closed: the child takes its lock. It tells on the standard error output what it does.
    """
    acting.close()
    names = ", ".join(map(str, steps))
    _say(f"training has ended; step {names} of {acting.run} is still to be acted on (Ctrl-C leaves it undone)")
    given = {"modules": sys.path, "run": str(acting.run), "file": str(acting.file), "steps": list(steps)}
    code = _run(given)
    if code:
        _say(f"step {names}: not all was done, code {code}. What is left: {acting.catch_up()}")
    return code


def _run(given: Mapping[str, Any]) -> int:
    """Start a child that reads no environment and no directory for modules, but takes those of this process."""
    if not sys.executable:  # Python inside of another program
        return 70
    try:
        command = [sys.executable, "-I", "-c", _CODE, json.dumps(given)]
        return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode  # noqa: S603 - no shell
    except OSError as error:
        _say(f"{sys.executable}: {error.strerror}")
        return 70


def main(given: Mapping[str, Any]) -> int:
    """Act on steps, and return the exit code: that of the first error, 1 where an action failed."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="ckpttool: %(message)s")
    try:
        acting = Acting(Path(given["run"]), Path(given["file"]))
        try:
            unfinished = acting.finish(given["steps"])
        finally:
            acting.close()
    except CkpttoolError as error:
        _say(str(error))
        return error.exit_code
    for late in unfinished:
        _say(str(late))
    return 1 if acting.failures else unfinished[0].exit_code if unfinished else 0


def _say(text: str) -> None:
    sys.stderr.write(f"ckpttool: {text}\n")
    sys.stderr.flush()
