"""verl's callback against the module of verl's own package that makes and calls it, without importing all of verl."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ckpttool.errors import UsageError
from ckpttool.integrations.verl import CkpttoolCallback
from ckpttool.watching.actions import ActionFailed
from tests.test_verl_callback import Site, names, site

__all__ = ["site"]

VERSION = "0.9.1"
MODULE = "verl.trainer.ppo.checkpoint_callback"
FILES = ("verl/trainer/ppo/checkpoint_callback.py", "verl/trainer/ppo/v1/trainer_base.py", "verl/utils/import_utils.py")


class Section(dict):
    """A part of a configuration: what verl reads of it, as OmegaConf has it."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.fixture(scope="session")
def package(pytestconfig: pytest.Config) -> Path:
    """The directory of verl's package, as far as it is needed; fetched once, and kept between sessions."""
    assert pytestconfig.cache is not None
    folder = pytestconfig.cache.mkdir(f"verl-{VERSION}")
    if not all((folder / name).is_file() for name in FILES):
        with zipfile.ZipFile(_fetched(folder)) as wheel:
            for name in FILES:
                wheel.extract(name, folder)
    return folder / "verl"


def _fetched(folder: Path) -> Path:
    """The wheel, from the index that pip has; without one the tests are skipped, but not in CI."""
    where = ["--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *where, f"verl=={VERSION}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "CI" not in os.environ:
        pytest.skip(f"verl {VERSION} cannot be fetched: {done.stderr.strip().splitlines()[-1:]}")
    assert done.returncode == 0, done.stderr
    return next(folder.glob(f"verl-{VERSION}-*.whl"))


@pytest.fixture
def verl(package: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """verl's module of callbacks; the packages around it are empty, as theirs import Ray."""
    before = {name for name in sys.modules if name.split(".")[0] == "verl"}
    for below in ("", "trainer", "trainer/ppo", "utils"):
        made = ModuleType(".".join(["verl", *below.split("/")]) if below else "verl")
        made.__path__ = [str(package / below)]
        monkeypatch.setitem(sys.modules, made.__name__, made)
    yield importlib.import_module(MODULE)
    for name in [name for name in sys.modules if name.split(".")[0] == "verl"]:
        if name not in before:
            monkeypatch.delitem(sys.modules, name)


def config_of(site: Site) -> Section:
    return Section({name: Section(part) for name, part in site.config.items()})


def test_verl_makes_it_by_its_name(verl: ModuleType, site: Site) -> None:
    callback = verl.build_checkpoint_callback(config_of(site))
    assert type(callback) is CkpttoolCallback
    callback.close()
    assert "ray" not in sys.modules


def test_verl_fails_before_training_where_settings_are_wrong(verl: ModuleType, site: Site) -> None:
    site.settle(exec="no-such-program {path}")
    with pytest.raises(UsageError, match="no-such-program"):
        verl.build_checkpoint_callback(config_of(site))


def test_it_takes_what_verl_says_to_its_own(verl: ModuleType) -> None:
    """Every word that verl's base class takes is taken, by the same name and with the same default."""
    theirs = inspect.signature(verl.CheckpointCallback.on_save).parameters
    ours = inspect.signature(CkpttoolCallback.on_save).parameters
    for name, parameter in theirs.items():
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            assert name in ours
            assert name == "trainer" or ours[name].default == parameter.default
    assert any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours.values())
    assert list(inspect.signature(verl.CheckpointCallback).parameters) == ["config"]


def test_a_trainer_with_the_callback_that_verl_makes(verl: ModuleType, site: Site) -> None:
    trainer = site.trainer(build_callback=lambda _config: verl.build_checkpoint_callback(config_of(site)))
    trainer.save(20)
    assert site.noted() == names(20)
    site.touch("fail")
    with pytest.raises(ActionFailed):
        trainer.save(40)


def test_verl_calls_it_as_the_stub_does(package: Path) -> None:
    """The stub is as good as its likeness: verl tells of an asynchronous save before it writes the tracker."""
    tree = ast.parse((package / "trainer/ppo/v1/trainer_base.py").read_text())
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    calls = [node for node in ast.walk(functions["_save_checkpoint"]) if isinstance(node, ast.Call)]
    told = {call.lineno: call for call in calls if ast.unparse(call.func) == "self.checkpoint_callback.on_save"}
    (written,) = (call.lineno for call in calls if ast.unparse(call) == "f.write(str(self.global_steps))")
    first, second = (told[line] for line in sorted(told))
    assert not first.args
    assert not second.args
    assert [word.arg for word in first.keywords] == ["trainer", "global_step", "checkpoint_dir", "async_save"]
    assert [word.arg for word in second.keywords] == ["trainer", "global_step", "checkpoint_dir", "async_save"]
    assert [ast.unparse(call.keywords[-1].value) for call in (first, second)] == ["True", "False"]
    assert first.lineno < written < second.lineno
    assert "self.global_steps >= self.total_training_steps" in ast.unparse(functions["fit"])
