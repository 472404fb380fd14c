"""verl's checkpoint callback, called by a trainer that keeps to the contract: when it acts, and how failures end."""

from __future__ import annotations

import gc
import json
import logging
import pickle
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpttool.errors import BrokenCheckpoint, CannotWrite, CkpttoolError, NotACheckpoint, UsageError
from ckpttool.integrations.verl import CkpttoolCallback
from ckpttool.watching import Watcher
from ckpttool.watching.actions import ActionFailed
from ckpttool.watching.settingsfile import read_settings
from tests.verl_stub import OURS, SaveFailed, Trainer

SECONDS = 60
"""After which something that has to happen has not."""

SCRIPT = """#!/bin/sh
echo "$1" >> {folder}/begun
while [ -e {folder}/hold ]; do sleep 0.02; done
if [ -e {folder}/fail ]; then exit 7; fi
echo "$1" >> {folder}/log
"""


class Site:
    """A run and settings whose action notes names; it waits while ``hold`` is there, fails while ``fail`` is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run, self.file = folder, folder / "run", folder / "settings.json"
        self.made: list[Any] = []
        script = folder / "note.sh"
        script.write_text(SCRIPT.format(folder=folder))
        script.chmod(0o755)
        self.exec = f"{script} {{name}}"
        self.settle()

    def settle(self, **settings: Any) -> None:
        self.file.write_text(json.dumps({"exec": self.exec, "interval": 0.02, "patience": 30, **settings}))

    @property
    def config(self) -> dict[str, Any]:
        return {
            "trainer": {
                "checkpoint_callback_class": OURS,
                "ckpttool_config": str(self.file),
                "default_local_dir": str(self.run),
            },
            "actor_rollout_ref": {"actor": {}},
        }

    def trainer(self, **options: Any) -> Trainer:
        trainer = Trainer(self.config, **options)
        self.made.append(trainer.checkpoint_callback)
        return trainer

    def noted(self, name: str = "log") -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def touch(self, name: str) -> None:
        (self.folder / name).touch()

    def remove(self, name: str) -> None:
        (self.folder / name).unlink()

    def wait(self, reached: Callable[[], bool]) -> None:
        until = time.monotonic() + SECONDS
        while not reached():
            assert time.monotonic() < until
            time.sleep(0.01)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    with suppress(FileNotFoundError):
        site.remove("hold")
    for callback in site.made:
        with suppress(CkpttoolError):
            callback.close()


def names(*steps: int, roles: tuple[str, ...] = ("actor", "critic")) -> list[str]:
    return [f"global_step_{step}/{role}" for step in steps for role in roles]


def state_of(site: Site) -> dict[str, str]:
    found = json.loads((site.run / ".ckpttool-watch.json").read_text())["checkpoints"]
    return {name: entry["course"] for name, entry in found.items()}


# When it acts


def test_every_role_is_acted_on_before_training_goes_on(site: Site) -> None:
    trainer = site.trainer()
    trainer.save(20)
    assert site.noted() == names(20)
    trainer.save(40)
    assert site.noted() == names(20, 40)
    assert state_of(site) == dict.fromkeys(names(20, 40), "done")


@pytest.mark.parametrize("how", ["fsdp", "v1", "v2"])
def test_what_verl_saves_synchronously_is_finished_when_it_calls(site: Site, how: str) -> None:
    site.trainer(roles={"actor": how, "critic": "fsdp"}).save(1)
    assert site.noted() == names(1)


def test_only_the_roles_of_the_settings_are_acted_on(site: Site) -> None:
    site.settle(role="critic")
    site.trainer().save(1)
    assert site.noted() == ["global_step_1/critic"]


def test_what_verl_may_tell_one_day_is_taken(site: Site) -> None:
    site.trainer(epoch=3, metrics={"reward": 0.5}).save(1)
    assert site.noted() == names(1)


def test_a_save_that_fails_is_not_acted_on(site: Site) -> None:
    trainer = site.trainer()
    with pytest.raises(SaveFailed):
        trainer.save(1, fails=True)
    assert site.noted() == []
    trainer.save(2)
    assert site.noted() == names(2)


def test_in_the_background_training_goes_on(site: Site) -> None:
    site.settle(background=True)
    site.touch("hold")
    trainer = site.trainer()
    for step in (1, 2, 3):
        trainer.save(step)  # returns although the action does not
    site.wait(lambda: site.noted("begun") == names(1)[:1])
    assert site.noted() == []
    site.remove("hold")
    site.wait(lambda: site.noted() == names(1, 2, 3))
    site.wait(lambda: not ours())


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ckpttool"]


@pytest.mark.parametrize("how", ["v1", "v2"])
def test_an_asynchronous_save_is_acted_on_when_the_training_loop_has_finished_it(site: Site, how: str) -> None:
    site.settle(patience=None)
    trainer = site.trainer(roles={"actor": how})
    trainer.save(20, async_save=True)
    other = replace(read_settings(site.file), state=str(site.folder / "other.json"))
    with Watcher(site.run, other) as watch, pytest.raises(BrokenCheckpoint, match="not finished"):
        next(watch.act_on(20, patience=0))  # it is not, for whoever looks now
    assert site.noted("begun") == []
    trainer.finalise()
    site.wait(lambda: site.noted() == ["global_step_20/actor"])


def test_asynchronous_saves_are_acted_on_in_the_order_of_steps(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.settle(patience=None)
    trainer = site.trainer(roles={"actor": "v2", "critic": "v2"})
    trainer.save(20, async_save=True)
    trainer.save(40, async_save=True)
    assert "step 20: its save is still not finished" in caplog.text
    trainer.finalise()
    site.wait(lambda: site.noted() == names(20, 40))


def test_a_step_that_was_resumed_and_saved_again_is_acted_on_again(site: Site) -> None:
    site.trainer().save(20)
    site.made.pop().close()
    for path in (site.run / "global_step_20").rglob("*.pt"):
        path.unlink()
    site.trainer().save(20)
    assert site.noted() == names(20, 20)


def test_the_last_save_returns_when_all_is_done(site: Site) -> None:
    """Ray ends verl's driver soon after: a thread would be cut short."""
    site.settle(background=True)
    site.touch("hold")
    trainer = site.trainer(total=2)
    trainer.save(1)
    site.wait(lambda: site.noted("begun") != [])
    threading.Timer(0.1, lambda: site.remove("hold")).start()
    trainer.save(2)
    assert site.noted() == names(1, 2)


