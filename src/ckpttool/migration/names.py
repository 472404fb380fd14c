"""The names in a role directory that a migration works with."""

from __future__ import annotations

from typing import Literal, get_args

from ckpttool import layout

Mode = Literal["hardlink", "symlink", "copy"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""How a tree gets the files of another one."""

TREES = (*layout.ARCHIVES, layout.HUGGINGFACE)
V1_NAMES = (layout.V1_ARCHIVE, layout.V1_HUGGINGFACE)

STAGING = layout.MIGRATION_STAGING
NEW, OLD, V1, GONE = (f"{STAGING}/{name}" for name in ("new", "old", "v1", "gone"))
"""Where trees are built; where trees, and the names of v1, lie before they are deleted."""

NEW_MANIFEST = f"{STAGING}/{layout.MANIFEST}"
