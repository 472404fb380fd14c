"""Write a plan into a directory that appears complete or not at all, while nobody writes to its sources."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ckpttool.errors import BrokenCheckpoint, Problem
from ckpttool.export.result import ExportOptions
from ckpttool.export.side_files import is_of_a_model
from ckpttool.formats import hf
from ckpttool.formats.findings import counted, listing
from ckpttool.plan import Plan
from ckpttool.sink import execute
from ckpttool.staging import staged
from ckpttool.tensors import TensorInfo

Progress = Callable[[int], None]
Ready = Callable[[int], Progress]
Stamps = Mapping[Path, tuple[int, int]]


def stamps(paths: Iterable[Path]) -> Stamps:
    """Return size and time of files, to see afterwards whether a trainer has written to them meanwhile."""
    found = {}
    for path in paths:
        with suppress(OSError):  # it is told of by whoever reads it
            info = path.stat()
            found[path] = info.st_size, info.st_mtime_ns
    return found


def check_unchanged(root: Path, before: Stamps) -> None:
    """Raise :class:`BrokenCheckpoint` when a file has been written to, replaced or removed since before it was read."""
    now = stamps(before)
    changed = [path.name for path, stamp in before.items() if now.get(path) != stamp]
    if changed:
        raise BrokenCheckpoint(
            f"{root}: changed while it was read: {listing(changed)}; nothing was written",
            hint="Is a training run saving here? Wait until it is done.",
            code="changed-meanwhile",
        )


def write(
    output: Path,
    plan: Plan,
    sources: Mapping[str, TensorInfo],
    root: Path,
    options: ExportOptions,
    progress: Progress,
    check: Callable[[], None],
) -> Mapping[str, int]:
    """Write a plan; ``check`` is called before the directory gets its name. Returns what became infinite, by target."""
    with staged(output, force=options.force) as folder:
        overflows = execute(plan, sources, root, folder, threads=options.threads, progress=progress)
        if overflows and not options.allow_overflow:
            raise BrokenCheckpoint(
                f"{root}: {sum(overflows.values()):,} finite values do not fit into the dtype asked for; "
                "nothing was written",
                hint="Write bf16 or fp32 (--dtype), or let them become infinite: --allow-overflow.",
                code="overflow",
                problems=[
                    Problem(code="overflow", message=f"{name}: {counted(lost, 'value')} would become infinite")
                    for name, lost in overflows.items()
                ],
            )
        check()
    return overflows


def names_of(plan: Plan) -> frozenset[str]:
    """Return the names of all files that a plan writes."""
    return frozenset({*(file.name for file in plan.weights), *(file.name for file in plan.copies), *plan.contents})


def is_replaceable(output: Path, ours: Collection[str] = ()) -> bool:
    """Tell whether ``--force`` may take away what is there: a model and nothing else, or nothing at all.

    ``ours`` are the names of what is written instead; side files may have any.
    """
    with suppress(OSError):
        names = os.listdir(output) if output.is_dir() and not output.is_symlink() else ["no directory"]
        adapters = [name for name in names if _is_adapters(output / name)]
        known = all(is_of_a_model(name) or name in ours for name in names if name not in adapters)
        return known and bool(not names or adapters or hf.detect(output) is not None)
    return False


_ADAPTER = frozenset({hf.ADAPTER_CONFIG, "adapter_model.safetensors"})
"""What is written of an adapter, and nothing else: a directory of peft's own has a README, and stays."""


def _is_adapters(folder: Path, *, nested: bool = True) -> bool:
    """Tell a directory of an adapter, or of several with a directory each, as ``merge-fsdp --lora`` writes them."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = os.listdir(folder)
    files = all(name in _ADAPTER and (folder / name).is_file() for name in names)
    return bool(names) and (files or (nested and all(_is_adapters(folder / name, nested=False) for name in names)))


def give_back() -> None:
    """Let the allocator return what reading the indexes took: the bands that are moved next need it more."""
    with suppress(OSError, AttributeError):  # glibc has it
        ctypes.CDLL(None).malloc_trim(0)
