"""Plan the migration of one role directory: pure reading, the steps as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.formats import fsdp, shardfiles
from ckpttool.inspection import megatron
from ckpttool.migration import manifest as manifests
from ckpttool.migration import steps as do
from ckpttool.migration.names import GONE, NEW, NEW_MANIFEST, OLD, STAGING, TREES, V1, V1_NAMES, Mode
from ckpttool.migration.result import Action, Options, RolePlan, TreeChange
from ckpttool.migration.role import Role, look
from ckpttool.migration.trees import Condition, condition, filled, flat, kinship, leans_on, wanted
from ckpttool.migration.undoing import plan_undo

_LINKS = ("absolute link", "dangling link")


def plan_role(path: Path, options: Options) -> RolePlan:
    """Return what a migration (or its undoing) does to one role directory."""
    if fsdp.detect(path) or (path / shardfiles.CONFIG_FILE).is_file():
        return RolePlan(path=str(path), kind="fsdp", title="FSDP role directory", action="leave")
    if megatron.detect(path) is None:
        return RolePlan(path=str(path), kind="other", title="no Megatron role directory of verl", action="leave")
    role = look(path)
    return plan_undo(role) if options.undo else _plan_migration(role, options)


def _plan_migration(role: Role, options: Options) -> RolePlan:
    if manifests.is_v2(role.manifest) and not role.ours:
        return _leave(role)
    if role.remains and role.ours and manifests.is_v2(role.manifest):
        role.refuse(
            "source-missing",
            f"{layout.V1_ARCHIVE}/ is not whole any more; the trees are",
            path=layout.V1_ARCHIVE,
            hint="--undo brings it back from them.",
        )
        return role.plan(megatron.V2, "verl Megatron role directory, layout v1 and v2", "nothing")
    if not role.v1 and not role.v1_hf:
        return _plan_without_v1(role)
    trees = wanted(role.parts, archive=role.v1, huggingface=role.v1_hf)
    if not trees:
        role.refuse("nothing-saved", "the archive holds no weights, optimizer or rng, and there is no huggingface/")
    if role.remains and not role.ours:
        role.refuse(
            "source-missing",
            f"{layout.V1_ARCHIVE}/ has lost files that {role.archives[0]}/ has",
            path=layout.V1_ARCHIVE,
            hint="--undo brings them back.",
        )
    elif not role.v1 and role.archives and not role.ours:
        role.refuse("mixed-layouts", f"huggingface/ is of layout v1, {', '.join(role.archives)} of a save of layout v2")
    found = {tree: condition(role.path, tree, source) for tree, source in trees.items()}
    spare = _spare(role, trees)
    broken = bool(role.reasons)
    for tree in [tree for tree, state in {**found, **spare}.items() if state == "foreign"]:
        role.refuse_strangers(
            tree,
            trees.get(tree, layout.V1_ARCHIVE),
            hint=_KEEP if broken else "It belongs to another save: move it away, or remove the older of the two.",
        )
    return _plan_trees(role, options, trees, found, spare)


_KEEP = f"{layout.V1_ARCHIVE}/ is not whole: the tree may be the good copy, keep it."


def _spare(role: Role, trees: Iterable[str]) -> dict[str, Condition]:
    """Return the trees that the archive does not ask for, as verl's script makes them, with their conditions."""
    there = [tree for tree in layout.ARCHIVES if (role.path / tree).is_symlink() or filled(role.path / tree)]
    spare = [tree for tree in there if tree not in trees] if role.v1 else []
    return {tree: condition(role.path, tree, layout.V1_ARCHIVE) for tree in spare}


def _leave(role: Role) -> RolePlan:
    role.reasons.clear()
    return role.plan(megatron.V2, "verl Megatron role directory, saved in layout v2", "leave")


