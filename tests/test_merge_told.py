"""What `ckpttool merge-fsdp` prints, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckpttool.cli.options import count_of, size_of
from ckpttool.errors import UsageError
from ckpttool.render import terminal
from tests import builders
from tests.conftest import Call
from tests.merged import QWEN2, tensors_in, unequal, write_role

Run = Callable[..., Call]
WEIGHTS = {"model.embed_tokens.weight": torch.randn(10, 4), "lm_head.weight": torch.randn(10, 4)}


@pytest.fixture
def role(tmp_path: Path) -> Path:
    """Two ranks with a buffer and a config."""
    return write_role(tmp_path / "role", WEIGHTS, {"model.step": torch.tensor(3)}, config=QWEN2)


def test_a_merge_says_what_it_did_and_what_to_type_next(ckpttool: Run, role: Path, tmp_path: Path) -> None:
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--dtype", "bf16")
    assert (call.code, call.err) == (0, "")
    first, *rest = call.out.splitlines()
    assert first.startswith(f"merged {role} into {tmp_path / 'out'}: 80 parameters, 3 tensors in 1 file, ")
    words = " ".join(" ".join(rest).split())
    for told in (
        "shards 2 FSDP shards of world size 2, mesh fsdp=2",
        "model qwen2, Qwen2ForCausalLM",
        "cast float32 to bfloat16: 2 tensors, 160 B",
        "copies 1 replicated tensor (8 B) compared byte by byte",
        "config torch_dtype: bfloat16 (was float32)",
        "not found generation_config.json, tokenizer_config.json, a tokenizer",
        "model.safetensors 3",
    ):
        assert told in words
    assert rest[-1] == f"  ckpttool inspect {tmp_path / 'out'} --strict"
    assert ckpttool(*shlex.split(rest[-1])[1:]).code == 0


def test_a_dry_run_checks_everything_and_writes_nothing(ckpttool: Run, role: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    options = ["--dtype", "bf16", "--max-shard-size", "1kb", "--cast-buffers", "--hf-config", role / "huggingface"]
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--dry-run", *options)
    assert call.code == 0
    assert "nothing was written" in call.out
    assert "B needed, " in call.out
    assert sorted(tmp_path.rglob("*")) == before
    command = shlex.split(call.out.splitlines()[-1])
    assert ckpttool(*command[1:]).code == 0
    assert (
        unequal(
            tensors_in(tmp_path / "out"),
            {**{k: v.bfloat16() for k, v in WEIGHTS.items()}, "model.step": torch.tensor(3)},
        )
        == set()
    )


def test_a_dry_run_finds_what_would_be_refused(ckpttool: Run, tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", WEIGHTS, lambda rank: {"b": torch.tensor([1.0, rank])})
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--dry-run").code == 4


def test_copies_that_differ_are_a_table(ckpttool: Run, tmp_path: Path) -> None:
    """Case 3: key, ranks, how many elements and by how much, NaN apart."""
    nan = float("nan")

    def buffers(rank: int) -> dict[str, torch.Tensor]:
        wrong = {2: torch.tensor([1.0, 2.5, 3.0]), 3: torch.tensor([nan, 2.0, 3.0])}
        return {"mean": wrong.get(rank, torch.tensor([1.0, 2.0, 3.0])), "same": torch.tensor(rank // 4)}

    role = write_role(tmp_path / "role", WEIGHTS, buffers, ranks=4)
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out")
    assert (call.code, call.out) == (4, "")
    assert "--on-mismatch rank0" in call.err
    (row,) = [line.split("  ") for line in call.err.splitlines() if line.startswith("  mean")]
    assert [cell.strip() for cell in row if cell] == ["mean", "2-3", "0", "1 of 3", "0.5", "1"]
    assert not (tmp_path / "out").exists()
    told = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--json").json
    assert told["ok"] is False
    assert told["data"]["mismatches"] == [
        {"name": "mean", "reference": 0, "ranks": [2, 3], "elements": 3, "changed": 1, "largest": 0.5, "nans": 1}
    ]
    taken = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--on-mismatch", "rank0")
    assert taken.code == 0
    note = "mean: taken from rank 0; on rank 2-3 up to 1 of 3 elements differ, by up to 0.5, 1 with a NaN"
    assert note in " ".join(taken.out.split())
    assert tensors_in(tmp_path / "out")["mean"].tolist() == [1.0, 2.0, 3.0]


def test_json_has_everything(ckpttool: Run, role: Path, tmp_path: Path) -> None:
    told = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "--dtype", "bf16", "--json").json
    assert (told["ckpttool"], told["command"], told["ok"]) == (1, "merge-fsdp", True)
    assert [problem["code"] for problem in told["problems"]] == ["no-generation-config"]
    data = told["data"]
    assert (data["done"], data["tensors"], data["parameters"]) == (True, 3, 80)
    assert data["dtypes"] == {"bfloat16": 160, "int64": 8}
    assert {file["name"]: file["tensors"] for file in data["files"]} == {"model.safetensors": 3, "config.json": 0}
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    assert {file["name"]: file["bytes"] for file in data["files"]} == sizes
    assert data["bytes_written"] == sum(sizes.values())
    assert data["options"]["dtype"] == "bfloat16"


def test_quiet_is_one_line(ckpttool: Run, role: Path, tmp_path: Path) -> None:
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", "-q")
    assert (call.code, call.out.count("\n"), call.err) == (0, 1, "")


def test_long_lists_are_short_unless_asked(ckpttool: Run, tmp_path: Path) -> None:
    weights = {f"w{n}": torch.randn(10) for n in range(20)}
    buffers = {f"b{n}": torch.randn(3) for n in range(9)}
    role = write_role(tmp_path / "role", weights, buffers)
    options = ["--dtype", "bf16", "--max-shard-size", "40B"]
    short = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", *options).out
    long = ckpttool("merge-fsdp", role, "-o", tmp_path / "out", *options, "--force", "--verbose").out
    assert "b3 and 5 more (buffers" in short
    assert "b8 (buffers" in " ".join(long.split())
    assert short.count("model-000") < long.count("model-000") == len(list((tmp_path / "out").glob("model-000*")))


def test_names_from_a_file_do_not_reach_the_terminal(ckpttool: Run, tmp_path: Path) -> None:
    odd = {"a\x1b[31mred\nline": torch.ones(2)}
    role = write_role(tmp_path / "role", WEIGHTS, lambda rank: {name: v + rank for name, v in odd.items()})
    call = ckpttool("merge-fsdp", role, "-o", tmp_path / "out")
    assert call.code == 4
    assert "\x1b" not in call.err
    assert "a\\x1b[31mred\\nline" in call.err


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], 2),
        (["-o", "out", "--dtype", "int8"], 2),
        (["-o", "out", "--max-shard-size", "5 apples"], 2),
        (["-o", "out", "--world-size", "0"], 2),
        (["-o", "out", "--threads", "many"], 2),
        (["-o", "out", "--on-mismatch", "ignore"], 2),
        (["-o", "out", "--cast-buffers"], 2),
        (["-o", "out", "--allow-overflow"], 2),
        (["-o", ""], 2),
        (["-o", "out", "--hf-config", "nowhere"], 3),
        (["-o", "out", "--hf-config", "role"], 3),
        (["-o", "out", "--input", "nowhere"], 3),
        (["-o", "out", "--step", "3"], 3),
    ],
)
def test_exit_codes(
    options: list[str], code: int, ckpttool: Run, role: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call = ckpttool("merge-fsdp", role, *options)
    assert (call.code, call.out) == (code, "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 << 30),
        ("500M", 5 * 10**8),
        ("1.5kb", 1500),
        ("7000000", 7_000_000),
        ("7B", 7),
        ("2 tib", 2 << 40),
        ("9B", 9),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert size_of("--max-shard-size", text) == size


def test_a_bare_small_number_lacks_its_unit() -> None:
    with pytest.raises(UsageError) as caught:
        size_of("--max-shard-size", "5")
    assert "5GB" in caught.value.hint


@pytest.mark.parametrize("text", ["", "GB", "-1", "5iB", "5GBs", "1e3", "0", "0.4", "٣GB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError):
        size_of("--max-shard-size", text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "²", "99999999"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(UsageError):
        count_of("--threads", text)


def test_shards_in_two_directories_from_the_command_line(ckpttool: Run, role: Path, tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (role / "model_world_size_2_rank_1.pt").rename(tmp_path / "node1" / "model_world_size_2_rank_1.pt")
    assert ckpttool("merge-fsdp", role, "-o", tmp_path / "out").code == 4
    assert ckpttool("merge-fsdp", role, "--input", tmp_path / "node1", "-o", tmp_path / "out").code == 0


def test_progress_shows_bytes_rate_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 2.0, 2.1, 4.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    shown = io.StringIO()
    shown.isatty = lambda: True  # type: ignore[method-assign]
    with terminal.progress("written", terminal.console(shown), shown=True) as start:
        advance = start(4_000_000_000)
        for _ in range(3):
            advance(1_000_000_000)
    lines = shown.getvalue().split("\r\x1b[K")
    assert lines == [
        "",
        " 25%  written 1 GB of 4 GB, 500 MB/s, 6.0 s left",
        " 75%  written 3 GB of 4 GB, 750 MB/s, 1.3 s left",
        "",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.08, "80 ms"), (1.84, "1.8 s"), (9.97, "10 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (3900, "1 h 5 min")],
)
def test_time_spans(seconds: float, text: str) -> None:
    assert terminal.duration(seconds) == text


@pytest.mark.parametrize(("stop", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_nothing(stop: signal.Signals, code: int, tmp_path: Path) -> None:
    role = write_role(tmp_path / "role", {"w": torch.randn(3000, 3000)})
    slow = (
        "import os, sys, time\n"
        "from ckpttool.cli import entry\n"
        "pwrite = os.pwrite\n"
        "def slowly(*a):\n"
        "    sys.stderr.write('writing\\n'); sys.stderr.flush(); time.sleep(30)\n"
        "os.pwrite = slowly\n"
        f"sys.argv = ['ckpttool', 'merge-fsdp', {str(role)!r}, '-o', {str(tmp_path / 'out')!r}]\n"
        "entry()\n"
    )
    with subprocess.Popen([sys.executable, "-c", slow], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "writing\n"
        assert [name for name in os.listdir(tmp_path) if name.startswith("out.partial-")]
        process.send_signal(stop)
        _, told = process.communicate(timeout=20)
    assert process.returncode == code
    assert f"nothing was written to {tmp_path / 'out'}" in told
    assert sorted(os.listdir(tmp_path)) == ["role"]


def test_a_checkpoint_from_the_demo_is_suggested_and_merged(
    ckpttool: Run, fsdp_checkpoints: Path, tmp_path: Path
) -> None:
    """`inspect` names the command, and it works as it is printed."""
    run = builders.run_directory(tmp_path / "run", {"actor": fsdp_checkpoints / "fsdp2"}, (10,))
    told = json.loads(ckpttool("inspect", run / "global_step_10" / "actor", "--json").out)
    command = shlex.split(told["data"]["next"][0]["command"])
    assert command[:2] == ["ckpttool", "merge-fsdp"]
    command[-1] = str(tmp_path / command[-1])
    assert ckpttool(*command[1:]).code == 0
    assert (tmp_path / "global_step_10-actor-hf" / "model.safetensors").is_file()
