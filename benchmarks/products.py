"""How long the products of matrices alone take when adapters are fused, which no copy of the files has to compute."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.checkpoints import RANK, qwen2_shapes
from ckpttool.fusing import PART


def seconds(layers: int = 24) -> float:
    """Multiply, scale and add once for every adapted weight of the model that is measured; return the seconds."""
    shapes = [shape for name, shape in qwen2_shapes(layers).items() if name.endswith("_proj.weight")]
    product, weight = (np.zeros(PART, np.float32) for _ in range(2))
    generator = np.random.default_rng(0)
    factors = {n: generator.standard_normal(n * RANK, np.float32) for shape in shapes for n in shape}
    started = time.perf_counter()
    for rows, columns in shapes:
        band = PART // columns
        for first in range(0, rows, band):
            count = min(band, rows - first)
            held = product[: count * columns].reshape(count, columns)
            np.matmul(factors[rows].reshape(rows, RANK)[:count], factors[columns].reshape(RANK, columns), out=held)
            held *= np.float32(2)
            weight[: held.size].reshape(held.shape)[...] += held
    return time.perf_counter() - started
