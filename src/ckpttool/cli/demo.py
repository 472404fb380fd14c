"""``ckpttool demo``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Context, Exit

from ckpttool.cli.options import Color, Force, Json, check_color


def demo(
    ctx: Context,
    folder: Annotated[str, Argument(help="Where to write the demo.")] = "ckpttool-demo",
    force: Force = False,
    json: Json = False,
    color: Color = "auto",
) -> None:
    """Write small real checkpoints into a folder and walk through the commands on them.

    Each command line is printed before it runs. The checkpoints were written by torch and megatron-core; nothing but
    ckpttool is needed to read them. Exit codes: 0 done, 6 the folder exists (--force replaces it).
    """
    session = ctx.obj
    session.begin("demo", json=json, color=check_color(color))
    from ckpttool.demo import write_demo
    from ckpttool.render import terminal

    result = write_demo(Path(folder), force=force)
    if json:
        sys.stdout.write(terminal.envelope("demo", ok=True, data=asdict(result), problems=()) + "\n")
        raise Exit(0)
    out = session.out
    for scene in result.scenes:
        out.print(terminal.demo_heading(scene.what, shlex.join(("ckpttool", *scene.command))), soft_wrap=True)
        sys.stdout.flush()
        code = session.run([*scene.command, "--color", color])
        sys.stderr.flush()
        if code != scene.code:
            raise Exit(code or 70)
    out.print(terminal.demo_end(result.root), soft_wrap=True)
