"""Where `watch` finds checkpoints: what programs leave that keep them deeper, and what may not be looked into."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpttool.watching import Settings, Watcher
from ckpttool.watching.scanning import scan
from tests import builders


def test_each_format_of_nemo_rl_has_its_place(
    tmp_path: Path, fsdp_checkpoints: Path, megatron_checkpoints: Path, data: Path
) -> None:
    """Beside the weights lie the optimizer, of the same format as they, and the tokenizer."""
    dcp, archive = fsdp_checkpoints / "dcp/step-10", data / "megatron/mcore0.14-dense-tp2"
    saved = {
        "step_10/policy/weights": dcp,
        "step_20/policy/weights/model": megatron_checkpoints / "expected/dense-hf",
        "step_30/policy/weights/iter_0000000": archive,
    }
    for where, source in saved.items():
        shutil.copytree(source, tmp_path / where)
        step = tmp_path / where.split("/")[0]
        shutil.copytree(dcp, step / "policy/optimizer")
        (step / "policy/tokenizer").mkdir()
        (step / "training_info.json").write_text('{"step": 10}')
    with Watcher(tmp_path, Settings(exec=("true",))) as watcher:
        events = [notice.event for notice in watcher.watch(once=True) if notice.what == "done"]
    assert [(event.name, event.role, event.kind) for event in events if event is not None] == [
        ("step_10/policy/weights", "policy", "dcp"),
        ("step_20/policy/weights/model", "policy", "huggingface"),
        ("step_30/policy/weights/iter_0000000", "policy", "torch_dist"),
    ]


def test_what_accelerate_saves_in_parts_is_one_checkpoint(tmp_path: Path, fsdp_checkpoints: Path) -> None:
    step = tmp_path / "checkpoint-10"
    for part in ("pytorch_model_fsdp_0", "optimizer_0"):
        shutil.copytree(fsdp_checkpoints / "accelerate" / part, step / part)
    (step / "trainer_state.json").write_text('{"global_step": 10}')
    with Watcher(tmp_path, Settings(exec=("true",))) as watcher:
        events = [notice.event for notice in watcher.watch(once=True) if notice.what == "done"]
    assert [(event.name, event.role, event.kind) for event in events if event is not None] == [
        ("checkpoint-10", "", "step")
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_step_of_somebody_else_hides_no_other(open_folder: Path, megatron_checkpoints: Path) -> None:
    run = open_folder / "run"
    for number in (10, 20):
        step = builders.copy(megatron_checkpoints / "expected/dense-hf", run / f"checkpoint-{number}")
        (step / "trainer_state.json").write_text('{"global_step": 1}')
    (run / "checkpoint-10").chmod(0)
    os.seteuid(65534)
    try:
        assert [candidate.name for candidate in scan(run).candidates] == ["checkpoint-20"]
    finally:
        os.seteuid(0)
