"""Smaller groups of columns for the same integers, with repeated scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ingot.codecs.affine.windows import Windows, computed_part
from ingot.core.numeric.dtypes import DTYPES
from ingot.model.layouts.affine import SCALES, ZEROS, AffineLayout, Group
from ingot.model.part import Part
from ingot.model.tensor import Array, Tensor


def split_groups(tensor: Tensor, columns: int) -> Tensor:
    """Return an affine tensor with groups of ``columns``, a divisor of the stored group size; values do not change.

    Scales and zero points are repeated on access.
    """
    layout = AffineLayout.from_tensor(tensor)
    assert isinstance(layout.grid, Group)
    assert layout.grid.columns % columns == 0
    rows, cols = tensor.matrix_shape
    groups = layout.group_columns(cols)
    size = DTYPES[layout.scales].bits // 8
    before = -(-cols // groups)
    after = -(-cols // columns)
    parts = dict(tensor.parts)
    for role in (SCALES, ZEROS):
        if role in parts:
            make = _repeater(parts[role], rows, before, after, groups // columns, size)
            parts[role] = replace(
                computed_part(parts[role], parts[role].dtype, rows, after * size, make), type=parts[role].type
            )
    return replace(tensor, parts=parts, params={**tensor.params, "group_size": columns})


def _repeater(part: Part, rows: int, before: int, after: int, times: int, size: int) -> Callable[[int, int], Array]:
    """Return a function that reads rows of ``before`` numbers and repeats each number ``times`` times.

    Each number has ``size`` bytes. A resulting row has its first ``after`` numbers.
    """
    stored = Windows(part, rows, before * size)

    def make(first: int, last: int) -> Array:
        numbers = np.ascontiguousarray(stored.read(slice(first, last), 0, before * size)).reshape(
            last - first, before, size
        )
        repeated = np.repeat(numbers, times, axis=1)[:, :after]
        return np.ascontiguousarray(repeated).reshape(-1)

    return make
