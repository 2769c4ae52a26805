"""Differences of two arrays: maximum and RMS error, signal-to-noise ratio, cosine similarity."""

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
    """Sums over pairs of elements (reference r, other x) in double precision; ``+`` adds the sums of two.

    ``squared_error`` is the sum of (r - x)^2, and ``max_abs`` the maximum of |r - x|. The sums leave out pairs with a
    value that is not finite. ``odd`` counts the pairs that are left out and differ. ``different`` counts all pairs that
    differ: -0 differs from 0, and all NaN are equal.
    """

    count: int = 0
    squared_error: float = 0.0
    squared_reference: float = 0.0
    squared_other: float = 0.0
    dot: float = 0.0
    max_abs: float = 0.0
    odd: int = 0
    different: int = 0

    def __add__(self, addend: ErrorStats) -> ErrorStats:
        return ErrorStats(
            self.count + addend.count,
            self.squared_error + addend.squared_error,
            self.squared_reference + addend.squared_reference,
            self.squared_other + addend.squared_other,
            self.dot + addend.dot,
            max(self.max_abs, addend.max_abs),
            self.odd + addend.odd,
            self.different + addend.different,
        )

    @property
    def rms(self) -> float:
        """The root of the mean squared error."""
        return sqrt(self.squared_error / self.count) if self.count else 0.0

    @property
    def snr_db(self) -> float:
        """The signal-to-noise ratio 10 log10(sum r^2 / sum (r - x)^2) in decibels; infinite without error."""
        if self.squared_error == 0:
            return inf
        ratio = self.squared_reference / self.squared_error  # may underflow to 0
        return 10 * log10(ratio) if ratio else -inf

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the two vectors; 1 if both are zero, NaN if the squares overflow."""
        norms = sqrt(self.squared_reference) * sqrt(self.squared_other)
        if norms == 0:
            return 1.0 if self.squared_reference == self.squared_other else 0.0
        return max(-1.0, min(1.0, self.dot / norms)) if isfinite(norms) else nan

    def sums(self) -> dict[str, float]:
        """Return the sums that are not zero, by name; ``ErrorStats(**sums)`` restores the object."""
        if self is NO_ERROR:  # called for each tensor that was copied
            return {}
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}

    def summary(self) -> dict[str, float]:
        """Return the figures that reports print, by name."""
        return {"max_abs": self.max_abs, "rms": self.rms, "snr_db": self.snr_db, "cosine": self.cosine}


NO_ERROR = ErrorStats()
"""The sums over no elements, also used for tensors that were not measured."""


def measure(reference: Array, values: Array) -> ErrorStats:
    """Return the error statistics of ``values`` against ``reference``; the result is deterministic.

    Both arrays have the same number of elements, in C order, of type f64, f32, f16 or bf16.
    """
    sums = native.kernels.pair_stats(as_bits(reference), float_name(reference), as_bits(values), float_name(values))
    return ErrorStats(*sums)


def squared_error(reference: Array, values: Array) -> float:
    """Return ``measure(reference, values).squared_error`` without computing the other sums."""
    return native.kernels.pair_error(as_bits(reference), float_name(reference), as_bits(values), float_name(values))
