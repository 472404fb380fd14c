"""Placeholders in a line of shell: each becomes a reference to a variable, as the quotes around it ask for.

A value never becomes text that the shell reads: a directory may be called ``$(reboot)``. Where a reference would not be
expanded, or be computed with, the placeholder is refused: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ckpttool.errors import UsageError

_COMMENT = re.compile(r"#[^\n]*")
_SINGLE = re.compile(r"'[^']*(?:'|\Z)")
_HERE = re.compile(r"(?<!<)<<(?!<)")

_PLAIN, _DOUBLE, _GROUP, _TICKS, _ARITHMETIC = "plain", '"', "(", "`", "(("
_ENDS = {_DOUBLE: '"', _GROUP: ")", _TICKS: "`", _ARITHMETIC: ")"}
_QUOTED = (_DOUBLE, _ARITHMETIC)
"""Where quotes and comments of a shell do not begin."""


def with_references(line: str, placeholder: re.Pattern[str], variable: Callable[[str], str]) -> str:
    """Return a line of shell with a reference in the place of each placeholder.

    ``variable`` says what the variable of a name (the first group of ``placeholder``) is called. Raises
    :class:`UsageError` for a placeholder in single quotes, in arithmetic and in a line with a here-document.
    """
    return "".join(_parts(line, placeholder, variable))


def _parts(line: str, placeholder: re.Pattern[str], variable: Callable[[str], str]) -> Iterator[str]:
    here, inside, at = False, [_PLAIN], 0
    while at < len(line):
        if found := placeholder.match(line, at):
            _check(found[0], _of_no_use(inside, here=here), variable(found[1]))
            yield _reference(variable(found[1]), quoted=inside[-1] == _DOUBLE)
            at = found.end()
            continue
        end = _step(line, at, inside)
        here = here or (inside[-1] not in _QUOTED and bool(_HERE.match(line, at)))
        if line[at] == "'" and (found := placeholder.search(line, at, end)):
            _check(found[0], "in single quotes", variable(found[1]))
        yield line[at:end]
        at = end


def _of_no_use(inside: list[str], *, here: bool) -> str:
    """Say where a reference would be computed with, or stand among quotes that are none; mostly nothing."""
    return "in arithmetic" if _ARITHMETIC in inside else "after a here-document" if here else ""


def _check(text: str, where: str, name: str) -> None:
    if where:
        raise UsageError(
            f"--exec with --shell: {text} {where}",
            hint=f'There, write what the shell itself has: "${name}". A program finds {name} in its environment.',
        )


def _reference(name: str, *, quoted: bool) -> str:
    return f"${{{name}}}" if quoted else f'"${{{name}}}"'


def _step(line: str, at: int, inside: list[str]) -> int:
    """Return where the next part of a line begins; what it opens and closes is put on and taken off ``inside``."""
    mark, where = line[at], inside[-1]
    if mark == "\\":
        return at + 2
    if mark == _ENDS.get(where):
        inside.pop()
        return at + (2 if where == _ARITHMETIC and line.startswith("))", at) else 1)
    if line.startswith("$((", at) or (line.startswith("((", at) and where not in _QUOTED):
        inside.append(_ARITHMETIC)
        return line.index("((", at) + 2
    if line.startswith("$(", at) or (mark == "(" and where != _DOUBLE):
        inside.append(_GROUP)
        return line.index("(", at) + 1
    if mark in '"`' and where != _ARITHMETIC:
        inside.append(mark)
    elif where not in _QUOTED:
        return _literal(line, at)
    return at + 1


def _literal(line: str, at: int) -> int:
    """Return the end of what is no code in a line, a comment or text in single quotes, or of one character."""
    begins = at == 0 or line[at - 1] in " \t\n;&|()`"
    found = _SINGLE.match(line, at) or (_COMMENT.match(line, at) if begins else None)
    return found.end() if found else at + 1
