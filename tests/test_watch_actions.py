"""What `watch` does itself with a checkpoint: verify, migrate, to-hf; and the options of all actions, checked early."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ckpttool as package
from ckpttool.callbacks import CheckpointEvent
from ckpttool.errors import CannotWrite, CkpttoolError, NotACheckpoint, UsageError
from ckpttool.inspection import inspect
from ckpttool.watching.actions import ActionFailed, actions_of
from ckpttool.watching.actions.models import ToHf
from ckpttool.watching.actions.originals import Migrate, Verify
from ckpttool.watching.settings import Settings
from tests.conftest import DATA, Call
from tests.looking import bombs, repack, save_dcp
from tests.test_to_hf_fixtures import CONFIG
from tests.verifying import flip, records_of

DEMO = Path(package.__file__).parent / "demo_data"
FSDP, LORA, MEGATRON = (DEMO / name for name in ("fsdp", "lora", "megatron"))
SHARDS, ARCHIVE = DATA / "fsdp" / "torch2.13-fsdp2", DATA / "megatron" / "mcore0.16-dense-tp2"
MODEL = "model.safetensors"

Run = Callable[..., Call]


def saved(run: Path, name: str, source: Path, **fields: Any) -> CheckpointEvent:
    """The event of a checkpoint that lies in a run."""
    path = run / name
    shutil.copytree(source, path)
    step = int("".join(filter(str.isdigit, name.partition("/")[0])))
    about = {"role": name.partition("/")[2], "kind": inspect(path).kind, **fields}
    return CheckpointEvent(run=str(run), name=name, path=str(path), original=str(path), step=step, **about)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """What a bare archive of Megatron is converted with."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "config"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damage(path: Path) -> None:
    """Change a bit of a tensor."""
    record = next(
        record for record in records_of(path) if record.name.startswith("data/") and record.end > record.begin
    )
    flip(path, record.begin)


@pytest.mark.parametrize(
    ("name", "source", "command", "options"),
    [
        ("global_step_20/actor", FSDP, "merge-fsdp", {}),
        ("global_step_20/actor", FSDP, "merge-fsdp", {"dtype": "bf16"}),
        ("global_step_7", SHARDS, "merge-fsdp", {}),
        ("global_step_20/actor", LORA, "merge-fsdp", {"lora": "adapter"}),
        ("global_step_20/actor", MEGATRON, "to-hf", {}),
        ("iter_0000100", ARCHIVE, "to-hf", {"hf_config": "config", "dtype": "fp32"}),
    ],
)
def test_a_model_is_what_the_command_writes(
    name: str, source: Path, command: str, options: dict[str, Any], run: Path, config: Path, ckpttool: Run
) -> None:
    options = {option: str(config) if value == "config" else value for option, value in options.items()}
    event = saved(run, name, source)
    here = run.parent
    told = ToHf(f"{here}/models/{{step}}", **options).run(event)
    words = [word for option, value in options.items() for word in (f"--{option.replace('_', '-')}", value)]
    call = ckpttool(command, event.path, "-o", here / "out", "--json", *words)
    assert contents(here / "models" / str(event.step)) == contents(here / "out") != {}
    data = call.json["data"]
    number, size = f"{data['parameters']:,} parameters", sum(file["bytes"] for file in data["files"])
    notes = [note["message"] for note in call.json["problems"]]
    assert told.splitlines() == [f"to-hf: {here}/models/{event.step} ({number}, {size / 1000:.3g} KB)", *notes]


