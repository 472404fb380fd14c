"""Strange things in the places of steps, roles and trackers: a watch acts on the sound step, and on nothing else."""

from __future__ import annotations

from pathlib import Path

from tests.campaign.strange import CASES, campaign


def test_a_watch_goes_on_beside_what_is_strange(open_folder: Path) -> None:
    found = campaign(open_folder)
    assert not found.faults, str(found)
    assert found.trials == 2 * len(CASES) > 100
