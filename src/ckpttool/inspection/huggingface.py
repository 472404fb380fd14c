"""Hugging Face directories, alone or inside a role directory."""

from __future__ import annotations

from pathlib import Path

from ckpttool.formats import hf
from ckpttool.formats.findings import counted, listing
from ckpttool.inspection.access import add_closed, closed
from ckpttool.inspection.beside import add_trainer_files
from ckpttool.inspection.draft import Draft, refusals_of
from ckpttool.inspection.result import Content
from ckpttool.inspection.sections import Section
from ckpttool.inspection.sidefiles import add_doubts


def inspect_hf(path: Path, evidence: tuple[str, ...]) -> Draft:
    """Describe a Hugging Face directory."""
    source = hf.open_(path)
    if source.adapter:
        kind, title = "hf-adapter", "PEFT adapter (Hugging Face)"
    elif source.weights:
        kind, title = "huggingface", "Hugging Face model"
    else:
        kind, title = "hf-config", "Hugging Face configuration without weights"
    draft = Draft(path=path, kind=kind, title=title, evidence=evidence)
    draft.add(Section("", source))
    _hf_facts(draft, source)
    if kind == "hf-config":
        draft.state = "no weights" if not source.problems else None
        draft.note("no-weights", "configuration and tokenizer files only: the weights are somewhere else")
    if kind == "huggingface" and source.config is None:
        draft.note("no-config", "config.json is not here: transformers cannot load the weights without it")
    add_doubts(draft, "", source)
    if source.side_files:
        draft.contents.append(Content("side files", "", detail=_file_list(source)))
    add_trainer_files(draft)
    return draft


def add_huggingface(draft: Draft, where: str, weights_are: str) -> None:
    """Add a ``huggingface/`` directory below: weights, side files, or a note that it holds neither."""
    path = draft.path / where
    add_closed(draft, [where])
    if not path.is_dir() or closed(path):
        return
    with refusals_of(where):
        source = hf.open_(path)
    if source.weights:
        draft.add(Section(where, source))
    else:
        draft.problems += source.problems
        draft.note("side-files-only", f"{where}/ holds Hugging Face side files only; {weights_are}", path=where)
    _hf_facts(draft, source)
    if source.side_files:
        size = sum((path / name).stat().st_size for name in source.side_files if (path / name).is_file())
        draft.contents.append(Content("side files", where, bytes=size, detail=_file_list(source)))
    missing = [
        what for what, there in (("config.json", source.config), ("tokenizer", source.has_tokenizer)) if not there
    ]
    if missing:
        draft.note("side-files-missing", f"{where}/ has no {' and no '.join(missing)}", path=where)
    add_doubts(draft, where, source)


def _hf_facts(draft: Draft, source: hf.HfSource) -> None:
    config = source.config or {}
    classes = config.get("architectures")
    names = ", ".join(map(str, classes)) if isinstance(classes, list) else ""
    if config.get("model_type") or names:
        draft.facts["model"] = f"{config.get('model_type', 'no model_type')} ({names or 'no architectures'})"


def _file_list(source: hf.HfSource) -> str:
    return f"{counted(len(source.side_files), 'file')}: {listing(source.side_files, 12)}"
