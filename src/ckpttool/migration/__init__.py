"""``migrate``: verl's Megatron layout v1 to v2 in place, by adding names. Planned, checked, then carried out."""

from __future__ import annotations

import os
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, CannotWrite, NotACheckpoint, Problem, UsageError
from ckpttool.formats.findings import listing
from ckpttool.inspection import kinds, runs
from ckpttool.inspection.access import HINT
from ckpttool.inspection.search import only_candidate
from ckpttool.migration import manifest as manifests
from ckpttool.migration import steps as do
from ckpttool.migration.names import GONE, NEW, OLD, STAGING, TREES, V1, V1_NAMES
from ckpttool.migration.plan import plan_role
from ckpttool.migration.result import Migration, Options, RolePlan
from ckpttool.migration.role import marks
from ckpttool.migration.spare import OnlyCopy, only_copies
from ckpttool.migration.steps import LinkRefused, SourceChanged, execute, locked
from ckpttool.migration.trees import condition, filled, flat

__all__ = ["Migration", "Options", "migrate"]

Progress = Callable[[int], None]


def migrate(path: Path, options: Options, progress: Progress = lambda _bytes: None) -> Migration:
    """Migrate every v1 role at or below a path: a role, a step or a run.

    Raises :class:`BrokenCheckpoint` with all reasons when a source is not complete (before the first role is touched),
    :class:`CannotWrite` when the system refuses, :class:`NotACheckpoint` when there is no role directory.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    if options.remove_v1 and "symlink" in (options.mode, options.fallback):
        option = "--mode" if options.mode == "symlink" else "--fallback"
        raise UsageError(f"--remove-v1 with {option} symlink: the links would lead nowhere")
    if options.undo and options.remove_v1:
        raise UsageError("--undo and --remove-v1 ask for opposite things")
    try:
        roles = find_roles(path)
        plans = [_plan(role, options) for role in roles]
    except PermissionError as error:
        raise NotACheckpoint(f"{error.filename}: permission denied", hint=HINT, code="unreadable") from error
    _refuse_broken(path, plans, options)
    if options.dry_run:
        return Migration(path=str(path), done=False, roles=tuple(plans), options=options)
    _check_space(plans)
    done: list[RolePlan] = []
    for plan in plans:
        try:
            done.append(_migrate_role(Path(plan.path), plan, options, progress))
        except (CannotWrite, BrokenCheckpoint) as error:
            if options.skip_broken and isinstance(error, BrokenCheckpoint):
                reasons = tuple(error.problems) or (Problem(code=error.code, message=error.message, hint=error.hint),)
                done.append(replace(plan, action="refuse", reasons=reasons, steps=()))
                continue
            finished = ", ".join(os.path.relpath(p.path, path) for p in done if p.action not in ("leave", "nothing"))
            error.hint += f"\nDone before that: {finished}." if finished else ""
            raise
    return Migration(path=str(path), done=True, roles=tuple(done), options=options)


def _plan(role: Path, options: Options) -> RolePlan:
    """Plan one role. Where nothing may be written, and what cannot be read, are told before anything is touched."""
    try:
        plan = plan_role(role, options)
    except PermissionError as error:
        if not options.skip_broken:
            raise
        reason = Problem(code="unreadable", message=f"{error.filename}: permission denied", hint=HINT)
        return RolePlan(path=str(role), kind="unknown", title="not readable", action="refuse", reasons=(reason,))
    if plan.action == "refuse" and _interrupted(role):
        plan = replace(plan, reasons=(*plan.reasons, *_aside(role)))
    if not plan.steps or plan.action == "refuse" or _may_change(role, plan):
        return replace(plan, notes=(*plan.notes, *([_LEFT_BEHIND] if _interrupted(role) and options.dry_run else [])))
    read_only = bool(os.statvfs(role).f_flag & os.ST_RDONLY)
    message = "Read-only file system (EROFS)" if read_only else "Permission denied (EACCES)"
    if options.dry_run:
        return replace(plan, notes=(*plan.notes, f"you cannot write here: {message}"))
    if not options.skip_broken:
        raise CannotWrite(f"{role}: {message}; nothing was touched", hint=f"{_OWNER} Or leave it out: --skip-broken.")
    reason = Problem(code="not-writable", message=message, hint=_OWNER)
    return replace(plan, action="refuse", reasons=(reason,), steps=())


def _aside(role: Path) -> Iterator[Problem]:
    """Name what an interrupted migration has moved aside: it may be what the rest of the role lacks."""
    aside = [
        f"{top}/{child.name}"
        for top in (V1, OLD, GONE, NEW)
        if (role / top).is_dir()
        for child in (role / top).iterdir()
    ]
    if aside:
        yield Problem(
            code="migration-interrupted",
            message=f"an interrupted migration has moved aside: {listing(sorted(aside))}",
            path=STAGING,
            hint="If that is what is missing here, move it back to its name, then run again.",
        )


def _may_change(role: Path, plan: RolePlan) -> bool:
    """Tell whether one may make names in a role, and rename the directories that the plan moves."""
    moved = [role / step.source for step in plan.steps if isinstance(step, do.Move)]
    return all(os.access(path, os.W_OK | os.X_OK) for path in (role, *moved) if path.is_dir() and not path.is_symlink())


_OWNER = "Run as the owner of the checkpoint."
_LEFT_BEHIND = "an interrupted migration left .ckpttool-migration/, which is cleared first"


def find_roles(path: Path) -> list[Path]:
    """Return the role directories at or below a path: itself, the roles of a step, of every step of a run."""
    if not path.is_dir():
        what = "not a directory" if path.exists() else "no such directory"
        raise NotACheckpoint(f"{path}: {what}", hint=_beside(path))
    itself = [path] if kinds.is_checkpoint(path) or _interrupted(path) else []
    steps = runs.steps(path)
    roles = [role for step in steps for role in (kinds.roles(step) or ([step] if kinds.is_checkpoint(step) else []))]
    found = [*itself, *roles] or kinds.roles(path)
    if not found:
        raise NotACheckpoint(f"{path}: no role directory here or below", hint=_below(path))
    return found


_MEANT = "Give a role (actor), a step (global_step_N) or a run."


def _beside(path: Path) -> str:
    """Return what may have been meant by a path that is not there."""
    try:
        close = get_close_matches(path.name, [p.name for p in path.parent.iterdir() if p.is_dir()], 3)
    except OSError:
        close = []
    lines = "".join(f"\n  ckpttool migrate {shlex.quote(str(path.with_name(name)))}" for name in close)
    return f"Try:{lines}" if lines else _MEANT


def _below(path: Path) -> str:
    """Return what to type instead, by what lies below a directory."""
    try:
        found = str(only_candidate(path))
    except NotACheckpoint as error:
        if "ckpttool inspect " in error.hint:
            return error.hint.replace("ckpttool inspect ", "ckpttool migrate ")
        return _MEANT
    return f"Try:\n  ckpttool migrate {shlex.quote(found)}"


def _refuse_broken(path: Path, plans: Sequence[RolePlan], options: Options) -> None:
    refused = [plan for plan in plans if plan.action == "refuse"]
    if not refused or options.skip_broken:
        return
    reasons = [
        replace(reason, path=f"{os.path.relpath(plan.path, path)}/{reason.path}".removeprefix("./").rstrip("/"))
        for plan in refused
        for reason in plan.reasons
    ]
    several = len(plans) > 1
    what = "be undone" if options.undo else "be migrated"
    count = f"{len(refused)} of the role directories cannot" if several else "this cannot"
    raise BrokenCheckpoint(
        f"{path}: {count} {what}; nothing was touched",
        hint=f"Mend or complete what is listed{', or go on with the sound ones: --skip-broken' if several else ''}.",
        code="broken-source",
        problems=reasons,
    )


def _migrate_role(role: Path, plan: RolePlan, options: Options, progress: Progress) -> RolePlan:
    """Carry out one role's plan under its lock, and check the outcome; what changed meanwhile is planned anew."""
    if plan.action == "refuse" or (plan.action in ("nothing", "leave") and not _interrupted(role)):
        return plan
    try:
        with locked(role):
            recovered = _recover(role)
            if recovered or marks(role) != plan.marks:
                plan = plan_role(role, options)
            done = _carry_out(role, plan, options, progress)
            if options.remove_v1 and done.action not in ("remove v1", "leave"):
                removal = _carry_out(role, plan_role(role, options), options, progress)
                done = removal if done.action == "nothing" else replace(done, notes=(*done.notes, *removal.notes))
            if recovered:
                action = "finish" if done.action == "nothing" else done.action
                note = "what an interrupted migration had left was cleared"
                done = replace(done, action=action, notes=(*done.notes, note))
            return done
    except PermissionError as error:
        raise CannotWrite(f"{error.filename}: permission denied", hint="Run as the owner of the checkpoint.") from error


