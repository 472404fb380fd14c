"""What ``inspect`` found, for people."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ckpttool.inspection.result import Content, Disk, Inspection, Manifest, Module, Run, State, TensorRow
from ckpttool.render.terminal import (
    WIDE,
    age,
    clean,
    new_grid,
    new_table,
    number,
    show_next,
    show_problems,
    shown_path,
    size,
)

BAR = 20
MODULES_SHOWN = 24

MOST_SHARED = 6
"""Groups of directories with shared files that are listed one by one."""

_SHORT = {
    "fsdp": "FSDP",
    "fsdp-lora": "FSDP, LoRA",
    "verl-megatron-v1": "Megatron v1",
    "verl-megatron-v2": "Megatron v2",
    "verl-megatron-half-migrated": "Megatron v1 to v2, half",
    "torch_dist": "Megatron torch_dist",
    "dcp": "torch DCP",
}
_CONTENT_COLUMNS = ("what", "where", "tensors", "parameters", "bytes", "how")

_STATE_STYLES: Mapping[State, str] = {
    "complete": "bold green",
    "incomplete": "bold red",
    "absent": "bold yellow",
    "no weights": "bold yellow",
    "refused": "bold red",
    "not opened": "bold yellow",
    "unknown": "bold yellow",
}


def show_inspection(found: Inspection, out: Console, *, quiet: bool = False, listing: bool = False) -> None:
    """Print an inspection; ``listing`` replaces all but the verdict by the list of tensors."""
    out.print(_verdict(found))
    if quiet:
        return
    if listing:
        _show_tensors(found.tensors, out)
    else:
        for title, body in _blocks(found, narrow=out.width < WIDE):
            out.print()
            if title:
                out.print(Text(title, "bold"))
            out.print(Padding(body, (0, 0, 0, 2), expand=False))
    if found.problems:
        show_problems(found.problems, out)
    _show_next(found, out)


def _verdict(found: Inspection) -> Text:
    text = Text(clean(found.title) or "file", "bold")
    if found.kind != "file" or found.state != "complete":
        text += Text(": ") + Text(found.state, _STATE_STYLES[found.state])
    return text + Text(f"\n{clean(shown_path(found.path))}", "dim")


def _blocks(found: Inspection, *, narrow: bool) -> Iterable[tuple[str, RenderableType]]:
    yield "", _facts(found)
    if found.run is not None and found.run.rows:
        yield "Steps", _run_table(found.run, narrow)
    if found.contents:
        yield "Contents", _contents(found.contents, narrow)
    if found.modules is not None and found.parameters:
        yield "Modules", _modules(found.modules)
    if found.manifest is not None:
        yield "Manifest", _manifest(found.manifest, narrow)


def _facts(found: Inspection) -> Table:
    grid = new_grid()
    facts: dict[str, str] = {}
    if found.step is not None:
        facts["step"] = f"{found.step:,}"
    if found.role is not None:
        facts["role"] = found.role
    facts.update(found.facts)
    if found.parameters is not None:
        facts["parameters"] = _parameters(found)
    if found.disk is not None and found.kind != "file":
        facts["on disk"] = _disk(found.disk)
        facts.update(_shared(found.disk))
    if found.run is not None and found.run.tracker_file is not None:
        facts["tracker"] = f"{found.run.tracker} ({found.run.tracker_file})"
    if found.run is not None and found.run.latest_complete is not None:
        facts["latest complete"] = f"step {found.run.latest_complete}"
    if found.evidence:
        facts["evidence"] = "; ".join(found.evidence)
    for name, value in facts.items():
        grid.add_row(clean(name), Text(clean(value)))
    return grid


def _parameters(found: Inspection) -> str:
    total = sum(use.bytes for use in found.dtypes)
    uses = [f"{use.dtype} {_share(use.bytes, total)}" for use in found.dtypes]
    tensors = sum(use.tensors for use in found.dtypes)
    return f"{number(found.parameters or 0)} in {tensors:,} tensors, {size(total)} ({', '.join(uses)})"


def _shared(disk: Disk) -> dict[str, str]:
    """Say which directories hold the same files under several names."""
    lines: dict[str, list[str]] = {}
    if len(disk.shared) > MOST_SHARED:
        count, total = sum(s.files for s in disk.shared), sum(s.bytes for s in disk.shared)
        return {"shared by links": f"{count:,} files in {len(disk.shared)} groups of directories, {size(total)}"}
    for shared in disk.shared:
        how = "shared by symbolic links" if shared.symbolic else "shared by hard links"
        lines.setdefault(how, []).append(f"{', '.join(shared.trees)} ({shared.files} files, {size(shared.bytes)})")
    return {how: "; ".join(groups) for how, groups in lines.items()}


def _disk(disk: Disk) -> str:
    once = f", {size(disk.unique)} counting linked files once" if disk.unique != disk.apparent else ""
    return f"{size(disk.apparent)} in {disk.files:,} files{once}"


def _run_table(run: Run, narrow: bool) -> Table:
    table = new_table("step", "role", "kind", "state", "size", "age", right=("step", "size", "age"))
    for row in run.rows:
        table.add_row(
            Text(clean(row.path.partition("/")[0]) if row.step is None else f"{row.step:,}"),
            Text(clean(row.role) or "-"),
            Text(clean(_SHORT.get(row.kind, row.kind if narrow else row.title))),
            Text(row.state, _STATE_STYLES[row.state]),
            size(row.bytes),
            age(row.modified) if row.modified else "-",
        )
    return table


def _contents(contents: Sequence[Content], narrow: bool) -> Table:
    """Show what is held; a narrow terminal gets the first words of the last column only."""
    columns = ("what", "where", "parameters", "bytes", "how") if narrow else _CONTENT_COLUMNS
    table = new_table(*columns, right=("tensors", "parameters", "bytes"))
    for item in contents:
        cells = {
            "what": Text(item.name, no_wrap=True),
            "where": Text(clean(item.where) or ".", no_wrap=narrow),
            "tensors": Text(f"{item.tensors:,}" if item.tensors else ""),
            "parameters": Text(number(item.parameters) if item.parameters else "", no_wrap=True),
            "bytes": Text(size(item.bytes) if item.bytes else "", no_wrap=True),
            "how": Text(clean(re.split("[,:]", item.detail)[0] if narrow else item.detail)),
        }
        table.add_row(*(cells[column] for column in columns))
    return table


def _modules(root: Module) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for justify in ("left", "left", "right", "right", "right"):
        table.add_column(justify=justify, no_wrap=justify == "right", overflow="fold")
    lines = list(_module_lines(root, 0))
    for depth, module in lines[:MODULES_SHOWN]:
        share = module.bytes / root.bytes if root.bytes else 0
        table.add_row(
            Text("  " * depth + clean(module.name)),
            Text(_bar(share), "blue"),
            _share(module.bytes, root.bytes),
            number(module.parameters),
            size(module.bytes),
        )
    if len(lines) > MODULES_SHOWN:
        table.add_row(f"and {len(lines) - MODULES_SHOWN} more modules")
    return table


def _module_lines(module: Module, depth: int) -> Iterable[tuple[int, Module]]:
    for child in module.children:
        yield depth, child
        if not (len(child.children) == 1 and not child.children[0].children):
            yield from _module_lines(child, depth + 1)


def _bar(share: float) -> str:
    eighths = round(share * BAR * 8)
    if not _unicode():
        return "#" * round(share * BAR)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else "▏▎▍▌▋▊▉"[eighths % 8 - 1])


def _unicode() -> bool:
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def _manifest(manifest: Manifest, narrow: bool) -> RenderableType:
    grid = new_grid()
    grid.add_row("schema", str(manifest.schema_version))
    grid.add_row("save contents", Text(clean(", ".join(manifest.save_contents))))
    if manifest.backend:
        grid.add_row("backend", Text(clean(", ".join(f"{k} {v}".lower() for k, v in manifest.backend.items()))))
    table = new_table("tree", "holds", *(() if narrow else ("format", "written by")), "on disk")
    for tree in manifest.trees:
        how = () if narrow else (tree.format, tree.backend)
        state = Text("there", "green") if tree.found else Text("missing", "bold red")
        table.add_row(clean(tree.path), tree.holds, *how, state)
    return Group(grid, table) if manifest.trees else grid


COLUMN_MOST = 200
"""Characters that a column of tensors is wide at most: one name of a megabyte is no reason to fill up all others."""


def _show_tensors(rows: Sequence[TensorRow], out: Console) -> None:
    """Print one line a tensor, uncut: this is what people grep."""
    lines = [
        (
            clean(row.name),
            row.dtype,
            "[" + ", ".join(map(str, row.shape)) + "]",
            f"{row.bytes:,}",
            clean(f"{row.where}: {row.placement}" if row.where else row.placement),
        )
        for row in rows
    ]
    widths = [min(max((len(line[i]) for line in lines), default=0), COLUMN_MOST) for i in range(4)]
    out.print()
    for name, dtype, shape, count, placement in lines:
        text = f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {count:>{widths[3]}}  {placement}"
        out.print(Text(text), soft_wrap=True)
    if not lines:
        out.print("no tensor has such a name")


def _show_next(found: Inspection, out: Console) -> None:
    if found.next:
        show_next([(suggestion.why, suggestion.command) for suggestion in found.next], out)


def _share(part: int, whole: int) -> str:
    percent = 100 * part / whole if whole else 0
    return "<1%" if 0 < percent < 1 else f"{percent:.0f}%"
