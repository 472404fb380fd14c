"""Damaged shards of every version: each merge ends in an error with an exit code of the table, or in an output."""

from __future__ import annotations

import random
import shutil
import zipfile
from collections import Counter
from pathlib import Path

from ckpttool.errors import CkpttoolError
from ckpttool.merging import Options, merge
from tests.merged import leftovers, tensors_in
from tests.mutations import DATA, mutated, scrambled

ROLES = sorted(path for path in (DATA / "fsdp").iterdir() if path.is_dir())
TIMES = 600


def damage(path: Path, chance: random.Random) -> None:
    """Change the pickle, any bytes of the file, or its length."""
    how = chance.randrange(3)
    if how == 0:
        with zipfile.ZipFile(path) as old:
            records = [(entry.filename, old.read(entry)) for entry in old.infolist()]
        with zipfile.ZipFile(path, "w") as new:
            for name, data in records:
                new.writestr(name, mutated(data, chance) if name.endswith("data.pkl") else data)
    elif how == 1:
        path.write_bytes(scrambled(path.read_bytes(), chance))
    else:
        path.write_bytes(path.read_bytes()[: chance.randrange(path.stat().st_size)])


def outcome(role: Path, output: Path, chance: random.Random) -> str:
    """What a merge comes to; exceptions that are not ours are the test's."""
    error = attempt(role, output, Options(dtype=chance.choice([None, "bf16", "fp16"])))
    if error is None:
        assert len(tensors_in(output)) == 16
        return "merged"
    assert error.exit_code in (3, 4, 5, 6, 7)
    assert not output.exists()
    return type(error).__name__


def attempt(role: Path, output: Path, options: Options) -> CkpttoolError | None:
    try:
        merge(role, output, options)
    except CkpttoolError as error:
        return error
    return None


def test_damaged_shards_end_in_an_error_or_in_an_output(tmp_path: Path) -> None:
    """Nothing else is left, and the shards are as they were."""
    outcomes: Counter[str] = Counter()
    output = tmp_path / "out"
    for seed in range(TIMES):
        chance = random.Random(seed)
        role = shutil.copytree(chance.choice(ROLES), tmp_path / "role")
        damage(chance.choice(sorted(role.glob("*.pt"))), chance)
        before = {path.name: path.read_bytes() for path in role.iterdir()}
        outcomes[outcome(role, output, chance)] += 1
        assert {path.name: path.read_bytes() for path in role.iterdir()} == before
        assert leftovers(output) == []
        for made in (role, output):
            shutil.rmtree(made, ignore_errors=True)
    assert set(outcomes) == {"BrokenCheckpoint", "Refused", "merged"}
