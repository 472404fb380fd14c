"""What ``to-hf`` plans or did, and the weight maps that it knows, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console

from ckpttool.architectures.family import Family
from ckpttool.converting.result import Conversion, Skipped
from ckpttool.render.exporting import adapters, beside, changes, dtypes, left_out, named, show_export
from ckpttool.render.terminal import new_table, plural

UNPROVEN = "not yet proven on a real checkpoint"


def show_conversion(result: Conversion, out: Console, *, quiet: bool = False, verbose: bool = False) -> None:
    """Print what was (or would be) written, from what, and everything that is not as it was."""
    facts = _facts(result, verbose=verbose)
    show_export(result, "converted", facts, "to-hf", result.options.flags(), out, quiet=quiet, verbose=verbose)


def _facts(result: Conversion, *, verbose: bool) -> Iterator[tuple[str, str]]:
    yield "archive", result.title
    if result.model:
        yield "model", result.model
    experts = f" and {result.mtp} of multi-token prediction" if result.mtp else ""
    experts += f", {plural(result.experts, 'expert')} each" if result.experts else ""
    proven = "" if result.proven else f" ({UNPROVEN})"
    yield "weight map", f"{result.family}: {plural(result.layers, 'layer')}{experts}{proven}"
    if result.heads:
        yield "attention", result.heads
    if result.value_head:
        yield "head", f"a value head of {plural(result.value_head, 'row')}: score.weight"
    for order in result.row_order:
        yield "row order", order
    yield from adapters(result.adapters, verbose=verbose)
    yield from named(result, verbose=verbose)
    yield "dtypes", dtypes(result)
    yield from changes(result, "biases of routers, and what is kept wider than the rest", verbose=verbose)
    if result.skipped:
        yield "skipped", ", ".join(_skipped(part, skipped) for part, skipped in result.skipped.items())
    yield from left_out(result, verbose=verbose)
    yield from beside(result, verbose=verbose)


def _skipped(part: str, skipped: Skipped) -> str:
    counts = ((skipped.tensors, "tensor"), (skipped.objects, "object"))
    return f"{part} ({' and '.join(plural(count, noun) for count, noun in counts if count)})"


def show_architectures(families: Sequence[Family], out: Console) -> None:
    """Print every weight map: its name, its models, the model types it is chosen by, whether it is proven."""
    table = new_table("weight map", "models", "model_type", "")
    for family in families:
        types = ", ".join(family.model_types)
        table.add_row(family.name, family.title, types, "" if family.proven else UNPROVEN)
    out.print(table)


def architectures_data(families: Sequence[Family]) -> list[dict[str, Any]]:
    """Return the same as values that JSON has."""
    return [
        {"name": f.name, "models": f.title, "model_types": list(f.model_types), "proven": f.proven} for f in families
    ]
