"""`python -m tests.writers {fsdp,lora,served,meshes,megatron,converted,adapted,demo} OUT`.

Four ranks, unless a module says otherwise with `WORLD`.

Megatron's writer starts helper processes that import the main module again, in every rank: so this
module imports nothing heavy before it knows that it is the one process that was started by hand.
"""

import importlib
import sys
from pathlib import Path

if __name__ == "__main__":
    what, out = sys.argv[1:]
    ranks = importlib.import_module("tests.writers.ranks")
    job = importlib.import_module(f"tests.writers.{what}_ranks")
    ranks.run_ranks(job.write_all, Path(out), getattr(job, "WORLD", ranks.WORLD))
