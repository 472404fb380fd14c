"""Heads: whether the class that the config names can hold those that are stored, and what is changed if not.

Pure: decided by names and shapes of what is written, the config, and ``--architecture``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpttool.errors import Problem, Unmapped, UsageError
from ckpttool.export import classes
from ckpttool.export.classes import ALL, BIAS, EACH
from ckpttool.export.config import GENERATES, Edits, ModelConfig
from ckpttool.formats.findings import listing
from ckpttool.formats.hfconfig import HEADS

CLASSIFIES = (EACH, ALL, "ForRewardModel", "RewardModel")
"""How the names of classes end that have a head which classifies or scores."""

TRL = "v_head.summary.weight"
"""The head of trl's classes with a value head, which lie around a model that keeps its own head."""

_LABELS = ("score", "classifier", "classification_head")
_SCORES = (*_LABELS, "v_head", "value_head", "reward_head")
_AROUND = ("pooler", "pre_classifier")
_OTHERS = (*GENERATES, "ForMaskedLM", "ForQuestionAnswering", "PreTrainedModel")
_BODIES = frozenset({"model", "transformer", "language_model"})

_LABELS_MOST = 100_000
"""Labels that a config is made to name: a shape may claim any number of rows."""

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Head:
    """What the config has to say of the head: fields to set and to remove with their reasons, and what is refused.

    ``config`` is the one that names the class which is written.
    """

    config: ModelConfig
    fields: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    removed: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    notes: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stored:
    """The tensors of heads that score, how many rows the last of them has (0: not known), and the other heads."""

    tensors: frozenset[str]
    rows: int
    vocabulary: str
    alone: bool

    @property
    def what(self) -> str:
        """The head in words."""
        if not self.rows:
            return f"{listing(sorted(self.tensors), 3)} {'is' if len(self.tensors) == 1 else 'are'} stored"
        return "the head has 1 row: a value head" if self.rows == 1 else f"the head has {self.rows:,} rows"


def check_name(architecture: str | None) -> None:
    """Raise :class:`UsageError` for an ``--architecture`` that is no name of a class."""
    if architecture is not None and not (architecture.isascii() and architecture.isidentifier()):
        raise UsageError(f"--architecture {architecture!r}: no name of a class")


def labels_of(config: ModelConfig) -> int:
    """Return how many labels a config gives a classification; 2 is what transformers takes without a word of it."""
    said = config.values.get("num_labels")
    names = config.values.get("id2label")
    if type(said) is int:
        return said
    return len(names) if isinstance(names, dict) and names else 2


def settle(
    where: str, shapes: Shapes, config: ModelConfig | None, architecture: str | None
) -> tuple[ModelConfig | None, Edits, tuple[Problem, ...]]:
    """Return the config that names the class which is written, what is changed for it, and notes.

    Raises :class:`Unmapped` with what is refused, :class:`UsageError` where no config can name an ``architecture``.
    """
    if config is None:
        if architecture is not None:
            raise UsageError(f"--architecture {architecture}: there is no config.json that could name it")
        return None, Edits(), ()
    head = decide(shapes, config, architecture)
    if head.problems:
        message = f"{where}: its heads are not those of the class that config.json names; nothing was written"
        raise Unmapped(message, code=head.problems[0].code, problems=head.problems)
    return head.config, Edits(fields=head.fields, removed=head.removed), head.notes


def decide(shapes: Shapes, config: ModelConfig, architecture: str | None) -> Head:
    """Decide which class the output is to be loaded as, by the heads that are stored."""
    stored, given = _look(shapes), architecture is not None
    named = architecture or next(iter(config.architectures), "")
    if not stored.tensors:
        head = _none(stored, named, config)
    elif TRL in stored.tensors and _is_other(named, config):
        head = _of_trl(stored, named, config)
    elif _is_other(named, config) and stored.vocabulary:
        head = Head(config, notes=(_two(stored, named, stored.vocabulary),))
    else:
        head = _scores(stored, named, config, given=given)
    if architecture is None or head.problems:
        return head
    return _with_class(head, config, architecture, "--architecture")


def _look(shapes: Shapes) -> _Stored:
    tops = {name.partition(".")[0] for name in shapes}
    scores = tops.intersection(_SCORES)
    mine = scores.union(_AROUND) if scores else scores
    tensors = frozenset(name for name in shapes if name.partition(".")[0] in mine)
    last = (f"{top}.{part}weight" for top in _LABELS for part in ("", "out_proj."))
    rows = next((shapes[name][0] for name in last if shapes.get(name)), 0)
    vocabulary = next((name for name, shape in shapes.items() if _is_vocabulary(name, shape)), "")
    return _Stored(tensors, rows, vocabulary, tops <= _BODIES)


def _is_vocabulary(name: str, shape: tuple[int, ...]) -> bool:
    parts = name.split(".")
    return len(shape) == 2 and 2 <= len(parts) <= 3 and parts[-1] == "weight" and parts[-2] in HEADS


def _is_other(named: str, config: ModelConfig) -> bool:
    """Tell a class whose head is another one, or that has none; one that is not known may have any."""
    stems = {known.stem for known in classes.of_model(config.model_types, _stem(named))}
    return not named or named.endswith(_OTHERS) or named.removesuffix("Model") in stems


def _stem(named: str) -> str:
    return next((named.removesuffix(end) for end in (*_OTHERS, EACH, ALL, "Model") if named.endswith(end)), "")


