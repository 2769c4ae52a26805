"""Choice of types for scales and entries that represent small values (``spec/affine.md``, "Small values").

f16 loses bits below 2^-14, and everything below 2^-24. An encoder with smaller scales reports it before encoding, and
is prepared again with a wider type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from ingot.core.numeric.dtypes import FLOATS, SMALLEST, TINY, as_bits, float_name
from ingot.core.runtime import native
from ingot.model.tensor import Array

AUTO = "auto"
HALF = "half"
"""The value of option ``scales`` for programs that store scales in 16 bits: bf16 for weights in bf16, else f16."""


class RangeProbe:
    """A check whether a declared type represents the scales or codebook entries of small values.

    The probe observes the largest magnitude of the values.

    Parameters
    ----------
    option : str
        The codec option that sets the type: ``scales``, ``entries``, ...
    dtype : str
        The declared type of the stored numbers: f16, bf16 or f32.
    wider : sequence of str
        Types for small values, in order of preference; empty if the user chose the type.
    levels : float
        The stored number is ``(largest magnitude / levels) ** power``.
    source : str
        Type of the values. If it equals ``dtype``, or if ``dtype`` is f32, underflow is never reported.
    power : float
        Exponent of the stored number; see ``levels``.
    """

    def __init__(
        self, option: str, dtype: str, wider: Iterable[str], levels: float, source: str, *, power: float = 1.0
    ) -> None:
        self._option = option
        self._dtype = dtype
        self._wider = tuple(wider)
        self._levels = levels
        self._power = power
        self._floor = 0.0 if dtype in (source, "f32") else self._magnitude_for(SMALLEST[dtype])
        self._enough = self._magnitude_for(TINY[dtype]) if self._wider else self._floor
        self._seen = 0.0

    def observe(self, rows: Array) -> bool:
        """Observe rows; return True if further rows cannot change ``wider_options`` or ``underflow``."""
        if self._seen < self._enough and rows.size:
            self._seen = max(self._seen, magnitude(rows))
        return self._seen >= self._enough

    def wider_options(self) -> dict[str, Any]:
        """Return the option with a type that preserves all bits of the observed values; empty if it need not change."""
        if not self._wider or not 0 < self._seen < self._enough:
            return {}
        fitting = [dtype for dtype in self._wider if self._seen >= self._magnitude_for(TINY[dtype])]
        return {self._option: fitting[0] if fitting else self._wider[-1]}

    def underflow(self) -> str | None:
        """Return why the declared type would lose all observed values; None if it does not."""
        if not 0 < self._seen < self._floor:
            return None
        return (
            f"the values are too small for {self._option} of {self._dtype}: the largest is {self._seen:.3g}, expected "
            f"at least {self._floor:.3g}; keep this tensor dense or take a wider type"
        )

    def _magnitude_for(self, number: float) -> float:
        return float(self._levels * number ** (1 / self._power))


def magnitude(rows: Array) -> float:
    """Return the largest magnitude of ``rows`` in f32; infinite if a value is NaN or infinite.

    Encoders refuse these values later.
    """
    if float_name(rows) not in FLOATS:
        return np.inf
    low, high, bad = native.kernels.affine_range(as_bits(rows).reshape(-1), float_name(rows))
    return float(max(-low, high)) if bad == rows.size else np.inf
