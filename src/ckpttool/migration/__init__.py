"""``migrate``: verl's Megatron layout v1 to v2 in place, by adding names. Planned, checked, then carried out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ckpttool import layout
from ckpttool.errors import BrokenCheckpoint, CannotWrite, NotACheckpoint, UsageError
from ckpttool.inspection import kinds, runs
from ckpttool.migration import steps as do
from ckpttool.migration.plan import STAGING, V1, plan_role
from ckpttool.migration.result import Migration, Options, RolePlan
from ckpttool.migration.steps import LinkRefused, execute, locked, remove_names

__all__ = ["Migration", "Options", "migrate"]

Progress = Callable[[int], None]


def migrate(path: Path, options: Options, progress: Progress = lambda _bytes: None) -> Migration:
    """Migrate every v1 role at or below a path: a role, a step or a run.

    Raises :class:`BrokenCheckpoint` with all reasons when a source is not complete (before the first role is touched),
    :class:`CannotWrite` when the system refuses, :class:`NotACheckpoint` when there is no role directory.
    """
    path = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow links
    if options.remove_v1 and options.mode == "symlink":
        raise UsageError("--remove-v1 with --mode symlink: the links would lead nowhere")
    if options.undo and options.remove_v1:
        raise UsageError("--undo and --remove-v1 ask for opposite things")
    try:
        roles = find_roles(path)
        plans = [plan_role(role, options) for role in roles]
    except PermissionError as error:
        raise NotACheckpoint(f"{error.filename}: permission denied", code="unreadable") from error
    _refuse_broken(path, plans, options)
    if options.dry_run:
        return Migration(path=str(path), done=False, roles=tuple(plans))
    done = [_migrate_role(Path(plan.path), plan, options, progress) for plan in plans]
    return Migration(path=str(path), done=True, roles=tuple(done))


def find_roles(path: Path) -> list[Path]:
    """Return the role directories at or below a path: itself, the roles of a step, of every step of a run."""
    if not path.is_dir():
        raise NotACheckpoint(f"{path}: no such directory", hint="Give a role (actor), a step (global_step_N) or a run.")
    if kinds.is_checkpoint(path):
        return [path]
    steps = runs.steps(path)
    roles = [role for step in steps for role in (kinds.roles(step) or ([step] if kinds.is_checkpoint(step) else []))]
    found = roles or kinds.roles(path)
    if not found:
        raise NotACheckpoint(
            f"{path}: no role directory here or below",
            hint="Give a role (actor), a step (global_step_N) or a run.",
        )
    return found


def _refuse_broken(path: Path, plans: Iterable[RolePlan], options: Options) -> None:
    refused = [plan for plan in plans if plan.action == "refuse"]
    if not refused or options.skip_broken:
        return
    reasons = [
        replace(reason, path=f"{os.path.relpath(plan.path, path)}/{reason.path}".removeprefix("./").rstrip("/"))
        for plan in refused
        for reason in plan.reasons
    ]
    raise BrokenCheckpoint(
        f"{path}: {len(refused)} of the role directories cannot be migrated; nothing was touched",
        hint="Mend or complete them, or go on with the sound ones: --skip-broken.",
        code="broken-source",
        problems=reasons,
    )


def _migrate_role(role: Path, plan: RolePlan, options: Options, progress: Progress) -> RolePlan:
    """Carry out one role's plan under its lock, made anew there, and check the outcome."""
    if plan.action == "refuse" or (plan.action in ("nothing", "leave") and not (role / STAGING).exists()):
        return plan
    try:
        with locked(role):
            _recover(role)
            done = _carry_out(role, options, progress)
            if options.remove_v1 and done.action != "remove v1" and done.action != "leave":
                done = _carry_out(role, options, progress)
            return done
    except PermissionError as error:
        raise CannotWrite(f"{error.filename}: permission denied", hint="Run as the owner of the checkpoint.") from error


def _carry_out(role: Path, options: Options, progress: Progress) -> RolePlan:
    plan = plan_role(role, options)
    if plan.action == "refuse":
        raise BrokenCheckpoint(f"{role}: changed while it was looked at", problems=plan.reasons)
    _check_space(role, plan)
    try:
        execute(role, plan.steps, progress)
    except LinkRefused as refused:
        _recover(role)
        if options.fallback is None or options.fallback == options.mode:
            raise
        again = _carry_out(role, replace(options, mode=options.fallback, fallback=None), progress)
        return replace(again, notes=(*again.notes, f"{refused.message}; went on with --fallback {options.fallback}"))
    except CannotWrite:
        _recover(role)
        raise
    after = plan_role(role, replace(options, remove_v1=False))
    if after.action not in ("nothing", "leave"):
        raise BrokenCheckpoint(
            f"{role}: the outcome is not what was planned", problems=after.reasons, code="not-as-planned"
        )
    return plan


def _check_space(role: Path, plan: RolePlan) -> None:
    free = shutil.disk_usage(role).free
    if plan.copied_bytes > free:
        raise CannotWrite(
            f"{role}: the copies need {plan.copied_bytes:,} bytes, {free:,} are free",
            hint="Hard links need no space: --mode hardlink.",
            code="no-space",
        )


def _recover(role: Path) -> None:
    """Clear away what a killed run left aside; v1 names that it had moved there come back first."""
    if not (role / STAGING).is_dir():
        return
    back = tuple(
        do.Move(f"{V1}/{name}", name)
        for name in (layout.V1_ARCHIVE, layout.V1_HUGGINGFACE)
        if (role / V1 / name).is_dir() and not (role / name).exists()
    )
    try:
        execute(role, back)
        remove_names(role / STAGING)
    except OSError as error:
        raise CannotWrite(f"{role}/{STAGING}: {error.strerror}", hint="It holds extra names only.") from error
