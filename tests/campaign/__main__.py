"""Run a campaign by hand: ``python -m tests.campaign KIND [--seed N] [--times N] [--minutes M]``.

Kinds are broken, hostile, killed and racing: each is a module with ``campaign(seed, times, folder) -> Outcomes``.
With minutes, one seed comes after the other.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path

from tests.campaign.outcomes import Outcomes

KINDS = ("broken", "hostile", "killed", "racing")


def run(kind: str, seed: int, times: int, minutes: float) -> Outcomes:
    """One campaign, or as many as begin within the minutes."""
    campaign, found, until = (
        import_module(f"tests.campaign.{kind}").campaign,
        Outcomes(),
        time.monotonic() + minutes * 60,
    )
    while True:
        with tempfile.TemporaryDirectory(prefix=f"ckpttool-{kind}-") as folder:
            done: Outcomes = campaign(seed, times, Path(folder))
        found.extend(done)
        for fault in done.faults:
            sys.stderr.write(f"seed {seed}: {fault}\n")
        if time.monotonic() >= until:
            return found
        seed += 1


def main(words: list[str]) -> int:
    """Print what was seen; 1 when something may not be."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaign", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=300, help="trials of one seed")
    parser.add_argument("--minutes", type=float, default=0.0, help="further seeds until then")
    asked = parser.parse_args(words)
    found = run(asked.kind, asked.seed, asked.times, asked.minutes)
    sys.stdout.write(f"{found}\n")
    return min(len(found.faults), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
