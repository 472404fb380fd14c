"""What ``verify`` found, for people."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ckpttool.render.terminal import (
    clean,
    duration,
    new_table,
    plural,
    show_next,
    show_problems,
    shown_path,
    size,
    typed_path,
)
from ckpttool.verification.result import State, Verification

_NAMES: Mapping[str, str] = {
    "crc": "checksums",
    "integrity": "integrity.json",
    "second-opinion": "second opinion",
    "against": "source",
}

_STYLES: Mapping[State, str] = {
    "sound": "bold green",
    "faults": "bold red",
    "not recorded": "bold yellow",
    "not there": "dim",
    "not asked": "dim",
}


def show_verification(found: Verification, out: Console, *, quiet: bool = False) -> None:
    """Print the verdict, what was checked, every problem, and what to type next."""
    out.print(_verdict(found), soft_wrap=True)
    if quiet:
        return
    out.print()
    table = new_table("check", "", "what", "bytes", right=("bytes",))
    for check in found.checks:
        if check.state == "not asked" and check.name in ("second-opinion", "against"):
            continue
        state = Text(check.state, _STYLES[check.state], no_wrap=True)
        read = size(check.bytes) if check.bytes else ""
        table.add_row(_NAMES.get(check.name, check.name), state, Text(clean(check.detail)), Text(read, no_wrap=True))
    out.print(Padding(table, (0, 0, 0, 2), expand=False))
    for line in _remarks(found):
        out.print(Padding(Text(clean(line), "dim"), (0, 0, 0, 2), expand=False))
    if found.problems:
        show_problems(found.problems, out)
    show_next(_next(found), out)


def _verdict(found: Verification) -> Text:
    """Say in two lines whether it is sound, and how much was read for that."""
    if found.refused:
        verdict = Text("refused: it would run code", "bold red")
    elif found.sound:
        verdict = Text("sound", "bold green") + Text(", as far as it was read" if found.subset else "")
    else:
        verdict = Text(plural(len(found.faults), "fault"), "bold red")
    title = "" if found.refused else f"{clean(found.title) or 'file'}: "
    rate = f", {size(found.bytes_read / found.seconds)}/s" if found.seconds > 1 else ""
    tail = f": {size(found.bytes_read)} read in {duration(found.seconds)}{rate}"
    return Text(title, "bold") + verdict + Text(f"\n{clean(shown_path(found.path))}{tail}", "dim")


def _remarks(found: Verification) -> Iterator[str]:
    """Yield what was not looked at although it lies there."""
    if found.subset is not None:
        yield f"Only a part was read, --read-subset {found.subset}; every check takes its own."
    files = [file for file in found.files if file.bytes]
    bare = [file for file in files if not file.checked]
    if bare and found.subset is None:
        yield f"Nothing says what {plural(len(bare), 'file')} of {size(sum(f.bytes for f in bare))} should hold."


def _next(found: Verification) -> Iterator[tuple[str, str]]:
    path = shlex.quote(typed_path(found.path))
    whole = f"ckpttool verify {path}"
    written = found.check("integrity")
    if found.faults:
        yield "see what is there, and what it is", f"ckpttool inspect {path}"
        if found.options.write_integrity:
            yield "once the faults are gone", f"{whole} --write-integrity"
        return
    if found.subset is not None:
        part, parts = (found.options.subset.part, found.options.subset.parts) if found.options.subset else (0, 0)
        again = f" --read-subset {part + 1}/{parts}" if part < parts else ""
        yield ("read the next part" if again else "read all of it"), whole + again
    elif found.integrity_files:
        yield "hold the files against it, here or where they are copied to", whole
    elif written.state == "not there" and not _is_a_file(found):
        yield "have every byte checked from now on, small files and headers too", f"{whole} --write-integrity"
    if not found.options.values and found.subset is None:
        yield "look into the values for NaN, infinities and zeros", f"{whole} --values"


def _is_a_file(found: Verification) -> bool:
    return found.kind in ("file", "safetensors")
