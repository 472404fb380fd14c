"""``--to-hf``: a Hugging Face directory is made of a checkpoint, by whichever converter takes its kind."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from ckpttool import layout
from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import CannotWrite, CkpttoolError, UsageError

if TYPE_CHECKING:
    from ckpttool.export.result import Export
    from ckpttool.inspection import Inspection

STEP, ROLE, KIND, NAME = "step", "role", "kind", "name"
FIELDS = (STEP, ROLE, KIND, NAME)
"""What a template may have in braces."""

_FIELD = re.compile(r"\{([^{}]*)\}")
_EXAMPLE = CheckpointEvent(run="", name="global_step_1/actor", path="", original="", step=1, role="actor", kind="fsdp")


@dataclass(frozen=True, slots=True)
class ToHf:
    """A template of a directory for each step, and the options of the converters.

    ``roles`` are those that are acted on at all, none means every one: two of a step must not be written to one
    directory. Raises :class:`UsageError` for a template or an option that can never be right.
    """

    template: str
    dtype: str | None = None
    lora: str | None = None
    hf_config: str | None = None
    roles: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        used = self._used()
        if "\0" in self.template:
            raise UsageError("--to-hf: a NUL byte in a path")
        if unknown := [name for name in used if name not in FIELDS]:
            known = ", ".join(f"{{{name}}}" for name in FIELDS)
            raise UsageError(f"--to-hf {self.template}: there is no {{{unknown[0]}}}", hint=f"There is {known}.")
        if STEP not in used and NAME not in used:
            raise UsageError(
                f"--to-hf {self.template}: every checkpoint would be written to one directory",
                hint=f"Add the step: --to-hf {self.template.rstrip('/') or 'models'}/{{step}}",
            )
        _check_options(self)

    @property
    def label(self) -> str:
        """What the action is called: with another dtype, it is another action."""
        options = {"--dtype": self.dtype, "--lora": self.lora, "--hf-config": self.hf_config}
        return " ".join(["to-hf", self.template, *(f"{name} {value}" for name, value in options.items() if value)])

    def check_place(self, run: Path) -> None:
        """Raise :class:`UsageError` for a place in a run where a model would be taken for a checkpoint of it."""
        real, here = Path(os.path.realpath(self.output(_EXAMPLE))), Path(os.path.realpath(run))
        inside = real.relative_to(here).parts if real.is_relative_to(here) else ()
        if real == here or (inside and layout.step_of(inside[0]) is not None):
            where = "is the run" if real == here else f"would lie in {run} as a step, or in one"
            raise UsageError(f"--to-hf {self.template}: {where}", hint="Name a directory outside of it: models/{step}")

    def output(self, event: CheckpointEvent) -> Path:
        """Return the directory for a checkpoint."""
        template = os.path.expanduser(self.template)  # noqa: PTH111 - the one of Path raises
        return Path(_FIELD.sub(lambda found: str(getattr(event, found[1])), template))

    def run(self, event: CheckpointEvent) -> str:
        """Convert it, or tell that it is a model already. What an earlier attempt wrote is replaced.

        Raises what the converters raise, and :class:`UsageError` where another role would be written to the same place.
        """
        from ckpttool.formats.findings import counted, size
        from ckpttool.inspection import inspect

        found = inspect(event.path)
        if where := _is_model(found):
            return f"to-hf: nothing to do, {where}"
        output, force = self.output(event), event.attempt > 1 or event.rewritten
        self._check_output(event, output, force=force)
        done = self._convert(found, Path(event.path), output, force=force)
        written = size(sum(file.bytes for file in done.files))
        outcome = f"to-hf: {output} ({counted(done.parameters, 'parameter')}, {written})"
        return "\n".join([outcome, *(note.message for note in done.notes)])

    def _used(self) -> list[str]:
        return [found[1] for found in _FIELD.finditer(self.template)]

    def _convert(self, found: Inspection, path: Path, output: Path, *, force: bool) -> Export:
        """Merge what has FSDP shards; of what is no Megatron checkpoint either, the other converter says what it is."""
        from ckpttool import converting, merging
        from ckpttool.inspection.suggestions import FSDP

        options: dict[str, Any] = {"dtype": self.dtype, "lora": self.lora, "hf_config": self.hf_config, "force": force}
        if found.kind in FSDP:
            return merging.merge(path, output, merging.Options(**options))
        return converting.convert(path, output, converting.Options(**options))

    def _check_output(self, event: CheckpointEvent, output: Path, *, force: bool) -> None:
        own = ROLE in self._used() or NAME in self._used()
        others = [] if own or not event.role else list(_others(event, self.roles))
        if others:
            raise UsageError(
                f"to-hf: {event.role} and {', '.join(others)} of step {event.step} would both be written to {output}",
                hint=f"Add {{role}}: --to-hf {self.template.rstrip('/')}/{{role}}, or take one: --role {event.role}",
            )
        if not force and os.path.lexists(output):
            raise CannotWrite(
                f"{output}: exists already, and not by an earlier attempt", hint="Move it away, or name another place."
            )


def _check_options(action: ToHf) -> None:
    from ckpttool.export.precision import DTYPES
    from ckpttool.export.result import LORA
    from ckpttool.inspection.search import model_directory

    for option, given, words in (("--dtype", action.dtype, tuple(DTYPES)), ("--lora", action.lora, LORA)):
        if given is not None and given not in words:
            raise UsageError(f"{option} {given}: not one of {', '.join(words)}")
    if action.hf_config is not None:
        model_directory("--hf-config", action.hf_config)


def _is_model(found: Inspection) -> str:
    """Say where the weights lie as Hugging Face's already; nothing where they are to be converted."""
    from ckpttool.inspection.suggestions import MEGATRON

    if found.kind in ("huggingface", "hf-adapter"):
        return f"it is a {found.title}" if found.kind == "huggingface" else "it is an adapter as peft loads it"
    weights = [part for part in found.contents if part.name == "model weights"]
    if found.kind in MEGATRON and weights and not any(part.detail.startswith("torch_dist") for part in weights):
        return f"its weights are a Hugging Face model in {weights[0].where}/"
    return ""


def _others(event: CheckpointEvent, roles: tuple[str, ...]) -> Iterator[str]:
    """Yield the other roles of the step of which a model would be made."""
    from ckpttool.inspection import inspect, kinds
    from ckpttool.inspection.suggestions import FSDP, MEGATRON

    step = Path(event.run, PurePath(event.name).parts[0])
    for path in kinds.roles(step) if step.is_dir() else []:
        role = path.relative_to(step).parts[0]
        if path == Path(event.run, event.name) or (roles and role not in roles):
            continue
        try:
            found = inspect(path)
        except (CkpttoolError, OSError):
            continue
        if found.kind in (*FSDP, *MEGATRON) and not _is_model(found):
            yield role
