"""What ``merge-fsdp`` plans or did, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rich.console import Console

from ckpttool.merging.result import Copies, Merge
from ckpttool.render.exporting import adapters, beside, changes, dtypes, left_out, named, show_export
from ckpttool.render.terminal import plural, shown_path, size


def show_merge(result: Merge, out: Console, *, quiet: bool = False, verbose: bool = False) -> None:
    """Print what was (or would be) written, from what, and everything that is not as it was."""
    flags = replace(result.options, inputs=result.folders[1:]).flags()
    facts = _facts(result, verbose=verbose)
    show_export(result, "merged", facts, "merge-fsdp", flags, out, quiet=quiet, verbose=verbose)


def _facts(result: Merge, *, verbose: bool) -> Iterator[tuple[str, str]]:
    if len(result.folders) > 1:
        yield "united with", ", ".join(map(shown_path, result.folders[1:]))
    if result.lora is not None:
        yield "written", _WRITTEN[result.lora]
    yield "shards", result.title
    if result.model:
        yield "model", result.model
    yield from adapters(result.adapters, verbose=verbose)
    if result.base is not None:
        yield "base", shown_path(result.base)
    yield from named(result, verbose=verbose)
    yield "dtypes", dtypes(result)
    yield from changes(result, "buffers keep their dtype", verbose=verbose)
    yield "copies", "; ".join(_copies(result.copies))
    yield from left_out(result, verbose=verbose)
    for segment, count in result.renamed.items():
        yield "renamed", f"{segment}. taken out of {plural(count, 'name')}"
    yield from beside(result, verbose=verbose)


_WRITTEN = {
    "fuse": "a whole model, with the adapter in its weights",
    "adapter": "the adapter alone, without its base model",
    "both": "a whole model, with the adapter in its weights, and the adapter in lora_adapter/",
}


def _copies(copies: Copies) -> Iterator[str]:
    if not copies.replicated and not copies.replicas and copies.checked:
        yield "no tensor is stored more than once"
    if copies.replicated:
        what = plural(copies.replicated, "replicated tensor")
        yield f"{what} ({size(copies.replicated_bytes)}) compared byte by byte"
    if copies.replicas:
        how = f"{copies.by_crc:,} by recorded CRC-32, {copies.by_bytes:,} byte by byte"
        yield f"{plural(copies.replicas, 'replica')} of shards compared, {how}"
    elif not copies.checked:
        yield "replicas of shards not compared (--no-check-replicas)"
