"""Intervals of confidence by the bootstrap: what a figure is over samples that are drawn again from those there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Interval = tuple[float, float]

LEVEL = 0.95
_DRAWN = 1 << 20  # draws at a time


def interval(
    sums: Array, figure: Callable[[Array], Array], resamples: int, seed: int, level: float = LEVEL
) -> Interval | None:
    """Return the percentile interval of a figure over samples that are drawn with replacement.

    B. Efron, R. Tibshirani, An Introduction to the Bootstrap (1993), 13.3.

    Parameters
    ----------
    sums : f64 [samples, terms]
        What each sample adds to the sums that the figure is made from.
    figure : callable
        From sums over as many samples as there are, f64 [resamples, terms], to figures, f64 [resamples].
    resamples, seed : int
        How often samples are drawn; the same seed draws the same ones on every machine and by every NumPy.
    level : float
        The share of resamples whose figure is within.

    Returns
    -------
    (low, high), or None where fewer than two samples or no resamples tell nothing, or a figure is not finite.
    """
    count = len(sums)
    if count < 2 or resamples < 1:
        return None
    draw = np.random.RandomState(seed)  # its stream is frozen, that of Generator is not
    found = []
    step = max(1, _DRAWN // count)
    for first in range(0, resamples, step):
        rows = min(step, resamples - first)
        picked = draw.randint(0, count, (rows, count), dtype=np.int64)
        times = np.stack([np.bincount(row, minlength=count) for row in picked])
        found.append(figure(times @ sums))
    figures = np.concatenate(found)
    if not np.isfinite(figures).all():
        return None
    low, high = np.quantile(figures, ((1 - level) / 2, (1 + level) / 2))
    return float(low), float(high)
