"""``ckpttool diff``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

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
    number_of,
    source_options,
)
from ckpttool.errors import UsageError

_ULPS = re.compile(r"([0-9]{1,9})\s*ulps?", re.IGNORECASE | re.ASCII)


def diff(
    ctx: Context,
    a: Annotated[str | None, Argument(metavar="A", help="A checkpoint: a role, a step, an archive, a file.")] = None,
    b: Annotated[str | None, Argument(metavar="B", help="The one to compare it with, of the same kind or not.")] = None,
    include: Annotated[
        list[str] | None, Option("--include", metavar="GLOB", help="Compare tensors of such names only ('*norm*').")
    ] = None,
    exclude: Annotated[
        list[str] | None, Option("--exclude", metavar="GLOB", help="Leave tensors of such names out.")
    ] = None,
    tolerance: Annotated[
        str | None,
        Option("--tolerance", metavar="X|Nulp", help="The largest difference that still counts as the same."),
    ] = None,
    ignore_dtype: Annotated[
        bool, Option("--ignore-dtype", help="Compare values in the coarser of two dtypes; the dtype is no difference.")
    ] = False,
    trust_crc: Annotated[
        bool, Option("--trust-crc", help="Do not read what has the same recorded checksum on both sides.")
    ] = False,
    everything: Annotated[
        bool, Option("--all", help="Compare optimizer and other state, too, not the model alone.")
    ] = False,
    html: Annotated[
        str | None, Option("--html", metavar="FILE", help="Write a page that shows which layers have moved.")
    ] = None,
    force: Force = False,
    step: Step = None,
    role: Role = None,
    hf_config: HfConfig = None,
    arch: Arch = None,
    producer: Producer = None,
    lora: FuseLora = None,
    lora_alpha: LoraAlpha = None,
    threads: Annotated[
        str | None, Option("--threads", metavar="N", help="Tensors compared at the same time. Default: a core each.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
    no_progress: NoProgress = False,
    color: Color = "auto",
) -> None:
    """Say where two checkpoints differ: names, shapes, dtypes, and every value.

    FSDP shards, Megatron archives, DCP, Hugging Face models and single files are compared with each other: across
    kinds by the names and forms that a conversion would write. B is measured against A; only the page is written.
    Exit codes: 0 the same, 1 different, 3 no checkpoint, 4 not whole, 5 no weight map fits, 6 no page can be
    written there, 7 it would run code.
    """
    ctx.obj.begin("diff", json=json, color=check_color(color))
    if a is None or b is None:
        raise UsageError("two checkpoints are needed", hint="ckpttool diff A B; more: ckpttool diff --help")
    if force and html is None:
        raise UsageError("--force without --html: nothing is written")
    if lora_alpha is not None and lora is None:
        raise UsageError("--lora-alpha without --lora", hint="Say that adapters are to be fused: --lora fuse.")
    from ckpttool.comparison import Options, compare
    from ckpttool.comparison.page import check_page, write_page
    from ckpttool.render.terminal import envelope, progress, watching

    absolute, ulps = tolerance_of(tolerance)
    options = Options(
        step=step,
        role=role,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        tolerance=absolute,
        ulps=ulps,
        ignore_dtype=ignore_dtype,
        trust_crc=trust_crc,
        everything=everything,
        **source_options(hf_config, arch, producer, lora, lora_alpha),
        threads=every_core() if threads is None else count_of("--threads", threads),
    )
    page = None if html is None else Path(html)
    if page is not None:
        check_page(page, force=force, sources=(Path(a), Path(b)))
    shown = not (no_progress or quiet or json)
    with watching(ctx.obj.err, shown=shown), progress("compared", ctx.obj.err, shown=shown) as bar:
        found = compare(str(check_path(a)), str(check_path(b)), options, bar)
    if page is not None:
        from ckpttool.render.page import page as drawn

        write_page(page, drawn(found), force=force, sources=(Path(found.a.root), Path(found.b.root)))
    if json:
        sys.stdout.write(envelope("diff", ok=found.same, data=found.as_json(), problems=found.notes) + "\n")
    else:
        from ckpttool.render.comparison import show_comparison

        show_comparison(found, ctx.obj.out, quiet=quiet, page=html or "")
    raise Exit(0 if found.same else 1)


def tolerance_of(text: str | None) -> tuple[float, int]:
    """Return the absolute tolerance, and that in units in the last place; one of them is 0."""
    if text is None or text.strip() == "0":
        return 0.0, 0
    match = _ULPS.fullmatch(text.strip())
    if match:
        return 0.0, int(match[1])
    try:
        return number_of("--tolerance", text), 0
    except UsageError as error:
        raise UsageError(f"--tolerance {text}: neither a number (1e-6) nor units in the last place (2ulp)") from error
