"""What the tests of `to-hf` share: tiny roles, their archives written anew with other tensors, what is refused."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.converting import Conversion, Options, convert
from ckpttool.errors import CkpttoolError, Problem, Unmapped
from tests import synthetic
from tests.merged import leftovers, tensors_in, unequal
from tests.synthetic.archive import Entries, Entry, write_archive


@dataclass
class Role:
    """A role directory; ``state`` is what must come of it, ``entries`` is what lies in its archive."""

    path: Path
    state: dict[str, torch.Tensor]
    entries: Entries

    @property
    def archive(self) -> Path:
        return self.path / "dist_ckpt"

    @property
    def output(self) -> Path:
        return self.path.parent / "out"

    def put(self, **tensors: torch.Tensor | None) -> None:
        """Write the archive again with these tensors, without those that are none."""
        self.put_all(tensors)

    def put_all(self, tensors: Mapping[str, torch.Tensor | None]) -> None:
        for key, value in tensors.items():
            if value is None:
                del self.entries[key]
            else:
                self.entries[key] = Entry(value, self.entries[key].leading if key in self.entries else 0)
        shutil.rmtree(self.archive)
        write_archive(self.archive, self.entries, extra=False)

    def say(self, **changes: Any) -> None:
        """Change the config; ``...`` takes a field out."""
        path = self.path / "huggingface" / "config.json"
        fields = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def make(tmp_path: Path, family: str = "llama", **options: Any) -> Role:
    """A role of a family."""
    written = synthetic.write_role(tmp_path / "role", family, **options)
    return Role(tmp_path / "role", dict(written.state), dict(written.entries))


def done(role: Role, /, **options: Any) -> Conversion:
    """What a conversion says; it is written."""
    return convert(role.path, role.output, Options(**options))


def wrong(role: Role) -> set[str]:
    """Names of tensors in the output that are not, bit for bit, what they have to be."""
    return unequal(tensors_in(role.output), role.state)


def refused(role: Role, /, kind: type[CkpttoolError] = Unmapped, **options: Any) -> CkpttoolError:
    """The error; nothing is written."""
    with pytest.raises(CkpttoolError) as caught:
        convert(role.path, role.output, Options(**options))
    assert type(caught.value) is kind, caught.value
    assert not role.output.exists()
    assert leftovers(role.output) == []
    return caught.value


def codes(error: CkpttoolError) -> list[str]:
    """The codes of all problems, in order."""
    return [problem.code for problem in error.problems]


def only(error: CkpttoolError, code: str) -> Problem:
    """The one problem that there is."""
    assert codes(error) == [code], error
    return error.problems[0]


def unfolded(text: str) -> set[str]:
    """Every word of a text, written out: of `a.[0-1].b` there are two."""
    words = set()
    for word in text.replace(", ", " ").split():
        parts = re.split(r"\[([\d,-]+)\]", word)
        choices = [_numbers(part) if at % 2 else [part] for at, part in enumerate(parts)]
        words |= {"".join(chosen) for chosen in itertools.product(*choices)}
    return words


def _numbers(ranges: str) -> list[str]:
    ends = [part.split("-") for part in ranges.split(",")]
    return [str(n) for end in ends for n in range(int(end[0]), int(end[-1]) + 1)]