def test_the_last_save_does_not_wait_for_what_training_has_to_finish(site: Site) -> None:
    site.settle(patience=None)
    trainer = site.trainer(total=1, roles={"actor": "v2"})
    trainer.save(1, async_save=True)  # would wait for ever
    trainer.finalise()
    site.wait(lambda: site.noted() == ["global_step_1/actor"])


# How failures end


def test_an_action_that_fails_ends_training(site: Site) -> None:
    site.touch("fail")
    trainer = site.trainer()
    with pytest.raises(ActionFailed, match="ended with code 7"):
        trainer.save(20)
    assert site.noted("begun") == names(20)[:1]
    assert state_of(site) == {"global_step_20/actor": "failed"}


def test_whoever_goes_on_after_a_failure_is_told_again(site: Site) -> None:
    """Or the roles after the first, and later steps, would be left out without a word."""
    site.touch("fail")
    trainer = site.trainer()
    for step in (20, 40):
        with pytest.raises(ActionFailed, match="ended with code 7"):
            trainer.save(step)
    assert site.noted("begun") == names(20)[:1]


def test_a_failure_in_the_background_is_raised_by_the_next_save(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.settle(background=True)
    site.touch("fail")
    trainer = site.trainer()
    trainer.save(20)
    site.wait(lambda: not ours())
    assert f"ckpttool watch {site.run} --once --config {site.file}" in caplog.text
    with pytest.raises(ActionFailed, match="ended with code 7"):
        trainer.save(40)
    assert site.noted("begun") == names(20)[:1]


def test_a_failure_in_the_background_is_raised_by_close(site: Site) -> None:
    site.settle(background=True)
    site.touch("fail")
    trainer = site.trainer()
    trainer.save(20)
    with pytest.raises(ActionFailed, match="ended with code 7"):
        trainer.checkpoint_callback.close()


def test_keep_going_keeps_training_going(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.settle(**{"keep-going": True})
    site.touch("fail")
    trainer = site.trainer()
    trainer.save(20)
    site.remove("fail")
    trainer.save(40)
    assert site.noted() == names(40)
    assert [record.levelno for record in caplog.records if "code 7" in record.message] == [logging.ERROR] * 2
    with pytest.raises(ActionFailed):
        trainer.checkpoint_callback.close()


def test_a_save_that_is_never_finished_is_told_when_patience_ends(site: Site) -> None:
    site.settle(patience=0.05)
    trainer = site.trainer(roles={"actor": "v2"})
    trainer.save(20, async_save=True)
    site.wait(lambda: not ours())
    with pytest.raises(BrokenCheckpoint, match=r"step 20 is not finished\n.*actor waits for ckpt_contents.json"):
        trainer.save(40, async_save=True)


def test_what_other_nodes_have_written_for_themselves_is_told(site: Site) -> None:
    site.settle(patience=0.05)
    trainer = site.trainer()
    with pytest.raises(NotACheckpoint, match="no role of this step can be seen on") as caught:
        trainer.save(20, seen=False)
    assert "all nodes share" in caught.value.hint


def test_a_shard_that_is_on_another_node_is_named(site: Site) -> None:
    site.settle(patience=0.2)
    trainer = site.trainer()
    copy = trainer._save_role

    def lacking(role: Path, how: str, step: int, *, async_save: bool) -> None:
        copy(role, how, step, async_save=async_save)
        (role / "model_world_size_4_rank_2.pt").unlink()

    trainer._save_role = lacking  # type: ignore[method-assign]
    with pytest.raises(BrokenCheckpoint, match="global_step_20/actor: model shards of rank 2 are missing"):
        trainer.save(20)


@pytest.mark.parametrize("how", ["fsdp", "v2"])
def test_what_the_trainer_removes_too_early_is_told(site: Site, how: str) -> None:
    """verl's own retention removes roles, and leaves the directory of the step."""
    site.settle(background=True, patience=0.2)
    site.touch("hold")
    trainer = site.trainer(roles={"actor": how})
    trainer.save(1)
    site.wait(lambda: site.noted("begun") != [])
    trainer.save(2)
    shutil.rmtree(site.run / "global_step_2" / "actor")
    site.remove("hold")
    site.wait(lambda: not ours())
    with pytest.raises(NotACheckpoint, match="global_step_2: its roles were removed before") as caught:
        trainer.save(3)
    assert "keep more" in caught.value.hint


def test_a_step_elsewhere_is_refused(site: Site, tmp_path: Path) -> None:
    callback = site.trainer().checkpoint_callback
    with pytest.raises(UsageError, match="not below"):
        callback.on_save(trainer=None, global_step=1, checkpoint_dir=str(tmp_path / "other" / "global_step_1"))


# Before training begins


def refused(config: Any, error: type[CkpttoolError] = UsageError) -> str:
    with pytest.raises(error) as caught:
        CkpttoolCallback(config=config)
    return f"{caught.value}\n{caught.value.hint}"


def test_settings_are_named_by_the_configuration_or_the_environment(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = site.config
    del config["trainer"]["ckpttool_config"]
    told = refused(config)
    assert "trainer.ckpttool_config" in told
    assert "CKPTTOOL_CONFIG" in told
    monkeypatch.setenv("CKPTTOOL_CONFIG", str(site.file))
    callback = CkpttoolCallback(config=config)
    callback.close()
    monkeypatch.setenv("CKPTTOOL_CONFIG", "/absent.json")
    CkpttoolCallback(config=site.config).close()  # the configuration comes first
    assert "/absent.json" in refused(config)


def test_a_hint_is_shown_where_others_print_the_error(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    config = site.config
    del config["trainer"]["ckpttool_config"]
    with pytest.raises(UsageError) as caught:
        CkpttoolCallback(config=config)
    assert "+trainer.ckpttool_config=" in f"{getattr(caught.value, '__notes__', '')}{caplog.text}"


class Structured(dict):
    """As OmegaConf: keys are attributes, and one that is not in the structure is an error."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


@pytest.mark.parametrize("kind", [SimpleNamespace, Structured])
def test_any_kind_of_configuration_will_do(site: Site, kind: Callable[..., Any]) -> None:
    CkpttoolCallback(config=kind(trainer=kind(**site.config["trainer"]))).close()
    assert "trainer.ckpttool_config" in refused(kind(trainer=kind(default_local_dir=str(site.run))))
    assert "default_local_dir" in refused(kind(trainer=kind(ckpttool_config=str(site.file))))
    assert "default_local_dir" in refused(kind())
    assert "default_local_dir" in refused(None)


def test_what_cannot_work_is_told_before_training(site: Site) -> None:
    site.settle(**{"keep-lst": 3})
    assert "did you mean keep-last?" in refused(site.config)
    site.settle(exec="no-such-program {path}")
    assert "no-such-program" in refused(site.config)
    site.settle(exec=[])
    assert "names nothing to do" in refused(site.config)
    assert not site.run.exists()


def test_a_watch_of_the_run_is_told_before_training(site: Site) -> None:
    site.run.mkdir()
    with Watcher(site.run, read_settings(site.file)):
        assert "another watch is at work" in refused(site.config, CannotWrite)
    site.trainer().save(1)
    assert site.noted() == names(1)


def test_another_state_is_another_matter(site: Site) -> None:
    site.run.mkdir()
    with Watcher(site.run, read_settings(site.file)):
        site.settle(state="other.json")
        site.trainer().save(1)
    assert (site.folder / "other.json").exists()


def test_a_callback_that_is_dropped_gives_the_lock_back(site: Site) -> None:
    callback = CkpttoolCallback(config=site.config)
    del callback
    gc.collect()
    site.trainer().save(1)
    assert site.noted() == names(1)


def test_a_closed_callback_says_so(site: Site) -> None:
    trainer = site.trainer()
    trainer.checkpoint_callback.close()
    trainer.checkpoint_callback.close()
    with pytest.raises(UsageError, match="closed"):
        trainer.save(1)


def test_the_trainer_is_neither_kept_nor_pickled(site: Site) -> None:
    site.settle(background=True)
    site.touch("hold")
    trainer = site.trainer()
    with pytest.raises(TypeError):
        pickle.dumps(trainer)
    trainer.save(1)
    site.wait(lambda: site.noted("begun") != [])
    kept = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert kept() is None


def test_close_does_what_is_left_in_the_thread_of_who_calls(site: Site) -> None:
    site.settle(background=True)
    site.touch("hold")
    trainer = site.trainer()
    for step in (1, 2, 3):
        trainer.save(step)
    site.wait(lambda: site.noted("begun") != [])
    threading.Timer(0.1, lambda: site.remove("hold")).start()
    trainer.checkpoint_callback.close()
    assert site.noted() == names(1, 2, 3)
    assert ours() == []


def test_close_names_what_was_not_finished_and_does_the_rest(site: Site) -> None:
    site.settle(patience=1)
    trainer = site.trainer(roles={"actor": "v2"})
    site.touch("hold")
    trainer.save(1, async_save=True)
    trainer.finalise()
    site.wait(lambda: site.noted("begun") != [])
    trainer.save(2, async_save=True)
    trainer.scheduled.clear()  # it never will be
    trainer.save(3, async_save=True)
    trainer.finalise()
    threading.Timer(0.1, lambda: site.remove("hold")).start()
    with pytest.raises(BrokenCheckpoint, match="step 2 is not finished"):
        trainer.checkpoint_callback.close()
    assert site.noted() == ["global_step_1/actor", "global_step_3/actor"]
