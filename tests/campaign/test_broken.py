"""The campaign of damaged checkpoints with a fixed seed: at least 2,000 of them, and none does harm."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaign import extremes
from tests.campaign.broken import campaign
from tests.campaign.damages import WAYS
from tests.campaign.extremes import CASES

TIMES = 500


@pytest.mark.parametrize("seed", range(4))
def test_what_is_damaged_ends_in_an_exit_code_and_leaves_nothing(seed: int, open_folder: Path) -> None:
    found = campaign(seed, TIMES, open_folder)
    assert not found.faults, str(found)
    assert found.trials > 2 * TIMES
    assert len({words[0] for words in found.counts}) > len(set(WAYS))
    assert {words[-1] for words in found.counts} >= {"0", "1", "3", "4", "5"}


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_is_enormous_takes_little(name: str, tmp_path: Path) -> None:
    found = extremes.campaign(tmp_path, (name,))
    assert not found.faults, str(found)
    assert found.trials >= 3
