"""``ckpttool merge-fsdp``."""

from __future__ import annotations

from typing import Annotated

from typer import Argument, Context, Option

from ckpttool.cli.complete import of_words
from ckpttool.cli.exporting import carry_out
from ckpttool.cli.options import (
    LORA,
    AllowExtra,
    AllowMissing,
    AllowOverflow,
    Architecture,
    Color,
    DryRun,
    Dtype,
    Force,
    HfConfig,
    Json,
    Like,
    LoraAlpha,
    MaxShardSize,
    NoProgress,
    Output,
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

ON_MISMATCH = ("error", "rank0")


def merge_fsdp(
    ctx: Context,
    path: Annotated[str, Argument(help="A role directory of FSDP shards, or the step or run that has one.")],
    output: Output,
    inputs: Annotated[
        list[str] | None,
        Option("--input", metavar="DIR", help="A further directory of the same save (another node's); repeatable."),
    ] = None,
    lora: Annotated[
        str | None,
        Option(
            "--lora",
            metavar="|".join(LORA),
            help="Of a PEFT model: a whole model with the adapter in its weights, the adapter alone, or both.",
            autocompletion=of_words(LORA),
        ),
    ] = None,
    adapter: Annotated[
        list[str] | None, Option("--adapter", metavar="NAME", help="Which of several adapters; repeatable.")
    ] = None,
    lora_alpha: LoraAlpha = None,
    adapter_config: Annotated[
        str | None,
        Option("--adapter-config", metavar="FILE", help="The adapter_config.json of the training, if it lies apart."),
    ] = None,
    base: Annotated[
        str | None,
        Option("--base", metavar="DIR", help="The model that adapters were saved without, to fuse them into."),
    ] = None,
    like: Like = None,
    allow_missing: AllowMissing = None,
    allow_extra: AllowExtra = None,
    dtype: Dtype = None,
    cast_buffers: Annotated[bool, Option("--cast-buffers", help="With --dtype: cast buffers, too.")] = False,
    allow_overflow: AllowOverflow = False,
    max_shard_size: MaxShardSize = "5GB",
    hf_config: HfConfig = None,
    architecture: Architecture = None,
    untie: Annotated[
        bool,
        Option("--untie", help="lm_head has diverged from tied embeddings: write both, untie the config."),
    ] = False,
    drop_lm_head: Annotated[
        bool, Option("--drop-lm-head", help="lm_head has diverged: write the embeddings alone.")
    ] = False,
    on_mismatch: Annotated[
        str,
        Option(
            "--on-mismatch",
            metavar="|".join(ON_MISMATCH),
            help="When ranks store different copies of one tensor: stop, or take that of the lowest rank.",
            autocompletion=of_words(ON_MISMATCH),
        ),
    ] = "error",
    no_check_replicas: Annotated[
        bool, Option("--no-check-replicas", help="Do not compare the replicas of sharded tensors (HSDP).")
    ] = False,
    world_size: Annotated[
        str | None, Option("--world-size", metavar="N", help="Which set of shards, where several lie together.")
    ] = None,
    step: Step = None,
    role: Role = None,
    threads: Threads = None,
    force: Force = False,
    dry_run: DryRun = False,
    json: Json = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Merge FSDP shards into a Hugging Face directory that from_pretrained loads.

    Runs on a CPU with neither torch nor a process group, in memory that does not grow with the model. Every rank must
    be there, every replicated tensor must be the same on all of them; names and dtypes stay those of training, or
    follow a base model (--like). Adapters are fused or written as you say (--lora). The output is complete or absent.
    Exit codes: 0 done, 2 wrong usage or a choice that is yours, 3 no FSDP shards or several directories of them, 4
    broken or refused (all reasons are listed), 5 not as the reference is, adapters that are no LoRA, or a head that no
    class holds, 6 cannot write there, 7 a file would run code.
    """
    session = ctx.obj
    session.begin("merge-fsdp", json=json, color=check_color(color))
    session.when_stopped = f"stopped; {output} is as it was" if force else f"stopped; nothing was written to {output}"
    from ckpttool.export.precision import DTYPES as NAMES
    from ckpttool.export.result import LORA as WAYS
    from ckpttool.merging import Options, merge
    from ckpttool.merging.result import ON_MISMATCH as MISMATCHES
    from ckpttool.render.merging import show_merge

    options = Options(
        inputs=tuple(str(check_path(folder)) for folder in inputs or ()),
        step=step,
        role=role,
        world_size=None if world_size is None else count_of("--world-size", world_size),
        lora=None if lora is None else one_of("--lora", lora, WAYS),
        adapters=tuple(adapter or ()),
        lora_alpha=None if lora_alpha is None else number_of("--lora-alpha", lora_alpha),
        adapter_config=None if adapter_config is None else str(check_path(adapter_config)),
        base=None if base is None else str(check_path(base)),
        like=None if like is None else str(check_path(like)),
        allow_missing=tuple(allow_missing or ()),
        allow_extra=tuple(allow_extra or ()),
        dtype=None if dtype is None else one_of("--dtype", dtype, tuple(NAMES)),
        cast_buffers=cast_buffers,
        allow_overflow=allow_overflow,
        on_mismatch=one_of("--on-mismatch", on_mismatch, MISMATCHES),
        check_replicas=not no_check_replicas,
        untie=untie,
        drop_lm_head=drop_lm_head,
        hf_config=None if hf_config is None else str(check_path(hf_config)),
        architecture=architecture,
        max_shard_size=size_of("--max-shard-size", max_shard_size),
        threads=Options().threads if threads is None else count_of("--threads", threads),
        force=force,
        dry_run=dry_run,
    )
    carry_out(
        session,
        lambda bar: merge(check_path(path), check_path(output), options, bar),
        show_merge,
        json=json,
        quiet=quiet,
        verbose=verbose,
        no_progress=no_progress,
    )
