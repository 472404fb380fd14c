"""Megatron's ``integrity.json``: a hash for every file that lies directly in a directory. Read, and written.

megatron-core writes it since 0.18 where it is asked to, and holds files against it on loading where it is asked to.
The schema is ``{"algorithm": "sha256", "files": {NAME: HEX}}``; files in directories below are not in it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ckpttool.errors import BrokenCheckpoint, CannotWrite, CkpttoolError, Problem, Severity
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.formats.findings import listing
from ckpttool.formats.jsonfile import INDEX_MOST, read_object
from ckpttool.staging import cannot, take
from ckpttool.verification.checksums import COPY, Checked
from ckpttool.verification.tree import Entry, Identity, Tree
from ckpttool.wholefile import write_whole

FILE = "integrity.json"
ALGORITHM = "sha256"
ALGORITHMS = {"sha256": 64, "sha384": 96, "sha512": 128, "sha3_256": 64, "sha3_512": 128, "blake2b": 128}
"""Hashes that are worth something, and the length of theirs in hexadecimal; Megatron knows the first one only."""

_PARTIAL = re.compile(rf"{re.escape(FILE)}\.partial-[0-9a-f]{{8}}")
_DATA = (".distcp", ".metadata", ".pt", ".pth", ".bin", ".safetensors")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an ``integrity.json`` says of the files of its directory, which is called ``where`` from the base on."""

    where: str
    folder: Path
    algorithm: str
    files: Mapping[str, str]


def read_manifests(tree: Tree) -> tuple[list[Manifest], list[Problem]]:
    """Return every manifest of a tree, and what is wrong with those that are none."""
    found, problems = list[Manifest](), list[Problem]()
    for where, folder in tree.folders.items():
        if os.path.lexists(folder / FILE):
            shown = _below(where, FILE)
            try:
                found.append(_parse(where, folder, read_object(folder / FILE, INDEX_MOST)))
            except CkpttoolError as error:
                message = error.message if shown in error.message else f"{shown}: {error.message}"
                problems.append(Problem(code="integrity-unreadable", message=message, path=shown))
    return found, problems


def _parse(where: str, folder: Path, content: Mapping[str, Any]) -> Manifest:
    algorithm, files = content.get("algorithm", ALGORITHM), content.get("files")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise BrokenCheckpoint(f"its hashes are of {algorithm!r}, not of {listing(ALGORITHMS)}")
    if not isinstance(files, dict):
        raise BrokenCheckpoint("it has no list of files")
    for name, digest in files.items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not name or "\0" in name:
            raise BrokenCheckpoint(f"it names {name!r}, which is no file in its directory; nothing is read for it")
        if not (isinstance(digest, str) and re.fullmatch(rf"[0-9a-fA-F]{{{ALGORITHMS[algorithm]}}}", digest)):
            raise BrokenCheckpoint(f"what it has for {name!r} is no {algorithm}")
    return Manifest(where, folder, algorithm, files)


def _below(where: str, name: str) -> str:
    return f"{where}/{name}" if where else name


def entries_of(tree: Tree, manifest: Manifest) -> Iterator[tuple[str, Entry]]:
    """Yield the files of a manifest that are there."""
    for name in manifest.files:
        entry = tree.entry(manifest.folder / name)
        if entry is not None:
            yield name, entry


def judge(tree: Tree, manifest: Manifest, checked: Mapping[Identity, Checked]) -> Iterator[Problem]:
    """Yield what is not as a manifest says: files that are missing, that have another hash, that it does not name.

    A file that was not hashed, as it is not in a subset or cannot be read, is passed over here.
    """
    for name, wanted in manifest.files.items():
        shown, entry = _below(manifest.where, name), tree.entry(manifest.folder / name)
        if entry is None:
            message = f"{shown}: missing, and {_below(manifest.where, FILE)} lists it"
            yield Problem(code="integrity-missing-file", message=message, path=shown)
            continue
        done = checked.get(entry.identity)
        found = done.digests.get(manifest.algorithm, "") if done is not None else ""
        if found and found != wanted.lower():
            message = f"{shown}: its {manifest.algorithm} is {found[:16]}..., listed is {wanted[:16].lower()}..."
            yield Problem(code="integrity-mismatch", message=message, path=shown, hint=COPY)
    yield from _extra(manifest)


def _extra(manifest: Manifest) -> Iterator[Problem]:
    """Yield the files that a manifest does not name; those that no checkpoint needs are notes."""
    names = [name for name in file_names(manifest.folder) if name not in manifest.files]
    for data in (True, False):
        some = [name for name in names if name.endswith(_DATA) == data]
        if some:
            what = f"{_below(manifest.where, FILE)} does not list {listing(some)}"
            told = "which may be of another save" if data else "which came later"
            severity: Severity = "error" if data else "note"
            message = f"{what}, {told}"
            yield Problem(code="integrity-extra-file", message=message, path=manifest.where, severity=severity)


def file_names(folder: Path) -> list[str]:
    """Return the files that lie directly in a directory, sorted; those of a manifest are left out."""
    return sorted(
        entry.name
        for entry in os.scandir(folder)
        if entry.name != FILE and not _PARTIAL.fullmatch(entry.name) and entry.is_file()
    )


# Writing


def folders_of(tree: Tree) -> list[str]:
    """Return the directories that get a manifest: those in which a checkpoint lies, not only around it."""
    kinds = (fsdp.detect, dcp.detect, hf.detect)
    return [where for where, folder in tree.folders.items() if any(detect(folder) is not None for detect in kinds)]


def check_place(folder: Path, *, force: bool) -> None:
    """Raise :class:`CannotWrite` where a manifest is already and is not to be replaced, or where one may not write."""
    if os.path.lexists(folder / FILE) and not force:
        raise CannotWrite(f"{folder / FILE}: exists already", hint="Replace it with --force.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CannotWrite(f"{folder}: no permission to write there", hint="Run as the user who trained.")


def write_manifest(folder: Path, digests: Mapping[str, str], *, force: bool) -> Path:
    """Write a manifest as megatron-core does; it appears complete or not at all.

    Raises :class:`CannotWrite` where there is one and it is not to be replaced, or another run is at it.
    """
    text = json.dumps({"algorithm": ALGORITHM, "files": dict(sorted(digests.items()))}, indent=2)
    target = folder / FILE
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise cannot(target, error) from error
    try:
        if not take(handle):
            raise CannotWrite(f"{folder}: another run is writing there", hint="Wait until it is done.")
        check_place(folder, force=force)
        write_whole(target, text.encode(), force=force)
    finally:
        os.close(handle)
    return target
