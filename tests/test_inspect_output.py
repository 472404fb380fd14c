"""What `ckpttool inspect` prints: for people at any width, for programs, and never what a file wants printed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests import builders
from tests.conftest import Call
from tests.looking import BOMBS, bombs, headers, repack, write_json, write_shards
from tests.writers.reading import expected

Run = Callable[..., Call]
ENVELOPE = ["ckpttool", "command", "ok", "data", "problems"]
ESCAPES = "\x1b[31mred\x1b]0;title\x07\x9b2J\r\n\u202e"


@pytest.fixture
def broken(tmp_path: Path, fsdp_checkpoints: Path) -> Path:
    """A role that has lost a rank."""
    role = builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "global_step_10/actor")
    builders.drop_rank(role, 3)
    return role


def test_json_is_one_object(ckpttool: Run, fsdp_checkpoints: Path) -> None:
    call = ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--json")
    assert (call.code, call.err) == (0, "")
    assert list(call.json) == ENVELOPE
    assert (call.json["ckpttool"], call.json["command"], call.json["ok"]) == (1, "inspect", True)
    assert call.json["data"]["kind"] == "fsdp"
    notes = call.json["problems"]
    assert [(n["code"], n["severity"]) for n in notes] == [("side-files-only", "note"), ("tokenizer-class", "note")]
    assert all(note.keys() == {"code", "message", "path", "hint", "severity"} for note in notes)


def test_json_has_everything(ckpttool: Run, fsdp_checkpoints: Path) -> None:
    data = ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--json").json["data"]
    assert data.keys() == {
        *("path", "kind", "title", "state", "evidence", "step", "role", "facts", "parameters", "dtypes", "disk"),
        *("contents", "modules", "manifest", "run", "next", "tensors", "ranks"),
    }
    assert data["ranks"] == {
        "world_size": 4,
        "present": [0, 1, 2, 3],
        "missing": [],
        "mesh": {"fsdp": 4},
        "placements": {"Shard(0) over fsdp=4": 27, "replicated": 3},
    }
    assert data["disk"].keys() == {"files", "apparent", "unique", "modified", "shared"}
    assert data["modules"]["parameters"] == data["parameters"] == 23_590
    assert data["tensors"] == []


def test_json_lists_tensors_when_asked(ckpttool: Run, fsdp_checkpoints: Path) -> None:
    data = ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--tensors", "--json").json["data"]
    stored = headers(fsdp_checkpoints / "expected/fsdp2.safetensors")
    assert {row["name"]: (row["dtype"], tuple(row["shape"])) for row in data["tensors"]} == stored


def test_json_of_an_error(ckpttool: Run, tmp_path: Path) -> None:
    call = ckpttool("inspect", tmp_path / "nothing", "--json")
    assert (call.code, list(call.json)) == (3, ENVELOPE)
    assert (call.json["ok"], call.json["data"]) == (False, None)
    assert "no such file" in call.json["problems"][0]["message"]
    assert "error:" in call.err


def test_strict_is_code_1_when_there_are_problems(ckpttool: Run, broken: Path) -> None:
    assert ckpttool("inspect", broken).code == 0
    call = ckpttool("inspect", broken, "--strict", "--json")
    assert (call.code, call.json["ok"]) == (1, False)
    assert call.json["data"]["state"] == "incomplete"


def test_strict_is_code_0_for_a_note(ckpttool: Run, fsdp_checkpoints: Path) -> None:
    assert ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--strict").code == 0


def test_strict_is_code_1_for_what_is_absent_or_has_no_weights(
    ckpttool: Run, tmp_path: Path, fsdp_checkpoints: Path
) -> None:
    for path in (tmp_path, fsdp_checkpoints / "fsdp2/huggingface"):
        assert (ckpttool("inspect", path).code, ckpttool("inspect", path, "--strict").code) == (0, 1)


@pytest.mark.parametrize("options", [["--strict"], ["--quiet"], ["--json"], []])
def test_code_3_is_not_softened(ckpttool: Run, tmp_path: Path, options: list[str]) -> None:
    assert ckpttool("inspect", tmp_path / "nothing", *options).code == 3


def test_quiet_prints_the_verdict_only(ckpttool: Run, broken: Path) -> None:
    call = ckpttool("inspect", broken, "--quiet")
    assert call.out.splitlines() == ["FSDP role directory: incomplete", str(broken)]


def test_the_whole_answer(ckpttool: Run, broken: Path) -> None:
    out = ckpttool("inspect", broken).out
    for words in (
        *("FSDP role directory: incomplete", "step", "10", "role", "actor", "fsdp=4", "Shard(0) over fsdp=4"),
        *(
            "23,590 in 30 tensors",
            "evidence",
            "3 of 4 model_world_size_4_rank_*.pt",
            "Contents",
            "optimizer",
            "Modules",
        ),
        *("layers.* (2)", "3 problems and 2 notes", "rank 3", "multi-node", "Next", "ckpttool inspect"),
    ):
        assert words in out
    assert "█" in out
    assert (
        out.index("FSDP role")
        < out.index("Contents")
        < out.index("Modules")
        < out.index("problems")
        < out.index("Next")
    )


def test_a_tree_of_many_modules_is_cut(ckpttool: Run, tmp_path: Path) -> None:
    save_file({f"m{n:02}.w": torch.zeros(2) for n in range(40)}, tmp_path / "model.safetensors")
    out = ckpttool("inspect", tmp_path).out
    assert "and 16 more modules" in out
    assert sum(line.strip().startswith("m") and " B" in line for line in out.splitlines()) >= 24


def test_bars_without_unicode(fsdp_checkpoints: Path) -> None:
    command = [sys.executable, "-m", "ckpttool", "inspect", str(fsdp_checkpoints / "fsdp2")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    out = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout
    assert b"####" in out
    assert out.isascii()


def test_a_run_is_shown_as_a_table(ckpttool: Run, tmp_path: Path, fsdp_checkpoints: Path) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": fsdp_checkpoints / "fsdp2"}, (10, 20))
    builders.drop_rank(run / "global_step_20/actor", 1)
    out = ckpttool("inspect", run).out
    assert "20 (latest_checkpointed_iteration.txt)" in out
    assert "latest complete  step 10" in out
    rows = [line.split() for line in out.splitlines() if "actor" in line and "FSDP" in line]
    assert [(row[0], row[1]) for row in rows] == [("10", "actor"), ("20", "actor")]
    assert ["complete" in rows[0], "incomplete" in rows[1]] == [True, True]


def test_shared_bytes_are_told(ckpttool: Run, tmp_path: Path, fsdp_checkpoints: Path) -> None:
    role = builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "role")
    (role / "kept").mkdir()
    for path in role.glob("*.pt"):
        os.link(path, role / "kept" / path.name)
    out = ckpttool("inspect", role).out
    assert "counting linked files once" in out
    (line,) = [line for line in out.splitlines() if "shared by hard links" in line]
    assert "., kept" in line
    assert "12 files" in line


def test_every_tensor_is_listed_with_all_that_is_asked(ckpttool: Run, fsdp_checkpoints: Path) -> None:
    call = ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--tensors")
    stored = expected(fsdp_checkpoints, "fsdp2")
    for name, tensor in stored.items():
        (line,) = [line for line in call.out.splitlines() if line.split()[:1] == [name]]
        assert str(tensor.dtype).removeprefix("torch.") in line.split()
        assert f" {list(tensor.shape)} " in line
        assert f" {tensor.nbytes:,} " in line
        assert "Shard(0) over fsdp=4" in line or "replicated" in line


@pytest.mark.parametrize("pattern", ["*norm*", "lm_head.weight", "*.layers.[1].*"])
def test_a_glob_selects_tensors(ckpttool: Run, fsdp_checkpoints: Path, pattern: str) -> None:
    data = ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--tensors", pattern, "--json").json["data"]
    wanted = {name for name in expected(fsdp_checkpoints, "fsdp2") if fnmatchcase(name, pattern)}
    assert {row["name"] for row in data["tensors"]} == wanted != set()


def test_the_next_command_can_be_typed(
    ckpttool: Run, tmp_path: Path, fsdp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the working directory, and quoted for a shell."""
    builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "my $role")
    monkeypatch.chdir(tmp_path)
    merge, look = [told["command"] for told in ckpttool("inspect", "my $role", "--json").json["data"]["next"]]
    assert merge == "ckpttool merge-fsdp 'my $role' -o 'my $role-hf'"
    assert ckpttool(*shlex.split(merge)[1:]).code == 0
    assert look == "ckpttool inspect 'my $role' --tensors"
    call = ckpttool(*shlex.split(look)[1:])
    assert (call.code, "lm_head.weight" in call.out) == (0, True)


