"""The course of a verification: what is there, what is read of it, what comes of that."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from ckpttool.crew import Ready
from ckpttool.errors import Problem, UsageError
from ckpttool.formats.dcp import DcpSource
from ckpttool.formats.findings import counted
from ckpttool.tensors import TensorInfo
from ckpttool.verification import integrity
from ckpttool.verification.asking import Answer, ask_framework, ask_source
from ckpttool.verification.checksums import Checked, check_bytes
from ckpttool.verification.integrity import Manifest
from ckpttool.verification.naming import with_tensors
from ckpttool.verification.result import Check, FileCheck, Options, State, ValueCheck, Verification
from ckpttool.verification.sources import Opened, open_sources
from ckpttool.verification.structure import Structure
from ckpttool.verification.subset import choose
from ckpttool.verification.tree import Entry, Identity, Tree, walk
from ckpttool.verification.work import Plan


class Verifying:
    """One verification. Every step adds to ``problems``, in the order in which they are told."""

    def __init__(self, structure: Structure, options: Options) -> None:
        self.started = time.monotonic()
        self.structure, self.options = structure, options
        self.tree: Tree = walk(structure.base)
        self.opened: Opened = open_sources(self.tree, structure.sources, every=options.values or options.second_opinion)
        self.problems: list[Problem] = []
        self.checked: dict[Identity, Checked] = {}
        self.values: list[ValueCheck] = []
        self.written: tuple[str, ...] = ()
        self.bytes_read = 0

    def run(self, ready: Ready) -> Verification:
        """Do what is asked for, one after the other."""
        structure = self._structure()
        crc, hashes, to_write = self._bytes(ready)
        values = self._values(ready)
        others = [
            self._answered(ask_framework(self.opened.sources, self.options)),
            self._answered(ask_source(str(self.structure.base), self.options, ready)),
        ]
        if self.options.write_integrity:  # last, as it vouches for all that was checked
            hashes = self._write(to_write)
        checks = (structure, crc, hashes, values, *others)
        return Verification(
            path=str(self.structure.base),
            kind=self.structure.kind,
            title=self.structure.title,
            checks=checks,
            files=tuple(map(_file, self._files())),
            values=tuple(self.values),
            problems=tuple(self.problems),
            subset=self.options.subset.text if self.options.subset is not None else None,
            integrity_files=self.written,
            bytes_read=self.bytes_read,
            seconds=time.monotonic() - self.started,
            refused=self.structure.refused or self.opened.refused,
            options=self.options,
        )

    def _report(self, problems: Iterable[Problem]) -> int:
        """Take the problems that are not known by code and path, and return how many of them are faults."""
        known = {(problem.code, problem.path) for problem in self.problems}
        new = [problem for problem in problems if (problem.code, problem.path) not in known]
        self.problems += new
        return sum(problem.severity == "error" for problem in new)

    def _files(self) -> list[Checked]:
        return sorted(self.checked.values(), key=lambda checked: checked.entry.shown)

    def _structure(self) -> Check:
        self._report(self.structure.problems)
        faults = self._report((*self.tree.problems, *self.opened.problems))
        faults += sum(problem.severity == "error" for problem in self.structure.problems)
        files = len(self.tree.files)
        if not self.structure.opened and not faults:
            return Check(name="structure", state="not there", detail="known by its names, not opened", files=files)
        return Check(name="structure", state=_judged(faults), detail=self.structure.detail, files=files)

    # Bytes: checksums of records, hashes of files

    def _bytes(self, ready: Ready) -> tuple[Check, Check, dict[str, dict[str, Entry]]]:
        """Read every byte that is asked for, once; return the checks of checksums and hashes, and what to list."""
        plan = Plan(self.tree)
        plan.add_archives()
        plan.add_headers()
        for source in self.opened.sources.values():
            if isinstance(source, DcpSource):
                plan.add_items(source)
        plan.add_chains(self.opened.indexed)
        plan.sort()
        if self.options.subset is not None:
            plan.cut(self.options.subset)
        to_write = self._to_write(plan) if self.options.write_integrity else {}
        manifests, problems = self._to_check(plan) if not self.options.write_integrity else ([], [])
        for checked in check_bytes(list(plan.works.values()), self.options.threads, ready):
            self.checked[checked.entry.identity] = checked
        self.bytes_read += sum(checked.read for checked in self.checked.values())
        crc = self._crc(plan.problems)
        problems += [problem for one in manifests for problem in integrity.judge(self.tree, one, self.checked)]
        return crc, self._integrity(manifests, self._report(problems)), to_write

    def _crc(self, problems: Iterable[Problem]) -> Check:
        """Report what the checksums of records have come to."""
        faults = self._report(problems)
        found = [problem for checked in self._files() for problem in with_tensors(checked)]
        known = {(problem.code, problem.path) for problem in self.problems}
        new = [p for p in found if p.code in PER_RECORD or (p.code, p.path) not in known]
        self.problems += new
        faults += len(new)
        files = [checked for checked in self._files() if checked.records]
        records, recorded = sum(c.records for c in files), sum(c.recorded for c in files)
        if records > recorded:
            self.problems.append(_not_recorded(files))
        state: State = "faults" if faults else "sound" if recorded else "not recorded" if records else "not there"
        detail = f"{counted(recorded, 'record')} in {counted(sum(c.recorded > 0 for c in files), 'file')}"
        detail += f", {records - recorded:,} more without a checksum" if records > recorded else ""
        if not records:
            detail = "nothing here has checksums of its own"
        return Check(name="crc", state=state, detail=detail, files=len(files), bytes=sum(c.covered for c in files))

    def _to_check(self, plan: Plan) -> tuple[list[Manifest], list[Problem]]:
        """Ask for the hashes that manifests list, of the files in the subset where there is one."""
        manifests, problems = integrity.read_manifests(self.tree)
        wanted: dict[Identity, tuple[Entry, set[str]]] = {}
        for manifest in manifests:
            for _, entry in integrity.entries_of(self.tree, manifest):
                wanted.setdefault(entry.identity, (entry, set()))[1].add(manifest.algorithm)
        files = list(wanted.values())
        kept = [True] * len(files)
        if self.options.subset is not None:
            kept = choose(self.options.subset, [entry.size for entry, _ in files])
        for (entry, algorithms), keep in zip(files, kept, strict=True):
            if keep:
                plan.work(entry).algorithms |= algorithms
        return manifests, problems

    def _integrity(self, manifests: Sequence[Manifest], faults: int) -> Check:
        hashed = [checked for checked in self._files() if checked.digests]
        listed = sum(len(manifest.files) for manifest in manifests)
        detail = f"{counted(len(hashed), 'file')} by {', '.join(sorted({m.algorithm for m in manifests}))}, as listed"
        if faults:
            detail = f"{counted(faults, 'fault')} in {counted(listed, 'listed file')}"
        elif not manifests:
            detail = f"no {integrity.FILE} here; --write-integrity makes one"
        state: State = "faults" if faults else "sound" if manifests else "not there"
        size = sum(checked.entry.size for checked in hashed)
        return Check(name="integrity", state=state, detail=detail, files=len(hashed), bytes=size)

    def _to_write(self, plan: Plan) -> dict[str, dict[str, Entry]]:
        """Ask for the hashes of every file beside a checkpoint, by the directory that they are written into."""
        if self.tree.is_file:
            raise UsageError("--write-integrity with a file", hint=f"Give its directory: {self.tree.base.parent}")
        folders = integrity.folders_of(self.tree)
        for where in folders:
            integrity.check_place(self.tree.folders[where], force=self.options.force)
        found: dict[str, dict[str, Entry]] = {}
        for where in folders:
            folder = self.tree.folders[where]
            entries = ((name, self.tree.entry(folder / name)) for name in integrity.file_names(folder))
            found[where] = {name: entry for name, entry in entries if entry is not None}
            for entry in found[where].values():
                plan.work(entry).algorithms.add(integrity.ALGORITHM)
        return found

    def _write(self, to_write: dict[str, dict[str, Entry]]) -> Check:
        """Write a manifest into each directory, unless there are faults: then nothing is vouched for."""
        faults = sum(problem.severity == "error" for problem in self.problems)
        if faults:
            detail = f"not written: {counted(faults, 'fault')} {'was' if faults == 1 else 'were'} found"
            return Check(name="integrity", state="faults", detail=detail)
        for where, files in to_write.items():
            digests = {name: self.checked[e.identity].digests[integrity.ALGORITHM] for name, e in files.items()}
            path = integrity.write_manifest(self.tree.folders[where], digests, force=self.options.force)
            self.written = (*self.written, str(path.relative_to(self.tree.base)))
        listed = {entry.identity: entry.size for files in to_write.values() for entry in files.values()}
        detail = f"written: {counted(len(listed), 'file')} by {integrity.ALGORITHM}, {', '.join(self.written)}"
        return Check(name="integrity", state="sound", detail=detail, files=len(listed), bytes=sum(listed.values()))

    # Values, and what others say

    def _answered(self, answer: Answer) -> Check:
        self.problems += answer.problems
        self.bytes_read += answer.read
        self.opened.refused |= answer.refused
        return answer.check

    def _values(self, ready: Ready) -> Check:
        if not self.options.values:
            return Check(
                name="values", state="not asked", detail="--values counts NaN, infinities and tensors of zeros"
            )
        from ckpttool.verification.values import Stored, can_be_counted, count_values  # with NumPy, which takes time

        stored = [
            Stored(source.root, where, tensor)
            for where, source in self.opened.sources.items()
            for tensor in source.tensors.values()
            if can_be_counted(tensor) and not self._is_elsewhere(tensor)
        ]
        if self.options.subset is not None:
            kept = choose(self.options.subset, [one.nbytes for one in stored])
            stored = [one for one, keep in zip(stored, kept, strict=True) if keep]
        if not stored:
            return Check(name="values", state="not there", detail="no tensors that are read")
        self.values, problems, size = count_values(stored, self.options.threads, ready)
        self.problems += problems
        self.bytes_read += size
        faults = sum(problem.severity == "error" for problem in problems)
        elements = sum(value.elements for value in self.values)
        detail = f"{counted(len(stored), 'tensor')}, {elements:,} elements"
        files = {piece.place.file for one in stored for piece in one.tensor.pieces}
        return Check(name="values", state=_judged(faults), detail=detail, files=len(files), bytes=size)

    def _is_elsewhere(self, tensor: TensorInfo) -> bool:
        """Tell whether a tensor of an archive lies in other files than the one that is looked at."""
        return self.tree.is_file and any(piece.place.file != self.tree.base.name for piece in tensor.pieces)


PER_RECORD = ("crc-mismatch", "damaged-zip")
"""Problems of which a file may have many."""


def _judged(faults: int) -> State:
    return "faults" if faults else "sound"


def _file(checked: Checked) -> FileCheck:
    size = checked.entry.size
    return FileCheck(
        name=checked.entry.shown,
        records=checked.records,
        recorded=checked.recorded,
        bytes=size,
        checked=size if checked.digests else checked.covered,
    )


def _not_recorded(files: Sequence[Checked]) -> Problem:
    some = [checked for checked in files if checked.records > checked.recorded]
    count = sum(checked.records - checked.recorded for checked in some)
    message = (
        f"{counted(count, 'record')} in {counted(len(some), 'file')} without a checksum: their bytes are not checked"
    )
    hint = "torch was told to write none: torch.serialization.set_crc32_options(False)."
    return Problem(code="not-recorded", message=message, path=some[0].entry.shown, hint=hint, severity="note")