def test_a_template_has_what_an_event_has(run: Path) -> None:
    event = saved(run, "global_step_20/actor", FSDP)
    action = ToHf(f"{run.parent}/{{name}}/{{kind}}-{{role}}-{{step}}")
    assert action.output(event) == run.parent / "global_step_20/actor/fsdp-actor-20"
    assert ToHf("m/{step}/{role}").output(replace(event, role="")) == Path("m/20")
    assert ToHf("m/{step}-{role}").output(replace(event, role="{step}$(x)")) == Path("m/20-{step}$(x)")
    assert ToHf("~/m/{step}").output(event) == Path.home() / "m/20"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "models"}, "every checkpoint would be written to one directory"),
        ({"template": "models/{role}"}, "every checkpoint would be written to one directory"),
        ({"template": "models/{step}/{rank}"}, r"there is no \{rank\}"),
        ({"template": "models/{step:06}"}, r"there is no \{step:06\}"),
        ({"template": "models/{}"}, r"there is no \{\}"),
        ({"template": "models\0/{step}"}, "a NUL byte"),
        ({"template": "{step}", "dtype": "bf17"}, "--dtype bf17: not one of bf16, fp16, fp32"),
        ({"template": "{step}", "lora": "melt"}, "--lora melt: not one of fuse, adapter, both"),
    ],
)
def test_what_can_never_be_written_is_refused_early(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ToHf(**options)


def test_a_configuration_that_is_not_there_is_told_early(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint, match=r"--hf-config .*absent: no such file or directory"):
        ToHf("{step}", hf_config=str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "place", ["", "/checkpoint-{step}", "/{name}/hf", "/global_step_{step}/hf", "/x/../iter_{step}"]
)
def test_a_model_may_not_become_a_step_of_the_run(place: str, run: Path) -> None:
    (run.parent / "link").symlink_to("run")
    template = f"{run.parent}/link{place}" if place else f"{run.parent}/{{step}}/../link"
    with pytest.raises(UsageError, match=r"is the run|as a step, or in one"):
        actions_of(Settings(to_hf=template), run)
    assert actions_of(Settings(to_hf=f"{run}/models/{{step}}"), run)
    assert actions_of(Settings(to_hf=f"{run.parent}/checkpoint-{{step}}"), run)


def test_what_is_there_is_replaced_where_it_may_be_of_an_earlier_attempt(run: Path) -> None:
    event = saved(run, "global_step_20/actor", FSDP)
    action = ToHf(f"{run.parent}/{{step}}")
    action.run(event)
    model = run.parent / "20" / MODEL
    before = model.read_bytes()
    for again in ({"attempt": 2}, {"rewritten": True}):
        model.write_bytes(before[:-1] + b"x")
        action.run(replace(event, **again))
        assert model.read_bytes() == before
    model.write_bytes(before[:-1] + b"x")
    with pytest.raises(CannotWrite, match="exists already, and not by an earlier attempt"):
        action.run(event)
    assert model.read_bytes() != before


def test_what_is_no_model_is_not_replaced_by_any_attempt(run: Path) -> None:
    event = saved(run, "global_step_20/actor", FSDP, attempt=2)
    (run.parent / "20").mkdir()
    (run.parent / "20" / "notes.txt").write_text("mine")
    with pytest.raises(CannotWrite):
        ToHf(f"{run.parent}/{{step}}").run(event)
    assert os.listdir(run.parent / "20") == ["notes.txt"]


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("done", [False, True])
def test_two_roles_are_not_written_to_one_directory(attempt: int, done: bool, run: Path) -> None:
    """Nor replaces one of them the other, when it is tried again."""
    action = ToHf(f"{run.parent}/models/{{step}}")
    first = saved(run, "global_step_20/actor", FSDP)
    before = {}
    if done:
        action.run(first)
        before = contents(run.parent / "models")
    event = saved(run, "global_step_20/critic", MEGATRON, attempt=attempt)
    with pytest.raises(UsageError, match="critic and actor of step 20 would both be written to") as caught:
        action.run(event)
    assert f"--to-hf {run.parent}/models/{{step}}/{{role}}" in caught.value.hint
    assert (contents(run.parent / "models") if done else {}) == before
    both = ToHf(f"{run.parent}/both/{{step}}/{{role}}")
    for one in (first, event):
        both.run(one)
    assert sorted(os.listdir(run.parent / "both/20")) == ["actor", "critic"]


def test_a_role_that_becomes_no_model_is_in_nobodys_way(run: Path, ckpttool: Run) -> None:
    event = saved(run, "global_step_20/actor", FSDP)
    ckpttool("merge-fsdp", FSDP, "-o", run / "global_step_20/actor_hf")
    (run / "global_step_20/ref").mkdir()
    saved(run, "global_step_20/hostile", FSDP)
    bomb = next(iter(bombs(run / "gone").values()))
    repack(run / "global_step_20/hostile/model_world_size_4_rank_0.pt", lambda _data: bomb)
    ToHf(f"{run.parent}/{{step}}").run(event)
    saved(run, "global_step_20/critic", FSDP)
    ToHf(f"{run.parent}/one/{{step}}", roles=("actor",)).run(event)
    assert (run.parent / "20" / MODEL).read_bytes() == (run.parent / "one/20" / MODEL).read_bytes()
    assert not (run / "gone").exists()


def test_a_model_is_nothing_to_do(run: Path, ckpttool: Run) -> None:
    ckpttool("merge-fsdp", FSDP, "-o", run / "checkpoint-5")
    role = run / "global_step_20/actor"
    (role / "dist_ckpt").parent.mkdir(parents=True)
    shutil.copytree(run / "checkpoint-5", role / "huggingface")
    save_dcp(role / "dist_ckpt", {}, backend="torch_dist")
    event = CheckpointEvent(run=str(run), name="checkpoint-5", path=str(run / "checkpoint-5"), original="", step=5)
    action = ToHf(f"{run.parent}/models/{{step}}")
    assert action.run(event) == "to-hf: nothing to do, it is a Hugging Face model"
    assert action.run(replace(event, path=str(role))) == (
        "to-hf: nothing to do, its weights are a Hugging Face model in huggingface/"
    )
    assert not (run.parent / "models").exists()


def of_torch(path: Path) -> None:
    import torch

    save_dcp(path, {"model.weight": torch.ones(2, 3)})


def of_deepspeed(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "mp_rank_00_model_states.pt").touch()


def without_weights(path: Path) -> None:
    shutil.copytree(FSDP / "huggingface", path)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (of_torch, "a plain distributed checkpoint of torch"),
        (of_deepspeed, "it is a DeepSpeed ZeRO checkpoint"),
        (without_weights, "it is a Hugging Face configuration without weights"),
    ],
)
def test_what_cannot_be_converted_says_what_it_is(write: Callable[[Path], None], reason: str, run: Path) -> None:
    path = run / "global_step_5"
    write(path)
    event = CheckpointEvent(run=str(run), name=path.name, path=str(path), original=str(path), step=5)
    with pytest.raises(NotACheckpoint, match=reason):
        ToHf(f"{run.parent}/{{step}}").run(event)
    assert sorted(os.listdir(run.parent)) == ["run"]


