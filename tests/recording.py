"""What tests give to ``--exec``: reports the event and every byte of the checkpoint. ``LOG [WAIT_FOR_FILE]``.

It tells ``began`` first; with a second argument, it goes on when that file is there. A file ``LOG.fail`` is the code
that it ends with.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from tests.trainer import DEADLINE, contents, report


def main(log: Path, *waits: str) -> int:
    event = json.load(sys.stdin)
    report(log, {**event, "what": "began", "pid": os.getpid()})
    ends = time.monotonic() + DEADLINE
    while not all(Path(path).exists() for path in waits) and time.monotonic() < ends:
        time.sleep(0.01)
    report(log, {**event, "what": "fired", "files": contents(Path(os.environ["CKPTTOOL_PATH"]))})
    fail = log.with_suffix(".fail")
    return int(fail.read_text()) if fail.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]), *sys.argv[2:]))