def test_without_a_path_it_is_the_working_directory(
    ckpttool: Run, fsdp_checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(fsdp_checkpoints / "fsdp2")
    assert ckpttool("inspect", "--json").json["data"]["kind"] == "fsdp"


def test_a_glob_that_selects_nothing(ckpttool: Run, fsdp_checkpoints: Path) -> None:
    call = ckpttool("inspect", fsdp_checkpoints / "fsdp2", "--tensors", "*nothing*")
    assert (call.code, "no tensor has such a name" in call.out) == (0, True)


def test_tensors_of_a_run_are_those_of_its_one_checkpoint(
    ckpttool: Run, tmp_path: Path, fsdp_checkpoints: Path
) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": fsdp_checkpoints / "lora-only"}, (10,))
    assert "lora_A" in ckpttool("inspect", run, "--tensors").out
    builders.copy(run / "global_step_10", run / "global_step_20")
    call = ckpttool("inspect", run, "--tensors", "*lora_A*")
    assert (call.code, call.out) == (2, "")
    for step in (10, 20):
        assert f"{run}/global_step_{step}/actor --tensors '*lora_A*'" in call.err


def test_chunks_and_the_tree_are_listed(ckpttool: Run, megatron_checkpoints: Path) -> None:
    out = ckpttool(
        "inspect", megatron_checkpoints / "dense-v2", "--tensors", "decoder.layers.mlp.linear_fc1.weight"
    ).out
    (line,) = [line for line in out.splitlines() if line.startswith("decoder.layers.mlp.linear_fc1.weight")]
    assert "model/dist_ckpt: " in line
    assert line.endswith(" chunks")


def in_a_terminal(width: int, *arguments: object) -> str:
    """The command in a process whose output believes to be a terminal of this width."""
    environment = {**os.environ, "COLUMNS": str(width), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "ckpttool", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60).stdout


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.mark.parametrize("width", [80, 160])
def test_lines_fit_the_terminal(megatron_checkpoints: Path, tmp_path: Path, width: int) -> None:
    """Commands to type, paths and lists of tensors stay on one line; all else is wrapped."""
    role = builders.copy(megatron_checkpoints / "dense-v2", tmp_path / "role")
    (role / "optimizer/dist_ckpt/__3_1.distcp").unlink()
    text = in_a_terminal(width, "inspect", role)
    assert "\x1b[" in text
    long = [line for line in plain(text).splitlines() if len(line) > width]
    assert [line for line in long if str(role) not in line and "ckpttool inspect" not in line] == []


def test_piped_output_has_no_colour(fsdp_checkpoints: Path) -> None:
    command = [sys.executable, "-m", "ckpttool", "inspect", str(fsdp_checkpoints / "fsdp2")]
    environment = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "COLUMNS")}
    done = subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
    assert b"\x1b" not in done.stdout
    assert done.stderr == b""


