"""The end of every command that writes a Hugging Face directory: run it with progress, show what came of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from typer import Exit

from ckpttool.cli.session import Session

if TYPE_CHECKING:
    from ckpttool.export.result import Export

Told = TypeVar("Told", bound="Export")


def carry_out(
    session: Session,
    operation: Callable[[Any], Told],
    show: Callable[..., None],
    *,
    json: bool,
    quiet: bool,
    verbose: bool,
    no_progress: bool,
) -> NoReturn:
    """Call an operation with what it tells its progress to, show its result to people or programs, and exit."""
    from ckpttool.render.terminal import envelope, progress, watching

    shown = not (no_progress or quiet or json)
    with watching(session.err, shown=shown), progress("written", session.err, shown=shown) as bar:
        result = operation(bar)
    ok = not result.exit_code
    if json:
        sys.stdout.write(envelope(session.command, ok=ok, data=result.as_json(), problems=result.notes) + "\n")
    else:
        show(result, session.out, quiet=quiet, verbose=verbose)
    raise Exit(result.exit_code)
