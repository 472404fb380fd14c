"""Files that claim or hold more than a reader may follow, and nothing else: made fast, with holes for bytes."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable
from pathlib import Path

FULL = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
"""What stands in the end of a zip for the numbers of zip64."""


def zip_of(path: Path, records: Iterable[tuple[bytes, bytes]], *, claims: int = 0) -> None:
    """A stored zip without checksums; with ``claims`` each record has so many bytes, all of them holes."""
    central, at = [], 0
    with path.open("wb") as file:
        for name, data in records:
            size = claims or len(data)
            file.write(struct.pack("<4s5H3L2H", b"PK\3\4", 0, 0, 0, 0, 0, 0, size, size, len(name), 0) + name + data)
            fields = (b"PK\1\2", *(0,) * 7, size, size, len(name), *(0,) * 5, at)
            central.append(struct.pack("<4s6H3L5H2L", *fields) + name)
            at += 30 + len(name) + size
            file.seek(at)
        listed, count = b"".join(central), len(central)
        end64 = struct.pack("<4sQHHLLQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(listed), at)
        locator = struct.pack("<4sLQL", b"PK\6\7", 0, at + len(listed), 1)
        file.write(listed + end64 + locator + struct.pack("<4sHHHHLLH", b"PK\5\6", 0, 0, *FULL, 0))


def shard(folder: Path) -> Path:
    """The name of a role's only shard."""
    return folder / "model_world_size_1_rank_0.pt"


def safetensors(path: Path, header: bytes, data: int = 0) -> None:
    """A file with this header and so many bytes of elements, all of them holes."""
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + data)


def make_deep(folder: Path, name: str, depth: int) -> None:
    """Make so many directories in each other, step by step, and a file in the last."""
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(folder)
        for _ in range(depth):
            os.makedirs(name, exist_ok=True)  # noqa: PTH103
            os.chdir(name)
        Path("file").write_bytes(b"x")
    finally:
        os.fchdir(here)
        os.close(here)
