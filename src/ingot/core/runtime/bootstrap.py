"""Bootstrap confidence intervals: the spread of a figure over resampled data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Interval = tuple[float, float]

LEVEL = 0.95
_BATCH = 1 << 20  # samples drawn at once


def interval(
    sums: Array, figure: Callable[[Array], Array], resamples: int, seed: int, level: float = LEVEL
) -> Interval | None:
    """Return the percentile interval of a figure over resamples with replacement.

    B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), 13.3.

    Parameters
    ----------
    sums : f64 [samples, terms]
        The contribution of each sample to the sums from which the figure is computed.
    figure : callable
        Returns figures, f64 [resamples], for sums over one resample each, f64 [resamples, terms].
    resamples : int
        The number of resamples.
    seed : int
        The same seed gives the same resamples on all machines and with all versions of NumPy.
    level : float
        The share of resamples whose figure is within the interval.

    Returns
    -------
    (low, high), or None if there are fewer than two samples or no resamples, or if a figure is not finite.
    """
    count = len(sums)
    if count < 2 or resamples < 1:
        return None
    draw = np.random.RandomState(seed)  # NumPy guarantees its stream of numbers, unlike that of Generator
    batches = []
    step = max(1, _BATCH // count)
    for first in range(0, resamples, step):
        rows = min(step, resamples - first)
        picked = draw.randint(0, count, (rows, count), dtype=np.int64)
        times = np.stack([np.bincount(row, minlength=count) for row in picked])
        batches.append(figure(times @ sums))
    figures = np.concatenate(batches)
    if not np.isfinite(figures).all():
        return None
    low, high = np.quantile(figures, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)
