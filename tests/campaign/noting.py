"""What a watch does in the campaign where no program may be run: it leaves a file for each step that it is told of."""

from __future__ import annotations

from pathlib import Path

from ckpttool.callbacks import CheckpointCallback, CheckpointEvent
from tests.campaign.followed import FIRED


class Noting(CheckpointCallback):
    """Leaves the number of the step beside the run."""

    def on_save(self, event: CheckpointEvent, **_more: object) -> None:
        (Path(event.run).parent / FIRED / f"{event.step}").touch()
