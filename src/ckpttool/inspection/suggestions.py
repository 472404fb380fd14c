"""The next command to type."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from ckpttool.errors import UsageError
from ckpttool.inspection.result import Content, Inspection, Suggestion
from ckpttool.layout import LORA_META, MODEL, V1_ARCHIVE, V1_HUGGINGFACE, step_of

COMMANDS = frozenset({"demo", "diff", "inspect", "merge-fsdp", "migrate", "to-hf", "verify", "watch"})
"""The commands that exist; only these are suggested."""


FSDP = ("fsdp", "fsdp-lora")
MEGATRON = ("verl-megatron-v1", "verl-megatron-v2", "verl-megatron-half-migrated", "torch_dist")
"""The kinds that ``merge-fsdp`` takes, and those that ``to-hf`` does."""

_OLD_LAYOUT = ("verl-megatron-v1", "verl-megatron-half-migrated")


def suggest(found: Inspection) -> Iterator[Suggestion]:
    """Yield what to type after seeing this, most useful first."""
    if found.kind in _OLD_LAYOUT and not _damaged(found):
        yield _command("migrate", found.path, "give it the trees of layout v2, which current verl loads")
    if found.kind in FSDP and found.parameters is not None and not found.tensors and not _lacking(found):
        yield from _merge(found.path, found.kind, _adapters(found))
    if found.kind in MEGATRON and not _damaged(found) and not found.tensors and _in_archive(found):
        yield _convert(found)
    if found.run is not None:
        yield from _after_run(found)
        if any(row.kind in _OLD_LAYOUT and row.state == "complete" for row in found.run.rows):
            yield _command("migrate", found.path, "give its roles the trees of layout v2, which current verl loads")
    elif found.state == "incomplete" and found.step is not None:
        yield inspect_command(str(_run_of(Path(found.path))), "see which steps of the run are whole")
    elif found.parameters is not None and not found.tensors and found.state == "complete":
        yield inspect_command(found.path, "list every tensor", "--tensors")


def only_row(found: Inspection, pattern: str) -> Path:
    """Return the one checkpoint of a run or step, whose tensors are to be listed.

    Raises :class:`UsageError` with the commands to type when there are several.
    """
    rows = found.run.rows if found.run else ()
    if len(rows) == 1:
        return Path(found.path, rows[0].path)
    commands = [inspect_command(f"{found.path}/{row.path}", "", "--tensors", pattern).command for row in rows[-20:]]
    raise UsageError(
        f"{found.path}: {len(rows)} checkpoints, choose whose tensors to list",
        hint="\n".join(["Try:", *(f"  {command}" for command in commands)]),
    )


def _run_of(path: Path) -> Path:
    """Return the directory above the step directory that a path lies in."""
    return next((p.parent for p in (path, *path.parents) if step_of(p.name) is not None), path)


def inspect_command(path: str, why: str, *options: str) -> Suggestion:
    """Return an ``inspect`` call, quoted for a shell."""
    return _command("inspect", path, why, *options)


def _command(command: str, path: str, why: str, *options: str) -> Suggestion:
    return Suggestion(shlex.join(["ckpttool", command, _typed(path), *options]), why)


def _adapters(found: Inspection) -> list[str]:
    """Return the names of the adapters of PEFT that a role has."""
    told = found.facts.get("adapters", "")
    return [adapter.partition(":")[0] for adapter in told.split("; ")] if told else []


def _merge(path: str, kind: str, adapters: list[str]) -> Iterator[Suggestion]:
    """Yield the ``merge-fsdp`` calls for a role; what they write lies in the working directory."""
    if not adapters:
        yield _command("merge-fsdp", path, "make a Hugging Face model of the shards", "-o", _output(path))
        return
    which = ["--adapter", adapters[0]] if len(adapters) > 1 else []
    fuse, why = ["--lora", "fuse", *which], "make a Hugging Face model with the adapter in its weights"
    if kind == "fsdp-lora":
        fuse, why = [*fuse, "--base", "MODEL"], f"{why}; MODEL is the directory of its base model"
    yield _command("merge-fsdp", path, why, "-o", _output(path), *fuse)
    adapter = f"{_output(path).removesuffix('-hf')}-lora"
    alone = ["--lora", "adapter", *which]
    yield _command("merge-fsdp", path, "write the adapter alone, as peft loads it", "-o", adapter, *alone)


def _convert(found: Inspection) -> Suggestion:
    """Return the ``to-hf`` call for a Megatron checkpoint; without a configuration the user has to name one."""
    lora = ("--lora", "fuse") if _wrapped(found) else ()
    if "model" in found.facts:
        return _command("to-hf", found.path, "make a Hugging Face model of it", "-o", _output(found.path), *lora)
    return _convert_with_config(found.path, *lora)


def _convert_with_config(path: str, *options: str) -> Suggestion:
    why = "make a Hugging Face model of it; MODEL is the directory of the one that was trained"
    return _command("to-hf", path, why, "-o", _output(path), *options, "--hf-config", "MODEL")


def _wrapped(found: Inspection) -> list[Content]:
    return [part for part in found.contents if part.name.startswith("adapter")]


def _in_archive(found: Inspection) -> bool:
    """Tell whether the weights of the model lie in an archive, and are not Hugging Face's already.

    Adapters that lie elsewhere are not fused.
    """
    inside = [part.where for part in found.contents if part.detail.startswith("torch_dist")]
    weights = [part.where for part in found.contents if part.name == "model weights" and part.where in inside]
    return bool(weights) and all(part.where in weights for part in _wrapped(found))


def _keeps_weights(role: Path) -> bool:
    """Tell by names whether a role of verl has its weights in an archive: they are not Hugging Face's already."""
    if (role / MODEL / ".metadata").is_file():
        return True
    from ckpttool.formats.hf import weight_files

    folder = role / V1_HUGGINGFACE
    names = os.listdir(folder) if folder.is_dir() else []
    return (role / V1_ARCHIVE / ".metadata").is_file() and not weight_files(names)


