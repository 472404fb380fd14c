"""What the tests of `migrate` share: small role directories, what verl's script leaves, and photographs of both."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ckpttool import layout
from ckpttool.cli import main
from ckpttool.migration import Migration, Options, migrate
from ckpttool.migration.result import RolePlan
from tests.conftest import Call
from tests.looking import save_dcp, write_json

TREES = (*layout.ARCHIVES, layout.HUGGINGFACE)
V1_NAMES = ("dist_ckpt", "huggingface")
MODES = ("hardlink", "symlink", "copy")
STAGING = layout.MIGRATION_STAGING

Photograph = dict[str, tuple[str, int, int]]


def photograph(root: Path, names: Iterable[str] = ("",)) -> Photograph:
    """Every file and link below: its bytes, time and mode; of the manifest, which returns as a new file, no time.

    What a link to a directory leads to is not walked.
    """
    found: Photograph = {}
    for path in (path for name in names for path in sorted((root / name).rglob("*"))):
        info = path.lstat()
        if path.is_symlink():
            found[str(path.relative_to(root))] = (f"-> {path.readlink()}", 0, 0)
        elif path.is_file():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            time = 0 if path == root / layout.MANIFEST else info.st_mtime_ns
            found[str(path.relative_to(root))] = (digest, time, info.st_mode)
        else:
            found[str(path.relative_to(root))] = ("directory", 0, info.st_mode)
    return found


def source(role: Path) -> Photograph:
    """The photograph of everything that a migration must not touch."""
    return photograph(role, V1_NAMES)


def outcome(role: Path) -> Photograph:
    """The photograph of a role without what differs from run to run: the time in the manifest."""
    found = photograph(role)
    if (role / layout.MANIFEST).is_file():
        found[layout.MANIFEST] = (json.dumps(timeless(manifest(role))), *found[layout.MANIFEST][1:])
    return found


def manifest(role: Path) -> dict[str, Any]:
    found = json.loads((role / layout.MANIFEST).read_text())
    assert isinstance(found, dict)
    return found


def timeless(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "migration": {**found.get("migration", {}), "time": ""}}


def move(path: Path, **options: Any) -> Migration:
    """Migrate by the operation itself."""
    return migrate(path, Options(**options))


def only(path: Path, **options: Any) -> RolePlan:
    """Migrate the one role at or below a path."""
    (plan,) = move(path, **options).roles
    return plan


def tiny_role(role: Path, *, model: bool = True, rng: bool = True) -> Path:
    """A v1 role as small as can be, by torch: weights, moments, an RNG state."""
    state = {"optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(4)}
    if model:
        state["decoder.final_layernorm.weight"] = torch.arange(4.0)
    if rng:
        state["rng_state/shard_0_1"] = torch.zeros(2)
    role.mkdir(parents=True)
    save_dcp(role / "dist_ckpt", state, backend="torch_dist")
    config = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 4}
    write_json(role / "huggingface/config.json", config)
    return role


def verls_script(role: Path, mode: str = "hardlink", trees: Iterable[str] = layout.ARCHIVES) -> Path:
    """Leave what verl 0.9.1's own script leaves: trees for everything, `huggingface/` moved, no manifest."""
    for tree in trees:
        (role / tree).parent.mkdir(exist_ok=True)
        if mode == "symlink":
            (role / tree).symlink_to((role / "dist_ckpt").resolve())
        else:
            copy = os.link if mode == "hardlink" else shutil.copy2
            shutil.copytree(role / "dist_ckpt", role / tree, copy_function=copy)
    (role / "model").mkdir(exist_ok=True)
    (role / "huggingface").rename(role / layout.HUGGINGFACE)
    if mode == "copy":
        shutil.rmtree(role / "dist_ckpt")
    return role


def reachable(before: Photograph, role: Path) -> bool:
    """Whether every file of layout v1 is still there in one piece: under its name, in a tree, or set aside."""
    aside = [f"{STAGING}/{where}" for where in ("v1", "gone")]
    places = {
        "dist_ckpt": ("dist_ckpt", *layout.ARCHIVES, *(f"{folder}/dist_ckpt" for folder in aside)),
        "huggingface": ("huggingface", layout.HUGGINGFACE, *(f"{folder}/huggingface" for folder in aside)),
    }
    return all(any(same_files(role / place, part(before, name)) for place in places[name]) for name in V1_NAMES)


def part(found: Photograph, name: str) -> Photograph:
    """The files of one directory in a photograph, told from there."""
    return {path.removeprefix(f"{name}/"): value for path, value in found.items() if path.startswith(f"{name}/")}


def same_files(folder: Path, wanted: Photograph) -> bool:
    """Whether a directory (or what it links to) holds just these files."""
    return (photograph(folder.resolve()) if folder.is_dir() else {}) == wanted


def clone(role: Path, step: Path) -> Path:
    """A copy in another step that keeps times, modes, and which names are one file; verl's links lead into it."""
    target = step / role.name
    seen: dict[tuple[int, int], str] = {}

    def copy(name: str, new: str) -> None:
        info = Path(name).stat()
        first = seen.setdefault((info.st_dev, info.st_ino), new)
        if first == new:
            shutil.copy2(name, new)
        else:
            os.link(first, new)

    shutil.copytree(role, target, symlinks=True, copy_function=copy)
    for link in [path for path in target.rglob("*") if path.is_symlink() and path.readlink().is_absolute()]:
        link.unlink()
        link.symlink_to(target / "dist_ckpt")
    return target


def as_nobody(*arguments: object) -> Call:
    """Run a command line in a child that has dropped root."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code, out = 70, io.StringIO()
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                code = main([str(argument) for argument in arguments])
            os.write(writing, out.getvalue().encode())
        finally:
            os._exit(code)
    os.close(writing)
    with open(reading, encoding="utf-8") as pipe:
        text = pipe.read()
    return Call(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text, text)
