"""``ckpttool inspect``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Exit, Option

from ckpttool.cli.options import Color, Json, NoProgress, Quiet, check_color, check_path

EVERY_TENSOR = "*"


def _steps(ctx: Context, incomplete: str) -> list[str]:
    """Complete a step: what the run on the command line has, newest first."""
    from ckpttool.layout import step_of

    steps = {step for folder in _folders(_typed(ctx)) if (step := step_of(folder.name)) is not None}
    words = [*(str(step) for step in sorted(steps, reverse=True)), "latest"]
    return [word for word in words if word.startswith(incomplete)]


def _roles(ctx: Context, incomplete: str) -> list[str]:
    """Complete a role: what the step on the command line has, or the steps of the run."""
    from ckpttool.layout import step_of

    path = _typed(ctx)
    steps = [path] if step_of(path.name) is not None else [f for f in _folders(path) if step_of(f.name) is not None]
    return sorted({role.name for step in steps for role in _folders(step) if role.name.startswith(incomplete)})


def _typed(ctx: Context) -> Path:
    """Return the path typed so far; behind an option without its value, arguments are not assigned to names yet."""
    return Path((ctx.args or [ctx.params.get("path") or "."])[0]).absolute()


def _folders(path: Path) -> Iterator[Path]:
    """Yield the directories in a directory; none where it cannot be read."""
    try:
        yield from (folder for folder in path.iterdir() if folder.is_dir())
    except OSError:
        return


def inspect(
    ctx: Context,
    path: Annotated[str, Argument(help="A run, a step, a role directory, a bare checkpoint, or a file.")] = ".",
    tensors: Annotated[
        str | None,
        Option("--tensors", metavar="[GLOB]", help="List tensors, all or those whose name matches GLOB ('*norm*')."),
    ] = None,
    step: Annotated[
        str | None,
        Option(
            "--step",
            metavar="N|latest",
            help="Choose a step of a run; latest is the newest complete one.",
            autocompletion=_steps,
        ),
    ] = None,
    role: Annotated[
        str | None,
        Option("--role", metavar="NAME", help="Choose a role of a step (actor).", autocompletion=_roles),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 1 unless it is complete.")] = False,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Say what a checkpoint is, whether it is whole, what is in it, and what to type next.

    Only headers and indexes are read: no tensor is loaded, torch is not imported, nothing from the files is run.
    Exit codes: 0 it has a name (whole or not), 1 not whole and --strict, 3 no checkpoint, 7 it would run code.
    """
    ctx.obj.begin("inspect", json=json, color=check_color(color))
    from ckpttool.inspection import inspect as look
    from ckpttool.inspection.suggestions import only_row
    from ckpttool.render.inspection import show_inspection
    from ckpttool.render.terminal import envelope, watching

    where = check_path(path)
    with watching(ctx.obj.err, shown=not (no_progress or quiet)):
        if step is None and role is None:
            found = look(where, tensors=tensors)
        else:
            from ckpttool.inspection.choice import inspect_chosen

            found = inspect_chosen(where, step, role, tensors=tensors)
        if tensors is not None and found.run is not None:
            found = look(only_row(found, tensors), tensors=tensors)
    code = 7 if found.refused else 1 if strict and not found.whole else 0
    if json:
        data = envelope("inspect", ok=code == 0, data=found.as_json(), problems=found.problems)
        sys.stdout.write(data + "\n")
    else:
        show_inspection(found, ctx.obj.out, quiet=quiet, listing=tensors is not None)
    raise Exit(code)
