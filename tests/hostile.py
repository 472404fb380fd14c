"""Pickles made by hand to do harm, and a child process with little memory to read them in."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

PROTO = b"\x80\x04"
STOP = b"."


class _Touch:
    """Runs a shell command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.path}'",)


def bomb(marker: Path) -> bytes:
    """A pickle that creates ``marker`` when a careless reader loads it."""
    return pickle.dumps({"weight": _Touch(marker)}, protocol=2)


def save_bomb(file: Path, marker: Path) -> None:
    """The same as a ``torch.save`` archive."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", bomb(marker))
        archive.writestr("archive/version", "3\n")


def text(value: str) -> bytes:
    """BINUNICODE."""
    raw = value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def named(module: str, name: str) -> bytes:
    """GLOBAL: the name is spelt out in the opcode."""
    return f"c{module}\n{name}\n".encode()


def stacked(module: str, name: str) -> bytes:
    """STACK_GLOBAL: the name comes from the stack."""
    return text(module) + text(name) + b"\x93"


_CHILD = """
import resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
from ckpttool.errors import CkpttoolError
from ckpttool.records import METADATA_NAMES, SHARD_NAMES
from ckpttool.unpickle import loads
names, data = (METADATA_NAMES if sys.argv[1] else SHARD_NAMES), sys.stdin.buffer.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    loads(data, names, where="stream", inert=bool(sys.argv[1]))
    outcome = "loaded"
except CkpttoolError as error:
    outcome = f"{type(error).__name__}: {error}"
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(grown, outcome)
"""


def confined(data: bytes, *, inert: bool = False, seconds: float = 20) -> tuple[int, str]:
    """Load in a child of 512 MiB; return the KiB by which it grew and the outcome."""
    command = [sys.executable, "-c", _CHILD, "yes" if inert else ""]
    child = subprocess.run(command, input=data, capture_output=True, timeout=seconds, check=False)
    assert child.returncode == 0, child.stderr.decode()
    grown, outcome = child.stdout.decode().split(" ", 1)
    return int(grown), outcome.strip()
