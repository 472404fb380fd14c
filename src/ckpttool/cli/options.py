"""Options that mean the same in every command, and command classes that keep the start short."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from typer import Option
from typer.core import TyperCommand, TyperGroup

from ckpttool.cli.complete import of_words, roles, steps
from ckpttool.errors import UsageError

Word = TypeVar("Word", bound=str)

COLORS = ("auto", "always", "never")


Json = Annotated[bool, Option("--json", help="Print one JSON object with everything, for programs.")]
Color = Annotated[
    str,
    Option("--color", metavar="|".join(COLORS), help="When to colour the output.", autocompletion=of_words(COLORS)),
]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print the verdict only.")]
DryRun = Annotated[bool, Option("--dry-run", help="Show the plan, change nothing.")]
NoProgress = Annotated[bool, Option("--no-progress", help="Do not show progress.")]
Force = Annotated[bool, Option("--force", help="Replace the one that was written there before.")]
Step = Annotated[
    str | None,
    Option(
        "--step",
        metavar="N|latest",
        help="Choose a step of a run; latest is the newest complete one.",
        autocompletion=steps,
    ),
]
Role = Annotated[
    str | None, Option("--role", metavar="NAME", help="Choose a role of a step (actor).", autocompletion=roles)
]
Output = Annotated[str, Option("--output", "-o", metavar="DIR", help="The directory to write; it must not exist.")]
Threads = Annotated[
    str | None, Option("--threads", metavar="N", help="Most output files written at the same time. Default: 1.")
]
Verbose = Annotated[bool, Option("--verbose", "-v", help="Show every name where otherwise there are a few, or counts.")]

DTYPES = ("bf16", "fp16", "fp32")
Dtype = Annotated[
    str | None,
    Option(
        "--dtype",
        metavar="|".join(DTYPES),
        help="Cast floating parameters. Default: every tensor keeps its dtype.",
        autocompletion=of_words(DTYPES),
    ),
]
AllowOverflow = Annotated[
    bool, Option("--allow-overflow", help="With --dtype: let values that do not fit become infinite.")
]
MaxShardSize = Annotated[
    str, Option("--max-shard-size", metavar="SIZE", help="Most bytes of tensors in one output file: 5GB, 500MB.")
]
HfConfig = Annotated[
    str | None, Option("--hf-config", metavar="DIR", help="Where config, tokenizer and code are taken from.")
]
Architecture = Annotated[
    str | None, Option("--architecture", metavar="NAME", help="The class that config.json is to name.")
]

Like = Annotated[
    str | None,
    Option("--like", metavar="DIR", help="Write names, form of experts, ties and dtypes as this base model has them."),
]
AllowMissing = Annotated[
    list[str] | None,
    Option("--allow-missing", metavar="NAME", help="With --like: names (or NAM*) that may be missing."),
]
AllowExtra = Annotated[
    list[str] | None,
    Option("--allow-extra", metavar="NAME", help="With --like: names (or NAM*) that it need not have."),
]

Arch = Annotated[str | None, Option("--arch", metavar="NAME", help="Which weight map, whatever config.json says.")]
PRODUCERS = ("auto", "nvidia", "swift")
Producer = Annotated[
    str | None,
    Option(
        "--producer",
        metavar="|".join(PRODUCERS),
        help="Who ordered the rows of a gated attention: Megatron-Core and its bridges, or ms-swift.",
        autocompletion=of_words(PRODUCERS),
    ),
]

LORA = ("fuse", "adapter", "both")
FUSE = ("fuse",)
FuseLora = Annotated[
    str | None,
    Option(
        "--lora",
        metavar="fuse",
        help="Of a PEFT model: a whole model with the adapter in its weights.",
        autocompletion=of_words(FUSE),
    ),
]
LoraAlpha = Annotated[
    str | None, Option("--lora-alpha", metavar="NUMBER", help="The alpha of the adapter, where no file says it.")
]

LEAST_BARE = 1_000_000
"""Numbers without a unit below this are taken for gigabytes that lack their unit."""

_SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,9})?)\s*([kmgtp]?)(i?)b?\s*", re.IGNORECASE | re.ASCII)


class PlainCommand(TyperCommand):
    """A command whose text parameters and unset flags are taken as they are."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` included, each told to skip the conversion."""
        return [_plain(param) for param in super().get_params(ctx)]


