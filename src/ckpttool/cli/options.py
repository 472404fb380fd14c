"""Options that mean the same in every command."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from typer import Option


class Color(str, Enum):
    """When to colour the output."""

    auto = "auto"
    always = "always"
    never = "never"


Json = Annotated[bool, Option("--json", help="Print one JSON object with everything, for programs.")]
ColorOption = Annotated[Color, Option("--color", help="Colour the output.")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="Print the verdict only.")]
Force = Annotated[bool, Option("--force", help="Replace what exists at the destination.")]
