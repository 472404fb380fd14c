"""A byte of a zip's local header says where the elements of a tensor begin: damaged, it would shift them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from ckpttool.errors import CkpttoolError
from ckpttool.merging import Options, merge
from tests.merged import write_role


@pytest.mark.parametrize("by", [-64, -16, 2, 8, 16, 60])
@pytest.mark.parametrize("field", [26, 28])
def test_a_shifted_storage_is_noticed(field: int, by: int, tmp_path: Path) -> None:
    """The length of the name or of the extra field is another one."""
    write_role(tmp_path / "role", {"w": torch.arange(4096.0).reshape(64, 64), "v": torch.ones(64, 8)})
    path = sorted((tmp_path / "role").glob("*.pt"))[0]
    raw = bytearray(path.read_bytes())
    at = raw.index(b"PK\x03\x04", raw.index(b"/data/0") - 60)
    (length,) = struct.unpack_from("<H", raw, at + field)
    if length + by < 0:
        pytest.skip("no such length")
    struct.pack_into("<H", raw, at + field, length + by)
    path.write_bytes(raw)
    with pytest.raises(CkpttoolError) as caught:
        merge(tmp_path / "role", tmp_path / "out", Options())
    assert caught.value.exit_code == 4
    assert not (tmp_path / "out").exists()