class PlainGroup(TyperGroup):
    """The same for the options before the command."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, ``--help`` included, each told to skip the conversion."""
        return [_plain(param) for param in super().get_params(ctx)]


def _plain(param: Any) -> Any:
    """Keep a parameter's strings and absent values away from pydantic.

    Typer (0.29) converts every value with pydantic, whose import takes longer than reading the index of a checkpoint.
    Numbers and anything else still go the usual way; where Typer has no ``type_descriptor`` nothing changes.
    """
    annotation = getattr(getattr(param, "type_descriptor", None), "annotation", None)
    if annotation in (str, bool, list[str]) and "process_value" not in vars(param):
        param.process_value = _unless_plain(param.process_value, param.required)
    return param


def _unless_plain(process: Callable[[Any, Any], Any], required: bool) -> Callable[[Any, Any], Any]:
    def process_value(ctx: Any, value: Any) -> Any:
        if isinstance(value, str) or (value is None and not required):
            return value
        if isinstance(value, (tuple, list)) and all(isinstance(word, str) for word in value):
            return list(value)
        return process(ctx, value)

    return process_value


def one_of(option: str, value: str, words: Sequence[Word]) -> Word:
    """Return the word among ``words`` that an option was given; raises :class:`UsageError` for another one."""
    for word in words:
        if value == word:
            return word
    raise UsageError(f"{option} {value}: not one of {', '.join(words)}")


def size_of(option: str, text: str) -> int:
    """Return the bytes that people mean by ``5GB``, ``5GiB`` or ``500M``; raises :class:`UsageError` otherwise."""
    match = _SIZE.fullmatch(text)
    power = "kmgtp".find(match[2].lower()) + 1 if match and match[2] else 0
    size = int(float(match[1]) * (1024 if match[3] else 1000) ** power) if match and (match[2] or not match[3]) else 0
    if not size:
        raise UsageError(f"{option} {text}: no size", hint="Sizes are written like 5GB, 5GiB or 500M.")
    if text.strip().isdecimal() and size < LEAST_BARE:
        raise UsageError(f"{option} {text}: {text} bytes?", hint=f"With a unit it is clear: {text}GB, or {text}B.")
    return size


def count_of(option: str, text: str) -> int:
    """Return a whole number above 0; raises :class:`UsageError` otherwise."""
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text) < 1 << 20:
        raise UsageError(f"{option} {text}: no whole number above 0")
    return int(text)


MOST_THREADS = 8
"""Threads that are taken without being asked for: each has buffers of its own."""


def every_core() -> int:
    """Return how many threads use every core that this process may have."""
    affinity = getattr(os, "sched_getaffinity", None)
    return min(len(affinity(0)) if affinity is not None else os.cpu_count() or 1, MOST_THREADS)


def number_of(option: str, text: str) -> float:
    """Return a finite number above 0; raises :class:`UsageError` otherwise."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UsageError(f"{option} {text}: no number above 0")
    return number


def source_options(
    hf_config: str | None, arch: str | None, producer: str | None, lora: str | None, lora_alpha: str | None
) -> dict[str, Any]:
    """Return what is said of a training's checkpoint, checked; raises :class:`UsageError` for a word that is none."""
    return {
        "hf_config": hf_config,
        "arch": arch,
        "producer": None if producer is None else one_of("--producer", producer, PRODUCERS),
        "lora": None if lora is None else one_of("--lora", lora, FUSE),
        "lora_alpha": None if lora_alpha is None else number_of("--lora-alpha", lora_alpha),
    }


def check_path(path: str) -> Path:
    """Return a path; raises :class:`UsageError` for an empty one, which is an unset variable of a shell."""
    if not path:
        raise UsageError("an empty path", hint="Is the variable set? The working directory is '.'.")
    return Path(path)


def check_color(color: str) -> str:
    """Return the word if it is one of ``COLORS``; raises :class:`UsageError` otherwise."""
    return one_of("--color", color, COLORS)
