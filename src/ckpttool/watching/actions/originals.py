"""``--verify`` and ``--migrate``: what is done with the checkpoint itself."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckpttool.callbacks import CheckpointEvent
from ckpttool.watching.actions import ActionFailed


@dataclass(frozen=True, slots=True)
class Verify:
    """Every byte that has a checksum is read, by one thread: the other cores are the trainer's."""

    label: ClassVar[str] = "verify"

    def run(self, event: CheckpointEvent) -> str:
        """Check it as ``ckpttool verify`` does; raises :class:`ActionFailed` with every fault."""
        from ckpttool.formats.findings import counted, size
        from ckpttool.verification import Options, verify

        found = verify(event.path, Options())
        if found.exit_code:
            raise ActionFailed(
                f"verify: {event.name} has {counted(len(found.faults), 'fault')}",
                status=found.exit_code,
                hint=f"More about it: ckpttool verify {shlex.quote(event.original)}",
                problems=found.faults,
            )
        return f"verify: sound ({size(found.bytes_read)} read)"


@dataclass(frozen=True, slots=True)
class Migrate:
    """A role of verl's Megatron layout v1 gets the trees of v2, as hard links; others are left alone."""

    label: ClassVar[str] = "migrate"

    def run(self, event: CheckpointEvent) -> str:
        """Migrate the checkpoint itself, not a tree of links to it; raises what the command raises."""
        from ckpttool.formats.findings import counted
        from ckpttool.migration import Options, migrate

        done = [plan for plan in migrate(Path(event.original), Options()).roles if plan.action not in _NOTHING]
        if not done:
            return "migrate: nothing to do"
        return f"migrate: {counted(sum(len(plan.trees) for plan in done), 'tree')} of layout v2"


_NOTHING = ("nothing", "leave")
