"""What the shell completes behind an option: words, and the steps and roles that a run on the command line has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from typer import Context


def of_words(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Return a function that completes one of these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def steps(ctx: Context, incomplete: str) -> list[str]:
    """Complete a step: what the run on the command line has, newest first."""
    from ckpttool.layout import step_of

    found = {step for folder in _folders(_typed(ctx)) if (step := step_of(folder.name)) is not None}
    words = [*(str(step) for step in sorted(found, reverse=True)), "latest"]
    return [word for word in words if word.startswith(incomplete)]


def roles(ctx: Context, incomplete: str) -> list[str]:
    """Complete a role: what the step on the command line has, or the steps of the run."""
    from ckpttool.layout import step_of

    path = _typed(ctx)
    places = [path] if step_of(path.name) is not None else [f for f in _folders(path) if step_of(f.name) is not None]
    return sorted({role.name for step in places for role in _folders(step) if role.name.startswith(incomplete)})


def _typed(ctx: Context) -> Path:
    """Return the path typed so far; behind an option without its value, arguments are not assigned to names yet."""
    return Path((ctx.args or [ctx.params.get("path") or "."])[0]).absolute()


def _folders(path: Path) -> Iterator[Path]:
    """Yield the directories in a directory; none where it cannot be read."""
    try:
        yield from (folder for folder in path.iterdir() if folder.is_dir())
    except OSError:
        return
