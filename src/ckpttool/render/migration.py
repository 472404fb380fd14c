"""What ``migrate`` plans or did, for people."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckpttool.migration.result import Action, Migration, RolePlan
from ckpttool.render.terminal import clean, new_table, show_problem, shown_path, size


def show_migration(result: Migration, out: Console) -> None:
    """Print what was (or would be) done to each role, and what that means."""
    for plan in result.roles:
        out.print(_migration_line(plan, done=result.done))
        if plan.action not in ("leave", "refuse"):
            out.print(Padding(_tree_table(plan), (0, 0, 0, 2), expand=False))
        for reason in plan.reasons:
            out.print(Padding(show_problem(reason), (0, 0, 0, 2), expand=False))
        for note in plan.notes:
            out.print(Text(f"  - {clean(note)}"))
    counts = Counter(plan.action for plan in result.roles)
    words = ", ".join(f"{n} {_ACTIONS[action][result.done]}" for action, n in counts.items())
    out.print(Text(f"\n{clean(words)}" + ("" if result.done else "; dry run: nothing was changed"), "bold"))
    _show_suggestions(result, out)


_ACTIONS: Mapping[Action, tuple[str, str]] = {
    "migrate": ("to migrate", "migrated"),
    "finish": ("to finish", "finished"),
    "adopt": ("to get a manifest", "given a manifest"),
    "remove v1": ("to lose the names of v1", "without the names of v1"),
    "undo": ("to undo", "undone"),
    "nothing": ("with nothing to do", "with nothing to do"),
    "leave": ("left alone", "left alone"),
    "refuse": ("refused", "refused"),
}


def _migration_line(plan: RolePlan, *, done: bool) -> Text:
    style = "bold red" if plan.action == "refuse" else "bold green" if done else "bold"
    return (
        Text(f"{clean(shown_path(plan.path))}: ", "bold")
        + Text(_ACTIONS[plan.action][done], style)
        + Text(f" ({clean(plan.title)})", "dim")
    )


def _tree_table(plan: RolePlan) -> Table:
    trees = new_table("tree", "holds", "files", "bytes", "how", right=("files", "bytes"))
    for tree in plan.trees:
        how = f"{tree.change}, {plan.mode} of {tree.source}/" if tree.change in ("made", "remade") else tree.change
        trees.add_row(f"{tree.path}/", tree.holds, f"{tree.files:,}", size(tree.bytes), how)
    return trees


def _show_suggestions(result: Migration, out: Console) -> None:
    changed = {plan.action for plan in result.roles} & {"migrate", "finish", "adopt"}
    path = shlex.quote(shown_path(result.path))
    if changed and result.done:
        out.print("\nLinked trees share their bytes: saving into this step again overwrites all of them.")
        lines = [(f"ckpttool inspect {path}", "look at it"), (f"ckpttool migrate --undo {path}", "take it back")]
    elif changed:
        lines = [(f"ckpttool migrate {path}", "do it")]
    else:
        lines = [(f"ckpttool inspect {path}", "look at it")]
    out.print()
    out.print(Text("Next", "bold"))
    for command, why in lines:
        out.print(Text(f"  {clean(command)}") + Text(f"  # {why}", "dim"), soft_wrap=True)