def _plan_trees(
    role: Role,
    options: Options,
    trees: dict[str, str],
    found: dict[str, Condition],
    spare: dict[str, Condition],
) -> RolePlan:
    """Plan a role whose v1 names are there."""
    to_make = {tree: source for tree, source in trees.items() if found[tree] != "whole"}
    go = {tree: state for tree, state in spare.items() if (role.path / tree).is_symlink() or state == "partial"}
    done = role.ours and manifests.is_v2(role.manifest)
    complete = done and not to_make and not go
    title = "verl Megatron role directory, layout v1" + (" and v2" if complete else "")
    if done:
        _check_listed(role, [tree for tree in TREES if tree not in to_make])
    if options.remove_v1:
        _refuse_linked(role, [tree for tree in trees if tree not in to_make])
    if complete:
        if options.remove_v1:
            return _plan_removal(role, trees, title)
        made = {kinship(role.path, tree, source) for tree, source in trees.items()}
        if options.mode not in made:
            words = " and ".join(sorted(made))
            role.notes.append(
                f"the trees are there, by {words}; for --mode {options.mode} take them back with --undo first"
            )
        return role.plan(megatron.V2, title, "nothing", trees=_changes(role, trees, found, {}))
    started = role.ours or bool(spare) or any(state not in ("absent", "empty") for state in found.values())
    action: Action = "migrate" if not started else "finish" if to_make or go else "adopt"
    kept = {kinship(role.path, tree, source) for tree, source in trees.items() if tree not in to_make}
    mode = options.mode if to_make or len(kept) != 1 else kept.pop()
    composed = _manifest(role, _with_moved(role, trees), mode)
    steps = (
        *_making(role, to_make, {**found, **go}, options.mode, manifests.render(composed)),
        do.Move(NEW_MANIFEST, layout.MANIFEST),
        do.Sync("."),
        do.RemoveNames(STAGING),
    )
    copied = sum(role.listing(source).bytes for source in to_make.values()) if options.mode == "copy" else 0
    if options.remove_v1:
        names = ", ".join(f"{name}/" for name in V1_NAMES if filled(role.path / name))
        role.notes += [] if not options.dry_run else [f"then the names of layout v1 go: {names}"]
    role.notes += [f"{tree}/ goes: the archive holds nothing that belongs there" for tree in go]
    return role.plan(
        megatron.V1,
        title,
        action,
        mode=mode,
        trees=_changes(role, trees, found, to_make),
        steps=steps,
        manifest=composed,
        copied_bytes=copied,
    )


def _with_moved(role: Role, trees: Iterable[str]) -> tuple[str, ...]:
    """Add the Hugging Face tree where verl's script moved it: it has no v1 name any more."""
    moved = not role.v1_hf and filled(role.path / layout.HUGGINGFACE)
    return (*trees, layout.HUGGINGFACE) if moved else tuple(trees)


def _manifest(role: Role, trees: Iterable[str], mode: str) -> dict[str, Any]:
    ranks = role.archive.ranks if role.archive else 0
    return manifests.compose(role.path, role.manifest, tuple(trees), role.parts, ranks, mode, role.huggingface)


def _changes(
    role: Role, trees: dict[str, str], found: dict[str, Condition], made: Iterable[str]
) -> tuple[TreeChange, ...]:
    new = {tree: "made" if found.get(tree) in ("absent", "empty") else "remade" for tree in made}
    return tuple(role.change(tree, source, new.get(tree, "kept")) for tree, source in trees.items())


def _making(
    role: Role, trees: dict[str, str], found: dict[str, Condition], mode: Mode, manifest: str
) -> Iterator[do.Step]:
    """Build everything aside, then rename it in: until the first rename the role is untouched v1."""
    yield from (do.MakeDirectory(STAGING), do.MakeDirectory(NEW))
    for tree, source in trees.items():
        yield from _building(role, f"{NEW}/{flat(tree)}", source, mode)
    yield from (do.Sync(NEW), do.WriteFile(NEW_MANIFEST, manifest), do.Sync(STAGING))
    if mode != "symlink":
        yield from (do.RequireWhole(f"{NEW}/{flat(tree)}", source) for tree, source in trees.items())
    if "partial" in found.values():
        yield do.MakeDirectory(OLD)
    for tree in (tree for tree in found if tree not in trees):
        yield from _clearing(tree, found[tree])
    for tree in trees:
        parent = tree.partition("/")[0]
        yield do.MakeDirectory(parent)
        yield from _clearing(tree, found[tree])
        yield do.Move(f"{NEW}/{flat(tree)}", tree)
        yield do.Sync(parent)
    yield do.Sync(".")
    yield do.RequireSpare()


def _clearing(tree: str, state: Condition) -> Iterator[do.Step]:
    if state == "empty":
        yield do.RemoveEmpty(tree)
    elif state in _LINKS:
        yield do.RemoveLink(tree)
    elif state == "partial":
        yield do.Move(tree, f"{OLD}/{flat(tree)}")


