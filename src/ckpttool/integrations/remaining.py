"""What training has left to be done, in a process of its own: Python starts no thread pool in one that is ending."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from ckpttool.errors import CkpttoolError
from ckpttool.integrations.acting import Acting, catch_up

_CODE = """
import json, sys
given = json.loads(sys.argv[1])
sys.path[:] = given["modules"]
from ckpttool.integrations.remaining import main
sys.exit(main(given))
"""


def do_elsewhere(acting: Acting, steps: Sequence[int]) -> None:
    """Act on steps in a child process that finds the same modules; ``acting`` is closed, as the child takes its lock.

    What it does, and what is left undone, is told on the standard error output.
    """
    acting.close()
    _say(f"training has ended; what is left of {_named(steps)} of {acting.run} is done now. Ctrl-C leaves it undone.")
    given = {"modules": sys.path, "run": str(acting.run), "file": str(acting.file), "steps": list(steps)}
    if reason := _run(given):
        _say(f"{reason}. To do what is left: {acting.catch_up()}")


def _run(given: Mapping[str, Any]) -> str:
    """Run a child that takes the modules of this process alone, and return why it could not tell what came of it."""
    if not sys.executable:
        return "Python runs inside of another program, and cannot be started"
    command = [sys.executable, "-I", "-c", _CODE, json.dumps(given)]
    try:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode  # noqa: S603 - no shell
    except OSError as error:
        return f"{sys.executable}: {error.strerror}"
    return f"The process that acts was killed by signal {-code}" if code < 0 else ""


def main(given: Mapping[str, Any]) -> int:
    """Act on steps, and return the exit code: that of what was not finished, 1 where an action failed."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="ckpttool: %(message)s")
    run, file = Path(given["run"]), Path(given["file"])
    code = 130
    with suppress(KeyboardInterrupt):
        code = _act(run, file, given["steps"])
    if code:
        _say(f"{_named(given['steps'])}: not all was done. To do what is left: {catch_up(run, file)}")
    return code


def _act(run: Path, file: Path, steps: Sequence[int]) -> int:
    try:
        with closing(Acting(run, file)) as acting:
            unfinished = acting.finish(steps)
    except CkpttoolError as error:
        unfinished = [error]
    for problem in unfinished:
        _say(str(problem))
    return unfinished[0].exit_code if unfinished else 1 if acting.failures else 0


def _named(steps: Sequence[int]) -> str:
    return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"


def _say(text: str) -> None:
    sys.stderr.write(f"ckpttool: {text}\n")
    sys.stderr.flush()
