"""What SECURITY.md promises with numbers and names is what the code has."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from ckpttool import cli, opcodes, unpickle
from ckpttool.callbacks import CheckpointEvent, search_here
from ckpttool.errors import Refused
from ckpttool.formats import dcp, jsonfile, safetensorsfile, torchzip
from ckpttool.render.terminal import clean
from ckpttool.watching.actions.commands import Exec
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


def test_a_name_never_becomes_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in words nor in a line for a shell; the child is told the name as it is."""
    monkeypatch.chdir(tmp_path)
    name = "$(touch made)`touch made`; touch made 'x\" {step}"
    event = CheckpointEvent(run="/run", name=name, path=f"/run/{name}", original=f"/run/{name}", step=3, role=name)
    line = f'printf "%s" {{role}} > {tmp_path}/told; printf "%s" "{{role}}" >> {tmp_path}/told'
    Exec(line, shell=True).run(event)
    assert (tmp_path / "told").read_text() == name * 2
    Exec(
        f"{sys.executable} -c 'import sys; open(sys.argv[2], \"w\").write(sys.argv[1])' {{role}} {tmp_path}/words"
    ).run(event)
    assert (tmp_path / "words").read_text() == name
    assert not (tmp_path / "made").exists()


def test_modules_are_not_searched_in_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    assert not search_here(tmp_path / "run")
    assert str(tmp_path / "run") not in sys.path
    assert "modules are not searched in the run" in TEXT
