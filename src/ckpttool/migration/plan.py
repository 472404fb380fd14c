"""Plan the migration of one role directory: pure reading, the steps as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpttool import layout
from ckpttool.errors import Problem
from ckpttool.formats import dcp, foreign, fsdp, hf
from ckpttool.inspection import megatron
from ckpttool.inspection.draft import under
from ckpttool.migration import manifest as manifests
from ckpttool.migration import steps as do
from ckpttool.migration.result import Action, Mode, Options, RolePlan, TreeChange
from ckpttool.migration.trees import Condition, condition, filled, listing_of, parts_of, wanted

STAGING = layout.MIGRATION_STAGING
NEW, OLD, V1 = f"{STAGING}/new", f"{STAGING}/old", f"{STAGING}/v1"

_BACK = (layout.V1_ARCHIVE, layout.V1_HUGGINGFACE)


@dataclass(slots=True)
class _Role:
    """What lies in a role directory before anything happens."""

    path: Path
    manifest: dict[str, Any]
    v1: bool
    v1_hf: bool
    archive: dcp.DcpSource | None = None
    parts: set[str] = field(default_factory=set)
    reasons: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, code: str, message: str, path: str = "", hint: str = "") -> None:
        """Add a reason why nothing is done here."""
        self.reasons.append(Problem(code=code, message=message, path=path, hint=hint))


def plan_role(path: Path, options: Options) -> RolePlan:
    """Return what a migration (or its undoing) does to one role directory."""
    if fsdp.detect(path) or (path / fsdp.CONFIG_FILE).is_file():
        return RolePlan(path=str(path), kind="fsdp", title="FSDP role directory", action="leave")
    if megatron.detect(path) is None:
        return RolePlan(path=str(path), kind="other", title="no Megatron role directory of verl", action="leave")
    role = _look(path)
    return _plan_undo(role) if options.undo else _plan_migration(role, options)


def _look(path: Path) -> _Role:
    v1, v1_hf = filled(path / layout.V1_ARCHIVE), filled(path / layout.V1_HUGGINGFACE)
    role = _Role(path, manifests.read(path), v1, v1_hf)
    where = layout.V1_ARCHIVE if v1 else next((t for t in layout.ARCHIVES if filled(path / t)), None)
    if where is not None:
        role.archive = dcp.open_(path / where)
        role.parts = parts_of(role.archive)
        role.reasons += [p for p in under(where, role.archive.problems) if p.severity == "error"]
    for where in (layout.V1_HUGGINGFACE, layout.HUGGINGFACE):
        if filled(path / where):
            role.reasons += [p for p in under(where, hf.open_(path / where).problems) if p.severity == "error"]
    other = foreign.detect(path)
    if other is not None and other.kind == "adapter-checkpoint":
        role.notes.append("adapter_checkpoint/ stays as it is: current verl does not load it from there")
    return role


def _plan(role: _Role, kind: str, title: str, action: Action, **fields: Any) -> RolePlan:
    return RolePlan(
        path=str(role.path),
        kind=kind,
        title=title,
        action="refuse" if role.reasons else action,
        reasons=tuple(role.reasons),
        notes=tuple(role.notes),
        **fields,
    )


def _plan_migration(role: _Role, options: Options) -> RolePlan:
    ours = manifests.is_ours(role.manifest)
    if manifests.is_v2(role.manifest) and not ours:
        return _leave(role, "saved in layout v2")
    if not role.v1 and not role.v1_hf:
        return _plan_without_v1(role, ours)
    trees = wanted(role.parts, archive=role.v1, huggingface=role.v1_hf)
    if not trees:
        role.refuse("nothing-saved", "the archive holds no weights, optimizer or rng, and there is no huggingface/")
    found = {tree: condition(role.path, tree, source) for tree, source in trees.items()}
    for tree in [tree for tree, state in found.items() if state == "foreign"]:
        role.refuse(
            "tree-foreign",
            f"{tree}/ holds files that are not those of {trees[tree]}/",
            path=tree,
            hint="It belongs to another save: move it away, or remove the older of the two.",
        )
    return _plan_trees(role, options, trees, found, ours)


def _leave(role: _Role, why: str) -> RolePlan:
    role.reasons.clear()
    return _plan(role, megatron.V2, f"verl Megatron role directory, {why}", "leave")


def _plan_trees(
    role: _Role, options: Options, trees: dict[str, str], found: dict[str, Condition], ours: bool
) -> RolePlan:
    """Plan a role whose v1 names are there."""
    to_make = {tree: source for tree, source in trees.items() if found[tree] != "whole"}
    complete = not to_make and ours
    title = "verl Megatron role directory, layout v1" + (" and v2" if complete else "")
    if complete and options.remove_v1:
        return _plan_removal(role, trees, title)
    if complete:
        return _plan(role, megatron.V2, title, "nothing", trees=_changes(role, trees, found, {}))
    started = ours or any(state not in ("absent", "empty") for state in found.values())
    action: Action = "migrate" if not started else "finish" if to_make else "adopt"
    composed = _manifest(role, trees, options.mode)
    steps = (
        *_making(role, to_make, found, options.mode),
        do.WriteFile(layout.MANIFEST, manifests.render(composed)),
        do.RemoveNames(STAGING),
    )
    copied = sum(listing_of(role.path / source).bytes for source in to_make.values()) if options.mode == "copy" else 0
    changes = _changes(role, trees, found, to_make)
    return _plan(
        role,
        megatron.V1,
        title,
        action,
        mode=options.mode,
        trees=changes,
        steps=steps,
        manifest=composed,
        copied_bytes=copied,
    )


def _manifest(role: _Role, trees: Iterable[str], mode: str) -> dict[str, Any]:
    earlier = role.manifest.get(manifests.BEFORE, {}) if manifests.is_ours(role.manifest) else role.manifest
    ranks = role.archive.ranks if role.archive else 0
    return manifests.compose(role.path, earlier, tuple(trees), role.parts, ranks, mode)


def _changes(
    role: _Role, trees: dict[str, str], found: dict[str, Condition], made: Iterable[str]
) -> tuple[TreeChange, ...]:
    changes = []
    for tree, source in trees.items():
        held = listing_of(role.path / source) if (role.path / source).is_dir() else listing_of(role.path / tree)
        new = "made" if found.get(tree) in ("absent", "empty") else "remade"
        changes.append(
            TreeChange(tree, source, _holds(role, tree), new if tree in made else "kept", held.count, held.bytes)
        )
    return tuple(changes)


def _holds(role: _Role, tree: str) -> str:
    parts = [part for part, home in layout.TREE_OF_PART.items() if home == tree and part in role.parts]
    return "Hugging Face files" if tree == layout.HUGGINGFACE else ", ".join(parts)


def _making(role: _Role, trees: dict[str, str], found: dict[str, Condition], mode: Mode) -> Iterator[do.Step]:
    """Build every tree aside, then rename all of them in: until the first rename the role is untouched v1."""
    if mode != "symlink":
        yield from (do.MakeDirectory(STAGING), do.MakeDirectory(NEW))
        for tree, source in trees.items():
            yield from _building(role, f"{NEW}/{_flat(tree)}", source, mode)
        yield do.Sync(NEW)
    if "partial" in found.values():
        yield from (do.MakeDirectory(STAGING), do.MakeDirectory(OLD))
    for tree, source in trees.items():
        parent = tree.partition("/")[0]
        yield do.MakeDirectory(parent)
        yield from _clearing(tree, found[tree])
        if mode == "symlink":
            yield do.LinkDirectory(tree, f"../{source}")
        else:
            yield do.Move(f"{NEW}/{_flat(tree)}", tree)
        yield do.Sync(parent)
    yield do.Sync(".")


def _flat(tree: str) -> str:
    return tree.replace("/", "-")


def _clearing(tree: str, state: Condition) -> Iterator[do.Step]:
    if state == "empty":
        yield do.RemoveEmpty(tree)
    elif state in ("absolute link", "dangling link"):
        yield do.RemoveLink(tree)
    elif state == "partial":
        yield do.Move(tree, f"{OLD}/{_flat(tree)}")


def _building(role: _Role, target: str, source: str, mode: Mode) -> Iterator[do.Step]:
    for folder, names in listing_of(role.path / source).folders.items():
        below = f"/{folder}" if folder else ""
        yield do.MakeDirectory(target + below)
        if names:
            files = do.LinkFiles if mode == "hardlink" else do.CopyFiles
            yield files(source + below, target + below, names)
        yield do.Sync(target + below)


def _plan_without_v1(role: _Role, ours: bool) -> RolePlan:
    """Plan a role that has no v1 names: finished and stripped by us, or copied by verl's script, or a v2 save."""
    trees = {t: t for t in (*layout.ARCHIVES, layout.HUGGINGFACE) if filled(role.path / t)}
    title = "verl Megatron role directory, layout v2"
    archives = [tree for tree in trees if tree != layout.HUGGINGFACE]
    if ours:
        _check_manifest_trees(role, archives)
        return _plan(role, megatron.V2, title, "nothing", trees=_changes(role, trees, {}, {}))
    if not archives or not megatron.same_archive_everywhere(role.path, archives):
        return _leave(role, "saved in layout v2")
    needed = wanted(role.parts, archive=True, huggingface=False)
    for tree in needed.keys() - trees.keys():
        role.refuse("tree-missing", f"{tree}/ is missing, but the archive holds its part", path=tree)
    composed = _manifest(role, {**needed, **trees}, "copy")
    steps = (do.WriteFile(layout.MANIFEST, manifests.render(composed)), do.RemoveNames(STAGING))
    return _plan(
        role,
        megatron.V2,
        title,
        "adopt",
        mode="copy",
        trees=_changes(role, trees, {}, {}),
        steps=steps,
        manifest=composed,
    )


