"""What is doubtful in the small files of a directory that is about to be written."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ckpttool.errors import Problem
from ckpttool.formats.hfconfig import CONFIG, ModelConfig
from ckpttool.formats.hfdoubts import TOKENIZER, Beside, doubts, read_tokenizer, weights_of
from ckpttool.formats.jsonfile import parse_object
from ckpttool.plan import Plan, Target


def notes(plan: Plan, targets: Iterable[Target], is_buffer: Callable[[Target], bool]) -> tuple[Problem, ...]:
    """Return notes on the files of a plan as they will be: the config is the edited one, the others are copies.

    ``targets`` are the tensors of the model, without those of adapters beside it.
    """
    raw = plan.contents.get(CONFIG)
    config = ModelConfig(CONFIG, raw, parse_object(raw, CONFIG)) if raw is not None else None
    copied = {file.name: file.path for file in plan.copies}
    tokenizer, damage = read_tokenizer(Path(copied[TOKENIZER])) if TOKENIZER in copied else (None, ())
    beside = Beside(config, tokenizer, frozenset(copied))
    weights = weights_of(target for target in targets if not is_buffer(target))
    return (*damage, *doubts(beside, weights))
