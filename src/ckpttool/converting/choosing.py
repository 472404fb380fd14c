"""Find the Megatron archive that is meant, and the configuration that belongs to it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpttool import layout
from ckpttool.converting.result import Options
from ckpttool.errors import NotACheckpoint, Problem
from ckpttool.export.config import CONFIG
from ckpttool.formats import dcp, fsdp, hf
from ckpttool.inspection import megatron, runs
from ckpttool.inspection.choice import choose
from ckpttool.inspection.search import below, model_directory, require_directory, what_it_is

SHOWN = 12
"""Directories that are listed at most."""

_TREES = (layout.MODEL, layout.V1_ARCHIVE)


def find_archive(path: Path, output: Path, options: Options) -> tuple[Path, tuple[Problem, ...]]:
    """Return the directory of the archive that the path and the options mean, and notes on the choice.

    Raises :class:`NotACheckpoint` that lists what lies below, as commands to type, when that is not exactly one.
    """
    if path.is_file() and (path.name == dcp.METADATA_FILE or path.suffix == ".distcp"):
        raise NotACheckpoint(f"{path}: one file of an archive", hint=f"Give its directory: {path.parent}")
    require_directory(path)
    chosen, notes = choose(path, options.step, options.role)
    archive = archive_of(chosen)
    if archive is not None:
        return archive, notes
    roles, all_seen = below(chosen, _is_checkpoint) if megatron.detect(chosen) is None else ([], True)
    archives = {role: archive for role in roles if (archive := archive_of(role)) is not None}
    if len(archives) == 1 and all_seen:
        return next(iter(archives.values())), notes
    if not archives:
        raise NotACheckpoint(
            f"{chosen}: no Megatron archive (.metadata and *.distcp) in it or below{_what_is_there(chosen)}",
            hint=_instead(roles[0] if len(roles) == 1 else chosen),
        )
    lines = list(_commands(chosen, archives, output, options))
    raise NotACheckpoint(
        f"{chosen}: {len(archives)} Megatron checkpoints lie below it",
        hint="\n".join(["Choose one, with --step and --role or by its path:", *lines]),
    )


def archive_of(folder: Path) -> Path | None:
    """Return the archive that a directory is, or that its role keeps the model in."""
    if dcp.detect(folder) is not None:
        return folder
    trees = (folder / tree for tree in _TREES)
    return next((tree for tree in trees if tree.is_dir() and dcp.detect(tree) is not None), None)


def _what_is_there(path: Path) -> str:
    """Say what a directory is; of a run, what its newest step is."""
    newest = runs.steps(path)[-1:]
    return what_it_is(path) + "".join(what_it_is(step).replace("; it is", "; its newest step is") for step in newest)


def _is_checkpoint(folder: Path) -> bool:
    """Tell a checkpoint of Megatron, with a model in it or without."""
    return archive_of(folder) is not None or megatron.detect(folder) is not None


def _instead(path: Path) -> str:
    """Say where the weights are, or what else to do."""
    written = [path / name for name in (layout.HUGGINGFACE, layout.V1_HUGGINGFACE) if has_weights(path / name)]
    if written:
        return f"A bridge has written the weights in Hugging Face form: {written[0]}. Nothing needs converting."
    if fsdp.detect(path) is not None:
        return f"Shards of FSDP are merged: ckpttool merge-fsdp {shlex.quote(str(path))} -o OUTPUT"
    return f"More about it: ckpttool inspect {shlex.quote(str(path))}"


def has_weights(folder: Path) -> bool:
    """Tell whether Hugging Face weights lie in a directory."""
    return folder.is_dir() and bool(hf.weight_files(path.name for path in folder.iterdir()))


def _commands(path: Path, archives: Mapping[Path, Path], output: Path, options: Options) -> Iterator[str]:
    """Yield what to type instead: the newest whole step, each one by its path."""
    tail = shlex.join(["-o", str(output)]) + "".join(f" {flag}" for flag in options.flags())
    if runs.steps(path):
        roles = sorted({folder.name for folder in archives if layout.step_of(folder.parent.name) is not None})
        role = f" --role {roles[0]}" if roles else ""
        yield f"  ckpttool to-hf {shlex.quote(str(path))} --step latest{role} {tail}"
    newest = sorted(archives, key=lambda folder: (layout.numbered(folder) or 0, str(folder)), reverse=True)
    for folder in newest[:SHOWN]:
        whole = all((archives[folder] / name).is_file() for name in (dcp.METADATA_FILE, dcp.BACKEND_FILE))
        yield f"  ckpttool to-hf {shlex.quote(str(folder))} {tail}{'' if whole else '  # its save did not finish'}"
    if len(archives) > SHOWN:
        yield f"  and {len(archives) - SHOWN:,} more"


def find_side_folder(archive: Path, options: Options) -> Path | None:
    """Return the folder of configuration and tokenizer: the one given, beside the archive, that of the reference.

    Raises :class:`NotACheckpoint` when the one given is no directory.
    """
    if options.hf_config is not None:
        return model_directory("--hf-config", options.hf_config)
    beside = [archive / layout.V1_HUGGINGFACE, archive.parent / layout.V1_HUGGINGFACE, archive]
    if archive.parent.name == "model":
        beside.insert(2, archive.parent.parent / layout.V1_HUGGINGFACE)
    if options.like is not None:
        beside.append(model_directory("--like", options.like))
    return next((folder for folder in beside if (folder / CONFIG).is_file()), None)
