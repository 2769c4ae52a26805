"""The values that windows represent (``spec/trellis.md``, "Values")."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from ingot.model.tensor import Array

WINDOWS = 1 << 12
STEPS = {2: 3043, 3: 1543, 4: 263}
"""For each number of bits, the odd factor that turns a window into the rank of its value."""


@cache
def values_of(bits: int) -> Array:
    """Return the values of the 4096 windows: f32 that f16 holds, read-only.

    Window w has the quantile ``(r + 1/2) / 4096`` of the normal distribution with ``r = STEPS[bits] * w mod 4096``.
    """
    normal = NormalDist()
    half = np.array([normal.inv_cdf((rank + 0.5) / WINDOWS) for rank in range(WINDOWS // 2, WINDOWS)])
    ranked = np.concatenate([-half[::-1], half]).astype(np.float16).astype(np.float32)
    values: Array = ranked[np.arange(WINDOWS) * STEPS[bits] % WINDOWS]
    values.flags.writeable = False
    return values
