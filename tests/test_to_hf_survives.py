"""A conversion ends with a complete output or none, touches nothing of the archive, and loads no framework."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpttool.converting import Options, convert
from tests.killing import convert_killed
from tests.merged import fingerprint, leftovers, tensors_in, unequal
from tests.synthetic import write_role


@pytest.mark.parametrize("before", [False, True])
def test_killed_at_every_call(before: bool, tmp_path: Path) -> None:
    """Transposed experts, two files: whole or absent, and whole the next time; the archive stays as it is."""
    role, output = tmp_path / "role", tmp_path / "out"
    written = write_role(role, "gpt_oss", config={"num_hidden_layers": 1})
    size = sum(value.nbytes for value in written.state.values())
    options: dict[str, Any] = {"max_shard_size": size // 2 + 1000}
    archive = fingerprint(role)
    files = {file.name for file in convert(role, output, Options(**options, dry_run=True)).files}
    assert {"config.json", "model.safetensors.index.json", "model-00002-of-00003.safetensors"} < files
    seen, at, came = set(), 0, True
    while came:
        at += 1
        came = convert_killed(role, output, options, at, before=before)
        seen.add(output.exists())
        if output.exists():
            assert {path.name for path in output.iterdir()} == files
            assert unequal(tensors_in(output), written.state) == set()
            subprocess.run(["rm", "-r", output], check=True)
    assert seen == {False, True}
    assert at > 20
    convert(role, output, Options(**options))
    assert leftovers(output) == []
    assert fingerprint(role) == archive


def test_no_framework_is_loaded(tmp_path: Path) -> None:
    write_role(tmp_path / "role", "qwen3_moe")
    code = (
        "import sys\nfrom ckpttool.cli import main\n"
        "code = main(['to-hf', sys.argv[1], '-o', sys.argv[2], '--dtype', 'bf16'])\n"
        "assert not {'torch', 'transformers', 'megatron', 'pydantic'} & set(sys.modules)\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "role", tmp_path / "out"], check=False)
    assert done.returncode == 0
