"""Fixtures that every test may use: the checkpoints that real libraries wrote, and the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpttool.cli import main
from tests import builders
from tests.merged import config_of, tensors_in
from tests.producers import sources_of

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def fsdp_checkpoints(pytestconfig: pytest.Config) -> Path:
    """Directories of FSDP shards, one a variant; shared by all tests: copy before you change one."""
    assert pytestconfig.cache is not None
    return builders.fsdp_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def lora_checkpoints(pytestconfig: pytest.Config) -> Path:
    """FSDP shards of PEFT models, with PEFT's own merges, answers and directories; shared by all tests."""
    assert pytestconfig.cache is not None
    return builders.lora_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def mesh_checkpoints(pytestconfig: pytest.Config) -> Path:
    """Shards of eight ranks on many meshes, without a model's configuration; shared by all tests."""
    assert pytestconfig.cache is not None
    return builders.mesh_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def megatron_checkpoints(pytestconfig: pytest.Config) -> Path:
    """Megatron checkpoints as verl and Megatron-LM lay them out; shared by all tests."""
    assert pytestconfig.cache is not None
    return builders.megatron_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def converted_checkpoints(pytestconfig: pytest.Config) -> Path:
    """Megatron checkpoints of each family that can be converted, with logits; shared by all tests."""
    assert pytestconfig.cache is not None
    return builders.converted_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def adapted_checkpoints(pytestconfig: pytest.Config) -> Path:
    """Megatron checkpoints with adapters beside the model, and logits with them; shared by all tests."""
    assert pytestconfig.cache is not None
    return builders.adapted_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture(scope="session")
def served_checkpoints(pytestconfig: pytest.Config) -> Path:
    """FSDP shards of models whose saved names are others than those of training; shared by all tests."""
    assert pytestconfig.cache is not None
    return builders.served_checkpoints(pytestconfig.cache.mkdir("checkpoints"))


@pytest.fixture
def mixtral(served_checkpoints: Path) -> Path:
    """FSDP shards of Mixtral: every kind of rule but a transposition is needed for it."""
    return served_checkpoints / "mixtral"


@pytest.fixture
def mixtral_hub(served_checkpoints: Path) -> dict[str, Any]:
    """What Mixtral has on the hub."""
    return tensors_in(served_checkpoints / "expected" / "mixtral")


@pytest.fixture
def mixtral_config(served_checkpoints: Path) -> dict[str, Any]:
    """The config of Mixtral as transformers writes it."""
    return config_of(served_checkpoints / "expected" / "mixtral")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a file system in memory, with options of `mount`; skips the test where that is not permitted."""
    place = tmp_path / "disk"

    def mount(options: str) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting is not permitted here")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", str(place)], check=True)


@pytest.fixture
def no_checksums() -> Iterator[None]:
    """torch records no CRC of what it saves."""
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


@pytest.fixture
def data() -> Path:
    """Small checkpoints written by many versions of torch and megatron-core."""
    return DATA


@pytest.fixture
def lives(producer: str, fsdp_checkpoints: Path, megatron_checkpoints: Path, data: Path) -> list[dict[str, Path]]:
    """What a program that trains saves in two lives, by role; a test is parametrised with its name."""
    return sources_of(producer, fsdp_checkpoints, megatron_checkpoints, data)


@dataclass(frozen=True)
class Call:
    """What one command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The envelope that ``--json`` printed."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def ckpttool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Call]:
    """Run a command line in this process."""

    def run(*arguments: object) -> Call:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        return Call(code, streams.out, streams.err)

    return run


@pytest.fixture
def merge_lora(ckpttool: Callable[..., Call], tmp_path: Path) -> Callable[..., Call]:
    """Run `merge-fsdp` on a directory, to `tmp_path / "out"`; a failure leaves nothing."""

    def run(folder: Path, *more: object) -> Call:
        before = sorted(tmp_path.rglob("*"))
        call = ckpttool("merge-fsdp", folder, "-o", tmp_path / "out", *more)
        assert not call.code or sorted(tmp_path.rglob("*")) == before
        return call

    return run


@pytest.fixture
def plain_lora(lora_checkpoints: Path, tmp_path: Path) -> Path:
    """A role to be changed: one adapter on two projections of each layer, verl's file beside the shards."""
    return builders.copy(lora_checkpoints / "plain", tmp_path / "step" / "role")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A directory that everyone can reach; pytest's own are closed."""
    path = Path(tempfile.mkdtemp(prefix="ckpttool-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)
