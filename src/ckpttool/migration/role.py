"""What lies in a role directory before anything happens to it, and how a plan for it is put together."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import CkpttoolError, Problem
from ckpttool.formats import dcp, foreign, hf
from ckpttool.formats.findings import listing
from ckpttool.inspection.draft import under
from ckpttool.migration import manifest as manifests
from ckpttool.migration.names import STAGING, TREES, V1_NAMES
from ckpttool.migration.result import Action, RolePlan, TreeChange
from ckpttool.migration.trees import Listing, filled, is_part_of, leans_on, listing_of, parts_of, strangers


@dataclass(slots=True)
class Role:
    """A role directory, read. ``manifest`` is empty where there is none.

    ``remains`` are files of ``dist_ckpt/`` that somebody was removing: the trees have all of them and more.
    """

    path: Path
    manifest: dict[str, Any]
    v1: bool
    v1_hf: bool
    marks: tuple[tuple[str, int, int], ...] = ()
    remains: bool = False
    archive: dcp.DcpSource | None = None
    huggingface: hf.HfSource | None = None
    parts: set[str] = field(default_factory=set)
    reasons: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _listings: dict[str, Listing] = field(default_factory=dict)

    def listing(self, name: str) -> Listing:
        """Return the files of a directory, looked at once: an archive may have ten thousand."""
        if name not in self._listings:
            self._listings[name] = listing_of(self.path / name)
        return self._listings[name]

    @property
    def ours(self) -> bool:
        """Whether the manifest is one of ours: of a migration that is done, or of one that is being undone."""
        return manifests.is_ours(self.manifest)

    @property
    def archives(self) -> list[str]:
        """The trees of v2 that hold an archive, or lead to one."""
        return [tree for tree in layout.ARCHIVES if filled(self.path / tree)]

    def refuse(self, code: str, message: str, path: str = "", hint: str = "") -> None:
        """Add a reason why nothing is done here."""
        self.reasons.append(Problem(code=code, message=message, path=path, hint=hint))

    def refuse_strangers(self, tree: str, source: str, hint: str = "") -> None:
        """Refuse because of a tree that is not its source's: with other files, or with fewer."""
        files = strangers(self.path, tree, source)
        other = f"holds files that are not those of {source}/: {listing(files)}"
        self.refuse("tree-foreign", f"{tree}/ {other if files else f'is not what {source}/ is'}", tree, hint)

    def plan(self, kind: str, title: str, action: Action, **fields: Any) -> RolePlan:
        """Return a plan, or a refusal where there are reasons for one."""
        return RolePlan(
            path=str(self.path),
            kind=kind,
            title=title,
            action="refuse" if self.reasons else action,
            reasons=tuple(self.reasons),
            marks=self.marks,
            notes=tuple(self.notes),
            **fields,
        )

    def holds(self, tree: str) -> str:
        """Say what a tree has of the archive."""
        parts = [part for part, home in layout.TREE_OF_PART.items() if home == tree and part in self.parts]
        return "Hugging Face files" if tree == layout.HUGGINGFACE else ", ".join(parts)

    def change(self, tree: str, source: str, change: str) -> TreeChange:
        """Describe a tree with the files of its source, or its own where the source is gone."""
        held = self.listing(source if source and (self.path / source).is_dir() else tree)
        return TreeChange(tree, source, self.holds(tree), change, held.count, held.bytes)


def look(path: Path) -> Role:
    """Read a role directory; what is wrong with it becomes reasons."""
    v1, v1_hf = (filled(path / name) and not is_nickname(path, name) for name in V1_NAMES)
    role = Role(path, {}, v1, v1_hf, marks(path))
    try:
        role.manifest = manifests.read(path)
    except CkpttoolError as error:
        role.refuse(error.code, error.message, layout.MANIFEST, "Mend it or move it away; the migration replaces it.")
    archive = dcp.open_(path / layout.V1_ARCHIVE) if role.v1 else _soundest(path, role.archives)
    if archive is not None:
        role.archive = _complete_tree(role, archive) or archive
        role.parts = parts_of(role.archive)
        role.reasons += _errors(role.archive.root.relative_to(path).as_posix(), role.archive.problems)
    for where in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE):
        if filled(path / where):
            found = hf.open_(path / where)
            role.reasons += _errors(where, found.problems)
            role.huggingface = role.huggingface or found
    _refuse_links(role)
    other = foreign.detect(path)
    if other is not None and other.kind == "adapter-checkpoint":
        role.notes.append("adapter_checkpoint/ stays as it is: current verl does not load it from there")
    return role


def is_nickname(path: Path, name: str) -> bool:
    """Tell whether a name of layout v1 is a link to a tree, which somebody made for an older verl."""
    trees = [path / tree for tree in TREES if not (path / tree).is_symlink() and (path / tree).is_dir()]
    return (path / name).is_symlink() and any(leans_on(path / name, tree) for tree in trees)


def _soundest(path: Path, trees: Iterable[str]) -> dcp.DcpSource | None:
    """Return the first tree without errors, or the first one."""
    first = None
    for tree in trees:
        archive = dcp.open_(path / tree)
        if not _errors(tree, archive.problems):
            return archive
        first = first or archive
    return first


def _complete_tree(role: Role, archive: dcp.DcpSource) -> dcp.DcpSource | None:
    """Return the tree that has all that is left of a broken ``dist_ckpt/``: verl's script removes it after copying."""
    if not role.v1 or not _errors("", archive.problems):
        return None
    for tree in role.archives:
        source = dcp.open_(role.path / tree)
        if not _errors("", source.problems) and is_part_of(role.path / layout.V1_ARCHIVE, role.path / tree):
            role.v1, role.remains = False, True
            return source
    return None


def marks(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Return inode and time of every directory and file that a plan rests on: when they differ, something changed."""
    names = (".", layout.MANIFEST, *layout.V2_PARENTS, *TREES, *V1_NAMES)
    found = [(name, path / name) for name in (*names, f"{layout.V1_ARCHIVE}/{dcp.METADATA_FILE}")]
    infos = [(name, where.lstat()) for name, where in found if os.path.lexists(where)]
    return tuple((name, info.st_ino, info.st_mtime_ns) for name, info in infos)


def _errors(where: str, problems: Iterable[Problem]) -> list[Problem]:
    return [problem for problem in under(where, problems) if problem.severity == "error"]


def _refuse_links(role: Role) -> None:
    """Names are made and removed in these directories: a link there would lead us to do it somewhere else."""
    for name in (STAGING, layout.MANIFEST, *layout.V2_PARENTS):
        if (role.path / name).is_symlink():
            role.refuse("linked-directory", f"{name} is a symbolic link: nothing is made or removed through it", name)
    for source in V1_NAMES:
        odd = role.listing(source).odd
        if odd:
            role.refuse(
                "odd-entry",
                f"{source}/ holds links to directories, links that lead nowhere or special files: {listing(odd)}",
                source,
                "Replace them by what they stand for, or remove them.",
            )