def test_a_checkpoint_is_read_where_it_is_pinned(run: Path) -> None:
    event = saved(run, "global_step_20/actor", FSDP)
    pin = run / ".ckpttool-pins/global_step_20/actor"
    shutil.copytree(event.path, pin, copy_function=os.link)
    shutil.rmtree(event.path)
    pinned = replace(event, path=str(pin))
    assert ToHf(f"{run.parent}/{{step}}").run(pinned).startswith("to-hf: ")
    assert Verify().run(pinned).startswith("verify: sound")


@pytest.mark.parametrize("source", [FSDP, MEGATRON, SHARDS, ARCHIVE])
def test_a_sound_checkpoint_is_told_to_be(source: Path, run: Path, ckpttool: Run) -> None:
    event = saved(run, "global_step_20/actor", source)
    read = ckpttool("verify", event.path, "--json").json["data"]["bytes_read"]
    assert read > 0
    assert Verify().run(event) == f"verify: sound ({read / 1000:.3g} KB read)"


def test_every_fault_is_told(run: Path, ckpttool: Run) -> None:
    event = saved(run, "global_step_20/actor", FSDP)
    for rank in (1, 3):
        damage(Path(event.path, f"model_world_size_4_rank_{rank}.pt"))
    with pytest.raises(ActionFailed) as caught:
        Verify().run(event)
    error, told = caught.value, ckpttool("verify", event.path, "--json").json["problems"]
    assert [problem.message for problem in error.problems] == [fault["message"] for fault in told]
    assert len(error.problems) == 2
    assert error.message == "verify: global_step_20/actor has 2 faults"
    assert (error.status, error.exit_code) == (1, 1)
    assert all(problem.message in str(error) for problem in error.problems)


