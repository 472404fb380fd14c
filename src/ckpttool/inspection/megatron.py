"""Role directories of verl's Megatron manager: layout v1, layout v2, and everything between the two."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import Problem
from ckpttool.formats import dcp, foreign
from ckpttool.formats.dcpkeys import part_of
from ckpttool.formats.findings import listing
from ckpttool.inspection.access import add_closed, closed, is_directory
from ckpttool.inspection.archive import archive_facts
from ckpttool.inspection.draft import Draft, refusals_of
from ckpttool.inspection.huggingface import add_huggingface
from ckpttool.inspection.manifest import add_manifest, schema_version
from ckpttool.inspection.result import Content
from ckpttool.inspection.sections import Section

V1 = "verl-megatron-v1"
V2 = "verl-megatron-v2"
HALF = "verl-megatron-half-migrated"

_TREES = (*layout.ARCHIVES, layout.HUGGINGFACE, layout.V1_ARCHIVE, layout.V1_HUGGINGFACE, *layout.V2_PARENTS)


def detect(path: Path) -> tuple[str, ...] | None:
    """Return the evidence for a Megatron role directory of verl, by names alone, or ``None``."""
    trees = [t for t in (layout.V1_ARCHIVE, *layout.ARCHIVES, layout.HUGGINGFACE) if is_directory(path / t)]
    files = [f for f in (layout.MANIFEST, layout.TRANSFORMER_CONFIG) if (path / f).is_file()]
    hf = [layout.V1_HUGGINGFACE] if is_directory(path / layout.V1_HUGGINGFACE) else []
    if trees or files:
        return (*(f"{t}/" for t in (*trees, *hf)), *files)
    return None


def inspect_role(path: Path, evidence: tuple[str, ...]) -> Draft:
    """Describe a role directory; which layout it has is decided by the trees that hold something."""
    v1 = _filled(path / layout.V1_ARCHIVE)
    trees = [tree for tree in layout.ARCHIVES if _filled(path / tree)]
    v2 = bool(trees) or _filled(path / layout.HUGGINGFACE)
    draft = Draft(path=path, kind=V2 if v2 else V1, title="", evidence=evidence)
    add_closed(draft, _TREES)
    _add_archives(draft, [layout.V1_ARCHIVE] if v1 else [], trees)
    for where in _huggingface(path):
        add_huggingface(draft, where, _where_weights_are(draft))
    _note_empty(draft)
    _note_adapters(draft)
    _note_migration(draft)
    version = schema_version(path)
    if v2:
        _judge_v2(draft, v1=v1, trees=trees, version=version)
    else:
        draft.title = "verl Megatron role directory, layout v1"
        _check_weights(draft)
    if not v1 and not v2 and not draft.sections:
        draft.fault("nothing-saved", "neither an archive nor Hugging Face weights are here")
    add_manifest(draft)
    if (path / layout.TRANSFORMER_CONFIG).is_file():
        size = (path / layout.TRANSFORMER_CONFIG).stat().st_size
        draft.contents.append(Content("transformer config", layout.TRANSFORMER_CONFIG, bytes=size))
    return draft


def _check_weights(draft: Draft) -> None:
    """Layout v1 has no manifest that says what was saved: weights are what it was saved for."""
    readable = all(s.source.tensors or s.source.objects for s in draft.sections)
    if draft.sections and readable and not any(s.tensors("model", "adapter") for s in draft.sections):
        draft.fault("no-weights", "no model weights, neither in dist_ckpt/ nor in huggingface/")


def _filled(path: Path) -> bool:
    return is_directory(path) and not closed(path) and bool(os.listdir(path))


def _huggingface(path: Path) -> list[str]:
    """Return the Hugging Face directories to describe; one that a migration left under both names is one."""
    found = [where for where in (layout.HUGGINGFACE, layout.V1_HUGGINGFACE) if _filled(path / where)]
    if len(found) == 2 and sorted(os.listdir(path / found[0])) == sorted(os.listdir(path / found[1])):
        return found[:1]
    return found


def _add_archives(draft: Draft, v1: list[str], trees: list[str]) -> None:
    """Open each archive once; trees that are links to one archive are one section."""
    opened: dict[tuple[int, int], str] = {}
    for where in (*trees, *v1):
        index = draft.path / where / dcp.METADATA_FILE
        key = (index.stat().st_dev, index.stat().st_ino) if index.is_file() else (0, len(opened))
        if key in opened:
            draft.aliases[where] = opened[key]
            draft.contents.append(Content("same archive", where, detail=f"linked with {opened[key]}"))
            _check_tree_files(draft, where, opened[key])
            continue
        opened[key] = where
        with refusals_of(where):
            source = dcp.open_(draft.path / where)
        draft.add(Section(where, source))
        archive_facts(draft, source)


def _check_tree_files(draft: Draft, where: str, like: str) -> None:
    """A linked tree must hold every file of the archive that it shares."""
    missing = sorted(set(os.listdir(draft.path / like)) - set(os.listdir(draft.path / where)))
    if missing:
        draft.fault(
            "tree-incomplete", f"{where}/ lacks {len(missing)} files of {like}/: {listing(missing)}", path=where
        )


def _where_weights_are(draft: Draft) -> str:
    for section in draft.sections:
        if section.tensors("model"):
            return f"the weights are in {section.where}/"
    return "there are no model weights in the archive either"


def _note_empty(draft: Draft) -> None:
    empty = [
        t for t in _TREES if is_directory(draft.path / t) and not closed(draft.path / t) and not _filled(draft.path / t)
    ]
    if empty:
        misleads = draft.kind == V1 and any(t.split("/")[0] in layout.V2_PARENTS for t in empty)
        draft.note(
            "empty-tree",
            f"empty directories, which count as absent: {listing(f'{t}/' for t in empty)}",
            hint="verl takes them for layout v2 and does not look into dist_ckpt/: remove them." if misleads else "",
        )


def _note_adapters(draft: Draft) -> None:
    adapters = foreign.detect(draft.path)
    if adapters is not None and adapters.kind == "adapter-checkpoint":
        draft.note(adapters.kind, f"adapter_checkpoint/: {adapters.title}, not opened", hint=adapters.hint)
        draft.contents.append(Content("adapters", "adapter_checkpoint", detail="not opened"))


def _note_migration(draft: Draft) -> None:
    if (draft.path / layout.MIGRATION_STAGING).is_dir():
        draft.note(
            "migration-interrupted",
            f"{layout.MIGRATION_STAGING}/ is what a migration left that was killed; do not remove it by hand",
            hint="ckpttool migrate finishes it, ckpttool migrate --undo takes it back.",
        )


def _judge_v2(draft: Draft, *, v1: bool, trees: list[str], version: int | None) -> None:
    """Tell a finished save from a migration, whoever did it and however far it came."""
    draft.title = "verl Megatron role directory, layout v2"
    links = _links(draft.path, trees)
    if version is not None and version >= layout.SCHEMA_VERSION:
        kept = " with the names of v1 kept" if v1 else ""
        draft.title += f"{kept}{f' ({links})' if links else ''}"
        return
    missing = _missing_trees(draft, trees) if v1 or links else []
    dangling = [t for t in layout.ARCHIVES if (draft.path / t).is_symlink() and not is_directory(draft.path / t)]
    if dangling:
        draft.title += ", its links lead nowhere"
        draft.kind = HALF
        draft.fault(
            "half-migrated",
            f"links of a migration that the checkpoint was moved away from: {listing(dangling)}",
            hint="ckpttool migrate makes them anew, relative, if dist_ckpt/ is still here.",
        )
    elif missing:
        draft.kind = HALF
        draft.title = "verl Megatron role directory, half migrated from v1 to v2"
        draft.fault(
            "half-migrated",
            f"the archive holds parts whose trees are missing or unfinished: {listing(missing)}",
            hint="A migration was interrupted; nothing in dist_ckpt/ is lost.",
        )
    elif v1 or links or same_archive_everywhere(draft.path, trees):
        unread = version is None and (draft.path / layout.MANIFEST).is_file()
        author = "" if unread else ", migrated by verl's script"
        draft.title = f"verl Megatron role directory, layout v2{author} ({links or 'copies'})"
        if not unread:
            draft.note("no-manifest", f"{layout.MANIFEST} (schema 2) is missing: verl's migration script writes none")
    elif not (draft.path / layout.MANIFEST).is_file():
        draft.fault(
            "no-manifest",
            f"{layout.MANIFEST}, which verl writes last, is missing: the save did not finish",
            path=layout.MANIFEST,
        )


def _links(path: Path, trees: list[str]) -> str:
    """Say in words how trees share files with each other or with the archive of v1."""
    if any((path / tree).is_symlink() or (path / tree / dcp.METADATA_FILE).is_symlink() for tree in trees):
        return "symbolic links"
    names = [n for n in (*trees, layout.V1_ARCHIVE) if (path / n / dcp.METADATA_FILE).is_file()]
    inodes = {(path / n / dcp.METADATA_FILE).stat().st_ino for n in names}
    return "hard links" if len(inodes) < len(names) else ""


def _missing_trees(draft: Draft, trees: list[str]) -> list[str]:
    """Return the trees that the parts of a mixed archive ask for and that are not there in full."""
    archives = [s.source for s in draft.sections if isinstance(s.source, dcp.DcpSource)]
    parts = {part_of(name) for source in archives for name in (*source.tensors, *source.objects)}
    wanted = {layout.TREE_OF_PART[part] for part in parts if part in layout.TREE_OF_PART}
    broken = set(filter(partial(_is_broken, draft), trees))
    missing = sorted(tree for tree in wanted if tree not in trees or tree in broken)
    if _filled(draft.path / layout.V1_HUGGINGFACE) and not _filled(draft.path / layout.HUGGINGFACE):
        missing.append(layout.HUGGINGFACE)
    return missing


def _is_broken(draft: Draft, tree: str) -> bool:
    """Tell whether a tree has faults that the archive it was made from does not have."""
    faults = [p for p in draft.problems if p.severity == "error"]
    if any(p.code == "tree-incomplete" and p.path == tree for p in faults):
        return True
    sound = any(s.where == layout.V1_ARCHIVE for s in draft.sections) and not _under(faults, layout.V1_ARCHIVE)
    return sound and _under(faults, tree)


def _under(problems: Iterable[Problem], tree: str) -> bool:
    return any(f"{p.path}/".startswith(f"{tree}/") for p in problems)


def same_archive_everywhere(path: Path, trees: list[str]) -> bool:
    """Copies of one mixed archive in several trees: what verl's script leaves in copy mode."""
    indexes = [path / tree / dcp.METADATA_FILE for tree in trees]
    return len(indexes) > 1 and all(i.is_file() for i in indexes) and len({i.read_bytes() for i in indexes}) == 1