def _hostile_names(folder: Path) -> None:
    save_file({f"layers.{ESCAPES}.w": torch.zeros(2)}, folder / "model.safetensors")
    write_json(folder / "config.json", {"model_type": ESCAPES, "architectures": [ESCAPES]})


def _hostile_shards(folder: Path) -> None:
    write_shards(folder, lambda rank, _: {f"a{ESCAPES}": torch.zeros(1 + rank)})


def _hostile_tracker(folder: Path) -> None:
    (folder / "global_step_1").mkdir()
    builders.write_tracker(folder, ESCAPES)


def _hostile_manifest(folder: Path) -> None:
    (folder / "optimizer/dist_ckpt").mkdir(parents=True)
    (folder / "optimizer/dist_ckpt" / f"__0_0.distcp{ESCAPES}").write_text("")
    content = {"save_contents": [ESCAPES], "backend": {ESCAPES: True}, "contents": {ESCAPES: {"path": ESCAPES}}}
    write_json(folder / "ckpt_contents.json", {"schema_version": 2, **content})


def _hostile_directory(folder: Path) -> None:
    (folder / "global_step_1" / ESCAPES.replace("/", "")).mkdir(parents=True)
    builders.write_tracker(folder, 1)


@pytest.mark.parametrize("options", [[], ["--tensors"], ["--quiet"], ["--json"], ["--color", "always"]])
@pytest.mark.parametrize(
    "write", [_hostile_names, _hostile_shards, _hostile_tracker, _hostile_manifest, _hostile_directory]
)
def test_names_from_files_are_escaped(
    ckpttool: Run, tmp_path: Path, write: Callable[[Path], None], options: list[str]
) -> None:
    """Neither colours nor titles, neither C1 controls nor overrides of the direction of text."""
    write(tmp_path)
    call = ckpttool("inspect", tmp_path, *options)
    assert call.code == 0
    for control in ("\x1b]", "\x1b[31mred", "\x07", "\x9b", "\r", "\u202e"):
        assert control not in call.out + call.err
    if "--quiet" not in options and not (write is _hostile_tracker and "--tensors" in options):
        assert "red" in call.out


