"""Where `watch` finds checkpoints: what programs leave that keep them deeper."""

from __future__ import annotations

import shutil
from pathlib import Path

from ckpttool.watching import Settings, Watcher


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
