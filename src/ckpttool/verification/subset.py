"""``--read-subset``: which of many things are read, by what each of them weighs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from ckpttool.verification.result import Subset


def choose(subset: Subset, sizes: Sequence[int]) -> list[bool]:
    """Tell of each thing whether it is read. The parts 1 to M of M have everything once, and weigh about the same.

    A percentage or a number of bytes takes things at random until there is enough of them, and at least one.
    """
    weights = [max(size, 1) for size in sizes]
    total = sum(weights)
    if subset.parts:
        ends = accumulate(weights)
        middles = (2 * end - weight for end, weight in zip(ends, weights, strict=True))  # twice, to stay whole
        return [middle * subset.parts // (2 * total) == subset.part - 1 for middle in middles]
    wanted = subset.bytes or total * subset.percent / 100
    order = list(range(len(weights)))
    random.shuffle(order)
    taken, chosen = 0, set[int]()
    for index in order:
        if taken >= wanted:
            break
        chosen.add(index)
        taken += weights[index]
    return [index in chosen for index in range(len(weights))]
