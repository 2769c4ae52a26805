"""Where two arrays differ, as far as that is little."""

from __future__ import annotations

from typing import Any

import numpy as np

from ingot.core.runtime import native

Array = np.ndarray[Any, np.dtype[Any]]


def few_changes(old: Array, new: Array, most: int) -> tuple[Array, Array] | None:
    """Return where ``new`` differs from ``old``, and by how much; None where more than ``most`` elements do.

    Parameters
    ----------
    old, new : array
        One dimension, of one unsigned integer type, C order: floats as their bits.
    most : int
        Elements that there is room for.

    Returns
    -------
    tuple of int64 and of the arrays' type, or None
        Gaps between positions, the first counted from -1; differences ``new - old``, modulo the type's range.
    """
    gaps = np.empty(most, np.int64)
    steps = np.empty(most, old.dtype)
    count = native.kernels.changed_words(old, new, gaps, steps)
    return None if count > most else (gaps[:count], steps[:count])
