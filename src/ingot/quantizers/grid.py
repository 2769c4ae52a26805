"""The values that codes may stand for, and matrices of such codes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.core import native
from ingot.model.tensor import Array


@dataclass(frozen=True, slots=True)
class Grid:
    """``w = scale * level``: which levels, for how many columns there is a scale, and of which type it is.

    Parameters
    ----------
    bits : int
        Of a code, 2 to 8: there are ``2 ** bits`` levels.
    group : int
        Columns that share a scale; the last group of a row may be shorter.
    scales : str
        ``f16``, ``bf16`` or ``f32``: scales are rounded to it before codes are chosen.
    learnt : bool
        The levels are a table that is learnt for the tensor; else the integers from ``-2 ** (bits - 1)`` on. Scales
        of either may be negative, so that the one integer without an opposite is of use at both ends (Q4_0's).
    """

    bits: int
    group: int
    scales: str = "f16"
    learnt: bool = False

    @property
    def integers(self) -> Array:
        """The levels of a grid that is not learnt: f32 [2 ** bits]."""
        half = 1 << self.bits - 1
        return np.arange(-half, half, dtype=np.float32)

    def groups(self, cols: int) -> Array:
        """The group of each column: i32 [cols]."""
        return np.arange(cols, dtype=np.int32) // np.int32(self.group)


@dataclass(slots=True)
class Rounded:
    """A matrix as codes, level by level: ``levels[codes] * scales``.

    Parameters
    ----------
    codes : u8 [rows, cols]
        Indices of ``levels``.
    scales : f32 [rows, groups]
        Values that the scales' type holds.
    levels : f32 [2 ** bits]
    groups : i32 [cols]
    """

    codes: Array
    scales: Array
    levels: Array
    groups: Array

    def values(self) -> Array:
        """Return what the codes stand for: f32 [rows, cols]."""
        found: Array = self.levels[self.codes]
        found *= self.scales[:, self.groups]
        return found


def kernel_grid(grid: Grid, levels: Array) -> native.kernels.RoundingGrid:
    """Return a grid as kernels take it."""
    return native.kernels.RoundingGrid(levels, not grid.learnt, "none", True, grid.scales)
