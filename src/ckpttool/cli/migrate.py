"""``ckpttool migrate``."""

from __future__ import annotations

import sys
from typing import Annotated

from typer import Argument, Context, Exit, Option

from ckpttool.cli.complete import of_words
from ckpttool.cli.options import Color, DryRun, Json, NoProgress, Quiet, check_color, check_path, one_of

MODES = ("hardlink", "symlink", "copy")
FALLBACKS = ("symlink", "copy")


def migrate(
    ctx: Context,
    path: Annotated[str, Argument(help="A role directory, a step, or a run: every v1 role below is migrated.")] = ".",
    mode: Annotated[
        str,
        Option(
            "--mode",
            metavar="|".join(MODES),
            help="How the trees of v2 get their files.",
            autocompletion=of_words(MODES),
        ),
    ] = "hardlink",
    fallback: Annotated[
        str | None,
        Option(
            "--fallback",
            metavar="|".join(FALLBACKS),
            help="What to do where a link is refused. Default: stop.",
            autocompletion=of_words(FALLBACKS),
        ),
    ] = None,
    remove_v1: Annotated[bool, Option("--remove-v1", help="Drop the names of v1 once the trees are checked.")] = False,
    undo: Annotated[bool, Option("--undo", help="Go back to v1: its names return, the trees of v2 go.")] = False,
    skip_broken: Annotated[
        bool, Option("--skip-broken", help="Leave broken roles out, migrate the sound ones.")
    ] = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Give a Megatron checkpoint of verl's layout v1 the trees of layout v2, in place.

    Only names are added: the names of v1 stay, no byte of the checkpoint is touched, and --undo takes it back. A run
    that was killed is finished by the next one. Hard-linked trees share their bytes: saving into a migrated step again
    overwrites all of them. Exit codes: 0 done or nothing to do, 3 no role directory, 4 a source is broken (nothing was
    touched), 6 cannot write there, or a link was refused.
    """
    session = ctx.obj
    session.begin("migrate", json=json, color=check_color(color))
    session.when_stopped = "stopped; the names of layout v1 are safe: the same command finishes, --undo takes it back"
    from ckpttool.migration import Options, migrate
    from ckpttool.migration.names import MODES
    from ckpttool.render.migration import show_migration
    from ckpttool.render.terminal import envelope, progress

    options = Options(
        mode=one_of("--mode", mode, MODES),
        fallback=None if fallback is None else one_of("--fallback", fallback, MODES[1:]),
        remove_v1=remove_v1,
        undo=undo,
        skip_broken=skip_broken,
        dry_run=dry_run,
    )
    with progress("copied", session.err, shown=not (no_progress or quiet or json)) as start:
        result = migrate(check_path(path), options, start(None))
    refused = [plan for plan in result.roles if plan.action == "refuse"]
    code = 4 if refused else 0
    problems = [reason for plan in refused for reason in plan.reasons]
    if json:
        sys.stdout.write(envelope("migrate", ok=code == 0, data=result.as_json(), problems=problems) + "\n")
    else:
        show_migration(result, session.out, quiet=quiet)
    raise Exit(code)
