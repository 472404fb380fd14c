"""Tied embeddings: whether the head over the vocabulary is a tensor of its own, and what is written of it.

Pure but for ``differs``, which compares the two tensors where both are there.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace

from ckpttool.errors import Problem
from ckpttool.export.config import CONFIG, TIE, ModelConfig
from ckpttool.formats.families import TIED, UNTIED
from ckpttool.formats.hfconfig import HEADS, is_weight_of
from ckpttool.plan import Dropped
from ckpttool.tensors import TensorInfo

EMBEDDINGS = (
    "shared",
    "embed_tokens",
    "wte",
    "word_embeddings",
    "embed_in",
    "tok_embeddings",
    "embeddings",
    "embedding",
)
ALIAS_RULE = "tied-alias"


@dataclass(frozen=True, slots=True)
class Tie:
    """The decision: what is dropped, whether the config must say untied, and what to tell.

    ``tied`` is whether the model is, with which of its tensors as ``head`` and ``embedding``.
    """

    dropped: tuple[Dropped, ...] = ()
    untie: bool = False
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    tied: bool = False
    head: str | None = None
    embedding: str | None = None


@dataclass(frozen=True, slots=True)
class _Pair:
    """The head, the embeddings that it may be an alias of, and whether something else may be a head."""

    head: str | None
    embeddings: tuple[str, ...]
    other_head: bool

    @property
    def embedding(self) -> str | None:
        """The embeddings of the language model itself."""
        return self.embeddings[0] if self.embeddings else None


def decide(
    tensors: Mapping[str, TensorInfo],
    config: ModelConfig | None,
    differs: Callable[[str, str], str],
    *,
    untie: bool,
    drop_head: bool,
    changed: Container[str] = (),
) -> Tie:
    """Decide by the config, the family and the tensors; ``differs`` says how two tensors differ, or nothing.

    ``changed`` are tensors that an adapter has made others: a head that is not stored was not trained with them.
    """
    if config is None:
        return _refused("no-config", "without a config.json nothing is known of tying", untie, drop_head)
    pair = _find(tensors, config)
    tied, reason = _is_tied(config, pair)
    notes = () if config.said_ties else (f"config.json does not say {TIE}: {reason}",)
    if pair.head is None or pair.embedding is None:
        apart = bool(tied and pair.head is None and pair.embedding in changed)
        tie = _one_of_them(pair, config, tied=tied, untie=untie, drop_head=drop_head and not apart)
        tie = _apart(pair, tie, drop_head=drop_head) if apart and config.generates else tie
    elif tied is False or (tied is None and drop_head):
        tie = _refused("not-tied", f"{pair.head} is no alias: {reason}", untie, drop_head)
    else:
        tie = _both(pair.head, pair.embeddings, differs, untie=untie, drop_head=drop_head, clear=tied is True)
    return replace(tie, notes=(*notes, *tie.notes), tied=tied is True, head=pair.head, embedding=pair.embedding)


def _apart(pair: _Pair, tie: Tie, *, drop_head: bool) -> Tie:
    """Refuse embeddings that were trained apart from the head that is their alias, but where that is asked for."""
    if drop_head:
        return replace(
            tie, notes=(*tie.notes, f"--drop-lm-head: what {pair.embedding} has learned is in the head, too")
        )
    message = (
        f"tied, but an adapter is in {pair.embedding} alone: the head, which is not stored, was trained without it"
    )
    hint = "Have the head learn it, too, as peft's merge does: --drop-lm-head. To keep them apart: --lora adapter."
    return replace(tie, problems=(*tie.problems, Problem(code="tied-differ", message=message, hint=hint)))


def heads_of(names: Iterable[str]) -> list[str]:
    """Return the names among these that a head over the vocabulary may have."""
    return [name for name in names if is_weight_of(HEADS, name)]


def _find(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> _Pair:
    heads, embeddings = _named(tensors, HEADS), _named(tensors, EMBEDDINGS)
    head = heads[0] if heads else None
    if head is not None:  # those of the same width, where a model has several; by shape, where the name is another
        wide = [n for n in embeddings if tensors[n].shape[1:] == tensors[head].shape[1:]]
        alike = [n for n, t in tensors.items() if n != head and t.shape == tensors[head].shape]
        embeddings = wide or embeddings or alike
    sizes = config.vocab_sizes
    others = [
        name
        for name, tensor in tensors.items()
        if name not in embeddings and len(tensor.shape) == 2 and tensor.shape[0] in sizes
    ]
    return _Pair(head, tuple(embeddings), bool(others))


def _named(tensors: Mapping[str, TensorInfo], modules: tuple[str, ...]) -> list[str]:
    """Return weights of modules of these names, those of the language model's own top first."""
    found = [name for name, tensor in tensors.items() if len(tensor.shape) == 2 and is_weight_of(modules, name)]
    return sorted(found, key=lambda name: (modules.index(name.split(".")[-2]), name.count(".")))


