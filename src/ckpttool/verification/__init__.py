"""``verify``: is it whole and intact? Every byte that has a checksum, every structure that has a rule."""

from __future__ import annotations

from pathlib import Path

from ckpttool.crew import Ready
from ckpttool.errors import NotACheckpoint, UsageError
from ckpttool.verification.asking import require
from ckpttool.verification.result import Options, Subset, Verification
from ckpttool.verification.running import Verifying
from ckpttool.verification.structure import look

__all__ = ["Options", "Subset", "Verification", "verify"]


def verify(path: Path | str, options: Options, ready: Ready = lambda _total: lambda _bytes: None) -> Verification:
    """Check a checkpoint, a step, a run or a file; nothing is unpickled but what ``inspect`` reads.

    ``ready`` is told how many bytes are to be read and returns what is told of each part. Faults are in the result.
    Raises :class:`NotACheckpoint`, :class:`UsageError` for a choice that makes no sense and
    :class:`~ckpttool.errors.CannotWrite` where ``integrity.json`` cannot be written.
    """
    if options.write_integrity and options.subset is not None:
        raise UsageError("--write-integrity with --read-subset: what is not read cannot be vouched for")
    require(options)
    try:
        structure = look(Path(path), options.step, options.role)
        return Verifying(structure, options).run(ready)
    except PermissionError as error:
        raise NotACheckpoint(f"{error.filename}: permission denied", code="unreadable") from error