def _refused(config: ModelConfig, message: str, hint: str = "") -> Head:
    return Head(config, problems=(Problem(code="head-disagrees", message=message, hint=hint),))


def _none(stored: _Stored, named: str, config: ModelConfig) -> Head:
    """No head that scores is stored: refused where the class has one."""
    known = classes.find(named)
    if known is None and not (named.endswith(CLASSIFIES) and (stored.vocabulary or stored.alone)):
        return Head(config)
    needed = listing(sorted(known.tensors if known is not None else ["score.weight"], reverse=True), 2)
    there = f"{stored.vocabulary} is a head over the vocabulary" if stored.vocabulary else "there is none"
    message = f"{named} needs a head that classifies ({needed}), but {there}"
    return _refused(config, message, "Name the class that the checkpoint is of: --architecture NAME.")


def _of_trl(stored: _Stored, named: str, config: ModelConfig) -> Head:
    """Keep the head that no class of transformers has beside the one of a language model."""
    loads = "loads the model with them" if named.endswith(("ForCausalLM", "LMHeadModel")) else "reads them"
    message = (
        f"{listing(sorted(stored.tensors))} are kept: {named or 'transformers'} passes over them; trl's "
        f"AutoModelForCausalLMWithValueHead {loads}"
    )
    return Head(config, notes=(Problem(code="value-head", message=message, severity="note"),))


def _two(stored: _Stored, named: str, loaded: str) -> Problem:
    """Return the note that only one of the two heads that are kept will be loaded."""
    both = f"{listing(sorted(stored.tensors), 3)} and {stored.vocabulary}"
    message = f"{both} are two heads, and both are kept; {named or 'a class of transformers'} loads {loaded} alone"
    hint = "Which class reads them is your choice: --architecture NAME."
    return Problem(code="two-heads", message=message, hint=hint, severity="note")


def _scores(stored: _Stored, named: str, config: ModelConfig, *, given: bool) -> Head:
    """Keep the class that can hold the head, or take the one that can."""
    known, head = classes.find(named), Head(config)
    if known.holds(stored.tensors) if known is not None else not _is_other(named, config):
        return _said(head, config, stored, named)
    why = f"{stored.what}, and {named or 'a config without architectures'} {_lacks(known, stored)}"
    if given:
        made_up = ": its head over the vocabulary would be made up" if named.endswith(GENERATES) else ""
        return _refused(config, f"{why} (--architecture){made_up}")
    fitting = [new for new in classes.of_model(config.model_types, _stem(named)) if new.holds(stored.tensors)]
    if not fitting:
        what = next(iter(config.model_types), "this model")
        hint = f"No class of transformers for {what} has such a head. Name one that you have: --architecture NAME."
        return _refused(config, why, hint)
    name = fitting[0].name
    head = _said(_with_class(head, config, name, why), config, stored, name)
    return head if head.problems else replace(head, notes=(*head.notes, *(_other(new.name) for new in fitting[1:2])))


def _lacks(known: classes.HeadClass | None, stored: _Stored) -> str:
    """Say why a class does not hold what is stored."""
    if known is None:
        return "cannot hold it"
    extra, missing = sorted(stored.tensors - known.tensors), sorted(known.tensors - stored.tensors)
    parts = [
        *([f"has no {listing(extra, 3)}"] if extra else []),
        *([f"needs {listing(missing, 3)}"] if missing else []),
    ]
    return " and ".join(parts)


def _other(name: str) -> Problem:
    """Return the note on the class that was not taken."""
    message = "the head is read as one of tokens: a value for each"
    hint = f"For a reward model of whole sequences: --architecture {name}."
    return Problem(code="reads-tokens", message=message, hint=hint, severity="note")


def _with_class(head: Head, config: ModelConfig, name: str, why: str) -> Head:
    values = {**config.values, "architectures": [name]}
    return replace(head, config=replace(config, values=values), fields={**head.fields, "architectures": ([name], why)})


def _said(head: Head, config: ModelConfig, stored: _Stored, named: str) -> Head:
    """Set the fields that the class reads of its head: labels, and whether there is a bias."""
    fields = dict(head.fields)
    removed: dict[str, str] = {}
    if stored.rows and not _has_labels(config, stored.rows):
        if stored.rows > _LABELS_MOST:
            return _refused(config, f"{stored.what}, and config.json names {labels_of(config):,} labels")
        names = [f"LABEL_{n}" for n in range(stored.rows)]
        fields["id2label"] = ({str(n): name for n, name in enumerate(names)}, stored.what)
        fields["label2id"] = ({name: n for n, name in enumerate(names)}, stored.what)
        removed["num_labels"] = f"id2label names {stored.rows}"
    if named.endswith(EACH) and "score.weight" in stored.tensors:
        if BIAS not in stored.tensors:
            fields["token_classification_bias"] = (False, f"no {BIAS} is stored (transformers 4 adds one of zeros)")
        elif config.values.get("token_classification_bias") is False:
            fields["token_classification_bias"] = (True, f"{BIAS} is stored")
    notes = (_two(stored, named, listing(sorted(stored.tensors), 3)),) if stored.vocabulary else ()
    return replace(head, fields=fields, removed=removed, notes=notes)


def _has_labels(config: ModelConfig, rows: int) -> bool:
    """Tell whether every version of transformers takes this number of labels from a config."""
    names = config.values.get("id2label")
    return labels_of(config) == rows and not (isinstance(names, dict) and 0 < len(names) != rows)