def _interrupted(role: Path) -> bool:
    return (role / STAGING).is_dir() and not (role / STAGING).is_symlink()


def _carry_out(role: Path, plan: RolePlan, options: Options, progress: Progress) -> RolePlan:
    if plan.action == "refuse":
        raise BrokenCheckpoint(f"{role}: cannot be migrated", code="broken-source", problems=plan.reasons)
    _check_space([plan])
    try:
        execute(role, plan.steps, progress)
    except LinkRefused as refused:
        _step_back(role, plan)
        if options.fallback is None or options.fallback == options.mode:
            raise
        other = replace(options, mode=options.fallback, fallback=None)
        again = _carry_out(role, plan_role(role, other), other, progress)
        return replace(again, notes=(*again.notes, f"{refused.message}; went on with --fallback {options.fallback}"))
    except (CannotWrite, SourceChanged):
        _step_back(role, plan)
        raise
    except OnlyCopy:
        _recover(role)
        raise
    _check_outcome(role, plan)
    return plan


def _check_outcome(role: Path, plan: RolePlan) -> None:
    """Look at the directory again: every tree is whole and the manifest is in, or every tree is gone."""
    wrong = [
        tree.path
        for tree in plan.trees
        if plan.action in ("migrate", "finish", "adopt")
        and (role / tree.source).is_dir()
        and condition(role, tree.path, tree.source) != "whole"
    ]
    if plan.action == "undo":
        wrong = [tree.path for tree in plan.trees if os.path.lexists(role / tree.path)]
    if wrong or (plan.manifest is not None and manifests.read(role) != plan.manifest):
        raise BrokenCheckpoint(
            f"{role}: the outcome is not what was planned: {', '.join(wrong) or layout.MANIFEST}", code="not-as-planned"
        )


