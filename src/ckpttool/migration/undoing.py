"""Plan the way back: the v1 names return where they are gone, then the trees of v2 go."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

from ckpttool import layout
from ckpttool.inspection import megatron
from ckpttool.migration import manifest as manifests
from ckpttool.migration import steps as do
from ckpttool.migration.names import NEW_MANIFEST, OLD, STAGING, TREES
from ckpttool.migration.result import RolePlan
from ckpttool.migration.role import Role
from ckpttool.migration.trees import condition, filled, flat, leans_on


def plan_undo(role: Role) -> RolePlan:
    """Return what takes a migration back, whoever made it and however far it came."""
    present = [tree for tree in TREES if _is_link(role, tree) or (role.path / tree).is_dir()]
    trees = [tree for tree in present if _is_link(role, tree) or filled(role.path / tree)]
    if not role.ours and (manifests.is_v2(role.manifest) or _is_a_save(role)):
        role.reasons.clear()
        title = "verl Megatron role directory, saved in layout v2: there is nothing to undo"
        return role.plan(megatron.V2, title, "leave")
    parents = [parent for parent in layout.V2_PARENTS if _goes(role, parent, present)]
    if not trees and not parents and not role.ours:
        role.reasons.clear()
        return role.plan(megatron.V1, "verl Megatron role directory, layout v1", "nothing")
    back = dict(_bringing_back(role, trees))
    _check_depth(role, trees)
    _check(role, trees, back)
    changes = tuple(
        role.change(tree, "", f"becomes {back[tree]}/ again" if tree in back else "removed") for tree in trees
    )
    title = "verl Megatron role directory, migrated from layout v1"
    steps = tuple(_undoing(role, present, trees, back, parents))
    return role.plan(megatron.V2, title, "undo", trees=changes, steps=steps)


def _is_link(role: Role, tree: str) -> bool:
    return (role.path / tree).is_symlink()


def _is_a_save(role: Role) -> bool:
    """Tell trees that verl saved (and did not finish) from those that its script made of one archive."""
    if role.v1 or role.remains or (role.v1_hf and not role.archives):
        return False
    archives = role.archives
    return bool(archives or filled(role.path / layout.HUGGINGFACE)) and not megatron.same_archive_everywhere(
        role.path, archives
    )


def _goes(role: Role, parent: str, present: list[str]) -> bool:
    """Tell whether a directory of v2 holds nothing but trees that go."""
    path = role.path / parent
    return path.is_dir() and all(f"{parent}/{child.name}" in present for child in path.iterdir())


def _bringing_back(role: Role, trees: list[str]) -> Iterator[tuple[str, str]]:
    """Yield which tree becomes which v1 name again."""
    real = [tree for tree in trees if not _is_link(role, tree)]
    archives = [tree for tree in real if tree != layout.HUGGINGFACE]
    if not role.v1 and archives:
        sound = [tree for tree in archives if role.archive and role.path / tree == role.archive.root]
        yield (sound or archives)[0], layout.V1_ARCHIVE
    if not role.v1_hf and layout.HUGGINGFACE in real:
        yield layout.HUGGINGFACE, layout.V1_HUGGINGFACE


def _check(role: Role, trees: list[str], back: dict[str, str]) -> None:
    """Every tree that goes must be, byte by byte, what stays (or the beginning of it)."""
    origin = {name: tree for tree, name in back.items()}
    for tree, name in back.items():
        if any(link.is_symlink() and not link.readlink().is_absolute() for link in (role.path / tree).rglob("*")):
            role.refuse("linked-tree", f"{tree}/ holds relative links, which lead nowhere from {name}/", tree)
        if os.path.lexists(role.path / name) and not (role.path / name).is_dir():
            role.refuse("name-taken", f"{name} is no directory, and what was {name}/ has to return to it", name)
    for tree in trees:
        name = layout.V1_HUGGINGFACE if tree == layout.HUGGINGFACE else layout.V1_ARCHIVE
        source = origin.get(name, name)
        if source == tree:
            continue
        if not filled(role.path / source):
            role.refuse("source-missing", f"{tree} leads nowhere and {source}/ is not here: nothing can return", tree)
        elif condition(role.path, tree, source, by_bytes=True) == "foreign":
            role.refuse_strangers(tree, source)
        elif not _is_link(role, tree) and leans_on(role.path / source, role.path / tree):
            role.refuse("linked-tree", f"{source}/ holds symbolic links into {tree}/, which would go", source)


def _check_depth(role: Role, trees: list[str]) -> None:
    for tree in trees:
        if not _is_link(role, tree) and _too_deep(role.path / tree):
            role.refuse("too-deep", f"{tree}/ holds paths that are too long to be moved or compared", tree)


PATH_LONGEST = 3500
"""Bytes of a directory's path from which on what lies in it may have no path where it is moved to."""


def _too_deep(path: Path) -> bool:
    """Tell whether directories below cannot be walked: what begins to move has to arrive."""
    errors: list[OSError] = []
    longest = max((len(os.fsencode(folder)) for folder, _, _ in os.walk(path, onerror=errors.append)), default=0)
    return longest > PATH_LONGEST or any(error.errno == errno.ENAMETOOLONG for error in errors)


def _undoing(
    role: Role, present: list[str], trees: list[str], back: dict[str, str], parents: list[str]
) -> Iterator[do.Step]:
    """The manifest says first that an undoing has begun, and what the earlier one said, and goes last."""
    yield from (do.MakeDirectory(STAGING), do.MakeDirectory(OLD))
    if role.ours:
        yield from _writing(manifests.render(manifests.being_undone(role.manifest)))
    for tree, name in back.items():
        remains = role.remains and name == layout.V1_ARCHIVE
        if (role.path / name).is_symlink():
            yield do.RemoveLink(name)
        else:
            yield do.Move(name, f"{OLD}/{name}") if remains else do.RemoveEmpty(name)
        yield do.Move(tree, name)
    yield do.Sync(".")
    for tree in present:
        if _is_link(role, tree):
            yield do.RemoveLink(tree)
        elif tree in trees and tree not in back:
            yield do.Move(tree, f"{OLD}/{flat(tree)}")
        elif tree not in trees:
            yield do.RemoveEmpty(tree)
    yield do.RequireSpare()
    for parent in parents:
        yield do.RemoveEmpty(parent)
    if role.ours:
        earlier = manifests.earlier_text(role.manifest)
        yield from _writing(earlier) if earlier is not None else (do.RemoveFile(layout.MANIFEST), do.Sync("."))
    yield do.RemoveNames(STAGING)


def _writing(text: str) -> tuple[do.Step, ...]:
    return (do.WriteFile(NEW_MANIFEST, text), do.Move(NEW_MANIFEST, layout.MANIFEST), do.Sync("."))
