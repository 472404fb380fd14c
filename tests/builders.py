"""Tiny real checkpoints for the tests: built once by the real libraries, then kept in a cache.

`fsdp_checkpoints`, `lora_checkpoints`, `served_checkpoints`, `mesh_checkpoints`, `megatron_checkpoints`,
`converted_checkpoints` and `adapted_checkpoints` return a directory with one subdirectory a variant and the oracle of
each under `expected/`. It is shared: `copy` what a test wants to change.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITERS = Path(__file__).resolve().parent / "writers"
LIBRARIES = ("torch", "megatron-core", "transformers", "peft")
TIMEOUT = 300.0


def fsdp_checkpoints(cache: Path) -> Path:
    """FSDP role directories, what accelerate writes and plain DCP, by four ranks."""
    return _cached(cache, "fsdp")


def lora_checkpoints(cache: Path) -> Path:
    """FSDP role directories of PEFT models, and what PEFT itself makes of each."""
    return _cached(cache, "lora")


def mesh_checkpoints(cache: Path) -> Path:
    """The weights alone, by eight ranks: random placements, tensor parallelism inside FSDP and inside HSDP."""
    return _cached(cache, "meshes")


def megatron_checkpoints(cache: Path) -> Path:
    """Megatron role directories in both layouts of verl and a bare Megatron-LM one."""
    return _cached(cache, "megatron")


def converted_checkpoints(cache: Path) -> Path:
    """Megatron role directories of many model families and layouts, and what the models that wrote them answer."""
    return _cached(cache, "converted")


def adapted_checkpoints(cache: Path) -> Path:
    """Megatron role directories of models with adapters beside the base, and what they answer with them."""
    return _cached(cache, "adapted")


def served_checkpoints(cache: Path) -> Path:
    """FSDP role directories of models that are served under other names; `expected/` has their model directories."""
    return _cached(cache, "served")


def demo(out: Path) -> None:
    """The compact pair that ships inside the package: `OUT/fsdp` and `OUT/megatron`."""
    if out.exists():
        raise FileExistsError(f"{out}: remove it first")
    build(out, "demo")


def build(target: Path, what: str) -> None:
    """Run the writer of `what`; the target appears complete or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        run_writer(what, staging)
        staging.chmod(0o755)
        _move_in(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def run_writer(what: str, out: Path, timeout: float = TIMEOUT) -> None:
    """One process that forks the ranks; on failure its output is in the error."""
    process = _start(what, out)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as error:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise RuntimeError(f"{what} writer: no end after {timeout:g} s\n{output}") from error
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    if process.returncode != 0:
        raise RuntimeError(f"{what} writer: exit code {process.returncode}\n{output}")


def _start(what: str, out: Path) -> subprocess.Popen[str]:
    """In a session of its own, so that the ranks and their writers can be ended together.

    The ranks write to `.`: `.metadata` records the path it was saved to.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "tests.writers", what, "."],
        cwd=out,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _cached(cache: Path, what: str) -> Path:
    target = cache / f"{what}-{_fingerprint()}"
    if not target.is_dir():
        build(target, what)
    return target


def _fingerprint() -> str:
    """Changes with the writers' sources and with the versions of the libraries that write."""
    digest = hashlib.sha256()
    for path in sorted(WRITERS.glob("*.py")):
        if not path.name.startswith("test_"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for library in LIBRARIES:
        digest.update(f"{library} {version(library)}\n".encode())
    return digest.hexdigest()[:16]


def _move_in(staging: Path, target: Path) -> None:
    """Another session may have built the same meanwhile: then its copy stays."""
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise


# Runs composed of roles


def copy(source: Path, target: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(source, target)
    return target


def run_directory(
    root: Path, roles: dict[str, Path], steps: Iterable[int] = (10,), *, tracker: int | None = None
) -> Path:
    """A verl RL run: `global_step_N/{role}/`, `data.pt` and the tracker (the last step, or `tracker`)."""
    numbers = list(steps)
    for step in numbers:
        for name, role in roles.items():
            shutil.copytree(role, root / f"global_step_{step}" / name)
        write_data(root / f"global_step_{step}" / "data.pt", step)
    write_tracker(root, numbers[-1] if tracker is None else tracker)
    return root


def sft_directory(root: Path, role: Path, steps: Iterable[int] = (10,)) -> Path:
    """A verl SFT run: the step is the role directory, with `data_0.pt` in it."""
    numbers = list(steps)
    for step in numbers:
        folder = root / f"global_step_{step}"
        shutil.copytree(role, folder)
        write_data(folder / "data_0.pt", step)
    write_tracker(root, numbers[-1])
    return root


def write_data(path: Path, step: int) -> None:
    """The state of a StatefulDataLoader, as torch saves it."""
    import torch

    torch.save({"_snapshot": {"_snapshot_step": step}, "_steps_since_snapshot": 0}, path)


def write_tracker(root: Path, step: int | str) -> None:
    """`latest_checkpointed_iteration.txt`: the step, no newline."""
    (root / "latest_checkpointed_iteration.txt").write_text(str(step))


# Damage


def truncate(path: Path, fraction: float = 0.5) -> None:
    """Cut a file short, as a full disk or a killed writer leaves it."""
    os.truncate(path, int(path.stat().st_size * fraction))


def drop_rank(role: Path, rank: int) -> None:
    """Remove the three files of one FSDP rank, as on a node whose disk was not copied."""
    for path in role.glob(f"*_world_size_*_rank_{rank}.pt"):
        path.unlink()


def stale_ranks(role: Path, world_size: int) -> None:
    """Add the files of an earlier save with another world size: shards that must not be mixed in."""
    for path in sorted(role.glob("*_rank_0.pt")):
        stem = path.name.split("_world_size_")[0]
        for rank in range(world_size):
            shutil.copyfile(path, role / f"{stem}_world_size_{world_size}_rank_{rank}.pt")


# Large metadata


def synthetic_metadata(path: Path, ranks: int = 1024, chunks: int = 100_000) -> Path:
    """A `.metadata` as large as that of a real job, by torch's own classes; returns its path."""
    from tests.writers.metadata import write_metadata

    return write_metadata(path, ranks, chunks)


def main(arguments: list[str]) -> int:
    """`demo OUT` writes the pair for the package."""
    match arguments:
        case ["demo", out]:
            demo(Path(out).absolute())
            return 0
    sys.stderr.write("usage: python -m tests.builders demo OUT\n")
    return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
