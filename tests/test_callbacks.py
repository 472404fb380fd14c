"""Callbacks: a class by its name, loaded early or refused with the reason, and called with an event."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ckpttool
from ckpttool import CheckpointCallback, CheckpointEvent, UsageError, load_callback
from ckpttool.callbacks import search_here
from ckpttool.errors import CannotWrite
from ckpttool.watching.actions import ActionFailed
from ckpttool.watching.actions.calls import Call
from tests.conftest import Call as CommandLine

EVENT = CheckpointEvent(run="/run", name="global_step_20/actor", path="/p", original="/o", step=20, role="actor")
MODULE = """\
import ckpttool

class Told:
    def __init__(self, config=None):
        self.config, self.events = config, []

    def on_save(self, event, **kwargs):
        self.events.append((event, kwargs))

class Bare:
    def on_save(self, event):
        self.event = event

class Keyword(Told):
    def on_save(self, *, event, **kwargs):
        super().on_save(event, **kwargs)

class Outer:
    class Inner(Told):
        pass

class Needs(Told):
    def __init__(self, config):
        super().__init__(config["bucket"])

class Full:
    def on_save(self, event):
        self.upload(event)

    def upload(self, event):
        raise OSError(28, "bucket is full")

class Ends(Told):
    def on_save(self, event):
        raise SystemExit(self.config["code"])

class Refusing:
    def on_save(self, event):
        raise ckpttool.CannotWrite("there: no room", hint="Make some.")

class Stopped:
    def on_save(self, event):
        raise KeyboardInterrupt

class Silent:
    pass

class Flag:
    on_save = True

class Trainers:
    def on_save(self, *, trainer, global_step, **future):
        pass

class Nothing:
    def on_save(self):
        pass

class Later:
    async def on_save(self, event):
        pass

class Yielding:
    def on_save(self, event):
        yield

class Leaves:
    def __init__(self):
        raise SystemExit(3)

def function(event):
    pass
"""
OTHERS = {
    "lacking": "import boto_of_nobody\n",
    "lacking_inside": "from hooks.absent import nothing\n",
    "raising": "x = 1\n\ndef deep():\n    return x / 0\n\ndeep()\n",
    "malformed": "def f(:\n",
    "ending": "import sys\nsys.exit(3)\n",
    "lazy": "def __getattr__(name):\n    raise RuntimeError(f'{name} is not built')\n",
}
NUMBERS = itertools.count()


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a package with modules of callbacks; another one in each test."""
    package = f"hooks{next(NUMBERS)}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").touch()
    for name, text in {"uploads": MODULE, **OTHERS}.items():
        (tmp_path / package / f"{name}.py").write_text(text.replace("hooks.", f"{package}."))
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        del sys.modules[name]


def refusal(name: str, config: Any = None) -> UsageError:
    with pytest.raises(UsageError) as caught:
        load_callback(name, config)
    return caught.value


@pytest.mark.parametrize(
    "name", ["{}.uploads:Told", "{}.uploads.Told", "{}.uploads:Outer.Inner", "{}.uploads.Outer.Inner"]
)
def test_a_class_is_found_by_its_name(name: str, hooks: str) -> None:
    callback: Any = load_callback(name.format(hooks), {"bucket": "b"})
    assert (type(callback).__module__, type(callback).__name__) == (
        f"{hooks}.uploads",
        name.split(".")[-1].split(":")[-1],
    )
    assert callback.config == {"bucket": "b"}
    assert Call(name, callback).run(EVENT) == f"callback {name}: done"
    assert callback.events == [(EVENT, {})]


@pytest.mark.parametrize(
    ("name", "config", "has"),
    [("Told", None, None), ("Told", {}, {}), ("Needs", {"bucket": "b"}, "b"), ("Keyword", {"a": 1}, {"a": 1})],
)
def test_a_class_is_made_with_its_configuration(name: str, config: Any, has: Any, hooks: str) -> None:
    callback: Any = load_callback(f"{hooks}.uploads:{name}", config)
    assert callback.config == has
    Call(name, callback).run(EVENT)
    assert callback.events == [(EVENT, {})]


@pytest.mark.parametrize("config", [None, {}])
def test_a_class_need_not_take_a_configuration(config: Any, hooks: str) -> None:
    callback: Any = load_callback(f"{hooks}.uploads:Bare", config)
    Call("Bare", callback).run(EVENT)
    assert callback.event is EVENT


