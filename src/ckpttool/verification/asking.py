"""What others say of a checkpoint: the framework that wrote it, and the source that it was converted from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpttool.crew import Ready
from ckpttool.errors import BrokenCheckpoint, CkpttoolError, NotACheckpoint, Problem, Refused, Unmapped
from ckpttool.formats.findings import counted
from ckpttool.formats.folding import folded
from ckpttool.source import Source
from ckpttool.verification.result import Check, Options

if TYPE_CHECKING:  # each is imported where it is asked for: they take longer than to check a small checkpoint
    from ckpttool.comparison import Comparison
    from ckpttool.verification.second_opinion import SecondOpinion


class Answer(NamedTuple):
    """A check, its problems, the bytes that were read for it, and whether something would run code."""

    check: Check
    problems: list[Problem]
    read: int = 0
    refused: bool = False


SECOND, AGAINST = "second-opinion", "against"


def require(options: Options) -> None:
    """Raise :class:`UsageError` without torch where it is to be asked, :class:`NotACheckpoint` without the source."""
    if options.second_opinion:
        from ckpttool.verification.frameworks import find_torch

        find_torch()
    if options.against is not None:
        from ckpttool.comparison.finding import find

        find(Path(options.against), None, None)


def ask_framework(sources: Mapping[str, Source], options: Options) -> Answer:
    """Have a sample of every checkpoint read by its framework too; raises :class:`UsageError` where that is absent."""
    if not options.second_opinion:
        detail = "--second-opinion has a sample read by torch, too"
        return Answer(Check(name=SECOND, state="not asked", detail=detail), [])
    from ckpttool.verification.second_opinion import second_opinion

    heard: list[SecondOpinion] = []
    problems: list[Problem] = []
    for where, source in sources.items():
        with suppress(BrokenCheckpoint, NotACheckpoint, Refused):  # the structure tells
            opinion = second_opinion(source.root, source)
            heard.append(opinion)
            problems += [_below(where, problem) for problem in opinion.problems]
    tensors, read = sum(one.tensors for one in heard), sum(one.bytes for one in heard)
    if not tensors and not problems:
        return Answer(Check(name=SECOND, state="not there", detail="nothing that a framework could read"), problems)
    readers = ", ".join(dict.fromkeys(one.reader for one in heard))
    faults = any(problem.severity == "error" for problem in problems)
    detail = f"{counted(tensors, 'tensor')} by {readers}"
    check = Check(name=SECOND, state="faults" if faults else "sound", detail=detail, bytes=read)
    return Answer(check, problems, 2 * read)


def _below(where: str, problem: Problem) -> Problem:
    """Tell a problem from the directory above."""
    return replace(problem, path="/".join(part for part in (where, problem.path) if part))


def ask_source(path: str, options: Options, ready: Ready) -> Answer:
    """Hold a converted output against what it was made from, tensor by tensor, with the cast that the output shows."""
    if options.against is None:
        return Answer(Check(name=AGAINST, state="not asked", detail="--against SOURCE proves what was converted"), [])
    from ckpttool.comparison import Options as CompareOptions
    from ckpttool.comparison import prove

    asked = CompareOptions(threads=options.threads, **options.of_source())
    try:
        found = prove(options.against, path, asked, ready)
    except (BrokenCheckpoint, Refused, Unmapped) as error:  # what was found before is told all the same
        return _without_source(options.against, error)
    problems = list(_unlike(found))
    same = found.counts["equal"] + found.counts["close"]
    detail = f"{counted(same, 'tensor')} as {options.against} has {'it' if same == 1 else 'them'}"
    if problems:
        detail = f"{counted(len(found.tensors) - same, 'tensor')} not as {options.against} has them, {same:,} are"
    check = Check(name=AGAINST, state="faults" if problems else "sound", detail=detail, bytes=found.bytes_read)
    return Answer(check, [*problems, *found.notes], found.bytes_read)


def _without_source(source: str, error: CkpttoolError) -> Answer:
    """Tell of a source that cannot be compared with."""
    refused = isinstance(error, Refused)
    whole = Problem(code="refused" if refused else error.code, message=error.message, hint=error.hint)
    check = Check(name=AGAINST, state="faults", detail=f"{source} cannot be compared with")
    return Answer(check, [whole, *error.problems], refused=refused)


_SAID = {
    "differs": ("against-differs", "not as the source has it"),
    "only in A": ("against-missing", "only in the source"),
    "only in B": ("against-extra", "not in the source"),
}


def _unlike(found: Comparison) -> Iterable[Problem]:
    """Yield what the output does not have as its source: few lines, but every name is in one of them."""
    for state, (code, what) in _SAID.items():
        by_why: dict[str, list[str]] = {}
        for tensor in found.tensors:
            if tensor.state == state:
                by_why.setdefault("shape" if "shape" in tensor.why else "", []).append(tensor.name)
        for why, names in by_why.items():
            for text, count in folded(names):
                times = f", {count:,} of them" if count > 1 else ""
                yield Problem(code=code, message=f"{what}{f' ({why})' if why else ''}{times}: {text}")
