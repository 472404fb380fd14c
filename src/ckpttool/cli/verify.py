"""``ckpttool verify``."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Exit, Option

from ckpttool.cli.options import (
    Arch,
    Color,
    Force,
    FuseLora,
    HfConfig,
    Json,
    LoraAlpha,
    NoProgress,
    Producer,
    Quiet,
    Role,
    Step,
    check_color,
    check_path,
    count_of,
    every_core,
    size_of,
    source_options,
)
from ckpttool.errors import UsageError

if TYPE_CHECKING:
    from ckpttool.verification import Subset

_PERCENT = re.compile(r"([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%", re.ASCII)
_PART = re.compile(r"([0-9]{1,6})\s*/\s*([0-9]{1,6})", re.ASCII)


def verify(
    ctx: Context,
    path: Annotated[str, Argument(help="A run, a step, a role directory, a bare checkpoint, or a file.")] = ".",
    values: Annotated[
        bool, Option("--values", help="Count NaN, infinities and tensors of zeros, too: a second reading.")
    ] = False,
    read_subset: Annotated[
        str | None,
        Option("--read-subset", metavar="5%|2/10|10GB", help="Read a random share, or part 2 of 10, or so much."),
    ] = None,
    write_integrity: Annotated[
        bool, Option("--write-integrity", help="If it is sound, write integrity.json: a SHA-256 for every file.")
    ] = False,
    second_opinion: Annotated[
        bool, Option("--second-opinion", help="Have a sample read by torch's own reader, too (the extra torch).")
    ] = False,
    against: Annotated[
        str | None, Option("--against", metavar="SOURCE", help="Prove that it is what a conversion of SOURCE writes.")
    ] = None,
    hf_config: HfConfig = None,
    arch: Arch = None,
    producer: Producer = None,
    lora: FuseLora = None,
    lora_alpha: LoraAlpha = None,
    force: Force = False,
    step: Step = None,
    role: Role = None,
    threads: Annotated[
        str | None, Option("--threads", metavar="N", help="Threads that read. Default: one for every core, at most 8.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Say whether a checkpoint is whole and intact: its structure, and every byte that has a checksum.

    All that inspect checks, the CRC of every record that torch has written, Megatron's integrity.json where there is
    one. Every fault is listed. Of a run or a step, everything in it is checked, every file once.
    Exit codes: 0 sound, 1 faults, 3 no checkpoint, 6 integrity.json cannot be written, 7 it would run code.
    """
    ctx.obj.begin("verify", json=json, color=check_color(color))
    if force and not write_integrity:
        raise UsageError("--force without --write-integrity: nothing is written")
    how = {"--hf-config": hf_config, "--arch": arch, "--producer": producer, "--lora": lora, "--lora-alpha": lora_alpha}
    for name in (name for name, given in how.items() if given is not None and against is None):
        raise UsageError(f"{name} without --against: nothing is compared")
    from ckpttool.render.terminal import envelope, progress, watching
    from ckpttool.verification import Options
    from ckpttool.verification import verify as check

    options = Options(
        step=step,
        role=role,
        values=values,
        subset=None if read_subset is None else subset_of(read_subset),
        write_integrity=write_integrity,
        second_opinion=second_opinion,
        against=against,
        **source_options(hf_config, arch, producer, lora, lora_alpha),
        force=force,
        threads=every_core() if threads is None else count_of("--threads", threads),
    )
    shown = not (no_progress or quiet or json)
    with watching(ctx.obj.err, shown=shown), progress("verified", ctx.obj.err, shown=shown) as bar:
        found = check(check_path(path), options, bar)
    if json:
        data = envelope("verify", ok=found.exit_code == 0, data=found.as_json(), problems=found.problems)
        sys.stdout.write(data + "\n")
    else:
        from ckpttool.render.verification import show_verification

        show_verification(found, ctx.obj.out, quiet=quiet)
    raise Exit(found.exit_code)


def subset_of(text: str) -> Subset:
    """Return the part that a share, a fraction or a size means; raises :class:`UsageError` for anything else."""
    from ckpttool.verification import Subset

    hint = "A share like 5%, the second of ten parts like 2/10, or a size like 10GB."
    if match := _PERCENT.fullmatch(text.strip()):
        if not 0 < float(match[1]) <= 100:
            raise UsageError(f"--read-subset {text}: not between 0% and 100%", hint=hint)
        return Subset(text=text, percent=float(match[1]))
    if match := _PART.fullmatch(text.strip()):
        part, parts = int(match[1]), int(match[2])
        if not 0 < part <= parts:
            raise UsageError(f"--read-subset {text}: the parts are 1/{parts} to {parts}/{parts}", hint=hint)
        return Subset(text=text, part=part, parts=parts)
    try:
        return Subset(text=text, bytes=size_of("--read-subset", text))
    except UsageError as error:
        raise UsageError(error.message, hint=hint) from error