def _step_back(role: Path, plan: RolePlan) -> None:
    """Take away what a step that failed leaves aside, and directories that have not got their tree."""
    _recover(role)
    made = {step.path for step in plan.steps if isinstance(step, do.MakeDirectory)} & set(layout.V2_PARENTS)
    for parent in sorted(made):
        with suppress(OSError):  # it is not there, or not empty
            os.rmdir(role / parent)  # noqa: PTH106


def _check_space(plans: Iterable[RolePlan]) -> None:
    """Compare what will be copied to each file system with what is free there."""
    needed: Counter[int] = Counter()
    for plan in (plan for plan in plans if plan.copied_bytes):
        path = Path(plan.path)
        device = path.stat().st_dev
        needed[device] += plan.copied_bytes
        free = shutil.disk_usage(path).free
        if needed[device] > free:
            raise CannotWrite(
                f"{path}: the copies need {needed[device]:,} bytes, {free:,} are free",
                hint="Links need no space: --mode hardlink, or --mode symlink.",
                code="no-space",
            )


def _recover(role: Path) -> bool:
    """Clear away what a killed run left aside; v1 names that it had moved there come back first."""
    if not _interrupted(role):
        return False
    execute(role, tuple(_putting_back(role, [(f"{V1}/{name}", name) for name in V1_NAMES])))
    if any(only_copies(role)):
        aside = [(f"{OLD}/{flat(tree)}", tree) for tree in TREES]
        aside += [(f"{there}/{name}", name) for there in (OLD, GONE) for name in V1_NAMES]
        execute(role, tuple(_putting_back(role, aside)))
    execute(role, (do.RemoveNames(STAGING),))
    return True


def _putting_back(role: Path, places: Iterable[tuple[str, str]]) -> Iterator[do.Step]:
    """Yield what moves names back that lie aside, where nothing has taken their place."""
    for aside, name in places:
        if not os.path.lexists(role / aside) or filled(role / name) or (role / name).is_symlink():
            continue
        if not os.path.lexists(role / name) or (role / name).is_dir():
            parent = name.rpartition("/")[0]
            yield from (do.MakeDirectory(parent),) if parent else ()
            yield from (do.RemoveEmpty(name), do.Move(aside, name))