def test_a_path_with_escapes_is_escaped_in_the_error(ckpttool: Run, tmp_path: Path) -> None:
    call = ckpttool("inspect", tmp_path / ESCAPES)
    assert (call.code, "\x1b" in call.err, "\\x1b[31mred" in call.err) == (3, False, True)


def test_names_that_are_no_text(ckpttool: Run, tmp_path: Path) -> None:
    """Surrogates in JSON, bytes in file names: neither output breaks."""
    (tmp_path / "config.json").write_text(r'{"model_type": "\ud800"}')
    (tmp_path / os.fsdecode(b"tokenizer\xff.model")).write_text("")
    for options in ([], ["--json"]):
        call = ckpttool("inspect", tmp_path, *options)
        assert call.code == 0
        call.out.encode()


@pytest.mark.parametrize("way", BOMBS)
def test_a_hostile_checkpoint_is_code_7(ckpttool: Run, tmp_path: Path, fsdp_checkpoints: Path, way: str) -> None:
    marker, role = tmp_path / "it-ran", builders.copy(fsdp_checkpoints / "fsdp2", tmp_path / "role")
    repack(role / "model_world_size_4_rank_2.pt", lambda _: bombs(marker)[way])
    call = ckpttool("inspect", role)
    assert (call.code, call.out) == (7, "")
    assert "model_world_size_4_rank_2.pt" in call.err
    assert "hint:" in call.err
    envelope = ckpttool("inspect", role, "--json")
    assert (envelope.code, envelope.json["ok"], envelope.json["data"]) == (7, False, None)
    assert not marker.exists()


_WITHOUT = """
import contextlib, io, json, sys
from ckpttool.cli import main
for path in json.loads(sys.stdin.read()):
    assert main(["inspect", "--tensors", path]) in (0, 2), path  # 2: several checkpoints below
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["inspect", "--json", path]) == 0, path
    answer = json.loads(out.getvalue())
    assert answer["ok"] and answer["data"]["evidence"], path
heavy = {"torch", "megatron", "transformers", "numpy", "safetensors", "pydantic"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_no_kind_needs_torch_or_numpy(data: Path, fsdp_checkpoints: Path, megatron_checkpoints: Path) -> None:
    """Cases 5, 9, 12, 61: headers and indexes only, in a process of its own."""
    kinds = [
        *sorted((data / "fsdp").glob("torch*")),
        *sorted((data / "megatron").glob("mcore*")),
        *(path for path in sorted(fsdp_checkpoints.iterdir()) if path.is_dir()),
        *(path for path in sorted(megatron_checkpoints.iterdir()) if path.is_dir()),
        megatron_checkpoints / "expected/dense-hf",
        megatron_checkpoints / "megatron-lm/iter_0000010",
        fsdp_checkpoints / "dcp/step-10",
        fsdp_checkpoints / "fsdp2/model_world_size_4_rank_0.pt",
        fsdp_checkpoints / "fsdp2/huggingface",
    ]
    paths = json.dumps([str(path) for path in kinds])
    command = [sys.executable, "-c", _WITHOUT]
    done = subprocess.run(command, input=paths, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
