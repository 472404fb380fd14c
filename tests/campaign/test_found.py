"""The smallest inputs of faults that campaigns have found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool.formats.jsonfile import VALUES_MOST
from tests.conftest import Call


@pytest.mark.parametrize("value", [b"[]", b"{}", b"0"])
def test_a_header_of_millions_of_values(value: bytes, tmp_path: Path, ckpttool: Callable[..., Call]) -> None:
    """They took a gigabyte and more from a file of a few megabytes; where that was not there, exit code 70."""
    path = tmp_path / "model.safetensors"
    header = b'{"__metadata__":[' + b",".join([value] * (VALUES_MOST + 1)) + b"]}"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    (told,) = ckpttool("inspect", path, "--json").json["problems"]
    assert told["code"] == "bad-json"
    assert "model.safetensors" in told["message"]
    assert "more than is read" in told["message"]
    assert ckpttool("diff", path, path, "--json").code == 4
