"""``watch``: follow a run, and act once on each checkpoint when it is finished."""

from __future__ import annotations

from ckpttool.watching.beginning import check_run
from ckpttool.watching.result import Notice, Status
from ckpttool.watching.running import Watcher
from ckpttool.watching.settings import Settings

__all__ = ["Notice", "Settings", "Status", "Watcher", "check_run"]
