"""Times as people write them: ``30s``, ``2h``, ``1h30m``."""

from __future__ import annotations

import re

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": 0.001}
_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_PART = re.compile(rf"({_NUMBER})(ms|[dhms])")
_WHOLE = re.compile(rf"(?:{_NUMBER}(?:ms|[dhms]))+")
_BARE = re.compile(_NUMBER)


def seconds(text: str) -> float:
    """Return how many seconds ``30s``, ``2h``, ``1h30m``, ``250ms`` or a number (of seconds) are.

    Raises ``ValueError`` for anything else; a unit may be named once.
    """
    word = text.strip().lower()
    if _BARE.fullmatch(word):
        return float(word)
    parts = [(float(number), unit) for number, unit in _PART.findall(word)] if _WHOLE.fullmatch(word) else []
    if not parts or len({unit for _, unit in parts}) < len(parts):
        raise ValueError(f"{text!r} is no time; write 30s, 10m, 2h or 1h30m")
    return float(sum(number * _UNITS[unit] for number, unit in parts))
