"""The pages say what the code does: help texts, sessions, exit codes, problem codes, recipes."""

from __future__ import annotations

import ast
import re
import runpy
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpttool import errors
from ckpttool.inspection.suggestions import COMMANDS

PAGES = ("inspect.md", "merge-fsdp.md", "to-hf.md", "diff.md", "verify.md", "watch.md")
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_pages_made_from_the_code_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    for path, text in runpy.run_path(str(ROOT / "docs" / "generate.py"))["pages"]().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python docs/generate.py"


def test_readme_has_two_lines_that_set_up_everything() -> None:
    lines = re.findall(r"^python3 -m venv .+$", README, re.MULTILINE)
    assert len(lines) == 2
    demo, tests = lines
    assert demo.endswith("ckpttool demo --force")
    assert "-c constraints.txt" in tests
    assert tests.endswith("/pytest")


def test_exit_codes_in_the_readme_are_those_of_the_errors() -> None:
    table = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    families = {
        e.exit_code for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.CkpttoolError)
    }
    assert families <= table
    assert "| 130, 143 |" in README


def test_every_problem_code_of_the_product_is_documented() -> None:
    pages = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in PAGES]
    documented = {code for page in pages for code in re.findall(r"`([a-z0-9-]+)`", page)}
    assert _codes() <= documented, _codes() - documented


def _codes() -> set[str]:
    """Return the codes that the source hands to problems, as literals or first words of group()."""
    found: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found |= {k.value.value for k in node.keywords if k.arg == "code" and _text(k.value)}  # type: ignore[attr-defined]
                name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                if name in ("group", "fault", "note", "refuse") and len(node.args) > 1 and _text(node.args[0]):
                    found.add(node.args[0].value)  # type: ignore[attr-defined]
    return found - {""}


def _text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_recipes_of_the_readme_are_commands_that_exist(ckpttool: Callable[..., object]) -> None:
    recipes = re.findall(r"`(ckpttool [^`]+)`", README)
    assert len(recipes) >= 7
    for recipe in recipes:
        words = shlex.split(recipe.partition("&&")[0])
        assert words[1] in COMMANDS or words[1].startswith("--"), recipe
        for option in (word for word in words[2:] if word.startswith("--")):
            assert option in ckpttool(words[1], "--help").out, recipe  # type: ignore[attr-defined]


def test_changelog_names_every_command() -> None:
    unreleased = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("## Unreleased")[2]
    for command in COMMANDS:
        assert f"ckpttool {command}" in unreleased


def test_links_between_pages_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
