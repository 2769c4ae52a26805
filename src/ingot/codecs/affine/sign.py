"""One-bit codes and unbiased scales, both for differences.

``spec/affine.md``, "Signs" and "Unbiased scales".

Codes 0 and 1 with zero point 1/2 and scale 2m decode to -m and +m.
"""

from __future__ import annotations

import numpy as np

from ingot.core.numeric.dtypes import LARGEST, numpy_dtype
from ingot.model.tensor import Array

SIGNS = ("sign", "sign-rms")
"""Quantizers that choose a group's magnitude. ``sign`` minimizes the squared error: mean |w| (BitDelta, arXiv
2402.10193, section 3.1); ``sign-rms`` keeps the group's norm, the root mean square of w."""


def sign_codes(rows: Array, msb: bool) -> Array:
    """Return one bit per value, 1 if it is not negative; each row fills complete bytes."""
    return np.packbits(rows >= 0, axis=1, bitorder="big" if msb else "little")


def sign_scales(rows: Array, group: int, quantizer: str, scale_dtype: str) -> Array:
    """Return twice the magnitude of each group, [rows, groups]; groups are summed in f64.

    A magnitude beyond the range of ``scale_dtype`` becomes infinite.
    """
    starts = np.arange(0, rows.shape[1], group)
    counts = np.diff(np.append(starts, rows.shape[1]))
    wide = rows.astype(np.float64)
    if quantizer == "sign":
        magnitude = np.add.reduceat(np.abs(wide), starts, axis=1) / counts
    else:
        magnitude = np.sqrt(np.add.reduceat(np.square(wide), starts, axis=1) / counts)
    scales = 2 * magnitude
    scales[scales > LARGEST[scale_dtype]] = np.inf
    return scales.astype(np.float32).astype(numpy_dtype(scale_dtype))


def unbiased_scales(rows: Array, decoded: Array, group: int, scales: Array) -> Array:
    """Return scales with which the projection of each group on its decoded values is exact: ``<w, decoded> = <w, w>``.

    Each scale is multiplied by a factor of at most 2, or unchanged if its type cannot represent the product. Groups are
    summed in f64.
    """
    starts = np.arange(0, rows.shape[1], group)
    wide = rows.astype(np.float64)
    squares = np.add.reduceat(np.square(wide), starts, axis=1)
    products = np.add.reduceat(wide * decoded, starts, axis=1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        factor = np.where(products > 0, np.minimum(squares / products, 2), 1)
        better = (scales.astype(np.float64) * factor.reshape(scales.shape)).astype(np.float32).astype(scales.dtype)
    return np.where(np.isfinite(better.astype(np.float32)), better, scales)
