"""What benchmarks measure times with."""

from __future__ import annotations

import time
from collections.abc import Callable


def turns(repeat: int, *ways: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Best seconds of each way, each tried ``repeat`` times in turn with the others."""
    best = [float("inf")] * len(ways)
    for _ in range(repeat):
        for index, way in enumerate(ways):
            start = clock()
            way()
            best[index] = min(best[index], clock() - start)
    return best