def test_the_checkpoint_itself_is_migrated(run: Path) -> None:
    event = saved(run, "global_step_20/actor", MEGATRON)
    pin = run / ".ckpttool-pins/global_step_20/actor"
    shutil.copytree(event.path, pin, copy_function=os.link)
    pinned = replace(event, path=str(pin))
    assert Migrate().run(pinned) == "migrate: 4 trees of layout v2"
    assert inspect(event.original).kind == "verl-megatron-v2"
    assert inspect(pin).kind == "verl-megatron-v1"
    linked = Path(event.original, "model/dist_ckpt/__0_0.distcp").stat()
    assert os.path.samestat(linked, Path(event.original, "dist_ckpt/__0_0.distcp").stat())
    assert Migrate().run(pinned) == "migrate: nothing to do"


@pytest.mark.parametrize("source", [FSDP, ARCHIVE, SHARDS])
def test_other_kinds_are_nothing_to_migrate(source: Path, run: Path) -> None:
    event = saved(run, "global_step_20/actor", source)
    before = contents(Path(event.path))
    assert Migrate().run(event) == "migrate: nothing to do"
    assert contents(Path(event.path)) == before


def test_actions_come_in_their_order(run: Path) -> None:
    settings = Settings(
        exec=("true {path}", "false"),
        callbacks=("ckpttool:CheckpointCallback", "ckpttool.callbacks.CheckpointCallback"),
        callback_config={"bucket": "b"},
        to_hf="models/{step}",
        migrate=True,
        verify=True,
    )
    actions = actions_of(settings, run)
    assert [action.label for action in actions] == [
        *("verify", "migrate", "to-hf models/{step}", "callback ckpttool:CheckpointCallback"),
        *("callback ckpttool.callbacks.CheckpointCallback", "exec true {path}", "exec false"),
    ]
    assert actions[3].callback.config == {"bucket": "b"}  # type: ignore[attr-defined]
    assert actions_of(Settings(), run) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exec": ("true", "true")}, "exec true: twice"),
        ({"callbacks": ("ckpttool:CheckpointCallback",) * 2}, "callback ckpttool:CheckpointCallback: twice"),
        ({"dtype": "bf16"}, "--dtype without --to-hf"),
        ({"lora": "fuse"}, "--lora without --to-hf"),
        ({"hf_config": "."}, "--hf-config without --to-hf"),
        ({"shell": True}, "--shell without --exec"),
        ({"exec": ("true", "nothing-of-this-name")}, "there is no program nothing-of-this-name"),
        ({"exec": ("if",), "shell": True}, "--exec if: "),
        ({"callbacks": ("nowhere_at_all:X",)}, "no module nowhere_at_all"),
        ({"to_hf": "models"}, "every checkpoint would be written to one directory"),
        ({"to_hf": "{step}", "dtype": "int4"}, "--dtype int4"),
    ],
)
def test_all_options_are_checked_before_anything_is_done(settings: dict[str, Any], message: str, run: Path) -> None:
    with pytest.raises(CkpttoolError, match=message) as caught:
        actions_of(Settings(**settings), run)
    assert caught.value.exit_code == 2


def test_a_module_that_lies_in_the_run_is_not_found(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run / "planted_here.py").write_text("raise SystemExit('it was executed')\n")
    monkeypatch.chdir(run)
    with pytest.raises(UsageError, match="no module planted_here") as caught:
        actions_of(Settings(callbacks=("planted_here:X",)), run)
    assert "it lies in the run" in caught.value.hint
