"""Building, caching, composing and damaging checkpoints; `tests/writers` holds the tests of each variant."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import builders
from tests.writers.reading import part_of, read_metadata, shards


def test_a_failed_rank_is_quoted_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staging = tmp_path / "staging"
    staging.mkdir()
    (staging / "fsdp2").touch()
    monkeypatch.setattr("tests.builders.tempfile.mkdtemp", lambda **_: str(staging))
    with pytest.raises(RuntimeError, match=r"(?s)exit code 1.*Process 0 terminated.*FileExistsError"):
        builders.build(tmp_path / "target", "fsdp")
    assert not any(tmp_path.iterdir())


def test_a_writer_that_hangs_is_ended(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"no end after 0\.01 s"):
        builders.run_writer("fsdp", tmp_path, timeout=0.01)


def test_an_interrupted_build_leaves_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: str, out: Path) -> None:
        (out / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(builders, "run_writer", interrupted)
    with pytest.raises(KeyboardInterrupt):
        builders.fsdp_checkpoints(tmp_path)
    assert not any(tmp_path.iterdir())


def test_the_cache_follows_the_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    writers = shutil.copytree(builders.WRITERS, tmp_path / "writers")
    monkeypatch.setattr(builders, "WRITERS", writers)
    monkeypatch.setattr(builders, "run_writer", lambda what, _: built.append(what))
    first = builders.fsdp_checkpoints(tmp_path / "cache")
    assert builders.fsdp_checkpoints(tmp_path / "cache") == first
    (writers / "ranks.py").write_text("# changed")
    assert builders.fsdp_checkpoints(tmp_path / "cache") != first
    assert built == ["fsdp", "fsdp"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parent") / "demo"
    builders.demo(folder)
    return folder


def test_the_demo_is_small(demo: Path) -> None:
    files = [path for path in demo.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 520_000
    assert {path.relative_to(demo).parts[0] for path in files} == {"fsdp", "lora", "megatron"}
    assert len(shards(demo / "fsdp")) == 4
    keys = read_metadata(demo / "megatron/dist_ckpt").state_dict_metadata
    assert {part_of(key) for key in keys} == {"model", "optimizer", "rng_state"}
    with pytest.raises(FileExistsError, match="remove it first"):
        builders.demo(demo)


def test_the_demo_names_no_path_of_this_machine(demo: Path) -> None:
    for path in demo.rglob("*"):
        assert path.is_dir() or str(demo.parent).encode() not in path.read_bytes()


# Runs and damage


@pytest.fixture
def role(tmp_path: Path) -> Path:
    """Empty files under the names of a role of two ranks."""
    folder = tmp_path / "role"
    folder.mkdir()
    for kind in ("model", "optim", "extra_state"):
        for rank in range(2):
            (folder / f"{kind}_world_size_2_rank_{rank}.pt").write_bytes(b"0123456789")
    return folder


def test_a_run_has_its_steps_and_a_tracker(tmp_path: Path, role: Path) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": role, "critic": role}, (10, 20))
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "20"
    for step in (10, 20):
        folder = run / f"global_step_{step}"
        assert {path.name for path in folder.iterdir()} == {"actor", "critic", "data.pt"}
        assert torch.load(folder / "data.pt")["_snapshot"]["_snapshot_step"] == step
    assert len(list((run / "global_step_20/critic").iterdir())) == 6


def test_the_tracker_may_say_otherwise(tmp_path: Path, role: Path) -> None:
    run = builders.run_directory(tmp_path / "run", {"actor": role}, (10,), tracker=30)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "30"


def test_an_sft_step_is_the_role(tmp_path: Path, role: Path) -> None:
    run = builders.sft_directory(tmp_path / "run", role, (5,))
    assert (run / "global_step_5/data_0.pt").is_file()
    assert (run / "global_step_5/model_world_size_2_rank_0.pt").is_file()


def test_truncate_keeps_the_beginning(role: Path) -> None:
    path = role / "model_world_size_2_rank_0.pt"
    builders.truncate(path, 0.3)
    assert path.read_bytes() == b"012"


def test_drop_rank_takes_all_three_files(role: Path) -> None:
    builders.drop_rank(role, 1)
    assert {path.name.rpartition("_")[2] for path in role.iterdir()} == {"0.pt"}
    assert len(list(role.iterdir())) == 3


def test_stale_ranks_come_beside_the_others(role: Path) -> None:
    builders.stale_ranks(role, 3)
    assert len(list(role.glob("*_world_size_3_rank_*.pt"))) == 9
    assert len(list(role.glob("*_world_size_2_rank_*.pt"))) == 6


def test_synthetic_metadata_is_torchs_own(tmp_path: Path) -> None:
    path = builders.synthetic_metadata(tmp_path / ".metadata", ranks=8, chunks=20)
    metadata: Any = read_metadata(path.parent)
    assert len(metadata.storage_data) == 20
    assert [len(found.chunks) for found in metadata.state_dict_metadata.values()] == [8, 8, 4]
    assert [len(plan.items) for plan in metadata.all_local_plans] == [3, 3, 3, 3, 2, 2, 2, 2]