def _output(path: str) -> str:
    """Return a name in the working directory for what is made of a checkpoint."""
    names = [part for part in Path(path).parts[-2:] if part != "/"]
    return f"{names[0]}-{names[1]}-hf" if step_of(names[0]) is not None else f"{names[-1]}-hf"


def _lacking(found: Inspection) -> bool:
    """Tell whether something is missing that a model needs; ranks that hold further replicas are not."""
    enough = any(problem.code == "replicas-suffice" for problem in found.problems)
    return any(not (enough and problem.code == "rank-missing") for problem in found.faults)


def _damaged(found: Inspection) -> bool:
    return any(problem.code != "half-migrated" for problem in found.faults)


def _typed(path: str) -> str:
    """Return the path as one would type it here: relative when it lies below the working directory."""
    here = os.getcwd()  # noqa: PTH109 - text, not a Path
    typed = os.path.relpath(path, here) if os.path.commonpath([here, path]) == here else path
    return f"./{typed}" if typed.startswith("-") else typed


def _is_lora(role: Path) -> bool:
    """Tell by what trainers write beside the shards that they are those of a PEFT model."""
    beside = (LORA_META, f"../{LORA_META}", "adapter_config.json", "lora_adapter/adapter_config.json")
    return any((role / name).is_file() for name in beside)


def _after_run(found: Inspection) -> Iterator[Suggestion]:
    rows = found.run.rows if found.run else ()
    latest = found.run.latest_complete if found.run else None
    best = [row for row in rows if row.state == "complete" and (latest is None or row.step == latest)]
    broken = [row for row in rows if row.state != "complete"]
    for row in [row for row in best if row.role == "actor"] or best[-1:]:
        path = f"{found.path}/{row.path}"
        if row.kind in FSDP:
            lora = row.kind == "fsdp-lora" or _is_lora(Path(path))
            yield from _merge(path, row.kind, ["default"] if lora else [])
        elif row.kind == "torch_dist" and not row.role:
            yield _convert_with_config(path)
        elif row.kind in MEGATRON and _keeps_weights(Path(path)):
            yield _command("to-hf", path, "make a Hugging Face model of it", "-o", _output(path))
        yield inspect_command(f"{found.path}/{row.path}", f"look into the latest complete {row.role or 'checkpoint'}")
    for row in broken[-1:]:
        yield inspect_command(f"{found.path}/{row.path}", "see what is wrong there")