def _building(role: Role, target: str, source: str, mode: Mode) -> Iterator[do.Step]:
    if mode == "symlink":
        yield do.LinkDirectory(target, f"../{source}")
        return
    for folder, names in role.listing(source).folders.items():
        below = f"/{folder}" if folder else ""
        yield do.MakeDirectory(target + below, like=source + below)
        if names:
            files = do.LinkFiles if mode == "hardlink" else do.CopyFiles
            yield files(source + below, target + below, tuple(names))
        yield do.Sync(target + below)


def _plan_without_v1(role: Role) -> RolePlan:
    """Plan a role that has no v1 names: finished and stripped by us, or copied by verl's script, or a v2 save."""
    trees = {tree: tree for tree in TREES if filled(role.path / tree)}
    title = "verl Megatron role directory, layout v2"
    archives = role.archives
    for tree in TREES:
        if (role.path / tree).is_symlink() and tree not in trees:
            role.refuse("dangling-link", f"{tree} is a link that leads nowhere: the archive is not here", tree)
    if not role.ours and not role.reasons and not megatron.same_archive_everywhere(role.path, archives):
        return _leave(role)
    _check_alike(role, archives)
    if role.ours and manifests.is_v2(role.manifest) and not role.remains:
        _check_listed(role, TREES)
        return role.plan(megatron.V2, title, "nothing", trees=_changes(role, trees, {}, {}))
    needed = wanted(role.parts, archive=True, huggingface=False)
    for tree in [tree for tree in needed if tree not in trees]:
        role.refuse("tree-missing", f"{tree}/ is missing, but the archive holds its part", path=tree)
    kinds = {kinship(role.path, tree, archives[0]) for tree in archives[1:]}
    mode = kinds.pop() if len(kinds) == 1 else "copy"
    composed = _manifest(role, _with_moved(role, needed), mode)
    steps = (
        do.MakeDirectory(STAGING),
        do.WriteFile(NEW_MANIFEST, manifests.render(composed)),
        do.Move(NEW_MANIFEST, layout.MANIFEST),
        *([do.MakeDirectory(GONE), do.Move(layout.V1_ARCHIVE, f"{GONE}/{layout.V1_ARCHIVE}")] if role.remains else []),
        do.Sync("."),
        do.RemoveNames(STAGING),
    )
    changes = _changes(role, trees, {}, {})
    action: Action = "finish" if role.remains else "adopt"
    return role.plan(megatron.V2, title, action, mode=mode, trees=changes, steps=steps, manifest=composed)


def _check_listed(role: Role, trees: Iterable[str]) -> None:
    """Hold the disk against the manifest of a finished migration."""
    for tree in role.manifest.get("directories", {}):
        if tree in trees and not filled(role.path / tree):
            role.refuse("tree-missing", f"{tree}/ is missing or empty, but the manifest lists it", path=tree)


def _check_alike(role: Role, archives: list[str]) -> None:
    for tree in archives[1:]:
        if condition(role.path, tree, archives[0]) != "whole":
            role.refuse("tree-incomplete", f"{tree}/ does not hold the same files as {archives[0]}/", path=tree)


def _refuse_linked(role: Role, trees: Iterable[str]) -> None:
    linked = [t for t in trees if any(leans_on(role.path / t, role.path / name) for name in V1_NAMES)]
    if linked:
        role.refuse("linked-tree", f"symbolic links that --remove-v1 would leave dangling: {', '.join(linked)}")


def _plan_removal(role: Role, trees: dict[str, str], title: str) -> RolePlan:
    """Drop the v1 names, after the bytes behind the new ones were compared. Once ``GONE`` is there they are gone."""
    for tree, source in trees.items():
        if not (role.path / tree).is_symlink() and condition(role.path, tree, source, by_bytes=True) != "whole":
            role.refuse_strangers(tree, source)
    names = [name for name in V1_NAMES if filled(role.path / name)]
    steps = (
        do.MakeDirectory(STAGING),
        do.MakeDirectory(V1),
        *(do.Move(name, f"{V1}/{name}") for name in names),
        do.Sync("."),
        do.RequireSpare(),
        do.Move(V1, GONE),
        do.Sync(STAGING),
        do.RemoveNames(STAGING),
    )
    changes = tuple(replace(c, change="kept") for c in _changes(role, trees, {}, {}))
    role.notes.append(f"the names of layout v1 go: {', '.join(f'{name}/' for name in names)}")
    return role.plan(megatron.V2, title, "remove v1", trees=changes, steps=steps)