def _check_manifest_trees(role: _Role, archives: list[str]) -> None:
    """Hold a role whose v1 names are gone against its manifest, and its trees against each other."""
    for tree in role.manifest.get("directories", {}):
        if not filled(role.path / str(tree)):
            role.refuse("tree-missing", f"{tree}/ is missing or empty, but the manifest lists it", path=str(tree))
    for tree in archives[1:]:
        if condition(role.path, tree, archives[0]) != "whole":
            role.refuse("tree-incomplete", f"{tree}/ does not hold the same files as {archives[0]}/", path=tree)


def _plan_removal(role: _Role, trees: dict[str, str], title: str) -> RolePlan:
    """Drop the v1 names, after the bytes behind the new ones were compared."""
    for tree, source in trees.items():
        if (role.path / tree).is_symlink():
            role.refuse("linked-tree", f"{tree} is a symbolic link to {source}/: --remove-v1 would leave it dangling")
        elif condition(role.path, tree, source, by_bytes=True) != "whole":
            role.refuse("tree-foreign", f"{tree}/ is not byte by byte what {source}/ holds", path=tree)
    names = [name for name in _BACK if filled(role.path / name)]
    steps = (
        do.MakeDirectory(STAGING),
        do.MakeDirectory(V1),
        *(do.Move(name, f"{V1}/{name}") for name in names),
        do.Sync("."),
        do.RemoveNames(STAGING),
    )
    changes = tuple(replace(c, change="kept") for c in _changes(role, trees, {}, {}))
    role.notes.append(f"the names of layout v1 go: {', '.join(f'{name}/' for name in names)}")
    return _plan(role, megatron.V2, title, "remove v1", trees=changes, steps=steps)


