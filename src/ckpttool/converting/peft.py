"""What a run says of its adapters: the ``peft`` section of ``run_config.yaml``, or the files that verl writes.

Megatron Bridge scales by ``alpha / r``, ``r`` being the rank that the factors have: ``dim``, or for experts under
``normalize_moe_lora`` a part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpttool.adapters.settings import DEFAULT, Given, Settings, check_same, read_settings
from ckpttool.converting.settings import RUN_CONFIG
from ckpttool.errors import BrokenCheckpoint, Unmapped, UsageError
from ckpttool.formats.findings import listing
from ckpttool.formats.jsonfile import read_raw

_SECTION = re.compile(r"peft:[ \t]*(?:#.*)?")
_NONE = re.compile(r"peft:[ \t]*(?:null|~|\{\})[ \t]*(?:#.*)?")
_FIELD = re.compile(r"(alpha|dim|normalize_moe_lora):[ \t]*([^#]*?)[ \t]*(?:#.*)?")
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,9})?(?:[eE][+-]?[0-9]{1,2})?")
_PRETRAINED = re.compile(r"^\s*pretrained_checkpoint:[ \t]*['\"]?([^'\"\s#]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What adapters weigh; with ``normalised`` experts have another rank than the one that is said."""

    settings: Settings
    normalised: bool = False


def read_weighed(root: Path, alpha: float | None) -> Weighed:
    """Return what is said of the adapters in an archive; ``alpha`` is that of ``--lora-alpha``.

    Raises :class:`UsageError` naming ``--lora-alpha`` where nothing says it, :class:`BrokenCheckpoint` for files that
    are damaged or contradict one another, :class:`Unmapped` for settings that are no plain LoRA's.
    """
    said = _of_run(root / RUN_CONFIG)
    if said is None:
        return Weighed(_of_files(root, alpha))
    if alpha is not None:
        return replace(said, settings=replace(said.settings, alpha=alpha, where="--lora-alpha"))
    if not said.settings.alpha:
        raise UsageError(
            f"{said.settings.where}: the alpha of its peft section is 0 or missing",
            hint="Say it: --lora-alpha NUMBER. It is what the run was configured with.",
        )
    with suppress(UsageError):  # nothing else says it
        check_same(said.settings, _of_files(root, None))
    return said


def _of_files(root: Path, alpha: float | None) -> Settings:
    """Return what the files beside an archive say, that verl and PEFT write."""
    also = f", and no {RUN_CONFIG} has a peft section"
    found = read_settings(Given(alpha, None, _folders(root), also), DEFAULT, several=False)
    unusual = [*found.unusual, *("rank_pattern" for _ in found.ranks), *("alpha_pattern" for _ in found.alphas)]
    if unusual:
        raise Unmapped(
            f"{found.where}: has {listing(dict.fromkeys(unusual))}, which is not known of adapters in an archive",
            hint="Merge them into the model with the trainer that wrote them, and save again.",
            code="adapter-kind",
        )
    return found


def _folders(root: Path) -> tuple[Path, ...]:
    """Return the archive, its role and its step, as far as it has them."""
    role = root.parent.parent if root.parent.name == "model" else root.parent
    return root, role, role.parent


def _of_run(path: Path) -> Weighed | None:
    """Read the section without reading all of the YAML; raises where it is there and is not understood."""
    if not path.is_file():
        return None
    found: dict[str, str] = {}
    for name, text in _fields(path):
        if name in found:
            raise _unreadable(path, name)
        found[name] = text
    if not found:
        return None
    rank, alpha = _number(path, "dim", found), _number(path, "alpha", found)
    if rank is not None and rank != int(rank):
        raise _unreadable(path, "dim")
    normalised = found.get("normalize_moe_lora", "false")
    if normalised not in ("true", "false"):
        raise _unreadable(path, "normalize_moe_lora")
    settings = Settings(alpha or 0.0, None if rank is None else int(rank), where=str(path))
    return Weighed(settings, normalised == "true")


def _fields(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the fields of the section that say something here: those that are indented least."""
    lines = read_raw(path).decode(errors="replace").splitlines()
    begins = [at for at, line in enumerate(lines) if line.startswith("peft:") and not _NONE.fullmatch(line)]
    if not begins:
        return
    if len(begins) > 1 or not _SECTION.fullmatch(lines[begins[0]]):
        raise _unreadable(path, "peft")
    indent = ""
    for line in lines[begins[0] + 1 :]:
        text = line.lstrip(" ")
        if not text or text.startswith("#"):
            continue
        if text == line:
            return
        indent = indent or line[: len(line) - len(text)]
        if line == indent + text and (match := _FIELD.fullmatch(text.rstrip())):
            yield match[1], match[2]


def _number(path: Path, name: str, found: dict[str, str]) -> float | None:
    text = found.get(name, "null")
    if text in ("null", "~", ""):
        return None
    if not _NUMBER.fullmatch(text):
        raise _unreadable(path, name)
    return float(json.loads(text.lstrip("0") or "0") if text.isdecimal() else float(text))


def _unreadable(path: Path, name: str) -> BrokenCheckpoint:
    return BrokenCheckpoint(
        f"{path}: {name} of its adapters is not understood",
        hint="Write it as NAME: NUMBER in a line of its own, below a line that says peft: and nothing else.",
        code="settings-unreadable",
    )


def trained_from(root: Path) -> str:
    """Return what checkpoint adapters were trained on, where the run says so."""
    path = root / RUN_CONFIG
    found = _PRETRAINED.search(read_raw(path).decode(errors="replace")) if path.is_file() else None
    return found[1] if found and found[1] not in ("null", "~") else ""
