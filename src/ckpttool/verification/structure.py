"""The structure of a checkpoint, of a step or of a whole run: every fault that ``inspect`` knows of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ckpttool.errors import NotACheckpoint, Problem, Refused
from ckpttool.formats.findings import counted
from ckpttool.inspection import Inspection, inspect, open_directory
from ckpttool.inspection.choice import choose
from ckpttool.inspection.kinds import recognise
from ckpttool.inspection.result import StepRow
from ckpttool.source import Source
from ckpttool.unpickle import collector_paused

_NONE: Mapping[str, Source] = MappingProxyType({})


class Structure(NamedTuple):
    """What lies at ``base`` (a directory or a file), and what is wrong with it; notes are those on how it was chosen.

    ``opened`` is false for a kind that is known by its names only, ``refused`` tells of pickles that would run code,
    ``sources`` are archives that were opened to see that, by where they lie below the base.
    """

    base: Path
    kind: str
    title: str
    detail: str
    problems: tuple[Problem, ...]
    opened: bool = True
    refused: bool = False
    sources: Mapping[str, Source] = _NONE


def look(path: Path, step: str | None, role: str | None) -> Structure:
    """Return what a path, a step and a role mean; of a run or a step without a choice, everything in it.

    Raises :class:`NotACheckpoint`. What would run code is one of the problems: the rest is checked all the same.
    """
    chosen, notes = choose(path, step, role)
    chosen = Path(os.path.abspath(chosen))  # noqa: PTH100 - resolve() would follow links
    try:
        found, sources = _inspect(chosen)
    except Refused as error:
        refused = Problem(code="refused", message=error.message, hint=error.hint)
        return Structure(
            chosen, "refused", "refused: it would run code", error.message, (refused, *notes), refused=True
        )
    if found.state == "absent":
        raise NotACheckpoint(f"{chosen}: an empty directory", hint="Is it the right one? There is nothing to verify.")
    kept = [p for p in found.problems if p.severity == "error" or p.code == "found-below"]
    detail = found.state if found.run is None else counted(len(found.run.rows), "checkpoint")
    with collector_paused():
        problems = (*_with_rows(found, kept), *notes)
    opened = found.state != "not opened"
    return Structure(Path(found.path), found.kind, found.title, detail, problems, opened, found.refused, sources)


def _inspect(path: Path) -> tuple[Inspection, Mapping[str, Source]]:
    """Return what lies at a path, and the archives in it that were opened for that."""
    if path.is_file():
        return inspect(path), _NONE
    draft = open_directory(path)
    return draft.finish(), {section.where: section.source for section in draft.sections}


def _with_rows(found: Inspection, problems: list[Problem]) -> Iterator[Problem]:
    """Yield the faults of a run or step, with all of every row where it has the first one only."""
    rows = {row.path: list(_of_row(found, row)) for row in found.run.rows} if found.run is not None else {}
    yield from (problem for problem in problems if not rows.get(problem.path))
    for faults in rows.values():
        yield from faults


def _of_row(found: Inspection, row: StepRow) -> Iterator[Problem]:
    """Yield the faults of one checkpoint of a run; links are told of by the run."""
    if row.state in ("complete", "refused", "not opened"):
        return
    draft = recognise(Path(found.path, row.path), in_run=True)
    faults = draft.finish().faults if draft is not None else ()
    for fault in faults:
        if fault.code != "dangling-link":
            yield replace(fault, path=f"{row.path}/{fault.path}" if fault.path else row.path)
