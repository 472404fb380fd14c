"""What a migration plans and did, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from ckpttool.errors import Problem
from ckpttool.migration.names import Mode
from ckpttool.migration.steps import Step

Action = Literal["migrate", "finish", "adopt", "remove v1", "undo", "nothing", "leave", "refuse"]
"""``finish`` completes what was interrupted, ``adopt`` gives a directory that verl's script migrated its manifest."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    mode: Mode = "hardlink"
    fallback: Mode | None = None
    remove_v1: bool = False
    undo: bool = False
    skip_broken: bool = False
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class TreeChange:
    """One tree of layout v2: where it comes from, and what becomes of it: kept, made, remade, removed, moved back."""

    path: str
    source: str
    holds: str
    change: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What happens to one role directory: ``steps`` are carried out in order, ``reasons`` say why it is refused.

    ``marks`` are the inode and time of what the plan rests on: it is made anew when they have changed.
    """

    path: str
    kind: str
    title: str
    action: Action
    mode: Mode = "hardlink"
    trees: tuple[TreeChange, ...] = ()
    steps: tuple[Step, ...] = field(default=(), repr=False)
    manifest: dict[str, Any] | None = None
    copied_bytes: int = 0
    reasons: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()
    marks: tuple[tuple[str, int, int], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The roles below a path, in order, and whether the plans were carried out."""

    path: str
    done: bool
    roles: tuple[RolePlan, ...]
    options: Options = Options()

    def as_json(self) -> dict[str, Any]:
        """Return plain data; every step says what it does. Reasons are reported beside it, in the envelope."""
        return {
            "path": self.path,
            "done": self.done,
            "options": asdict(self.options),
            "roles": [_role_as_json(plan) for plan in self.roles],
        }


def _role_as_json(plan: RolePlan) -> dict[str, Any]:
    data = {
        field_.name: getattr(plan, field_.name) for field_ in fields(plan) if field_.name not in ("marks", "reasons")
    }
    data["steps"] = [{"do": type(step).__name__, **asdict(step)} for step in plan.steps]
    data["trees"] = [asdict(tree) for tree in plan.trees]
    return data
