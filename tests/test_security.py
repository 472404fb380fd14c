"""What SECURITY.md promises with numbers and names is what the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ckpttool import cli, opcodes, unpickle
from ckpttool.errors import Refused
from ckpttool.formats import dcp, jsonfile, safetensorsfile, torchzip
from ckpttool.render.terminal import clean
from tests.campaign.payloads import payloads

ROOT = Path(__file__).resolve().parent.parent
TEXT = " ".join((ROOT / "SECURITY.md").read_text().split())


@pytest.mark.parametrize(
    "words",
    [
        f"a pickle uses at most {unpickle.MOST_NAMES:,} names",
        f"a tuple has at most {opcodes.WEIGHT_LIMIT:,} elements",
        f"a safetensors file has at most {safetensorsfile.HEADER_MOST:,} bytes",
        f"the pickle of a `.pt` file at most {torchzip.SMALL >> 20} MiB",
        f"`.metadata` at most {dcp.METADATA_MOST >> 30} GiB",
        f"other JSON than an index at most {jsonfile.MOST >> 20} MiB",
        f"with exit code {Refused.exit_code}",
    ],
)
def test_numbers_are_those_of_the_code(words: str) -> None:
    assert words.lower() in TEXT.lower()


def test_commands_that_are_named_exist() -> None:
    names = {command.name for command in cli.app.registered_commands}
    named = re.search(r"never unpickled by ([^.]*)\.", TEXT)
    assert named is not None
    assert set(re.findall(r"`([^`]*)`", named[1])) <= names


def test_the_campaign_is_as_large_as_is_said() -> None:
    assert "more than a hundred payloads" in TEXT
    assert len(payloads(Path("x"))) > 100


def test_text_is_written_out_as_is_said() -> None:
    assert r"`\x1b`" in TEXT
    assert clean("a\x1b[31m\u202eb") == r"a\x1b[31m\u202eb"


def test_pages_link_to_it_and_its_links_lead_somewhere() -> None:
    assert "](SECURITY.md)" in (ROOT / "README.md").read_text()
    assert "](../SECURITY.md)" in (ROOT / "docs" / "safety.md").read_text()
    links = re.findall(r"\]\(([^)#:]*)\)", TEXT)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
