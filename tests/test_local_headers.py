"""A byte of a zip's local header says where the elements of a tensor begin: damaged, it would shift them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from ckpttool.errors import CkpttoolError
from ckpttool.merging import Options, merge
from tests.merged import write_role


@pytest.mark.parametrize(
    ("field", "by"),
    [(26, -4), (26, 2), (26, 8), (26, 16), (26, 60), (28, -8), (28, 2), (28, 8), (28, 16), (28, 60)],
)
def test_a_shifted_storage_is_noticed(field: int, by: int, tmp_path: Path) -> None:
    """The length of the name or of the extra field is another one."""
    write_role(tmp_path / "role", {"w": torch.arange(4096.0).reshape(64, 64), "v": torch.ones(64, 8)})
    path = sorted((tmp_path / "role").glob("*.pt"))[0]
    raw = bytearray(path.read_bytes())
    at = raw.index(b"PK\x03\x04", raw.index(b"/data/0") - 60)
    (length,) = struct.unpack_from("<H", raw, at + field)
    struct.pack_into("<H", raw, at + field, length + by)
    path.write_bytes(raw)
    with pytest.raises(CkpttoolError) as caught:
        merge(tmp_path / "role", tmp_path / "out", Options())
    assert caught.value.exit_code == 4
    assert not (tmp_path / "out").exists()
