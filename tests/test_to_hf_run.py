"""What a run says beside its weights, and where it keeps them: heads, settings, orders of rows, steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckpttool.converting import Options, convert
from ckpttool.errors import NotACheckpoint, Unmapped
from tests import builders
from tests.conftest import Call
from tests.synthetic import write_role

Run = Callable[..., Call]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
"""As many rows as the 4 heads, 2 query groups of 8 that were trained."""


def say(role: Path, **fields: Any) -> None:
    path = role / "huggingface" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_other_heads_than_the_run_had_are_refused_though_the_shapes_are_the_same(
    converted_checkpoints: Path, tmp_path: Path
) -> None:
    role = builders.copy(converted_checkpoints / "llama-tp1", tmp_path / "role")
    say(role, **HEADS)
    with pytest.raises(Unmapped) as caught:
        convert(role, tmp_path / "out", Options())
    said = [problem.message for problem in caught.value.problems]
    assert [problem.code for problem in caught.value.problems] == ["settings-disagree"] * 3
    assert (
        said[0] == "the run had num_attention_heads 4 (transformer_config.json), config.json has num_attention_heads 8"
    )
    assert "kv_channels 8" in said[2]
    assert "head_dim 4" in said[2]


def test_of_the_arguments_in_the_archive_too(megatron_checkpoints: Path, tmp_path: Path) -> None:
    hf = builders.copy(megatron_checkpoints / "expected" / "dense-hf", tmp_path / "hf")
    config = json.loads((hf / "config.json").read_text())
    trained = {"num_attention_heads": config["num_attention_heads"] // 2}
    (hf / "config.json").write_text(json.dumps({**config, **trained, "num_key_value_heads": 1, "head_dim": 16}))
    with pytest.raises(Unmapped) as caught:
        convert(megatron_checkpoints / "megatron-lm", tmp_path / "out", Options(hf_config=str(hf)))
    assert "the arguments in the archive" in caught.value.problems[0].message


def test_where_the_run_says_nothing_it_is_told_that_heads_are_the_configs(tmp_path: Path, ckpttool: Run) -> None:
    write_role(tmp_path / "role", "llama")
    out = ckpttool("to-hf", tmp_path / "role", "-o", tmp_path / "out").out
    assert "(config.json; shapes cannot show it)" in " ".join(out.split())


@pytest.mark.parametrize("file", ["transformer_config.json", "dist_ckpt/run_config.yaml"])
def test_settings_that_change_what_a_model_says_are_compared(file: str, tmp_path: Path) -> None:
    role = tmp_path / "role"
    write_role(role, "qwen3_moe")
    settings = {"layernorm_epsilon": 0.125, "moe_router_topk": 7}
    text = "".join(f"  {name}: {value}\n" for name, value in settings.items())
    (role / file).write_text(json.dumps(settings) if file.endswith("json") else f"model:\n{text}")
    notes = [note.message for note in convert(role, tmp_path / "out", Options()).notes]
    assert len(notes) == 2
    assert f"layernorm_epsilon 0.125 ({Path(file).name})" in notes[0]
    assert "moe_router_topk 7" in notes[1]


def test_a_producer_that_the_keys_speak_against_is_a_note(tmp_path: Path) -> None:
    write_role(tmp_path / "role", "qwen3_next")
    result = convert(tmp_path / "role", tmp_path / "out", Options(producer="swift"))
    assert "producer-disagrees" in [note.code for note in result.notes]
    assert result.row_order == ("queries and gates as swift keeps them (by --producer)",)
    result = convert(tmp_path / "role", tmp_path / "other", Options())
    assert "producer-disagrees" not in [note.code for note in result.notes]
    assert result.row_order == ("queries and gates as nvidia keeps them (by its keys)",)


def test_rows_that_are_put_in_order_are_told(tmp_path: Path, ckpttool: Run) -> None:
    write_role(tmp_path / "role", "qwen3_moe")
    (tmp_path / "role" / "transformer_config.json").write_text('{"moe_mlp_glu_interleave_size": 4}')
    out = " ".join(ckpttool("to-hf", tmp_path / "role", "-o", tmp_path / "out").out.split())
    assert "row order moe_mlp: gate and up rows taken apart, which lie in blocks of 4 (transformer_config.json)" in out


def test_layers_that_transformers_does_not_load_are_told(tmp_path: Path, ckpttool: Run) -> None:
    write_role(tmp_path / "role", "deepseek_v3")
    out = " ".join(ckpttool("to-hf", tmp_path / "role", "-o", tmp_path / "out").out.split())
    assert "3 layers and 1 of multi-token prediction" in out
    assert "unexpected" in out
    assert "--no-mtp" in out


def test_a_critic_is_called_what_it_is_written_as(tmp_path: Path, ckpttool: Run) -> None:
    write_role(tmp_path / "role", "llama", head="value")
    say(tmp_path / "role", architectures=["LlamaForCausalLM"])
    out = " ".join(ckpttool("to-hf", tmp_path / "role", "-o", tmp_path / "out").out.split())
    assert "model llama, LlamaForTokenClassification" in out
    assert "a value head of 1 row: score.weight" in out


@pytest.mark.parametrize("options", [Options(hf_config="Qwen/Qwen3-4B"), Options(like="Qwen/Qwen3-4B")])
def test_a_name_on_the_hub_is_told_how_to_get_it(options: Options, tmp_path: Path) -> None:
    write_role(tmp_path / "role", "llama")
    with pytest.raises(NotACheckpoint, match="nothing is downloaded") as caught:
        convert(tmp_path / "role", tmp_path / "out", options)
    assert "hf download Qwen/Qwen3-4B" in caught.value.hint


def test_a_config_file_stands_for_its_directory(tmp_path: Path) -> None:
    write_role(tmp_path / "role", "llama")
    file = tmp_path / "role" / "huggingface" / "config.json"
    convert(tmp_path / "role", tmp_path / "out", Options(hf_config=str(file)))
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_steps_of_nemo_are_those_of_the_directories_around(tmp_path: Path, ckpttool: Run) -> None:
    run = tmp_path / "run"
    for step in (50, 100):
        write_role(tmp_path / f"role-{step}", "llama")
        archive = run / f"step_{step}" / "policy" / "weights" / "iter_0000000"
        builders.copy(tmp_path / f"role-{step}" / "dist_ckpt", archive)
    config = tmp_path / "role-50" / "huggingface"
    found = ckpttool("to-hf", run, "-o", tmp_path / "out", "--hf-config", config)
    assert found.code == 3
    assert found.err.index("step_100") < found.err.index("step_50")
    assert ckpttool("to-hf", run, "-o", tmp_path / "out", "--hf-config", config, "--step", "latest").code == 0
    rows = json.loads(ckpttool("inspect", run, "--json").out)["data"]["run"]["rows"]
    assert [row["step"] for row in rows] == [50, 100]


def test_shards_of_fsdp_are_sent_to_the_command_that_merges_them(fsdp_checkpoints: Path, ckpttool: Run) -> None:
    told = ckpttool("to-hf", fsdp_checkpoints / "fsdp2", "-o", "out")
    assert told.code == 3
    assert "it is an FSDP role directory" in " ".join(told.err.split())
    assert "ckpttool merge-fsdp" in told.err


def test_a_data_file_of_zeros_is_named_with_the_byte(tmp_path: Path) -> None:
    """What a node leaves that went down before its disk had the data."""
    write_role(tmp_path / "role", "llama")
    file = tmp_path / "role" / "dist_ckpt" / "__0_0.distcp"
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)
    with pytest.raises(Exception, match=r"__0_0\.distcp: damaged at byte [0-9,]+, where a tensor begins") as caught:
        convert(tmp_path / "role", tmp_path / "out", Options())
    assert getattr(caught.value, "exit_code", 0) == 4
    assert "Copy the file again" in getattr(caught.value, "hint", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_even_when_the_disk_hangs(number: signal.Signals, tmp_path: Path) -> None:
    write_role(tmp_path / "role", "llama")
    words = ["to-hf", str(tmp_path / "role"), "-o", str(tmp_path / "out")]
    code = (
        "import os, sys, time\nfrom ckpttool.cli import entry\n"
        "def hang(*a):\n    sys.stderr.write('writing\\n'); sys.stderr.flush(); time.sleep(60)\n"
        "os.pwrite = hang\nentry()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, *words], stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        assert child.stderr.readline() == "writing\n"
        begun = time.monotonic()
        child.send_signal(number)
        assert child.wait(30) == 128 + number
        assert time.monotonic() - begun < 20
    assert sorted(os.listdir(tmp_path)) == ["role"]


def test_every_line_that_is_suggested_can_be_pasted(tmp_path: Path) -> None:
    """Also that of a save that did not finish: what is said of it is a comment."""
    for step in (1, 2):
        write_role(tmp_path / "run" / f"global_step_{step}" / "actor", "llama")
    (tmp_path / "run" / "global_step_2" / "actor" / "dist_ckpt" / "metadata.json").unlink()
    with pytest.raises(NotACheckpoint) as caught:
        convert(tmp_path / "run", tmp_path / "out", Options())
    lines = [line for line in caught.value.hint.splitlines() if "ckpttool to-hf" in line]
    assert [line.partition("#")[2] for line in lines] == ["", " its save did not finish", ""]
    assert all(subprocess.run(["sh", "-n", "-c", line], check=False).returncode == 0 for line in lines)
