"""What ``migrate`` plans or did, for people."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckpttool.migration.result import Action, Migration, Options, RolePlan
from ckpttool.render.terminal import clean, new_table, print_each, show_next, shown_path, size


def show_migration(result: Migration, out: Console, *, quiet: bool = False) -> None:
    """Print what was (or would be) done to each role, and what that means; quietly, refusals and the count alone."""
    for plan in result.roles:
        if quiet and plan.action != "refuse":
            continue
        out.print(_migration_line(plan, done=result.done))
        if plan.trees and plan.action not in ("leave", "refuse"):
            out.print(Padding(_tree_table(plan), (0, 0, 0, 2), expand=False))
        print_each(plan.reasons, out, indent=2)
        for note in plan.notes:
            out.print(Text(f"  - {clean(note)}"))
    counts = Counter(plan.action for plan in result.roles)
    words = ", ".join(f"{n} {_ACTIONS[action][result.done]}" for action, n in counts.items())
    tail = "" if result.done else "; dry run: nothing was changed"
    out.print(Text(("" if quiet else "\n") + clean(words) + tail, "bold"))
    if not quiet:
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
    changed = [plan for plan in result.roles if plan.action in _CHANGES]
    made = [plan for plan in changed if plan.action in ("migrate", "finish", "adopt") and plan.trees]
    path = shlex.quote(shown_path(result.path))
    if any(plan.mode != "copy" for plan in made) and result.done:
        out.print("\nLinked trees share their bytes: saving into this step again overwrites all of them.")
    lines = [("look at it", f"ckpttool inspect {path}")]
    if changed and not result.done:
        lines = [("do it", f"ckpttool migrate {path}{_flags(result.options)}")]
    elif made:
        lines.append(("take it back", f"ckpttool migrate {path} --undo"))
    show_next(lines, out)


_CHANGES = ("migrate", "finish", "adopt", "remove v1", "undo")


def _flags(options: Options) -> str:
    """Return the options as they were typed, but for the dry run."""
    words = [f"--mode {options.mode}"] if options.mode != Options().mode else []
    words += [f"--fallback {options.fallback}"] if options.fallback else []
    words += ["--remove-v1"] if options.remove_v1 else []
    words += ["--undo"] if options.undo else []
    words += ["--skip-broken"] if options.skip_broken else []
    return "".join(f" {word}" for word in words)