def test_the_base_does_nothing_and_takes_whatever_is_told() -> None:
    callback = load_callback("ckpttool.CheckpointCallback", {"a": 1})
    assert type(callback) is CheckpointCallback
    assert callback.config == {"a": 1}
    callback.on_save(EVENT, more="is told one day")
    assert Call("x", callback).run(EVENT) == "callback x: done"


@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("nowhere_at_all.uploads:Told", "no module nowhere_at_all", "PYTHONPATH"),
        ("nowhere_at_all.uploads.Told", "no module nowhere_at_all", "PYTHONPATH"),
        ("{0}.upload:Told", "no module {0}.upload", "There is uploads."),
        ("{0}.upload.Told", "no upload in module {0}", "There is uploads."),
        ("{0}.uploads.py:Told", "no module {0}.uploads.py", "not of a file"),
        ("{0}/uploads.py:Told", "no name of a class", "not of a file"),
        ("{0}.uploads:Tolt", "no Tolt in module {0}.uploads", "There is Told"),
        ("{0}.uploads:Outer.Iner", "no Iner in class Outer", "There is Inner."),
        ("{0}.lacking:X", "{0}.lacking cannot be imported: ModuleNotFoundError: No module named 'boto_of_nobody'", ""),
        ("{0}.lacking.X", "{0}.lacking cannot be imported: ModuleNotFoundError: No module named 'boto_of_nobody'", ""),
        ("{0}.lacking_inside:X", "{0}.lacking_inside cannot be imported: ModuleNotFoundError: No module named", ""),
        ("{0}.raising:X", "{0}.raising cannot be imported: ZeroDivisionError: division by zero", ""),
        ("{0}.malformed:X", "{0}.malformed cannot be imported: SyntaxError: ", ""),
        ("{0}.ending:X", "{0}.ending ends the program when it is imported", ""),
        ("{0}.lazy:X", "{0}.lazy.X cannot be imported: RuntimeError: X is not built", ""),
        ("{0}.uploads:function", "no class (function)", "The class itself"),
        ("{0}.uploads:Silent", "has no method on_save", "on_save(event)"),
        ("{0}.uploads:Flag", "has no method on_save", "on_save(event)"),
        ("{0}.uploads:Trainers", "on_save(*, trainer, global_step, **future) does not take an event", "on_save(event)"),
        ("{0}.uploads:Nothing", "on_save() does not take an event alone", "on_save(event)"),
        ("{0}.uploads:Later", "on_save is asynchronous or a generator", "on_save(event)"),
        ("{0}.uploads:Yielding", "on_save is asynchronous or a generator", "on_save(event)"),
        ("{0}.uploads:Needs", "cannot be made: TypeError: ", ""),
        ("{0}.uploads:Leaves", "cannot be made: SystemExit: 3", ""),
        ("Told", "no name of a class", "pkg.module:Class"),
        ("", "no name of a class", "pkg.module:Class"),
        ("{0}.uploads:", "no name of a class", "pkg.module:Class"),
        (":Told", "no name of a class", "pkg.module:Class"),
        (".uploads:Told", "no name of a class", "pkg.module:Class"),
    ],
)
def test_what_is_no_callback_says_why(name: str, message: str, hint: str, hooks: str) -> None:
    error = refusal(name.format(hooks))
    assert message.format(hooks) in error.message
    assert hint in error.hint


@pytest.mark.parametrize(("module", "line"), [("raising", 4), ("lacking", 1), ("ending", 2), ("lazy", 2)])
def test_an_import_that_fails_says_where(module: str, line: int, hooks: str, tmp_path: Path) -> None:
    assert refusal(f"{hooks}.{module}:X").message.endswith(f" ({tmp_path / hooks / module}.py, line {line})")


def test_a_configuration_that_nobody_takes_is_refused(hooks: str) -> None:
    error = refusal(f"{hooks}.uploads:Bare", {"a": 1})
    assert "cannot be made as Bare(config=...)" in error.message
    assert "Bare()" in error.hint


def test_what_a_callback_raises_is_told(hooks: str, tmp_path: Path) -> None:
    with pytest.raises(ActionFailed) as caught:
        Call("Full", load_callback(f"{hooks}.uploads:Full")).run(EVENT)
    error = caught.value
    assert error.message == "callback Full: OSError: [Errno 28] bucket is full"
    assert (error.status, error.exit_code) == (1, 1)
    assert isinstance(error.__cause__, OSError)
    lines = error.detail.splitlines()
    assert [line.split(", in ")[-1] for line in lines if line.startswith("  File ")] == ["on_save", "upload"]
    assert str(tmp_path / hooks / "uploads.py") in lines[1]
    assert (lines[0], lines[-1]) == ("Traceback (most recent call last):", "OSError: [Errno 28] bucket is full")


