"""The command line: parse, call one operation, hand its result to render. ``main`` is the one exit border."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Annotated

from typer import Context, Exit, Option, Typer

from ckpttool import __version__
from ckpttool.cli.convert import to_hf
from ckpttool.cli.demo import demo
from ckpttool.cli.diff import diff
from ckpttool.cli.inspect import EVERY_TENSOR, inspect
from ckpttool.cli.merge import merge_fsdp
from ckpttool.cli.migrate import migrate
from ckpttool.cli.options import PlainCommand, PlainGroup
from ckpttool.cli.session import Session
from ckpttool.cli.verify import verify
from ckpttool.cli.watch import watch
from ckpttool.environment import limit_threads
from ckpttool.errors import CannotWrite, CkpttoolError, NotACheckpoint

app = Typer(
    name="ckpttool",
    cls=PlainGroup,
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("inspect", cls=PlainCommand, short_help="What is it, is it whole, what is in it, what next.")(inspect)
app.command("migrate", cls=PlainCommand, short_help="Megatron layout v1 of verl to v2, in place.")(migrate)
app.command("merge-fsdp", cls=PlainCommand, short_help="FSDP shards to a Hugging Face directory.")(merge_fsdp)
app.command("to-hf", cls=PlainCommand, short_help="A Megatron checkpoint to a Hugging Face directory.")(to_hf)
app.command("diff", cls=PlainCommand, short_help="Where two checkpoints differ, and by how much.")(diff)
app.command("verify", cls=PlainCommand, short_help="Whether every byte is as it was written.")(verify)
app.command("watch", cls=PlainCommand, short_help="Act on each checkpoint when it is finished.")(watch)
app.command("demo", cls=PlainCommand, short_help="Try the commands on small real checkpoints.")(demo)

INTERRUPTED = 130
REPORT = "Please report it with the output of the same command and --debug: see CONTRIBUTING.md."


class _Terminated(BaseException):
    """SIGTERM or SIGHUP arrived; a BaseException so that nothing in between takes it for an error of its own."""


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"ckpttool {__version__}\n")
        raise Exit


@app.callback()
def root(
    ctx: Context,
    debug: Annotated[bool, Option("--debug", help="Show the traceback of an unexpected error.")] = False,
    version: Annotated[
        bool, Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Training checkpoints, inspected and converted without the framework that wrote them.

    CPU only, no torch, nothing from a checkpoint is executed.
    """
    ctx.obj.debug = debug


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    session = Session(run=main)
    arguments = expand_tensors(list(sys.argv[1:] if argv is None else argv))
    if "--debug" in arguments:  # before or after the command: who needs it types the same line again
        arguments = ["--debug", *(word for word in arguments if word != "--debug")]
    try:
        app(args=arguments, prog_name="ckpttool", obj=session)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
        return session.stopped(code) if code == INTERRUPTED else code
    except CkpttoolError as error:
        return session.fail(error)
    except _Terminated as stopped:
        return session.stopped(128 + int(stopped.args[0]))
    except KeyboardInterrupt:  # before Typer looks out for it
        return session.stopped(INTERRUPTED)
    except OSError as error:
        if session.debug:
            raise
        return session.fail(_of_the_system(error))
    except Exception as error:
        if session.debug:
            raise
        return session.fail(CkpttoolError(f"{type(error).__name__}: {error}", hint=REPORT))
    return 0


def _of_the_system(error: OSError) -> CkpttoolError:
    """Turn what the system refused and nobody foresaw into an error of its own kind: it is no bug of ours."""
    where = f"{os.fsdecode(error.filename)}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return CannotWrite(f"{where}{error.strerror}", hint="Make room, or write somewhere else.")
    return NotACheckpoint(
        f"{where}{error.strerror}", hint="See what the system says about it, with --debug.", code="unreadable"
    )


def expand_tensors(arguments: list[str]) -> list[str]:
    """Let ``--tensors`` go without a value: alone, before another option, or before a path that exists."""
    expanded = []
    for at, word in enumerate(arguments):
        following = arguments[at + 1] if at + 1 < len(arguments) else "-"
        bare = following.startswith("-") or os.path.exists(following)  # noqa: PTH110 - never raises
        expanded.append(f"{word}={EVERY_TENSOR}" if word == "--tensors" and bare else word)
    return expanded


def _terminate(number: int, _frame: FrameType | None) -> None:
    raise _Terminated(number)


def entry() -> None:
    """Console script: like ``main``, with the signals and pipes of a process of its own."""
    try:
        code = _as_a_process()
    except _Terminated as stopped:  # before ``main`` looks out for it, or when that is done
        code = 128 + int(stopped.args[0])
    except KeyboardInterrupt:
        code = INTERRUPTED
    os._exit(code)  # nothing is left to do but to free a million small objects one by one


def _as_a_process() -> int:
    signal.signal(signal.SIGTERM, _terminate)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup has it ignored
        signal.signal(signal.SIGHUP, _terminate)
    limit_threads()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BrokenPipeError:
        code = code or 1
    return code
