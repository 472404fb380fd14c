"""``ckpttool watch``."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Exit, Option

from ckpttool.cli.complete import of_words, roles
from ckpttool.cli.options import DTYPES, LORA, Color, Dtype, NoProgress, check_color, check_path, count_of, one_of
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from ckpttool.watching import Settings


def watch(
    ctx: Context,
    path: Annotated[str, Argument(metavar="RUN", help="The directory in which training makes its steps.")] = ".",
    exec_: Annotated[
        list[str] | None,
        Option(
            "--exec",
            metavar="CMD",
            help="Run a program; {path} {step} {role} {kind} {run} {name} are filled in.",
        ),
    ] = None,
    shell: Annotated[bool, Option("--shell", help="Have --exec run by /bin/sh: pipes, variables, &&.")] = False,
    callback: Annotated[
        list[str] | None,
        Option("--callback", metavar="PKG.MODULE:CLASS", help="Call on_save of a class, a CheckpointCallback."),
    ] = None,
    to_hf: Annotated[
        str | None,
        Option("--to-hf", metavar="DIR/{step}", help="Make a Hugging Face model (merge-fsdp or to-hf, as it fits)."),
    ] = None,
    dtype: Dtype = None,
    lora: Annotated[
        str | None,
        Option(
            "--lora",
            metavar="|".join(LORA),
            help="With --to-hf: what becomes of adapters.",
            autocompletion=of_words(LORA),
        ),
    ] = None,
    hf_config: Annotated[
        str | None, Option("--hf-config", metavar="DIR", help="With --to-hf: where config and tokenizer are.")
    ] = None,
    migrate: Annotated[bool, Option("--migrate", help="Give verl's Megatron layout v1 the names of v2.")] = False,
    verify: Annotated[bool, Option("--verify", help="Check every byte that has a checksum, before all else.")] = False,
    keep_last: Annotated[
        str | None, Option("--keep-last", metavar="N", help="Retention: keep the N newest finished steps.")
    ] = None,
    keep_every: Annotated[
        str | None, Option("--keep-every", metavar="K", help="Retention: keep steps that K divides, too.")
    ] = None,
    yes: Annotated[
        bool, Option("--yes", help="Delete what retention does not keep. Without it, that is only shown.")
    ] = False,
    pin: Annotated[
        bool, Option("--pin", help="Hard-link the checkpoint while actions run: the trainer may delete its own.")
    ] = False,
    role: Annotated[
        list[str] | None,
        Option("--role", metavar="NAME", help="Only this role (actor); may be repeated.", autocompletion=roles),
    ] = None,
    since: Annotated[str | None, Option("--since", metavar="STEP", help="Leave earlier steps alone.")] = None,
    once: Annotated[bool, Option("--once", help="Act on what is finished now, then end.")] = False,
    interval: Annotated[
        str | None, Option("--interval", metavar="TIME", help="Time between two looks: 30s (the default), 5m.")
    ] = None,
    timeout: Annotated[
        str | None, Option("--timeout", metavar="TIME", help="End when nothing was finished for so long: 2h.")
    ] = None,
    retries: Annotated[
        str | None, Option("--retries", metavar="N", help="Further attempts at an action that fails. Default: 0.")
    ] = None,
    keep_going: Annotated[
        bool, Option("--keep-going", help="Go on with the next checkpoint where an action fails.")
    ] = False,
    state: Annotated[
        str | None,
        Option("--state", metavar="FILE", help="What was done is kept there. Default: .ckpttool-watch.json in RUN."),
    ] = None,
    config: Annotated[
        str | None, Option("--config", metavar="FILE", help="Take options from a TOML or JSON file, too.")
    ] = None,
    json: Annotated[bool, Option("--json", help="Print one JSON object a line for everything that happens.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print failures only: nothing where there are none.")] = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Follow a run, and act once on each checkpoint when it is finished, until Ctrl-C.

    A checkpoint is finished when the program that writes it says so (verl, SkyRL, Megatron-LM, slime, NeMo-RL,
    torchtitan, Hugging Face's Trainer: the file that each writes last) and its structure bears it out. Those that are
    there already come first, steps in order. What was done is remembered: a restart repeats nothing that was done, and
    does again what was cut short. Actions run in this order: verify, migrate, to-hf, callbacks, programs; retention
    follows. One that fails is tried --retries times more, after 1, 2, 4 ... seconds, and then ends the watch. Exit
    codes: 0 done, 1 an action failed, 2 usage, 3 no run, 6 the state cannot be written or another watch is at work.
    """
    session = ctx.obj
    session.begin("watch", json=json, color=check_color(color), by_line=True)
    session.when_stopped = "stopped"
    given = {
        "exec": tuple(exec_ or ()),
        "shell": shell or None,
        "callbacks": tuple(callback or ()),
        "to_hf": to_hf,
        "dtype": None if dtype is None else one_of("--dtype", dtype, DTYPES),
        "lora": None if lora is None else one_of("--lora", lora, LORA),
        "hf_config": hf_config,
        "migrate": migrate or None,
        "verify": verify or None,
        "keep_last": None if keep_last is None else count_of("--keep-last", keep_last),
        "keep_every": None if keep_every is None else count_of("--keep-every", keep_every),
        "yes": yes or None,
        "pin": pin or None,
        "roles": tuple(role or ()),
        "retries": None if retries is None else _number_of("--retries", retries),
        "keep_going": keep_going or None,
        "state": state,
        "interval": None if interval is None else time_of("--interval", interval),
    }
    run = check_path(path)
    ending = None if timeout is None else time_of("--timeout", timeout)
    begin = 0 if since is None else _number_of("--since", since)
    from ckpttool.callbacks import search_here
    from ckpttool.render.watching import Display
    from ckpttool.watching import Watcher, check_run

    settings = settings_of(config, given)
    if settings.yes and settings.keep_last is None and settings.keep_every is None:
        raise UsageError("--yes without --keep-last or --keep-every: nothing is deleted")
    check_run(run)
    search_here(run)
    shown = Display(session.out, session.err, json=json, quiet=quiet, progress=not (no_progress or quiet or json))
    aside = redirect_stdout(sys.stderr)  # what callbacks print, as what commands do
    with aside, Watcher(run, settings) as watcher, shown:
        try:
            for notice in watcher.watch(once=once, timeout=ending, since=begin, waiting=shown.wait):
                session.when_stopped = shown.when_stopped(notice)
                shown.tell(notice)
        except BaseException as end:
            if json and not isinstance(end, Exception):  # a signal: for people, it is said at the border
                shown.tell(watcher.interrupted("Ctrl-C" if isinstance(end, KeyboardInterrupt) else "a signal"))
            raise
    raise Exit(watcher.exit_code)