def _is_tied(config: ModelConfig, pair: _Pair) -> tuple[bool | None, str]:
    """Return whether it is tied, ``None`` for a config that says both, and why."""
    said = config.said_ties
    if len(said) == 1:
        (tied,) = said
        return tied, f"config.json says {TIE} {str(tied).lower()}"
    if said:
        return None, f"config.json says both about {TIE}"
    for name in config.model_types[:1]:
        if name in TIED | UNTIED:
            return name in TIED, f"{name} {'ties' if name in TIED else 'does not tie'} by default"
    shown = pair.head is None and pair.embedding is not None and not pair.other_head
    return shown, "there is no head of its own" if shown else "its tensors are no aliases"


def _one_of_them(pair: _Pair, config: ModelConfig, *, tied: bool | None, untie: bool, drop_head: bool) -> Tie:
    """Only a head, only embeddings, or neither."""
    if pair.head is None and pair.embedding is not None and config.generates and not tied and not pair.other_head:
        architecture = config.architectures[0]
        message = f"{architecture} is not tied and has no lm_head: its head would be made up when it is loaded"
        hint = f"Is a part of the model missing here? If it is tied, config.json must say so ({TIE})."
        return Tie(problems=(Problem(code="head-missing", message=message, hint=hint),))
    if pair.head is not None and pair.embedding is None and tied and config.generates:
        message = f"tied, but of {pair.head} and its embeddings only the head is here"
        return Tie(problems=(Problem(code="embedding-missing", message=message),))
    tie = _refused("not-both", "there are not both, a head and embeddings", untie, drop_head)
    unclear = pair.head is None and pair.embedding is not None and not (config.architectures or tied or pair.other_head)
    note = "config.json names no architectures: whether the model lacks a head cannot be told"
    return replace(tie, notes=(note,)) if unclear else tie


def _both(
    head: str,
    embeddings: tuple[str, ...],
    differs: Callable[[str, str], str],
    *,
    untie: bool,
    drop_head: bool,
    clear: bool,
) -> Tie:
    embedding = embeddings[0]
    if untie:
        return Tie(untie=True, notes=(f"{head} and {embedding} are both written, untied",))
    if drop_head:
        reason = f"--drop-lm-head: {embedding} takes its place"
        return Tie(dropped=(Dropped(head, "drop-lm-head", reason),))
    compared = ((name, differs(head, name)) for name in embeddings)
    other, difference = next(((name, difference) for name, difference in compared if difference), ("", ""))
    if difference:
        alone = " Keep the embeddings alone: --drop-lm-head." if clear else ""
        hint = f"Keep both and untie the config: --untie.{alone}"
        why = "tied" if clear else f"{CONFIG} says both about {TIE}"
        message = f"{why}, but {head} is not {other}: {difference}"
        return Tie(problems=(Problem(code="tied-differ", message=message, hint=hint),))
    if not clear:
        return Tie(notes=(f"config.json says both about {TIE}: {head} and {embedding} are equal, both are written",))
    return Tie(dropped=(Dropped(head, ALIAS_RULE, f"tied, and equal to {embedding} in every byte"),))


def _refused(code: str, why: str, untie: bool, drop_head: bool) -> Tie:
    """An option that has nothing to do is a misunderstanding; say so rather than pass over it."""
    given: Iterable[str] = [name for name, wanted in (("--untie", untie), ("--drop-lm-head", drop_head)) if wanted]
    return Tie(problems=tuple(Problem(code=code, message=f"{option} does not apply: {why}") for option in given))
