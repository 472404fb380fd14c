"""``ckpttool inspect``."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Argument, Context, Exit, Option

from ckpttool.cli.options import Color, Json, NoProgress, Quiet, Role, Step, check_color, check_path

EVERY_TENSOR = "*"


def inspect(
    ctx: Context,
    path: Annotated[str, Argument(help="A run, a step, a role directory, a bare checkpoint, or a file.")] = ".",
    tensors: Annotated[
        str | None,
        Option("--tensors", metavar="[GLOB]", help="List tensors, all or those whose name matches GLOB ('*norm*')."),
    ] = None,
    step: Step = None,
    role: Role = None,
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
