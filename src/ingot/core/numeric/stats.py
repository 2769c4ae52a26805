"""How far two arrays are apart: maximum and RMS error, signal-to-noise ratio, cosine similarity."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, log10, nan, sqrt
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import as_bits, float_name
from ingot.core.runtime import native

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class ErrorStats:
    """Sums over pairs of elements (reference r, other x), in double precision; add two to join them.

    ``squared_error`` is the sum of (r - x)^2, ``max_abs`` the largest |r - x|, ``odd`` counts pairs in which one is
    not finite, or neither is and they differ; pairs with such a value are left out of the sums. ``different`` counts
    pairs whose values are not the same (-0 is not 0; all NaN are one value).
    """

    count: int = 0
    squared_error: float = 0.0
    squared_reference: float = 0.0
    squared_other: float = 0.0
    dot: float = 0.0
    max_abs: float = 0.0
    odd: int = 0
    different: int = 0

    def __add__(self, other: ErrorStats) -> ErrorStats:
        return ErrorStats(
            self.count + other.count,
            self.squared_error + other.squared_error,
            self.squared_reference + other.squared_reference,
            self.squared_other + other.squared_other,
            self.dot + other.dot,
            max(self.max_abs, other.max_abs),
            self.odd + other.odd,
            self.different + other.different,
        )

    @property
    def rms(self) -> float:
        """Root of the mean squared error."""
        return sqrt(self.squared_error / self.count) if self.count else 0.0

    @property
    def snr_db(self) -> float:
        """Signal-to-noise ratio 10 log10(sum r^2 / sum (r - x)^2) in decibels; infinite without error."""
        if self.squared_error == 0:
            return inf
        ratio = self.squared_reference / self.squared_error  # 0 where the squares are too far apart for one
        return 10 * log10(ratio) if ratio else -inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two as vectors; 1 where both are zero, NaN where squares are too large."""
        norms = sqrt(self.squared_reference) * sqrt(self.squared_other)
        if norms == 0:
            return 1.0 if self.squared_reference == self.squared_other else 0.0
        return max(-1.0, min(1.0, self.dot / norms)) if isfinite(norms) else nan

    def sums(self) -> dict[str, float]:
        """The sums that are not zero, by name: what ``ErrorStats(**sums)`` is made of again."""
        if self is NO_ERROR:  # asked of every tensor that was moved
            return {}
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}

    def summary(self) -> dict[str, float]:
        """The figures that reports print."""
        return {"max_abs": self.max_abs, "rms": self.rms, "snr_db": self.snr_db, "cosine": self.cosine}


NO_ERROR = ErrorStats()
"""The sums of nothing, and of what was not measured."""


def measure(reference: Array, other: Array) -> ErrorStats:
    """Compare two arrays of as many elements, each f64, f32, f16 or bf16, C order; deterministic."""
    sums = native.kernels.pair_stats(as_bits(reference), float_name(reference), as_bits(other), float_name(other))
    return ErrorStats(*sums)


def squared_error(reference: Array, other: Array) -> float:
    """Return what ``measure`` gives as ``squared_error``, and find out nothing else."""
    return native.kernels.pair_error(as_bits(reference), float_name(reference), as_bits(other), float_name(other))