def test_an_error_of_ours_keeps_its_code_and_its_hint(hooks: str) -> None:
    with pytest.raises(ActionFailed) as caught:
        Call("x", load_callback(f"{hooks}.uploads:Refusing")).run(EVENT)
    assert (caught.value.status, caught.value.hint) == (CannotWrite.exit_code, "Make some.")


@pytest.mark.parametrize(
    ("code", "status", "message"), [(3, 3, "ended with code 3"), (1, 1, "ended with code 1"), ("no room", 1, "no room")]
)
def test_a_callback_that_ends_the_program_has_failed(code: Any, status: int, message: str, hooks: str) -> None:
    with pytest.raises(ActionFailed) as caught:
        Call("x", load_callback(f"{hooks}.uploads:Ends", {"code": code})).run(EVENT)
    assert (caught.value.status, caught.value.message) == (status, f"callback x: {message}")


@pytest.mark.parametrize("code", [None, 0])
def test_a_callback_that_ends_the_program_well_is_done(code: Any, hooks: str) -> None:
    assert Call("x", load_callback(f"{hooks}.uploads:Ends", {"code": code})).run(EVENT) == "callback x: done"


def test_an_interruption_goes_through(hooks: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        Call("x", load_callback(f"{hooks}.uploads:Stopped")).run(EVENT)


SEARCH = """\
import os, sys
from ckpttool.callbacks import load_callback, search_here
from ckpttool.errors import UsageError
sys.path[:] = [folder for folder in sys.path if folder not in ("", os.getcwd())]
print(search_here(sys.argv[1]), search_here(sys.argv[1]), sys.path.count(os.getcwd()))
import json
print(json.JSONDecoder.__module__)
try:
    print(type(load_callback("planted:Hook")).__module__)
except UsageError as error:
    print(error.message)
"""


def searched(here: Path, run: Path) -> list[str]:
    """What a process finds that works in a directory with a module and one of the name of a module of Python."""
    (here / "planted.py").write_text("class Hook:\n    def on_save(self, event): pass\n")
    (here / "json.py").write_text("raise SystemExit('it was executed')\n")
    source = str(Path(ckpttool.__file__).parent.parent)
    code = f"import sys; sys.path.append({source!r})\n{SEARCH}"
    words = [sys.executable, "-c", code, str(run)]
    done = subprocess.run(words, cwd=here, capture_output=True, text=True, check=False, env={})
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_modules_are_found_in_the_working_directory_after_all_others(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert searched(tmp_path, tmp_path / "run") == ["True True 1", "json.decoder", "planted"]


@pytest.mark.parametrize("here", ["run", "run/global_step_20/actor", "link"])
def test_nothing_of_a_run_is_imported(here: str, tmp_path: Path) -> None:
    (tmp_path / "run/global_step_20/actor").mkdir(parents=True)
    (tmp_path / "link").symlink_to("run/global_step_20")
    found = searched(tmp_path / here, tmp_path / "run")
    assert found == ["False False 0", "json.decoder", "planted:Hook: no module planted"]


def test_a_working_directory_beside_the_run_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that begin alike are other directories."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run2").mkdir()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path / "run2")
    assert search_here(tmp_path / "run")
    assert sys.path[-1] == str((tmp_path / "run2").resolve())


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_what_a_callback_prints_is_no_result(
    more: tuple[str, ...],
    tmp_path: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
    ckpttool: Callable[..., CommandLine],
) -> None:
    """Of a watch, standard output has what it tells, whatever is printed by those that it calls."""
    name = f"loud{next(NUMBERS)}"
    methods = "".join(f"    def {head}: print('loud')\n" for head in ("__init__(self)", "on_save(self, event)"))
    text = f"print('loud')\nclass Loud:\n{methods}"
    (tmp_path / f"{name}.py").write_text(text)
    shutil.copytree(data / "fsdp" / "torch2.13-fsdp2", tmp_path / "run/global_step_20/actor")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("20")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    words = ("watch", "run", "--once", "--callback", f"{name}:Loud", "--exec", "echo loud", "--no-progress", *more)
    call = ckpttool(*words)
    assert (call.code, call.err) == (0, "loud\n" * 3)
    assert "callback" in call.out
    assert not [line for line in call.out.splitlines() if line == "loud"]
    assert not more or [json.loads(line)["command"] for line in call.out.splitlines()].count("watch") > 1
