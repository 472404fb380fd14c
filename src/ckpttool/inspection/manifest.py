"""verl's manifest ``ckpt_contents.json``, held against the disk and against the contents matrix."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ckpttool import layout
from ckpttool.errors import CkpttoolError
from ckpttool.formats.findings import listing
from ckpttool.formats.jsonfile import read_object
from ckpttool.inspection.access import closed, is_directory
from ckpttool.inspection.draft import Draft, role_of
from ckpttool.inspection.result import ExpectedTree, Manifest


def schema_version(path: Path) -> int | None:
    """Return the schema version of a role directory's manifest, or ``None`` where there is no readable one."""
    try:
        version = read_object(path / layout.MANIFEST).get("schema_version")
    except CkpttoolError:
        return None
    return version if type(version) is int else None


def add_manifest(draft: Draft) -> None:
    """Read the manifest of a role directory, if there is one, and say where it and the disk disagree."""
    file = draft.path / layout.MANIFEST
    if not file.is_file():
        return
    try:
        content = read_object(file)
    except CkpttoolError as error:
        draft.fault(error.code, error.message, path=layout.MANIFEST, hint=error.hint)
        return
    version = content.get("schema_version")
    saved = tuple(str(word) for word in _list(content.get("save_contents")))
    backend = {k: v for k, v in _dict(content.get("backend")).items() if isinstance(v, bool)}
    claims = _dict(content.get("contents"))
    trees = _expected(draft, saved, backend, claims) if version == layout.SCHEMA_VERSION else ()
    draft.manifest = Manifest(version if type(version) is int else None, saved, backend, trees)
    if version != layout.SCHEMA_VERSION:
        draft.note("old-manifest", f"{layout.MANIFEST} has schema version {version}, not {layout.SCHEMA_VERSION}")
        return
    if not saved and not backend.get("peft"):
        draft.fault("bad-manifest", f"{layout.MANIFEST} has no save_contents, so it vouches for nothing")
    _check_trees(draft, trees)
    _check_claims(draft, claims, trees)
    _check_place(draft, content)


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _expected(
    draft: Draft, saved: tuple[str, ...], backend: Mapping[str, bool], claims: Mapping[str, Any]
) -> tuple[ExpectedTree, ...]:
    """Return what the contents matrix asks for; a migrated role may never have had a transformer configuration."""
    trees = layout.expected_trees(
        saved,
        use_mbridge=backend.get("has_bridge"),
        use_dist_checkpointing=backend.get("use_dist_checkpointing"),
        peft=backend.get("peft", False),
        megatron_fsdp=_is_combined(draft),
    )
    if isinstance(trees, layout.Illegal):
        draft.note("illegal-contents", f"{layout.MANIFEST} describes a save that cannot be: {trees.reason}")
        return ()
    return tuple(
        ExpectedTree(t.path, t.holds, t.format, t.backend, _holds(draft, t))
        for t in trees
        if t.format != layout.JSON_FORMAT or t.holds in claims
    )


def _is_combined(draft: Draft) -> bool:
    """Megatron-FSDP saves one archive; its manifest claims trees that it never writes, and has no word for that."""
    section = draft.section_at(layout.MODEL)
    both = section is not None and bool(section.tensors("optimizer")) and bool(section.tensors("model"))
    return both and not _there(draft.path / layout.OPTIMIZER)


_PARTS = {
    "model weights": {"model"},
    "adapters": {"adapter"},
    "optimizer, lr_scheduler": {"optimizer", "scheduler"},
    "rng_state": {"rng"},
}


def _holds(draft: Draft, tree: layout.Tree) -> bool:
    """Tell whether a tree is there with what it should hold; what could not be opened is reported elsewhere."""
    if tree.path == layout.HUGGINGFACE and not closed(draft.path / tree.path):
        section = draft.section_at(tree.path)
        return section is not None and bool(section.source.tensors or section.source.problems)
    section = draft.section_at(tree.path)
    names = (*section.source.tensors, *section.source.objects) if section else ()
    if section is None or not names or tree.holds not in _PARTS:
        return _there(draft.path / tree.path)
    return bool(_PARTS[tree.holds] & {section.source.part_of(name) for name in names})


def _there(path: Path) -> bool:
    if os.path.isfile(path):  # noqa: PTH113 - a manifest may name a path that is too long to be one
        return True
    return is_directory(path) and (closed(path) or bool(os.listdir(path)))


def _check_trees(draft: Draft, trees: tuple[ExpectedTree, ...]) -> None:
    for tree in trees:
        if not tree.found:
            draft.fault(
                "tree-missing",
                f"{tree.path} is missing or holds no {tree.holds}, but save_contents asks for it",
                path=tree.path,
            )
    if trees:
        planned = {tree.path for tree in trees}
        extra = [t for t in (*layout.ARCHIVES, layout.HUGGINGFACE) if t not in planned and _has_weights(draft, t)]
        if extra:
            draft.note("tree-unexpected", f"trees that save_contents does not ask for: {listing(extra)}")


def _has_weights(draft: Draft, tree: str) -> bool:
    return any(section.where == tree for section in draft.sections)


def _check_claims(draft: Draft, contents: Mapping[str, Any], trees: tuple[ExpectedTree, ...]) -> None:
    """Report what the manifest says lies somewhere and does not; the matrix decides what had to be there."""
    needed = {tree.path for tree in trees if not tree.found}
    for name, entry in contents.items():
        claimed = _dict(entry).get("path")
        if not isinstance(claimed, str) or claimed in needed:
            continue
        parts = PurePosixPath(claimed).parts
        if PurePosixPath(claimed).is_absolute() or ".." in parts:
            draft.note("manifest-disagrees", f"{layout.MANIFEST} says {name} lies outside, in {claimed}")
        elif not _there(draft.path / claimed):
            draft.note("manifest-disagrees", f"{layout.MANIFEST} says {name} lies in {claimed}, which is not there")


def _check_place(draft: Draft, content: Mapping[str, Any]) -> None:
    """The manifest names its own step and role; another place means that the directory was moved or copied."""
    step, role = layout.step_of(draft.path.parent.name), role_of(draft.path)
    said, named = content.get("global_step"), content.get("role")
    if step is not None and type(said) is int and said != step:
        draft.note("manifest-disagrees", f"{layout.MANIFEST} says step {said}, the directory says {step}")
    if role is not None and isinstance(named, str) and named != role:
        draft.note("manifest-disagrees", f"{layout.MANIFEST} says role {named}, the directory says {role}")
    ranks = content.get("world_size")
    if type(ranks) is int:
        draft.facts.setdefault("world size", str(ranks))
