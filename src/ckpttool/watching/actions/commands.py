"""``--exec``: a command that the user names, run for a checkpoint as a shell would run it."""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from difflib import get_close_matches

from ckpttool.callbacks import CheckpointEvent
from ckpttool.environment import of_the_user
from ckpttool.errors import UsageError
from ckpttool.watching.actions import ActionFailed, children
from ckpttool.watching.actions.quoting import with_references

SHELL = "/bin/sh"
NAMES = ("path", "step", "role", "kind", "run", "name", "original")
"""What a command may have in braces; the same words, and ``attempt``, are in its environment."""

NOT_EXECUTABLE, NOT_FOUND = 126, 127
"""What a shell says of a command that it cannot run, or cannot find."""

_OPERATORS = ("|", "||", "&", "&&", ";", ">", ">>", "<", "<<", "2>", "2>&1")
"""What is meant for a shell where it stands alone."""

_WORD = re.compile(r"(?<!\$)\{([a-z_]+)\}")
"""What looks like a placeholder; ``${name}`` is the shell's."""

_PLACEHOLDER = re.compile(rf"\{{({'|'.join(NAMES)})\}}")


@dataclass(frozen=True, slots=True)
class Exec:
    """A command line, split into words as a shell does it, or given to a shell.

    Raises :class:`UsageError` for one that can never be run: empty, with a quote that is not closed, or naming a
    program that is not there.
    """

    command: str
    shell: bool = False

    def __post_init__(self) -> None:
        if "\0" in self.command:
            raise UsageError("--exec: a NUL byte in a command")
        if not self.command.strip():
            raise UsageError(f"{self._shown}: an empty command")
        for word in (word for word in _WORD.findall(self.command) if word not in NAMES):
            if close := get_close_matches(word, NAMES, 1):
                raise UsageError(f"{self._shown}: there is no {{{word}}}", hint=f"There is {{{close[0]}}}.")
        if self.shell:
            _check_line(self._shown, self._line(step=0))
        else:
            _check_program(self._shown, _split(self._shown, self.command)[0])

    @property
    def label(self) -> str:
        """What the action is called."""
        return f"exec {self.command}"

    @property
    def _shown(self) -> str:
        return f"--exec {shlex.quote(self.command)}"

    def run(self, event: CheckpointEvent) -> str:
        """Run it and wait; raises :class:`ActionFailed` with its code when that is not 0.

        The event is in its environment and, as a line of JSON, on its standard input; what it prints goes to standard
        error. It leads a process group of its own, which ends with us when we are interrupted.
        """
        words = [SHELL, "-c", self._line(event.step)] if self.shell else self._words(event)
        environment = {**of_the_user(), **variables(event)}
        if sys.stderr is not None:
            sys.stderr.flush()
        try:
            code = children.run(words, environment, json.dumps(event.as_json()).encode() + b"\n")
        except OSError as error:
            raise self._not_run(words[0], error) from error
        if code:
            raise self._ended_with(code)
        return f"{self.label}: done"

    def _words(self, event: CheckpointEvent) -> list[str]:
        values = _values(event)
        words = shlex.split(self.command)
        return [_PLACEHOLDER.sub(lambda found: values[found[1]], word) for word in words]

    def _line(self, step: int) -> str:
        """Return the line for a shell. A number is what it is in any quotes, so it is put in itself."""
        return with_references(self.command.replace("{step}", str(step)), _PLACEHOLDER, variable)

    def _not_run(self, program: str, error: OSError) -> ActionFailed:
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        hint = ""
        if isinstance(error, FileNotFoundError) and os.path.lexists(program):
            hint = "The file is there: is the program that its first line names?"
        elif isinstance(error, PermissionError):
            hint = f"Is it executable? chmod +x {shlex.quote(program)}"
        elif error.errno == errno.ENOEXEC:
            hint = "A script has to name its interpreter in the first line: #!/bin/sh"
        return ActionFailed(f"{self.label}: {program} cannot be run: {error.strerror}", status=code, hint=hint)

    def _ended_with(self, code: int) -> ActionFailed:
        if code < 0:
            return ActionFailed(f"{self.label}: was killed by {_signal(-code)}", status=code)
        inner = code - 128
        killed = inner in signal.valid_signals()
        hint = f"A shell says so of a program that was killed by {_signal(inner)}." if killed else ""
        return ActionFailed(f"{self.label}: ended with code {code}", status=code, hint=hint)


def variable(name: str) -> str:
    """Return the variable of the environment that has what a placeholder stands for."""
    return f"CKPTTOOL_{name.upper()}"


def variables(event: CheckpointEvent) -> dict[str, str]:
    """Return what a command is told in its environment."""
    told = {**_values(event), "attempt": str(event.attempt)}
    return {variable(name): value for name, value in told.items()}


def _values(event: CheckpointEvent) -> dict[str, str]:
    return {name: str(getattr(event, name)) for name in NAMES}


def _split(shown: str, command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise UsageError(f"{shown}: {str(error).lower()}") from error
    if not words or not words[0]:
        raise UsageError(f"{shown}: it names no program")
    bare = set(command.split())
    if found := next((word for word in words if word in _OPERATORS and word in bare), None):
        raise UsageError(
            f"{shown}: no shell reads it, so {found} is a word like others", hint="What a shell is to read: --shell."
        )
    return words


def _check_program(shown: str, program: str) -> None:
    """Raise :class:`UsageError` for a program that is nowhere; a path may be made later, or elsewhere."""
    expanded = program[0] in "~$"
    if not expanded and ("/" in program or _PLACEHOLDER.search(program) or shutil.which(program) is not None):
        return
    of_a_shell = expanded or shlex.quote(program) != program or "=" in program
    raise UsageError(
        f"{shown}: there is no program {program}",
        hint="What a shell is to read: --shell." if of_a_shell else "Is it on the PATH? A path to it is clear.",
    )


def _check_line(shown: str, line: str) -> None:
    """Raise :class:`UsageError` for a line that the shell cannot read; nothing of it is run."""
    words = [SHELL, "-n", "-c", line]
    told = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)  # noqa: S603 - not run
    if told.returncode:
        raise UsageError(f"{shown}: {told.stderr.decode(errors='replace').strip()}")


def _signal(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
