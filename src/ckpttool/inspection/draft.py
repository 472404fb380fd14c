"""A finding in the making: what every kind of checkpoint fills in, and how it becomes an :class:`Inspection`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import Problem, Refused
from ckpttool.formats.findings import listing
from ckpttool.inspection import summary
from ckpttool.inspection.result import Content, Inspection, Manifest, Ranks, Run, State, Suggestion
from ckpttool.inspection.sections import Section, contents, rows
from ckpttool.inspection.suggestions import suggest
from ckpttool.tensors import Place, TensorInfo


@dataclass(slots=True, kw_only=True)
class Draft:
    """What has been found so far. ``sections`` come in the order in which model weights are looked for.

    ``aliases`` name trees that are links to the archive of another one; ``lacking`` are steps without a usual role.
    """

    path: Path
    kind: str
    title: str
    evidence: tuple[str, ...] = ()
    sections: list[Section] = field(default_factory=list)
    facts: dict[str, str] = field(default_factory=dict)
    contents: list[Content] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    manifest: Manifest | None = None
    run: Run | None = None
    lacking: set[int] = field(default_factory=set)
    ranks: Ranks | None = None
    state: State | None = None
    next: tuple[Suggestion, ...] = ()

    def section_at(self, where: str) -> Section | None:
        """Return the opened archive of a tree."""
        return next((s for s in self.sections if s.where == self.aliases.get(where, where)), None)

    def add(self, section: Section) -> None:
        """Take an opened archive with the problems that it has."""
        self.sections.append(section)
        self.problems += under(section.where, section.source.problems)

    def note(self, code: str, message: str, *, path: str = "", hint: str = "") -> None:
        """Add something worth knowing that makes nothing incomplete."""
        self.problems.append(Problem(code=code, message=message, path=path, hint=hint, severity="note"))

    def fault(self, code: str, message: str, *, path: str = "", hint: str = "") -> None:
        """Add something that makes the checkpoint less than whole."""
        self.problems.append(Problem(code=code, message=message, path=path, hint=hint))

    def finish(self, pattern: str | None = None) -> Inspection:
        """Count, measure and freeze. ``pattern`` selects the tensors to list."""
        model, tied = once(_model_tensors(self.sections))
        if tied:
            self.facts["tied"] = f"{listing(tied, 3)} (one storage, counted once)"
        disk, dangling = summary.disk(self.path)
        problems = (*self.problems, *dangling)
        faults = [p for p in problems if p.severity == "error"]
        parts = [content for section in self.sections for content in contents(section)]
        found = Inspection(
            path=str(self.path),
            kind=self.kind,
            title=self.title,
            state=self.state or ("incomplete" if faults else "complete"),
            evidence=self.evidence,
            problems=problems,
            step=layout.numbered(self.path),
            role=role_of(self.path) if self.path.is_dir() else None,
            facts=self.facts,
            ranks=self.ranks,
            parameters=summary.parameters(model) if model else None,
            dtypes=summary.dtypes(model),
            disk=disk,
            contents=(*parts, *self.contents),
            modules=summary.modules(model) if model else None,
            manifest=self.manifest,
            run=self.run,
            tensors=tuple(rows(self.sections, pattern)) if pattern else (),
        )
        return replace(found, next=(*self.next, *suggest(found)))


def under(where: str, problems: Iterable[Problem]) -> list[Problem]:
    """Return problems with their paths told from the directory above."""
    if not where:
        return list(problems)
    return [replace(p, path=f"{where}/{p.path}" if p.path else where) for p in problems]


@contextmanager
def refusals_of(where: str) -> Iterator[None]:
    """Let a refusal say in which directory below the inspected one it was."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{where}: {error.message}", hint=error.hint, code=error.code) from error


def _model_tensors(sections: list[Section]) -> list[TensorInfo]:
    """Return the weights, counted once: the first archive that has some; adapters where there is nothing else."""
    for part in ("model", "adapter"):
        for section in sections:
            tensors = section.tensors(part)
            if tensors:
                return tensors
    return []


def once(tensors: list[TensorInfo]) -> tuple[list[TensorInfo], list[str]]:
    """Leave out tensors that are another name of the same storage, as tied embeddings are in a shard."""
    first: dict[tuple[Place, ...], str] = {}
    kept, tied = [], []
    for tensor in tensors:
        places = tuple(piece.place for piece in tensor.pieces)
        other = first.setdefault(places, tensor.name) if places else tensor.name
        if other == tensor.name:
            kept.append(tensor)
        else:
            tied.append(f"{tensor.name} is {other}")
    return kept, tied


def role_of(path: Path) -> str | None:
    """Return the role that a directory has by its place in a step, or ``None``."""
    return path.name if layout.step_of(path.parent.name) is not None and layout.step_of(path.name) is None else None