def _plan_undo(role: _Role) -> RolePlan:
    """Bring back the v1 names where they are gone, then take away the trees of v2."""
    present = [
        t for t in (*layout.ARCHIVES, layout.HUGGINGFACE) if (role.path / t).is_symlink() or (role.path / t).is_dir()
    ]
    trees = [t for t in present if (role.path / t).is_symlink() or filled(role.path / t)]
    if manifests.is_v2(role.manifest) and not manifests.is_ours(role.manifest):
        return _leave(role, "saved in layout v2: there is nothing to undo")
    if not trees and not manifests.is_ours(role.manifest):
        return _plan(role, megatron.V1, "verl Megatron role directory, layout v1", "nothing")
    back = dict(_bringing_back(role, trees))
    for tree in trees:
        source = layout.V1_HUGGINGFACE if tree == layout.HUGGINGFACE else layout.V1_ARCHIVE
        if tree not in back and source not in back.values() and condition(role.path, tree, source) == "foreign":
            role.refuse("tree-foreign", f"{tree}/ holds files that are not those of {source}/", path=tree)
    steps = tuple(_undoing(role, present, trees, back))
    held = {tree: listing_of(role.path / tree) for tree in trees}
    changes = tuple(
        TreeChange(tree, back.get(tree, ""), _holds(role, tree), _fate(tree, back), held[tree].count, held[tree].bytes)
        for tree in trees
    )
    return _plan(
        role, megatron.V2, "verl Megatron role directory, migrated from layout v1", "undo", trees=changes, steps=steps
    )


def _fate(tree: str, back: dict[str, str]) -> str:
    return f"becomes {back[tree]}/ again" if tree in back else "removed"


def _bringing_back(role: _Role, trees: list[str]) -> Iterator[tuple[str, str]]:
    """Yield which tree becomes which v1 name again."""
    real = [tree for tree in trees if not (role.path / tree).is_symlink()]
    archives = [tree for tree in real if tree != layout.HUGGINGFACE]
    if not role.v1 and archives:
        yield archives[0], layout.V1_ARCHIVE
    if not role.v1_hf and layout.HUGGINGFACE in real:
        yield layout.HUGGINGFACE, layout.V1_HUGGINGFACE


def _undoing(role: _Role, present: list[str], trees: list[str], back: dict[str, str]) -> Iterator[do.Step]:
    """The manifest goes first: without it the next run sees a migration to finish, or to undo again."""
    earlier = role.manifest.get(manifests.BEFORE) if manifests.is_ours(role.manifest) else role.manifest
    if earlier:
        yield do.WriteFile(layout.MANIFEST, manifests.render(earlier))
    elif (role.path / layout.MANIFEST).is_file():
        yield do.RemoveFile(layout.MANIFEST)
    for tree, name in back.items():
        yield do.RemoveEmpty(name)
        yield do.Move(tree, name)
    yield do.Sync(".")
    yield from (do.MakeDirectory(STAGING), do.MakeDirectory(OLD))
    for tree in present:
        if (role.path / tree).is_symlink():
            yield do.RemoveLink(tree)
        elif tree in trees and tree not in back:
            yield do.Move(tree, f"{OLD}/{_flat(tree)}")
        elif tree not in trees:
            yield do.RemoveEmpty(tree)
    for parent in sorted({tree.partition("/")[0] for tree in present}):
        if all(f"{parent}/{child.name}" in present for child in (role.path / parent).iterdir()):
            yield do.RemoveEmpty(parent)
    yield do.RemoveNames(STAGING)
