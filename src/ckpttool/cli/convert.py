"""``ckpttool to-hf``."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated

from typer import Argument, Context, Exit, Option

from ckpttool.cli.exporting import carry_out
from ckpttool.cli.options import (
    PRODUCERS,
    AllowExtra,
    AllowMissing,
    AllowOverflow,
    Arch,
    Architecture,
    Color,
    DryRun,
    Dtype,
    Force,
    FuseLora,
    HfConfig,
    Json,
    Like,
    LoraAlpha,
    MaxShardSize,
    NoProgress,
    Producer,
    Quiet,
    Role,
    Step,
    Threads,
    Verbose,
    check_color,
    check_path,
    count_of,
    number_of,
    one_of,
    size_of,
)
from ckpttool.cli.session import Session
from ckpttool.errors import UsageError


def to_hf(
    ctx: Context,
    path: Annotated[
        str | None, Argument(help="A Megatron archive (iter_*, dist_ckpt), or the role, step or run that has one.")
    ] = None,
    output: Annotated[
        str | None, Option("--output", "-o", metavar="DIR", help="The directory to write (needed); it must not exist.")
    ] = None,
    hf_config: HfConfig = None,
    like: Like = None,
    allow_missing: AllowMissing = None,
    allow_extra: AllowExtra = None,
    arch: Arch = None,
    architecture: Architecture = None,
    producer: Producer = "auto",
    no_mtp: Annotated[bool, Option("--no-mtp", help="Leave multi-token prediction out of weights and config.")] = False,
    lora: FuseLora = None,
    lora_alpha: LoraAlpha = None,
    dtype: Dtype = None,
    allow_overflow: AllowOverflow = False,
    max_shard_size: MaxShardSize = "5GB",
    untie: Annotated[
        bool,
        Option("--untie", help="output_layer has diverged from tied embeddings: write both, untie the config."),
    ] = False,
    drop_lm_head: Annotated[
        bool, Option("--drop-lm-head", help="output_layer has diverged: write the embeddings alone.")
    ] = False,
    step: Step = None,
    role: Role = None,
    list_architectures: Annotated[
        bool, Option("--list-architectures", help="List the weight maps that are known, and exit.")
    ] = False,
    threads: Threads = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Convert a Megatron distributed checkpoint into a Hugging Face directory that from_pretrained loads.

    Runs on a CPU with neither torch nor megatron, in memory that does not grow with the model; any layout of ranks,
    megatron-core 0.12 to 0.19. The map of weights is chosen by config.json (--list-architectures shows all); every
    tensor is written once or left out by a rule that is told. The output is complete or absent. Exit codes: 0 done,
    2 wrong usage or a choice that is yours, 3 no Megatron checkpoint or several of them, 4 broken or refused, 5 does
    not fit a weight map (everything that does not is listed), 6 cannot write there, 7 a file would run code.
    """
    session: Session = ctx.obj
    session.begin("to-hf", json=json, color=check_color(color))
    if list_architectures:
        _list(session, json=json)
    if path is None or output is None:
        raise UsageError(
            "a checkpoint and an output are needed" if path is None else "an output is needed",
            hint=f"ckpttool to-hf {'CHECKPOINT' if path is None else shlex.quote(path)} -o OUTPUT",
        )
    session.when_stopped = f"stopped; {output} is as it was" if force else f"stopped; nothing was written to {output}"
    from ckpttool.converting import Options, convert
    from ckpttool.export.precision import DTYPES
    from ckpttool.export.result import LORA as WAYS
    from ckpttool.render.converting import show_conversion

    options = Options(
        step=step,
        role=role,
        dtype=None if dtype is None else one_of("--dtype", dtype, tuple(DTYPES)),
        allow_overflow=allow_overflow,
        untie=untie,
        drop_lm_head=drop_lm_head,
        hf_config=None if hf_config is None else str(check_path(hf_config)),
        like=None if like is None else str(check_path(like)),
        allow_missing=tuple(allow_missing or ()),
        allow_extra=tuple(allow_extra or ()),
        arch=arch,
        architecture=architecture,
        producer=one_of("--producer", producer or PRODUCERS[0], PRODUCERS),
        mtp=not no_mtp,
        lora=None if lora is None else one_of("--lora", lora, WAYS),
        lora_alpha=None if lora_alpha is None else number_of("--lora-alpha", lora_alpha),
        max_shard_size=size_of("--max-shard-size", max_shard_size),
        threads=Options().threads if threads is None else count_of("--threads", threads),
        force=force,
        dry_run=dry_run,
    )
    carry_out(
        session,
        lambda bar: convert(check_path(path), check_path(output), options, bar),
        show_conversion,
        json=json,
        quiet=quiet,
        verbose=verbose,
        no_progress=no_progress,
    )


def _list(session: Session, *, json: bool) -> None:
    from ckpttool.architectures import FAMILIES
    from ckpttool.render.converting import architectures_data, show_architectures
    from ckpttool.render.terminal import envelope

    if json:
        data = {"architectures": architectures_data(FAMILIES)}
        sys.stdout.write(envelope("to-hf", ok=True, data=data, problems=()) + "\n")
    else:
        show_architectures(FAMILIES, session.out)
    raise Exit(0)
