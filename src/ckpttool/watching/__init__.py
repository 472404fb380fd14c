"""``watch``: follow a run, and act once on each checkpoint when it is finished."""

from __future__ import annotations

from ckpttool.watching.result import Notice, Status
from ckpttool.watching.running import Watcher, check_run
from ckpttool.watching.settings import Settings

__all__ = ["Notice", "Settings", "Status", "Watcher", "check_run"]