def settings_of(config: str | None, given: dict[str, Any]) -> Settings:
    """Return what a file says and the command line adds: lists are joined, anything else is replaced."""
    from ckpttool.watching import Settings
    from ckpttool.watching.settingsfile import read_settings

    settings = Settings() if config is None else read_settings(Path(config))
    said = {name: value for name, value in given.items() if value not in (None, ())}
    joined = {name: (*getattr(settings, name), *value) for name, value in said.items() if isinstance(value, tuple)}
    return replace(settings, **{**said, **joined})


def time_of(option: str, text: str) -> float:
    """Return the seconds that people mean by ``30s``, ``5m`` or ``2h``; raises :class:`UsageError` otherwise."""
    from ckpttool.watching.durations import seconds

    try:
        time = seconds(text)
    except ValueError as error:
        raise UsageError(f"{option} {text}: no time", hint="Times are written like 30s, 10m, 2h or 1h30m.") from error
    if not time:
        raise UsageError(f"{option} {text}: no time at all", hint="Times are written like 30s, 10m, 2h or 1h30m.")
    return time


def _number_of(option: str, text: str) -> int:
    """Return a whole number from 0 on; raises :class:`UsageError` otherwise."""
    if not (text.isascii() and text.isdecimal()) or len(text) > 18:
        raise UsageError(f"{option} {text}: no whole number")
    return int(text)
